// C++17: the gloo face with ranks as threads: contexts, how they are closed and connected, and their devices.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>
#include <type_traits>

#include <gloo/allreduce_ring.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/rendezvous/prefix_store.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/uv/device.h>

#include "gloo_messages.h"
#include "gloo_reductions.h"
#include "gloo_threads.h"
#include "gloo_waits.h"

namespace {

// As gloo's: a copy has the same connections.
static_assert(std::is_copy_constructible_v<gloo::Context> && std::is_copy_constructible_v<gloo::rendezvous::Context>);

using gloo::IoException;
using gloo::MakeString;
using std::chrono::milliseconds;

void a_group_of_one() {
    as_threads(1, [](const GlooContext &context) {
        barrier(context);
        CHECK(context->getPair(0) == nullptr);
        CHECK_THROWS(std::out_of_range, "", context->getPair(1));
        int value = 0;
        context->createUnboundBuffer(&value, sizeof(value))->abortWaitRecv();
        check_sum(context);
        CHECK(context->getDevice() != nullptr);
        const auto made = gloo::rendezvous::ContextFactory(context).makeContext(context->getDevice());
        CHECK_EQ(made->size, 1);
        barrier(made);
        context->closeConnections();
        context->closeConnections();
    });
}

// ---- closing

void closing_ends_this_ranks_waits() {
    for (const Wait &wait : waits()) {
        as_threads(3, [&wait](const GlooContext &context) {
            if (context->rank == 0) {
                auto waiting =
                    std::async(std::launch::async, [&] { wait.call(context, 1, gloo::transport::kUnsetTimeout); });
                if (ended(waiting, 50)) {
                    waiting.get();
                    throw std::logic_error(MakeString(wait.name, " did not wait"));
                }
                within(2, [&] {
                    context->closeConnections();
                    CHECK_THROWS(IoException, "", waiting.get());
                });
            } else {
                // They stay, and find out.
                pause_for(100);
                within(3, [&] { CHECK_THROWS(IoException, "", receive_now(context, 0, 7, 1)); });
            }
        });
    }
}

/* What the rank that closes has and keeps, though nothing of it is under way. */
struct Kept {
    const char *name;
    std::function<std::shared_ptr<void>(const GlooContext &, Bytes &)> make;
};

const std::vector<Kept> &kept() {
    static const std::vector<Kept> all{
        {"nothing", [](const GlooContext &, Bytes &) { return nullptr; }},
        {"a receive buffer to which nothing was sent",
         [](const GlooContext &context, Bytes &memory) { return Bound(make_receive(context, 1, 1, memory)); }},
        {"a send buffer that nobody has waited for",
         [](const GlooContext &context, Bytes &memory) {
             auto buffer = make_send(context, 1, 1, memory);
             buffer->send();
             return buffer;
         }},
        {"an unbound buffer",
         [](const GlooContext &context, Bytes &memory) {
             auto buffer = make_unbound(context, memory);
             buffer->send(1, 8);
             CHECK(buffer->waitSend());
             CHECK_THROWS(gloo::InvalidOperationException, "", buffer->send(context->rank, 8));
             return buffer;
         }},
        {"an allreduce",
         [](const GlooContext &context, Bytes &memory) {
             return std::make_shared<gloo::AllreduceRing<unsigned char>>(
                 context, std::vector<unsigned char *>{memory.data()}, 100);
         }},
        {"a broadcast",
         [](const GlooContext &context, Bytes &memory) {
             return std::make_shared<gloo::BroadcastOneToAll<unsigned char>>(
                 context, std::vector<unsigned char *>{memory.data()}, 100);
         }},
    };
    return all;
}

void closing_ends_what_others_wait_for() {
    for (const Kept &keeps : kept()) {
        as_threads(3, [&keeps](const GlooContext &context) {
            Bytes memory(100), receive(100);
            Bound buffer;
            if (context->rank == 0) {
                const auto thing = keeps.make(context, memory);
                meet(context, 1, 2);
                meet(context, 2, 2);
                pause_for(50);
                context->closeConnections();
                // The thing and the context live on until the others have noticed.
                pause_for(2500);
            } else {
                meet(context, 0, 2);
                const double begin = seconds_now();
                if (context->rank == 1) {
                    CHECK_THROWS(IoException, "0", receive_now(context, 0, 7, 1));
                } else {
                    buffer = make_receive(context, 0, 5, receive);
                    CHECK_THROWS(IoException, "0", buffer->waitRecv());
                }
                const double took = seconds_now() - begin;
                if (took > 2) {
                    throw std::logic_error(
                        MakeString("rank ", context->rank, " noticed after ", took, " s; kept: ", keeps.name));
                }
            }
        });
    }
}

void nothing_works_after_closing() {
    as_threads(2, [](const GlooContext &context) {
        const int peer = 1 - context->rank;
        exchange(context, 1, 100);
        Bytes memory(100);
        const auto before = make_unbound(context, memory);
        const auto sender = make_send(context, peer, 1, memory);
        const auto receiver = make_receive(context, peer, 2, memory);
        const auto waiting = make_send(context, peer, 6, memory);
        waiting->send();
        std::vector<float> numbers(10, 1);
        gloo::AllreduceRing<float> sum(context, {numbers.data()}, 10);
        gloo::BroadcastOneToAll<float> broadcast(context, {numbers.data()}, 10);
        barrier(context);
        context->closeConnections();
        within(5, [&] {
            CHECK(!context->getPair(peer)->isConnected());
            CHECK_THROWS(IoException, "", waiting->waitSend());
            CHECK_THROWS(IoException, "", sum.run());
            CHECK_THROWS(IoException, "", broadcast.run());
            CHECK_THROWS(IoException, "", (before->send(peer, 1), before->waitSend()));
            CHECK_THROWS(IoException, "", (before->recv(peer, 1), before->waitRecv()));
            CHECK_THROWS(IoException, "", (sender->send(), sender->waitSend()));
            CHECK_THROWS(IoException, "", receiver->waitRecv());
            CHECK_THROWS(IoException, "", make_send(context, peer, 3, memory)->send());
            CHECK_THROWS(IoException, "", make_receive(context, peer, 4, memory)->waitRecv());
            CHECK_THROWS(IoException, "", context->getPair(peer)->send(before.get(), 1, 0, 1));
            CHECK_THROWS(IoException, "", context->getPair(peer)->recv(before.get(), 1, 0, 1));
            CHECK_THROWS(IoException, "", barrier(context));
            CHECK_THROWS(IoException, "", gloo::rendezvous::ContextFactory(context).makeContext(context->getDevice()));
            context->closeConnections();
        });
    });
}

/* A transport whose connections another thread closes while something is made of it: when that is enlisted. */
class ClosedMeanwhile : public gloo::transport::Context {
  public:
    explicit ClosedMeanwhile(const GlooContext &context)
        : gloo::transport::Context(context->rank, context->size), context_(context) {}

