// C++17: the gloo face with ranks as threads: the stores by which contexts meet.

#include <condition_variable>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>

#include <gloo/rendezvous/prefix_store.h>

#include "gloo_messages.h"
#include "gloo_threads.h"

namespace {

using gloo::EnforceNotMet;
using gloo::InvalidOperationException;
using gloo::IoException;
using std::chrono::milliseconds;

/* What a program must have, and no more. */
class SmallStore : public gloo::rendezvous::Store {
  public:
    void set(const std::string &key, const std::vector<char> &data) override {
        const std::lock_guard<std::mutex> hold(mutex_);
        values_[key] = data;
        changed_.notify_all();
    }
    std::vector<char> get(const std::string &key) override {
        wait({key});
        const std::lock_guard<std::mutex> hold(mutex_);
        return values_.at(key);
    }
    using gloo::rendezvous::Store::wait;
    void wait(const std::vector<std::string> &keys) override {
        std::unique_lock<std::mutex> hold(mutex_);
        for (const auto &key : keys) {
            if (!changed_.wait_for(hold, std::chrono::seconds(20), [&] { return values_.count(key) > 0; })) {
                throw std::logic_error("no " + key);
            }
        }
    }
    std::size_t size() {
        const std::lock_guard<std::mutex> hold(mutex_);
        return values_.size();
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::string, std::vector<char>> values_;
};

/* How many files this process has open. */
int open_files() {
    const auto all = std::filesystem::directory_iterator("/proc/self/fd");
    return static_cast<int>(std::distance(begin(all), end(all)));
}

/* Ranks that meet in the stores, a store each. */
void meet_in(const std::vector<std::shared_ptr<gloo::rendezvous::Store>> &stores) {
    const int size = static_cast<int>(stores.size());
    at_once(size, [&](int rank) {
        const auto context = connect(rank, size, stores[static_cast<std::size_t>(rank)]);
        exchange(context, 1, 1000);
        barrier(context);
    });
}

std::vector<char> chars(const std::string &text) { return {text.begin(), text.end()}; }

void stores_of_the_programs_own() {
    const auto store = std::make_shared<SmallStore>();
    meet_in({store, store, store});
    CHECK(store->size() > 0);
    CHECK(!store->has_v2_support());
    CHECK_THROWS(InvalidOperationException, "multi_get", store->multi_get({"x"}));
    CHECK_THROWS(InvalidOperationException, "multi_set", store->multi_set({"x"}, {{}}));
    CHECK_THROWS(InvalidOperationException, "append", store->append("x", {}));
    CHECK_THROWS(InvalidOperationException, "add", store->add("x", 1));
    // Two groups in one store, and a prefix of a prefix.
    const auto prefixed = [&](const char *prefix) {
        return std::make_shared<gloo::rendezvous::PrefixStore>(prefix, store);
    };
    at_once({[&] { meet_in({prefixed("one"), prefixed("one")}); },
             [&] { meet_in({prefixed("other"), prefixed("other"), prefixed("other")}); },
             [&] {
                 const auto nested = std::make_shared<gloo::rendezvous::PrefixStore>("two", prefixed("one"));
                 meet_in({nested, nested});
             }});
}

void a_store_that_throws() {
    // Not even an exception of the standard library's.
    struct Lost {
        int code;
    };
    struct CannotSet : SmallStore {
        void set(const std::string &, const std::vector<char> &) override { throw Lost{1}; }
    };
    struct CannotWait : SmallStore {
        using SmallStore::wait;
        void wait(const std::vector<std::string> &) override { throw Lost{2}; }
    };
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    const auto check = [&](int rank, const std::shared_ptr<gloo::rendezvous::Store> &store, int expected) {
        const auto prefixed = std::make_shared<gloo::rendezvous::PrefixStore>("p", store);
        for (const auto &each : {store, std::static_pointer_cast<gloo::rendezvous::Store>(prefixed)}) {
            int code = 0;
            gloo::rendezvous::Context context(rank, 2);
            try {
                context.connectFullMesh(each, device);
            } catch (const Lost &lost) {
                code = lost.code;
            }
            CHECK_EQ(code, expected);
            CHECK_THROWS(EnforceNotMet, "", context.getPair(1 - rank));
        }
    };
    check(0, std::make_shared<CannotSet>(), 1);
    check(1, std::make_shared<CannotSet>(), 1);
    // Rank 0 waits for nothing in the store.
    check(1, std::make_shared<CannotWait>(), 2);
}

/* Rank 0 makes what the others meet by, and serves it: not for ever, when it cannot tell them. */
void meetings_that_nobody_comes_to() {
    struct Forgetful : SmallStore {
        void set(const std::string &key, const std::vector<char> &data) override {
            if (key == "0") {
                throw std::runtime_error("the store is gone");
            }
            SmallStore::set(key, data);
        }
    };
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    const std::vector<std::function<void()>> attempts{
        [&] {
            gloo::rendezvous::Context context(0, 2);
            CHECK_THROWS(std::runtime_error, "gone", context.connectFullMesh(std::make_shared<Forgetful>(), device));
        },
        // The program's own means fail, which carry it between pairs.
        [&] {
            const auto context = device->createContext(0, 2);
            CHECK(!context->createPair(1)->address().bytes().empty());
        },
    };
    for (const auto &attempt : attempts) {
        attempt();
        const int before = open_files();
        for (int i = 0; i < 10; i++) {
            attempt();
        }
        CHECK(open_files() < before + 10);
    }
}

/* Their contexts serve no other meeting, whether somebody has asked for an address before or asks afterwards. */
void addresses_of_pairs_that_met_in_a_store() {
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    const auto opened = [&](bool before, bool afterwards) {
        const auto told = [](gloo::transport::Context &context) {
            CHECK(!context.getPair(1)->address().bytes().empty());
        };
        std::vector<std::shared_ptr<gloo::transport::Context>> kept;
        const int idle = open_files();
        for (int i = 0; i < 10; i++) {
            const auto store = std::make_shared<gloo::rendezvous::HashStore>();
            std::vector<std::shared_ptr<gloo::transport::Context>> ranks;
            for (int rank = 0; rank < 2; rank++) {
                ranks.push_back(device->createContext(rank, 2));
                kept.push_back(ranks.back());
            }
            if (before) {
                ranks[0]->createPair(1);
                told(*ranks[0]);
            }
            at_once(2, [&](int rank) { ranks[static_cast<std::size_t>(rank)]->createAndConnectAllPairs(store); });
            if (afterwards) {
                told(*ranks[0]);
            }
        }
        return open_files() - idle;
    };
    opened(false, false);
    const int unasked = opened(false, false);
    CHECK(opened(true, false) < unasked + 10);
    CHECK(opened(false, true) < unasked + 10);
}

void stores_that_the_program_keeps() {
    // Ones that outlive their contexts, and that nobody else owns.
    gloo::rendezvous::HashStore store;
    gloo::rendezvous::PrefixStore prefixed("p", store);
    const auto borrowed = [](gloo::rendezvous::Store &one) {
        return std::shared_ptr<gloo::rendezvous::Store>(std::shared_ptr<void>(), &one);
    };
    meet_in({borrowed(store), borrowed(store)});
    meet_in({borrowed(prefixed), borrowed(prefixed)});
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    gloo::rendezvous::Context context(0, 1);
    CHECK_THROWS(EnforceNotMet, "", context.connectFullMesh(nullptr, device));
    CHECK_THROWS(EnforceNotMet, "", context.connectFullMesh(borrowed(store), nullptr));
    CHECK_THROWS(EnforceNotMet, "'rank_0'", context.connectFullMesh(borrowed(store), device));
    gloo::rendezvous::PrefixStore alone("alone", store);
    context.connectFullMesh(borrowed(alone), device);
    CHECK(context.getDevice() == device);
}

void hash_stores() {
    const auto store = std::make_shared<gloo::rendezvous::HashStore>();
    store->set("a", chars("one"));
    CHECK(store->get("a") == chars("one"));
    CHECK_THROWS(EnforceNotMet, "'a'", store->set("a", chars("two")));
    CHECK(store->get("a") == chars("one"));
    within(2, [&] { CHECK(store->get("b").empty()); });
    store->set("empty", {});
    CHECK(store->get("empty").empty());
    store->wait({"a", "empty"});
    store->wait({});
    const double took = within(2, [&] { CHECK_THROWS(IoException, "b", store->wait({"a", "b"}, milliseconds(150))); });
    CHECK(took > 0.1);
    within(2, [&] { CHECK_THROWS(IoException, "", store->wait_get("b", milliseconds(50))); });
    // Whoever waits goes on when it is set.
    auto got = std::async(std::launch::async, [&] { return store->wait_get("late", milliseconds(20000)); });
    auto waited = std::async(std::launch::async, [&] { store->wait({"late", "later"}, gloo::kNoTimeout); });
    CHECK(!ended(got, 50));
    store->set("late", chars("here"));
    CHECK(got.get() == chars("here"));
    CHECK(!ended(waited, 50));
    store->set("later", {});
    waited.get();

    CHECK(store->has_v2_support());
    store->multi_set({"x", "y"}, {chars("1"), chars("2")});
    CHECK((store->multi_get({"y", "x", "a"}) == std::vector<std::vector<char>>{chars("2"), chars("1"), chars("one")}));
    CHECK_THROWS(EnforceNotMet, "", store->multi_set({"x", "y"}, {chars("1")}));
    store->append("x", chars("0"));
    store->append("fresh", chars("5"));
    CHECK(store->get("x") == chars("10"));
    CHECK(store->get("fresh") == chars("5"));
    CHECK_EQ(store->add("count", 5), 5);
    CHECK_EQ(store->add("count", -7), -2);
    CHECK_EQ(store->add("count", 0), -2);
    at_once(8, [&](int) {
        for (int i = 0; i < 200; i++) {
            store->add("sum", 2);
        }
    });
    CHECK_EQ(store->add("sum", 0), 3200);

    // All of it through a prefix.
    gloo::rendezvous::PrefixStore prefixed("p", store), other("q", store);
    CHECK(prefixed.has_v2_support());
    prefixed.set("a", chars("three"));
    CHECK(prefixed.get("a") == chars("three"));
    CHECK(store->get("a") == chars("one"));
    CHECK(store->get("p/a") == chars("three"));
    prefixed.multi_set({"x", "y"}, {chars("3"), chars("4")});
    CHECK((prefixed.multi_get({"x", "y"}) == std::vector<std::vector<char>>{chars("3"), chars("4")}));
    CHECK(store->get("p/y") == chars("4"));
    prefixed.append("x", chars("0"));
    // What derived classes have of gloo's.
    struct Derived : gloo::rendezvous::PrefixStore {
        using PrefixStore::PrefixStore;
        std::vector<char> read(const std::string &key) { return store_->get(joinKey(key)); }
        const std::string &prefix() const { return prefix_; }
    };
    Derived derived("p", store);
    CHECK(derived.read("y") == chars("4"));
    CHECK_EQ(derived.prefix(), "p");
    struct DerivedHash : gloo::rendezvous::HashStore {
        std::size_t count() {
            std::lock_guard<std::mutex> hold(m_);
            cv_.notify_all();
            return map_.size();
        }
    };
    CHECK_EQ(DerivedHash().count(), std::size_t{0});
    CHECK(prefixed.wait_get("x", milliseconds(100)) == chars("30"));
    CHECK_EQ(prefixed.add("count", 1), 1);
    CHECK_EQ(other.add("count", 10), 10);
    CHECK_EQ(prefixed.add("count", 1), 2);
    prefixed.wait({"a", "x"});
    within(2, [&] { CHECK_THROWS(IoException, "q/a", other.wait({"a"}, milliseconds(50))); });
}

void file_stores() {
    const Directory directory;
    const std::string path = directory.path() + "/made";
    gloo::rendezvous::FileStore one(path), other(path);
    one.set("a/b with spaces:\n*", chars(std::string("1\0002", 3)));
    CHECK(other.get("a/b with spaces:\n*") == chars(std::string("1\0002", 3)));
    other.set("empty", {});
    CHECK(one.get("empty").empty());
    one.wait({"empty", "a/b with spaces:\n*"});
    other.wait({"empty"}, gloo::kNoTimeout);
    const double took = within(2, [&] { CHECK_THROWS(IoException, "", one.wait({"empty", "b"}, milliseconds(150))); });
    CHECK(took > 0.1);
    within(2, [&] { CHECK_THROWS(IoException, "", one.wait_get("b", milliseconds(50))); });
    auto got = std::async(std::launch::async, [&] { return one.get("late"); });
    CHECK(!ended(got, 50));
    other.set("late", chars(std::string(100000, 'x')));
    CHECK(got.get() == chars(std::string(100000, 'x')));
    CHECK(!one.has_v2_support());
    CHECK_THROWS(InvalidOperationException, "", one.add("n", 1));
    const auto store = [&] { return std::make_shared<gloo::rendezvous::FileStore>(path); };
    meet_in({store(), store(), store()});
    const auto prefixed = [&] { return std::make_shared<gloo::rendezvous::PrefixStore>("again", store()); };
    meet_in({prefixed(), prefixed()});
    CHECK_THROWS(EnforceNotMet, "/proc/no/such/place", gloo::rendezvous::FileStore("/proc/no/such/place"));
}

/* What gloo's programs do to meet in one directory again and again. */
void file_stores_whose_files_are_removed() {
    const Directory directory;
    const auto remove_all = [](gloo::rendezvous::FileStore &store) {
        for (const auto &path : store.getAllKeyFilePaths()) {
            CHECK(std::filesystem::remove(path));
        }
    };
    {
        // Keys of which each has a file of its own kind of name.
        gloo::rendezvous::FileStore store(directory.path()), other(directory.path());
        const std::vector<std::string> keys{"",  ".", "..a.b", "plain-Key_09", "a/b with\nmore:*%", "\u00e9\u4e2d",
                                            std::string(140, 'x'), std::string(141, 'x'), std::string(47, '/') + "y",
                                            std::string(1000, '.')};
        for (const auto &key : keys) {
            store.set(key, chars("1"));
            store.set(key, chars("2"));
        }
        for (std::size_t length = 142; length < 290; length++) {
            store.set(std::string(length, 'x'), {});
        }
        other.set("another's", {});
        CHECK_EQ(store.getAllKeyFilePaths().size(), keys.size() + 148);
        remove_all(store);
        CHECK_EQ(other.getAllKeyFilePaths().size(), 1u);
        remove_all(other);
        CHECK(std::filesystem::is_empty(directory.path()));
    }
    for (int round = 0; round < 3; round++) {
        at_once(3, [&](int rank) {
            pause_for(rank == 0 ? 200 : 0);
            const auto files = std::make_shared<gloo::rendezvous::FileStore>(directory.path());
            const auto store = std::make_shared<gloo::rendezvous::PrefixStore>("prefix", files);
            const auto context = connect(rank, 3, store, std::chrono::seconds(5));
            barrier(context);
            remove_all(*files);
        });
    }
}

/* Programs remove these when they have connected, to connect once more. */
void keys_that_gloo_has() {
    const auto store = std::make_shared<gloo::rendezvous::HashStore>();
    std::vector<GlooContext> contexts(2);
    std::thread other([&] { contexts[1] = connect(1, 2, store); });
    contexts[0] = connect(0, 2, store);
    // When a rank has connected, the keys of all are there.
    store->wait({"rank_0", "0", "rank_1", "1"}, std::chrono::milliseconds(1));
    other.join();
    CHECK(contexts[1] != nullptr);
}

} // namespace

int main() {
    return run_tests({
        {"stores of the program's own", stores_of_the_programs_own},
        {"a store that throws", a_store_that_throws},
        {"meetings that nobody comes to", meetings_that_nobody_comes_to},
        {"addresses of pairs that met in a store", addresses_of_pairs_that_met_in_a_store},
        {"stores that the program keeps", stores_that_the_program_keeps},
        {"hash stores", hash_stores},
        {"file stores", file_stores},
        {"file stores whose files are removed", file_stores_whose_files_are_removed},
        {"keys that gloo has", keys_that_gloo_has},
    });
}
