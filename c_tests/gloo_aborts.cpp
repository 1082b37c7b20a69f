// C++17: the gloo face with ranks as threads: waits that are aborted, and waits that time out.

#include <atomic>
#include <functional>
#include <future>
#include <random>

#include "gloo_messages.h"
#include "gloo_threads.h"
#include "gloo_waits.h"

namespace {

using gloo::IoException;
using std::chrono::milliseconds;

// ---- aborted waits

/* Whoever waits goes on waiting until the abort, and is told of it. */
void check_ends(const Unbound &buffer, bool receives, int ms) {
    auto wait = std::async(std::launch::async, [&] { return receives ? buffer->waitRecv() : buffer->waitSend(); });
    CHECK(!ended(wait, ms));
    within(2, [&] { receives ? buffer->abortWaitRecv() : buffer->abortWaitSend(); });
    CHECK(!wait.get());
}

void abort_ends_a_wait() {
    as_threads(2, [](const GlooContext &context) {
        Bytes memory(9 * MiB);
        const int peer = 1 - context->rank;
        const auto buffer = make_unbound(context, memory);
        if (context->rank == 0) {
            buffer->recv(peer, 1);
            for (int i = 0; i < 3; i++) {
                check_ends(buffer, true, i * 20);
            }
            // One that waits though nothing was started.
            check_ends(context->createUnboundBuffer(nullptr, 0), true, 20);
            // The messages can be waited for after it.
            barrier(context);
            CHECK(buffer->waitRecv());
            CHECK(memory == pattern(memory.size(), 4));
        } else {
            barrier(context);
            send_now(context, peer, 1, pattern(memory.size(), 4));
        }
        barrier(context);
        if (context->rank == 0) {
            // So long a message is not sent before the other side asks for it.
            buffer->send(peer, 2);
            check_ends(buffer, false, 50);
            barrier(context);
            CHECK(buffer->waitSend());
        } else {
            barrier(context);
            CHECK(receive_now(context, peer, 2, memory.size()) == pattern(memory.size(), 4));
        }
    });
}

void abort_before_a_wait_ends_the_next_one_only() {
    as_threads(2, [](const GlooContext &context) {
        int value = 5;
        const int peer = 1 - context->rank;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        if (context->rank == 0) {
            buffer->abortWaitRecv();
            buffer->abortWaitSend();
            within(1, [&] { CHECK(!buffer->waitRecv()); });
            within(1, [&] { CHECK(!buffer->waitSend()); });
            // Twice is once.
            buffer->abortWaitRecv();
            buffer->abortWaitRecv();
            buffer->recv(peer, 1);
            CHECK(!buffer->waitRecv());
            CHECK(buffer->waitRecv());
            // One side's abort is not the other's.
            buffer->abortWaitRecv();
            buffer->send(peer, 2);
            CHECK(buffer->waitSend());
            buffer->abortWaitSend();
            buffer->recv(peer, 3);
            CHECK(!buffer->waitRecv());
            CHECK(buffer->waitRecv());
            buffer->send(peer, 4);
            CHECK(!buffer->waitSend());
            CHECK(buffer->waitSend());
            // Also when the message is there already.
            buffer->recv(peer, 5);
            barrier(context);
            pause_for(50);
            buffer->abortWaitRecv();
            CHECK(!buffer->waitRecv());
            CHECK(buffer->waitRecv());
        } else {
            send_now(context, peer, 1, Bytes(sizeof(value)));
            receive_now(context, peer, 2, sizeof(value));
            send_now(context, peer, 3, Bytes(sizeof(value)));
            receive_now(context, peer, 4, sizeof(value));
            send_now(context, peer, 5, Bytes(sizeof(value)));
            barrier(context);
        }
    });
}

void abort_ends_one_of_two_waits() {
    as_threads(2, [](const GlooContext &context) {
        int values[2] = {0, 0};
        const auto buffer = context->createUnboundBuffer(values, sizeof(values));
        if (context->rank == 0) {
            for (int round = 0; round < 20; round++) {
                buffer->recv(1, 1, 0, sizeof(int));
                buffer->recv(1, 2, sizeof(int), sizeof(int));
                auto one = std::async(std::launch::async, [&] { return buffer->waitRecv(); });
                auto other = std::async(std::launch::async, [&] { return buffer->waitRecv(); });
                pause_for(round % 4);
                buffer->abortWaitRecv();
                send_now(context, 1, 3, Bytes(1));
                CHECK_EQ(int{one.get()} + int{other.get()}, 1);
                CHECK(buffer->waitRecv());
                CHECK_EQ(values[0], 10);
                CHECK_EQ(values[1], 11);
                values[0] = values[1] = 0;
            }
        } else {
            values[0] = 10;
            values[1] = 11;
            for (int round = 0; round < 20; round++) {
                receive_now(context, 0, 3, 1);
                buffer->send(0, 1, 0, sizeof(int));
                buffer->send(0, 2, sizeof(int), sizeof(int));
                CHECK(buffer->waitSend());
                CHECK(buffer->waitSend());
            }
        }
    });
}

void abort_meets_arrival() {
    as_threads(2, [](const GlooContext &context) {
        constexpr int count = 400;
        std::minstd_rand random(static_cast<unsigned>(context->rank) + 1);
        int value = -1;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        if (context->rank == 1) {
            for (int i = 0; i < count; i++) {
                receive_now(context, 0, 2, 1);
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
                value = i;
                buffer->send(0, 1);
                CHECK(buffer->waitSend());
            }
            return;
        }
        std::atomic<int> round{-1};
        std::atomic<bool> over{false};
        auto aborts = std::async(std::launch::async, [&] {
            std::minstd_rand delays(7);
            int last = -1, made = 0;
            while (!over) {
                if (const int now = round; now != last) {
                    last = now;
                    std::this_thread::sleep_for(std::chrono::microseconds(delays() % 200));
                    buffer->abortWaitRecv();
                    made++;
                } else {
                    std::this_thread::yield();
                }
            }
            return made;
        });
        int aborted = 0;
        try {
            for (int i = 0; i < count; i++) {
                buffer->recv(1, 1);
                send_now(context, 1, 2, Bytes(1));
                round = i;
                int from = -1;
                while (!buffer->waitRecv(&from, std::chrono::seconds(20))) {
                    aborted++;
                }
                CHECK_EQ(from, 1);
                CHECK_EQ(value, i);
            }
        } catch (...) {
            over = true;
            throw;
        }
        over = true;
        const int made = aborts.get();
        // An abort ends one wait at the most.
        CHECK(aborted <= made);
        CHECK(aborted > 0);
    });
}

void abort_meets_departure() {
    as_threads(2, [](const GlooContext &context) {
        Bytes memory(9 * MiB);
        const auto buffer = make_unbound(context, memory);
        for (int i = 0; i < 30; i++) {
            if (context->rank == 0) {
                buffer->send(1, 1);
                send_now(context, 1, 2, Bytes(1));
                auto wait = std::async(std::launch::async, [&] { return buffer->waitSend(); });
                std::this_thread::sleep_for(std::chrono::microseconds(i * 50));
                buffer->abortWaitSend();
                const bool sent = wait.get();
                // Either the wait was ended, and the send can be waited for, or the next wait is ended.
                CHECK_EQ(buffer->waitSend(), !sent);
            } else {
                receive_now(context, 0, 2, 1);
                buffer->recv(0, 1);
                CHECK(buffer->waitRecv());
            }
        }
    });
}

// ---- timeouts

void a_wait_with_nothing_started_times_out() {
    as_threads(1, [](const GlooContext &context) {
        int value = 0;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        const double took =
            within(5, [&] { CHECK_THROWS(IoException, "Timed out", buffer->waitRecv(milliseconds(200))); });
        CHECK(took > 0.15);
    });
    as_threads(2, [](const GlooContext &context) {
        int value = 0;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        within(5, [&] {
            if (context->rank == 0) {
                CHECK_THROWS(IoException, "Timed out", buffer->waitSend(milliseconds(200)));
            } else {
                buffer->recv(0, 1);
                CHECK_THROWS(IoException, "", buffer->waitRecv());
            }
        });
    });
    // The context's timeout is the one of a wait that is given none. The other rank stays until it is over.
    std::promise<void> done;
    auto over = done.get_future();
    as_threads(
        2,
        [&](const GlooContext &context) {
            if (context->rank == 0) {
                int value = 0;
                const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
                const double took = within(10, [&] { CHECK_THROWS(IoException, "Timed out", buffer->waitRecv()); });
                done.set_value();
                CHECK(took > 1.9);
            } else {
                over.wait_for(std::chrono::seconds(15));
            }
        },
        milliseconds(2000));
}

void a_timeout_ends_the_context_for_all() {
    // By the context's timeout, or by the wait's own.
    const auto check = [](const Wait &wait, bool own) {
        as_threads(2, [&](const GlooContext &context) {
            int value = 0;
            const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
            const double begin = seconds_now();
            if (context->rank == 0) {
                if (!own) {
                    context->setTimeout(milliseconds(200));
                }
                const auto timeout = own ? milliseconds(200) : gloo::transport::kUnsetTimeout;
                CHECK_THROWS(IoException, "Timed out", wait.call(context, 1, timeout));
                CHECK(seconds_now() - begin > 0.15);
            } else {
                buffer->recv(0, 9);
                CHECK_THROWS(IoException, "", buffer->waitRecv());
            }
            CHECK(seconds_now() - begin < 5);
            // Nothing goes on it any more.
            CHECK_THROWS(IoException, "", barrier(context));
            CHECK_THROWS(IoException, "", (buffer->send(1 - context->rank, 9), buffer->waitSend()));
        });
    };
    for (const Wait &wait : waits()) {
        check(wait, false);
        if (wait.takesTime) {
            check(wait, true);
        }
    }
}

/* What a wait throws that was ended by another call's timeout tells of that one, not of its own. */
void a_wait_tells_whose_timeout_ended_it() {
    std::atomic<int> told{0};
    as_threads(2, [&](const GlooContext &context) {
        Bytes memory(100);
        const auto buffer = make_unbound(context, memory);
        buffer->recv(1 - context->rank, 1);
        auto waiting = std::async(std::launch::async, [&] {
            try {
                buffer->waitRecv(std::chrono::seconds(54));
                return std::string("nothing");
            } catch (const IoException &error) {
                return std::string(error.what());
            }
        });
        if (context->rank == 0) {
            gloo::BarrierOptions options(context);
            options.setTimeout(milliseconds(200));
            CHECK_THROWS(IoException, "Timed out", gloo::barrier(options));
        }
        const std::string text = waiting.get();
        // Nobody leaves before the other has been told.
        told++;
        for (int i = 0; i < 20000 && told < 2; i++) {
            pause_for(1);
        }
        // Nothing comes any more.
        CHECK_THROWS(IoException, "nothing from rank", buffer->waitRecv(std::chrono::seconds(54)));
        CHECK_THROWS(IoException, "nothing from rank", buffer->waitSend(std::chrono::seconds(54)));
        if (text.find("Timed out: ") != 0 || text.find("54000") != std::string::npos) {
            throw std::logic_error("rank " + std::to_string(context->rank) + " is told \"" + text + "\"");
        }
    });
}

/* What the waits throw, each in a thread of its own; "true" or "false" for one that returns. */
std::vector<std::string> told(const std::vector<std::function<bool()>> &calls) {
    std::vector<std::string> texts(calls.size());
    at_once(static_cast<int>(calls.size()), [&](int i) {
        auto &text = texts[static_cast<std::size_t>(i)];
        try {
            text = calls[static_cast<std::size_t>(i)]() ? "true" : "false";
        } catch (const IoException &error) {
            text = error.what();
        }
    });
    return texts;
}

/* The other rank's wait times out. More wait than there are messages, of which there may be none. */
void waits_without_a_message_are_told_of_a_failure() {
    for (const bool posted : {true, false}) {
        for (const auto timeout : {milliseconds(20000), gloo::kNoTimeout}) {
            std::promise<void> done;
            auto over = done.get_future();
            as_threads(2, [&](const GlooContext &context) {
                int value = 0;
                const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
                if (context->rank == 1) {
                    buffer->recv(0, 5);
                    CHECK_THROWS(IoException, "Timed out", buffer->waitRecv(milliseconds(300)));
                    over.wait_for(std::chrono::seconds(30));
                    return;
                }
                if (posted) {
                    buffer->recv(1, 5);
                }
                const auto receives = [&] { return buffer->waitRecv(timeout); };
                const auto sends = [&] { return buffer->waitSend(timeout); };
                const double begin = seconds_now();
                const auto texts = told({receives, receives, sends});
                const double took = seconds_now() - begin;
                done.set_value();
                for (const auto &text : texts) {
                    if (text.find("300ms") == std::string::npos) {
                        throw std::logic_error("a wait was told \"" + text + "\"");
                    }
                }
                CHECK(took < 5);
            });
        }
    }
}

void closing_ends_waits_without_a_message() {
    as_threads(2, [](const GlooContext &context) {
        int value = 0;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        auto wait = std::async(std::launch::async, [&] { return buffer->waitRecv(std::chrono::seconds(20)); });
        CHECK(!ended(wait, 50));
        context->closeConnections();
        within(5, [&] { CHECK_THROWS(IoException, "closed", wait.get()); });
    });
}

/* A wait that is aborted as the other rank's times out ends by either, and one that throws tells the cause. */
void abort_meets_a_failure() {
    for (int round = 0; round < 20; round++) {
        std::promise<void> done;
        auto over = done.get_future();
        as_threads(2, [&](const GlooContext &context) {
            int value = 0;
            const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
            buffer->recv(1 - context->rank, 5);
            if (context->rank == 1) {
                CHECK_THROWS(IoException, "Timed out", buffer->waitRecv(milliseconds(8)));
                over.wait_for(std::chrono::seconds(30));
                return;
            }
            auto waiting = std::async(std::launch::async, [&] {
                const auto receives = [&] { return buffer->waitRecv(std::chrono::seconds(20)); };
                const std::string first = told({receives})[0];
                return std::vector<std::string>{first, told({receives})[0]};
            });
            std::this_thread::sleep_for(std::chrono::microseconds(7500 + round * 75));
            buffer->abortWaitRecv();
            const auto texts = waiting.get();
            done.set_value();
            for (const auto &text : texts) {
                if (text != "false" && text.find("Timed out waiting 8ms") == std::string::npos) {
                    throw std::logic_error("a wait was told \"" + text + "\"");
                }
            }
        });
    }
}

/* A timeout that no clock can add to the time is as good as none. */
void the_longest_timeout() {
    const auto longest = milliseconds::max();
    as_threads(
        2,
        [&](const GlooContext &context) {
            int value = context->rank;
            const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
            const auto &pair = context->getPair(1 - context->rank);
            if (context->rank == 0) {
                std::this_thread::sleep_for(milliseconds(50));
                buffer->send(1, 0);
                CHECK(buffer->waitSend(longest));
                pair->createSendBuffer(0, &value, sizeof(value))->send();
            } else {
                const auto received = pair->createRecvBuffer(0, &value, sizeof(value));
                buffer->recv(0, 0);
                CHECK(buffer->waitRecv(longest));
                received->waitRecv();
                CHECK_EQ(value, 0);
            }
        },
        longest);
}

} // namespace

int main() {
    return run_tests({
        {"abort ends a wait", abort_ends_a_wait},
        {"abort before a wait ends the next one only", abort_before_a_wait_ends_the_next_one_only},
        {"abort ends one of two waits", abort_ends_one_of_two_waits},
        {"abort meets arrival", abort_meets_arrival},
        {"abort meets departure", abort_meets_departure},
        {"a wait with nothing started times out", a_wait_with_nothing_started_times_out},
        {"a timeout ends the context for all", a_timeout_ends_the_context_for_all},
        {"a wait tells whose timeout ended it", a_wait_tells_whose_timeout_ended_it},
        {"waits without a message are told of a failure", waits_without_a_message_are_told_of_a_failure},
        {"closing ends waits without a message", closing_ends_waits_without_a_message},
        {"abort meets a failure", abort_meets_a_failure},
        {"the longest timeout", the_longest_timeout},
    });
}