    std::shared_ptr<unisono_context_t> native() override { return context_->native(); }
    void enlist(const std::shared_ptr<gloo::detail::Closable> &part) override {
        context_->closeConnections();
        context_->enlist(part);
    }

    std::unique_ptr<gloo::transport::Pair> &createPair(int peer) override { return context_->getPair(peer); }
    void createAndConnectAllPairs(std::shared_ptr<gloo::IStore>) override {}
    std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void *memory, std::size_t bytes) override {
        return context_->createUnboundBuffer(memory, bytes);
    }

  private:
    const GlooContext context_;
};

/* Else it would keep this rank in the group. */
void objects_are_not_made_of_what_closes_meanwhile() {
    struct Adopting : gloo::rendezvous::Context {
        explicit Adopting(const GlooContext &context) : gloo::rendezvous::Context(context->rank, context->size) {
            adopt(context->getDevice(), std::make_shared<ClosedMeanwhile>(context));
        }
    };
    as_threads(2, [](const GlooContext &context) {
        float value = 1;
        CHECK_THROWS(IoException, "closed",
                     gloo::AllreduceRing<float>(std::make_shared<Adopting>(context), {&value}, 1));
    });
}

void others_go_on_when_a_rank_closes() {
    // Rank `idle` has a buffer to receive from a rank that it does not hear of again: 0 from 2, or 2 from 0.
    const auto run = [](int idle, bool leave) {
        as_threads(3, [=](const GlooContext &context) {
            barrier(context);
            exchange(context, 1, 1000);
            Bytes memory(100);
            Bound buffer;
            if (context->rank == idle) {
                buffer = make_receive(context, 2 - idle, 1, memory);
            }
            if (context->rank == 2) {
                if (!leave) {
                    context->closeConnections();
                    pause_for(600);
                }
                return;
            }
            Bytes out = pattern(200 * KiB, 1), in(200 * KiB);
            const auto sender = make_send(context, 1 - context->rank, 3, out);
            const auto receiver = make_receive(context, 1 - context->rank, 3, in);
            const double end = seconds_now() + 1.2;
            uint64_t slot = 10;
            for (unsigned char more = 1; more != 0; slot++) {
                // Rank 0 says when it has been enough.
                more = seconds_now() < end;
                if (context->rank == 0) {
                    send_now(context, 1, slot, Bytes(1, more));
                } else {
                    more = receive_now(context, 0, slot, 1)[0];
                }
                sender->send();
                receiver->waitRecv();
                CHECK(in == out);
                sender->waitSend();
                meet(context, 1 - context->rank, 5);
            }
        });
    };
    for (const int idle : {-1, 0, 2}) {
        run(idle, false);
        run(idle, true);
    }
}

