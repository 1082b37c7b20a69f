// C++17: the gloo face with ranks as processes: forks, and ranks that are killed, stopped, or leave.

#include <functional>
#include <string>

#include <fcntl.h>
#include <poll.h>

#include <gloo/rendezvous/prefix_store.h>

#include "gloo_messages.h"
#include "gloo_reductions.h"
#include "gloo_threads.h"
#include "gloo_waits.h"

namespace {

using gloo::IoException;
using gloo::MakeString;
using std::chrono::milliseconds;

// ---- what the tests share

/* All of what a group does. */
void use(const AnyContext &context) {
    barrier(context);
    check_sum(context);
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, 3 * MiB}) {
        exchange(context, 1, bytes);
    }
    for (int peer = 0; peer < context->size; peer++) {
        if (peer != context->rank) {
            Bytes out = pattern(2 * MiB, context->rank), in(out.size());
            const auto receiver = make_receive(context, peer, 7, in);
            const auto sender = make_send(context, peer, 7, out);
            sender->send();
            sender->waitSend();
            receiver->waitRecv();
            CHECK(in == pattern(in.size(), peer));
        }
    }
    barrier(context);
}

GlooContext connect_on(const std::shared_ptr<gloo::transport::Device> &device, int rank, int size,
                       const std::shared_ptr<gloo::rendezvous::Store> &store) {
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    context->setTimeout(std::chrono::seconds(20));
    context->connectFullMesh(store, device);
    return context;
}

std::shared_ptr<gloo::rendezvous::Store> store_in(const std::string &path, const char *prefix = "p") {
    return std::make_shared<gloo::rendezvous::PrefixStore>(prefix, std::make_shared<gloo::rendezvous::FileStore>(path));
}

/* By which the processes tell the test how far they are. */
class Signs {
  public:
    Signs() {
        if (::pipe2(ends_, O_CLOEXEC) != 0) {
            throw std::runtime_error("no pipe");
        }
    }
    ~Signs() {
        ::close(ends_[0]);
        ::close(ends_[1]);
    }
    Signs(const Signs &) = delete;
    Signs &operator=(const Signs &) = delete;

    void give() const {
        const char sign = 1;
        if (::write(ends_[1], &sign, 1) != 1) {
            throw std::runtime_error("no sign given");
        }
    }
    void await(int count) const {
        const double end = seconds_now() + 20;
        for (int i = 0; i < count; i++) {
            pollfd ready = {ends_[0], POLLIN, 0};
            const int left = static_cast<int>((end - seconds_now()) * 1000);
            char sign = 0;
            if (::poll(&ready, 1, left < 0 ? 0 : left) != 1 || ::read(ends_[0], &sign, 1) != 1) {
                throw std::logic_error(MakeString("only ", i, " of ", count, " signs came"));
            }
        }
    }

  private:
    int ends_[2];
};

/* One process besides this one, which ends before this object does. */
class Child {
  public:
    explicit Child(const std::function<void()> &body) : pid_(fork()) {
        if (pid_ == 0) {
            try {
                body();
                std::_Exit(0);
            } catch (const std::exception &error) {
                std::fprintf(stderr, "child: %s\n", error.what());
            }
            std::_Exit(kOtherException);
        }
        if (pid_ < 0) {
            throw std::runtime_error("cannot fork");
        }
    }
    ~Child() {
        if (pid_ > 0) {
            ::kill(pid_, SIGKILL);
            ::waitpid(pid_, nullptr, 0);
        }
    }
    Child(const Child &) = delete;
    Child &operator=(const Child &) = delete;