using Close = std::function<void()>;

/* Rank 2 closes its connections in `closing`, where it calls what it is given; rank 0 does `peer` before. The others are
   told that rank 2 has left where they need it, and go on. */
void check_leaves_alone(const char *name, const std::function<void(const GlooContext &, const Close &)> &closing,
                        const Body &peer = [](const GlooContext &) {}) {
    std::atomic<int> told{0};
    const auto body = [&](const GlooContext &context) {
        if (context->rank == 2) {
            closing(context, [&] {
                meet(context, 0, 3);
                within(5, [&] { context->closeConnections(); });
                // What it has lives on until the others have noticed.
                for (int i = 0; i < 20000 && told < 2; i++) {
                    pause_for(1);
                }
                CHECK_EQ(told.load(), 2);
            });
            return;
        }
        if (context->rank == 0) {
            peer(context);
            meet(context, 2, 3);
        }
        CHECK_THROWS(IoException, "rank 2", receive_now(context, 2, 7, 1));
        told++;
        // If rank 2 had aborted the group, that would be known here soon.
        pause_for(100);
        for (int i = 0; i < 50; i++) {
            meet(context, 1 - context->rank, 5);
        }
    };
    try {
        as_threads(3, body);
    } catch (const std::exception &error) {
        throw std::logic_error(MakeString(name, ": ", error.what()));
    }
}

void messages_of_a_rank_that_closes_end_alone() {
    check_leaves_alone("messages that do not end", [](const GlooContext &context, const Close &close) {
        // So long a message is not sent before the other side asks for it.
        Bytes memory(20 * MiB);
        const auto buffer = make_unbound(context, memory);
        buffer->recv(0, 98, 0, 8);
        buffer->send(0, 99);
        close();
        CHECK_THROWS(IoException, "closed", buffer->waitRecv());
        CHECK_THROWS(IoException, "closed", buffer->waitSend());
    });
    for (const Wait &wait : waits()) {
        if (!wait.collective) {
            check_leaves_alone(wait.name, [&wait](const GlooContext &context, const Close &close) {
                auto waiting =
                    std::async(std::launch::async, [&] { wait.call(context, 0, gloo::transport::kUnsetTimeout); });
                CHECK(!ended(waiting, 50));
                close();
                CHECK_THROWS(IoException, "closed", waiting.get());
            });
        }
    }
}

/* Each can be waited for once, though the connections are closed. */
void complete_messages_stay_so_when_a_rank_closes() {
    check_leaves_alone(
        "complete messages",
        [](const GlooContext &context, const Close &close) {
            Bytes memory = pattern(16, 2);
            const auto buffer = make_unbound(context, memory);
            buffer->recv(0, 98, 0, 8);
            buffer->send(0, 99, 8, 8);
            close();
            int from = -1, to = -1;
            CHECK(buffer->waitRecv(&from));
            CHECK(buffer->waitSend(&to));
            CHECK_EQ(from, 0);
            CHECK_EQ(to, 0);
            CHECK(Bytes(memory.begin(), memory.begin() + 8) == pattern(8, 1));
            CHECK_THROWS(IoException, "closed", buffer->waitRecv());
            CHECK_THROWS(IoException, "closed", buffer->waitSend());
        },
        [](const GlooContext &context) {
            send_now(context, 2, 98, pattern(8, 1));
            receive_now(context, 2, 99, 8);
        });
}

// ---- connecting

void contexts_from_a_context() {
    as_threads(3, [](const GlooContext &context) {
        gloo::rendezvous::ContextFactory factory(context);
        auto device = context->getDevice();
        std::vector<AnyContext> made;
        for (int i = 0; i < 4; i++) {
            made.push_back(factory.makeContext(device));
            CHECK_EQ(made.back()->rank, context->rank);
            CHECK_EQ(made.back()->size, context->size);
            CHECK(made.back()->getTimeout() == context->getTimeout());
        }
        // The same slot on all of them, at the same time, and in another order on each rank.
        at_once(4, [&](int i) {
            const auto &one = made[static_cast<std::size_t>(i)];
            exchange(one, 1, static_cast<std::size_t>(i + 1) * 1000);
            barrier(one);
        });
        if (context->rank == 0) {
            for (unsigned i = 0; i < 4; i++) {
                send_now(made[i], 1, 2, Bytes(1, static_cast<unsigned char>(i)));
            }
        } else if (context->rank == 1) {
            for (unsigned i = 4; i-- > 0;) {
                CHECK_EQ(static_cast<unsigned>(receive_now(made[i], 0, 2, 1)[0]), i);
            }
        }
        // One that is closed, and the one that they were made of, leave the others be.
        barrier(context);
        made[1]->closeConnections();
        CHECK_THROWS(IoException, "", barrier(made[1]));
        context->closeConnections();
        exchange(made[0], 3, 5000);
        const auto child = gloo::rendezvous::ContextFactory(made[3]).makeContext(device);
        exchange(child, 1, 5000);
        barrier(made[2]);
    });
}