    // Its exit status, or minus the signal.
    int wait(double seconds) {
        const double end = seconds_now() + seconds;
        int status = 0;
        while (::waitpid(pid_, &status, WNOHANG) == 0) {
            if (seconds_now() > end) {
                throw std::logic_error(MakeString("a child runs on after ", seconds, " s"));
            }
            pause_for(2);
        }
        pid_ = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

  private:
    pid_t pid_;
};

/* The call throws an IoException that has this part, which goes on to end the process. */
template <class Call> void fails_naming(const std::string &part, const Call &call) {
    try {
        call();
    } catch (const IoException &error) {
        if (std::string(error.what()).find(part) == std::string::npos) {
            throw std::logic_error(MakeString("\"", error.what(), "\" does not contain \"", part, "\""));
        }
        throw;
    }
    throw std::logic_error("the call came back");
}

void await_all(Processes &processes, int first, int last, double seconds, int status) {
    const double begin = seconds_now();
    for (int rank = first; rank <= last; rank++) {
        const int ended = processes.wait(rank, seconds - (seconds_now() - begin));
        if (ended != status) {
            throw std::logic_error(MakeString("rank ", rank, " ended with ", ended, ", not ", status));
        }
    }
}

// ---- groups of processes

void groups_of_processes() {
    for (int size = 2; size <= 4; size++) {
        Processes processes(size, [](const GlooContext &context) {
            use(context);
            use(context);
        });
        await_all(processes, 0, size - 1, 20, 0);
    }
}

void forks_before_contexts() {
    // Its own program: what it does with contexts stays there.
    Child program([] {
        const Directory directory;
        const auto device = gloo::transport::tcp::CreateDevice("localhost");
        const auto lazy = gloo::transport::tcp::CreateLazyDevice("localhost");
        const auto one = store_in(directory.path(), "one"), other = store_in(directory.path(), "other");
        Child rank1([&] {
            use(connect_on(device, 1, 3, one));
            use(connect_on(lazy, 1, 3, other));
        });
        Child rank2([&] {
            use(connect_on(device, 2, 3, one));
            use(connect_on(lazy, 2, 3, other));
        });
        use(connect_on(device, 0, 3, one));
        use(connect_on(lazy, 0, 3, other));
        CHECK_EQ(rank1.wait(10), 0);
        CHECK_EQ(rank2.wait(10), 0);
    });
    CHECK_EQ(program.wait(30), 0);
}

void forks_after_contexts() {
    // A child that makes its own, and leaves its parent's alone, which go on.
    Child program([] {
        const Directory directory;
        const auto device = gloo::transport::tcp::CreateDevice("localhost");
        Signs signs;
        Child peer([&] {
            const auto context = connect_on(device, 1, 2, store_in(directory.path(), "one"));
            use(context);
            signs.await(1);
            use(context);
            use(connect_on(device, 1, 2, store_in(directory.path(), "two")));
        });
        const auto context = connect_on(device, 0, 2, store_in(directory.path(), "one"));
        use(context);
        Bytes memory(100);
        const auto buffer = make_unbound(context, memory);
        auto receiver = make_receive(context, 1, 9, memory);
        Bytes untaken(3 * MiB);
        auto sender = make_send(context, 1, 9, untaken);
        sender->send();
        const auto awaited = make_unbound(context, memory);
        awaited->recv(1, 9);
        auto waiting = std::async(std::launch::async, [&] { return awaited->waitRecv(); });
        CHECK(!ended(waiting, 50));
        Child child([&] {
            CHECK_THROWS(gloo::Exception, "", barrier(context));
            CHECK_THROWS(gloo::Exception, "", buffer->send(1, 1));
            within(2, [&] {
                CHECK_THROWS(gloo::Exception, "before a fork", receiver->waitRecv());
                CHECK_THROWS(gloo::Exception, "before a fork", sender->waitSend());
                receiver.reset(), sender.reset();
                context->closeConnections();
            });
            use(connect_on(device, 0, 2, store_in(directory.path(), "two")));
        });
        awaited->abortWaitRecv();
        CHECK(!waiting.get());
        pause_for(300);
        signs.give();
        use(context);
        CHECK_EQ(child.wait(20), 0);
        CHECK_EQ(peer.wait(20), 0);
    });
    CHECK_EQ(program.wait(30), 0);
}

// ---- ranks that are killed

/* The wait ends with an error that says so. */
void fails_waiting(const Wait &wait, const GlooContext &context, int peer, const std::string &part) {
    fails_naming(part, [&] { wait.call(context, peer, gloo::transport::kUnsetTimeout); });
}

void a_rank_is_killed() {
    for (const Wait &wait : waits()) {
        for (const int size : {2, 3}) {
            const int victim = size - 1;
            // Who waits for anyone may first hear of another rank, which has given up.
            const std::string named = wait.anyone && size > 2 ? "rank " : MakeString("rank ", victim);
            const Signs signs;
            Processes processes(size, [&](const GlooContext &context) {
                check_sum(context);
                signs.give();
                if (context->rank == victim) {
                    pause_for(20000);
                    return;
                }
                fails_waiting(wait, context, victim, named);
            });
            signs.await(size);
            pause_for(100);
            processes.signal(victim, SIGKILL);
            try {
                await_all(processes, 0, victim - 1, 3, kIoException);
            } catch (const std::exception &error) {
                throw std::logic_error(MakeString(wait.name, " of ", size, ": ", error.what()));
            }
            CHECK_EQ(processes.wait(victim, 1), -SIGKILL);
        }
    }
}

void a_rank_is_killed_in_allreduce() {
    // Whichever rank, and wherever it happens to be.
    for (int round = 0; round < 4; round++) {
        const int victim = round % 3;
        const Signs signs;
        Processes processes(3, [&](const GlooContext &context) {
            check_sum(context);
            signs.give();
            fails_naming(MakeString("rank ", victim), [&] {
                for (std::size_t i = 0;; i++) {
                    check_sum(context, i % 2 == 0 ? 100 : MiB);
                }
            });
        });
        signs.await(3);
        pause_for(100 + 7 * round);
        processes.signal(victim, SIGKILL);
        const double begin = seconds_now();
        for (int rank = 0; rank < 3; rank++) {
            if (rank != victim) {
                CHECK_EQ(processes.wait(rank, 3 - (seconds_now() - begin)), kIoException);
            }
        }
    }
}

void survivors_make_a_new_group() {
    const Directory directory;
    const Signs signs;
    constexpr int size = 4, victim = 1;
    Processes processes(size, [&](const GlooContext &context) {
        check_sum(context);
        Bytes memory(100);
        // What was under way on the old context may stay.
        const auto buffer = make_unbound(context, memory);
        buffer->recv(context->rank == 0 ? 3 : 0, 9);
        const auto bound = context->getPair(context->rank == 0 ? 3 : 0)->createRecvBuffer(9, memory.data(), 0);
        signs.give();
        if (context->rank == victim) {
            pause_for(20000);
        }
        CHECK_THROWS(IoException, MakeString("rank ", victim), check_sum(context));
        const int rank = context->rank > victim ? context->rank - 1 : context->rank;
        const auto survivors =
            connect_on(context->getDevice(), rank, size - 1, store_in(directory.path(), "survivors"));
        use(survivors);
        CHECK_THROWS(IoException, "", barrier(context));
        context->closeConnections();
        use(survivors);
    });
    signs.await(size);
    pause_for(100);
    processes.signal(victim, SIGKILL);
    for (const int rank : {0, 2, 3}) {
        CHECK_EQ(processes.wait(rank, 15), 0);
    }
}

// ---- ranks that are stopped

void a_rank_is_stopped() {
    for (const Wait &wait : waits()) {
        const int size = wait.collective ? 3 : 2, victim = size - 1;
        const Signs signs;
        Processes processes(
            size,
            [&](const GlooContext &context) {
                check_sum(context);
                signs.give();
                if (context->rank == victim) {
                    pause_for(20000);
                    return;
                }
                pause_for(100);
                fails_waiting(wait, context, victim, "Timed out");
            },
            milliseconds(1000));
        signs.await(size);
        processes.signal(victim, SIGSTOP);
        try {
            await_all(processes, 0, victim - 1, 5, kIoException);
        } catch (const std::exception &error) {
            throw std::logic_error(MakeString(wait.name, ": ", error.what()));
        }
        processes.signal(victim, SIGKILL);
        CHECK_EQ(processes.wait(victim, 2), -SIGKILL);
    }
}

void buffers_end_though_a_rank_is_stopped() {
    // While a long message is under way, of which a part has moved: within the context's timeout and a bit.
    constexpr std::size_t bytes = 256 * MiB;
    for (const bool pair : {false, true}) {
        for (const bool close : {false, true}) {
            Signs signs;
            Processes processes(
                2,
                [&](const GlooContext &context) {
                    Bytes memory(bytes, 1);
                    barrier(context);
                    signs.give();
                    if (context->rank == 1) {
                        const auto unbound = make_unbound(context, memory);
                        if (pair) {
                            make_receive(context, 0, 1, memory)->waitRecv();
                        } else {
                            unbound->recv(0, 1);
                            unbound->waitRecv();
                        }
                        pause_for(20000);
                    }
                    auto unbound = make_unbound(context, memory);
                    auto bound = make_send(context, 1, 1, memory);
                    pair ? bound->send() : unbound->send(1, 1);
                    pause_for(300);
                    if (close) {
                        context->closeConnections();
                    }
                    unbound.reset();
                    bound.reset();
                },
                milliseconds(1000));
            signs.await(2);
            pause_for(30);
            processes.signal(1, SIGSTOP);
            try {
                CHECK_EQ(processes.wait(0, 5), 0);
            } catch (const std::exception &error) {
                throw std::logic_error(MakeString("pair ", pair, ", closed ", close, ": ", error.what()));
            }
            processes.signal(1, SIGKILL);
            CHECK_EQ(processes.wait(1, 2), -SIGKILL);
        }
    }
}

// ---- ranks that leave

/* What they send fills the way to a rank that does not read, and then a part of a message has gone. All of them come. */
void send_buffers_end_while_a_rank_is_stopped() {
    constexpr std::size_t count = 1500;
    for (const std::size_t length : {105, 112, 130}) {
        const Signs there, stopped, sent;
        Processes processes(
            2,
            [&](const GlooContext &context) {
                const Bytes all = pattern(count * length, 1);
                barrier(context);
                there.give();
                if (context->rank == 0) {
                    stopped.await(1);
                    for (std::size_t at = 0; at < all.size(); at += length) {
                        Bytes memory(all.data() + at, all.data() + at + length);
                        make_send(context, 1, 1, memory)->send(0, length, at);
                    }
                    sent.give();
                    Bytes last(1, 0xee);
                    const auto buffer = make_send(context, 1, 1, last);
                    buffer->send(0, 1, all.size());
                    buffer->waitSend();
                } else {
                    Bytes memory(all.size() + 1);
                    const auto buffer = make_receive(context, 0, 1, memory);
                    for (std::size_t i = 0; i < count + 1; i++) {
                        buffer->waitRecv();
                    }
                    CHECK_EQ(memory.back(), 0xee);
                    memory.pop_back();
                    CHECK(memory == all);
                }
                barrier(context);
            },
            milliseconds(10000));
        there.await(2);
        processes.signal(1, SIGSTOP);
        stopped.give();
        sent.await(1);
        processes.signal(1, SIGCONT);
        await_all(processes, 0, 1, 20, 0);
    }
}

void a_rank_leaves() {
    // Its process returns; with its context ended before, or not.
    for (const Wait &wait : waits()) {
        for (const bool ends : {true, false}) {
            const Signs signs;
            Processes processes(2, [&](const GlooContext &context) {
                check_sum(context);
                if (context->rank == 0) {
                    signs.give();
                    fails_waiting(wait, context, 1, "rank 1");
                }
                signs.await(1);
                pause_for(100);
                if (!ends) {
                    std::_Exit(0);
                }
            });
            try {
                CHECK_EQ(processes.wait(1, 3), 0);
                await_all(processes, 0, 0, 3, kIoException);
            } catch (const std::exception &error) {
                throw std::logic_error(MakeString(wait.name, ", its context ended ", ends, ": ", error.what()));
            }
        }
    }
}

void others_go_on_when_a_rank_leaves() {
    const Signs signs;
    Processes processes(3, [&](const GlooContext &context) {
        use(context);
        if (context->rank == 2) {
            return;
        }
        signs.await(1);
        pause_for(300);
        Bytes memory(200000, 1);
        for (int i = 0; i < 20; i++) {
            const auto buffer = make_unbound(context, memory);
            context->rank == 0 ? buffer->send(1, 1) : buffer->recv(0, 1);
            CHECK(context->rank == 0 ? buffer->waitSend() : buffer->waitRecv());
            pause_for(20);
        }
    });
    CHECK_EQ(processes.wait(2, 20), 0);
    signs.give();
    signs.give();
    await_all(processes, 0, 1, 5, 0);
}

} // namespace

int main() {
    return run_tests({
        {"groups of processes", groups_of_processes},
        {"forks before contexts", forks_before_contexts},
        {"forks after contexts", forks_after_contexts},
        {"a rank is killed", a_rank_is_killed},
        {"a rank is killed in allreduce", a_rank_is_killed_in_allreduce},
        {"survivors make a new group", survivors_make_a_new_group},
        {"a rank is stopped", a_rank_is_stopped},
        {"buffers end though a rank is stopped", buffers_end_though_a_rank_is_stopped},
        {"send buffers end while a rank is stopped", send_buffers_end_while_a_rank_is_stopped},
        {"a rank leaves", a_rank_leaves},
        {"others go on when a rank leaves", others_go_on_when_a_rank_leaves},
    });
}