/* What pairs tell each other, as a program's own means of communication would carry it. */
class Exchange {
  public:
    void put(int from, int to, const std::vector<char> &bytes) {
        const std::lock_guard<std::mutex> hold(mutex_);
        told_[{from, to}] = bytes;
        changed_.notify_all();
    }
    std::vector<char> get(int from, int to) {
        std::unique_lock<std::mutex> hold(mutex_);
        if (!changed_.wait_for(hold, std::chrono::seconds(20), [&] { return told_.count({from, to}) > 0; })) {
            throw std::logic_error(MakeString("rank ", from, " told rank ", to, " nothing"));
        }
        return told_.at({from, to});
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::pair<int, int>, std::vector<char>> told_;
};

/* How many bytes a program takes of an address, of a pair whose own address has `own`. */
using Length = std::function<std::size_t(std::size_t own)>;

class OwnContext : public gloo::Context {
  public:
    OwnContext(int rank_, int size_, const std::shared_ptr<gloo::transport::Device> &device, Exchange &exchange,
               bool backwards, const Length &length)
        : gloo::Context(rank_, size_) {
        auto made = device->createContext(rank, size);
        made->setTimeout(getTimeout());
        std::vector<int> peers;
        for (int peer = 0; peer < size; peer++) {
            if (peer != rank) {
                peers.push_back(peer);
                auto &pair = made->createPair(peer);
                const auto bytes = pair->address().bytes();
                // PaddlePaddle has a place of gloo's length for each.
                CHECK_EQ(bytes.size(), 136u);
                CHECK(!pair->address().str().empty());
                exchange.put(rank, peer, bytes);
            }
        }
        if (backwards) {
            std::reverse(peers.begin(), peers.end());
        }
        for (const int peer : peers) {
            auto bytes = exchange.get(peer, rank);
            bytes.resize(length(made->getPair(peer)->address().bytes().size()));
            made->getPair(peer)->connect(bytes);
        }
        device_ = device;
        transportContext_ = std::move(made);
    }
};

void contexts_connected_by_hand() {
    // As many as its own has, or a place for the longest, of which the rest are zeros.
    const std::vector<Length> lengths{[](std::size_t own) { return own; },
                                      [](std::size_t) { return gloo::rendezvous::ContextFactory::kMaxAddressSize; }};
    for (const int size : {1, 2, 4}) {
        for (const bool backwards : {false, true}) {
            Exchange told;
            const Length &length = lengths[backwards ? 1 : 0];
            at_once(size, [=, &told](int rank) {
                const auto device = gloo::transport::tcp::CreateDevice("localhost");
                const AnyContext context = std::make_shared<OwnContext>(rank, size, device, told, backwards, length);
                barrier(context);
                exchange(context, 1, 100 * KiB);
                check_sum(context);
                for (int peer = 0; peer < size; peer++) {
                    CHECK(peer == rank || context->getPair(peer)->isConnected());
                }
                barrier(context);
                context->closeConnections();
            });
        }
    }
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    const auto context = device->createContext(0, 2);
    auto &pair = context->createPair(1);
    CHECK(!pair->isConnected());
    CHECK_THROWS(gloo::EnforceNotMet, "10 bytes are no address", pair->connect(std::vector<char>(10)));
}

/* However often it is tried. */
void a_pair_that_could_not_be_connected_is_not() {
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    const auto zero = device->createContext(0, 2), one = device->createContext(1, 2);
    zero->setTimeout(milliseconds(300));
    auto &pair = zero->createPair(1);
    auto &other = one->createPair(0);
    CHECK(!pair->address().bytes().empty());
    for (int i = 0; i < 3; i++) {
        within(10, [&] { CHECK_THROWS(IoException, "", pair->connect(other->address().bytes())); });
        CHECK(!pair->isConnected());
        // By this nobody can meet.
        const std::vector<char> none = gloo::transport::tcp::Address(0).bytes();
        CHECK_THROWS(gloo::EnforceNotMet, "the address of rank 0's", other->connect(none));
        CHECK(!other->isConnected());
    }
}

/* All ranks are connected at once. A program that leaves pairs out is told so, whatever it connects more than once. */
void pairs_that_are_left_out() {
    const auto device = gloo::transport::tcp::CreateDevice("localhost");
    const auto context = device->createContext(0, 4);
    for (const int peer : {1, 3, 1}) {
        const auto other = device->createContext(peer, 4);
        context->createPair(peer)->connect(other->createPair(0)->address().bytes());
    }
    CHECK(!context->getPair(1)->isConnected());
    char byte = 0;
    const std::string part = "rank 0 has not connected its pairs with ranks 2";
    CHECK_THROWS(IoException, part, context->getPair(1)->createSendBuffer(0, &byte, 1)->send());
    CHECK_THROWS(IoException, part, context->getPair(3)->createRecvBuffer(0, &byte, 1)->waitRecv());
}

void one_rank_never_comes() {
    for (const int missing : {0, 2}) {
        const auto store = std::make_shared<gloo::rendezvous::HashStore>();
        at_once(3, [&store, missing](int rank) {
            if (rank != missing) {
                const double took =
                    within(5, [&] { CHECK_THROWS(IoException, "", connect(rank, 3, store, milliseconds(500))); });
                CHECK(took > 0.4);
            }
        });
    }
    // The same of pairs that are connected by hand.
    Exchange told;
    at_once({[&] {
                 const auto device = gloo::transport::tcp::CreateDevice("localhost");
                 const auto context = device->createContext(1, 3);
                 context->setTimeout(milliseconds(500));
                 told.put(1, 0, context->createPair(0)->address().bytes());
                 context->createPair(2);
                 context->getPair(0)->connect(told.get(0, 1));
                 within(5, [&] { CHECK_THROWS(IoException, "", context->getPair(2)->connect(told.get(2, 1))); });
             },
             [&] {
                 const auto device = gloo::transport::tcp::CreateDevice("localhost");
                 const auto context = device->createContext(0, 3);
                 context->setTimeout(milliseconds(500));
                 told.put(0, 1, context->createPair(1)->address().bytes());
                 context->createPair(2);
                 context->getPair(1)->connect(told.get(1, 0));
                 // Rank 2 tells its address, and does not connect.
                 const auto missing = device->createContext(2, 3);
                 told.put(2, 1, missing->createPair(1)->address().bytes());
                 const auto address = missing->createPair(0)->address().bytes();
                 within(5, [&] { CHECK_THROWS(IoException, "", context->getPair(2)->connect(address)); });
             }});
}

/* Waiting for rank 0 and for the others is one wait. */
void connecting_has_one_timeout() {
    const auto store = std::make_shared<gloo::rendezvous::HashStore>();
    const milliseconds timeout(3000);
    at_once(2, [&store, timeout](int rank) {
        if (rank == 0) {
            pause_for(2500);
            CHECK_THROWS(IoException, "", connect(rank, 3, store, timeout));
        } else {
            const double took = within(4, [&] { CHECK_THROWS(IoException, "", connect(rank, 3, store, timeout)); });
            CHECK(took > 2.9);
        }
    });
}

void contexts_are_made_in_the_timeout_that_was_set_last() {
    as_threads(
        2,
        [](const GlooContext &context) {
            context->setTimeout(std::chrono::seconds(20));
            if (context->rank == 1) {
                pause_for(3500);
            }
            const auto made = gloo::rendezvous::ContextFactory(context).makeContext(context->getDevice());
            CHECK(made->getTimeout() == std::chrono::seconds(20));
            barrier(made);
        },
        milliseconds(2000));
    std::promise<void> over;
    auto isOver = over.get_future();
    as_threads(2, [&over, &isOver](const GlooContext &context) {
        barrier(context);
        if (context->rank == 0) {
            context->setTimeout(milliseconds(500));
            within(5, [&] {
                CHECK_THROWS(IoException, "Timed out",
                             gloo::rendezvous::ContextFactory(context).makeContext(context->getDevice()));
            });
            context->setTimeout(std::chrono::seconds(20));
            over.set_value();
        } else {
            CHECK(ended(isOver, 20000));
        }
        barrier(context);
    });
}

// ---- devices

void devices_of_all_kinds() {
    using Make = std::function<std::shared_ptr<gloo::transport::Device>()>;
    gloo::transport::tcp::attr lo, address("127.0.0.1"), any;
    lo.iface = "lo";
    gloo::transport::uv::attr uv_lo;
    uv_lo.iface = "lo";
    const std::vector<Make> makes{
        [] { return gloo::transport::tcp::CreateDevice("localhost"); },
        [&] { return gloo::transport::tcp::CreateDevice(lo); },
        [&] { return gloo::transport::tcp::CreateDevice(address); },
        [&] { return gloo::transport::tcp::CreateDevice(any); },
        [] { return gloo::transport::tcp::CreateLazyDevice("localhost"); },
        [&] { return gloo::transport::tcp::CreateLazyDevice(lo); },
        [] { return gloo::transport::uv::CreateDevice("localhost"); },
        [&] { return gloo::transport::uv::CreateDevice(uv_lo); },
    };
    for (const auto &make : makes) {
        const auto store = std::make_shared<gloo::rendezvous::HashStore>();
        at_once(2, [&](int rank) {
            const auto device = make();
            CHECK(!device->str().empty());
            CHECK(device->getInterfaceSpeed() >= 0);
            CHECK(device->getPCIBusID().size() < 100);
            CHECK(!device->hasGPUDirect());
            const auto context = std::make_shared<gloo::rendezvous::Context>(rank, 2);
            context->connectFullMesh(store, device);
            exchange(context, 1, 1000);
            // More than one context of a device, and a device that its maker has let go.
            const auto other = std::make_shared<gloo::rendezvous::Context>(rank, 2);
            other->connectFullMesh(std::make_shared<gloo::rendezvous::PrefixStore>("2", store), make());
            exchange(other, 1, 1000);
        });
    }
    CHECK(gloo::transport::tcp::CreateDevice(lo)->str().find("lo") != std::string::npos);
}

void devices_that_are_not_there() {
    within(10, [] {
        CHECK_THROWS(gloo::EnforceNotMet, "no-such-host.invalid",
                     gloo::transport::tcp::CreateDevice("no-such-host.invalid"));
        // An address that is not this host's.
        CHECK_THROWS(gloo::EnforceNotMet, "192.0.2.1", gloo::transport::tcp::CreateDevice("192.0.2.1"));
    });
    gloo::transport::tcp::attr attr;
    gloo::transport::uv::attr uv_attr;
    attr.iface = uv_attr.iface = "nosuch0";
    const char *text = "interface 'nosuch0' does not exist; there are lo 127.0.0.1";
    CHECK_THROWS(gloo::EnforceNotMet, text, gloo::transport::tcp::CreateDevice(attr));
    CHECK_THROWS(gloo::EnforceNotMet, text, gloo::transport::tcp::CreateLazyDevice(attr));
    CHECK_THROWS(gloo::EnforceNotMet, text, gloo::transport::uv::CreateDevice(uv_attr));
    // An address or a network, as unisono takes them for a name, is found out by connecting, on all ranks.
    for (const char *iface : {"192.0.2.1", "nosuch0/8"}) {
        attr.iface = iface;
        const auto device = gloo::transport::tcp::CreateDevice(attr);
        const auto store = std::make_shared<gloo::rendezvous::HashStore>();
        at_once(3, [&](int rank) {
            gloo::rendezvous::Context context(rank, 3);
            within(5, [&] { CHECK_THROWS(gloo::Exception, iface, context.connectFullMesh(store, device)); });
        });
    }
}

} // namespace

int main() {
    return run_tests({
        {"a group of one", a_group_of_one},
        {"closing ends this rank's waits", closing_ends_this_ranks_waits},
        {"closing ends what others wait for", closing_ends_what_others_wait_for},
        {"nothing works after closing", nothing_works_after_closing},
        {"objects are not made of what closes meanwhile", objects_are_not_made_of_what_closes_meanwhile},
        {"others go on when a rank closes", others_go_on_when_a_rank_closes},
        {"messages of a rank that closes end alone", messages_of_a_rank_that_closes_end_alone},
        {"complete messages stay so when a rank closes", complete_messages_stay_so_when_a_rank_closes},
        {"contexts from a context", contexts_from_a_context},
        {"contexts connected by hand", contexts_connected_by_hand},
        {"a pair that could not be connected is not", a_pair_that_could_not_be_connected_is_not},
        {"pairs that are left out", pairs_that_are_left_out},
        {"one rank never comes", one_rank_never_comes},
        {"connecting has one timeout", connecting_has_one_timeout},
        {"contexts are made in the timeout that was set last", contexts_are_made_in_the_timeout_that_was_set_last},
        {"devices of all kinds", devices_of_all_kinds},
        {"devices that are not there", devices_that_are_not_there},
    });
}
