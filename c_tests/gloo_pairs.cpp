// C++17: the gloo face with ranks as threads: pairs and their buffers.

#include <algorithm>
#include <atomic>
#include <fstream>
#include <limits>
#include <random>

#include "gloo_messages.h"
#include "gloo_threads.h"

namespace {

using gloo::IoException;
using gloo::MakeString;

struct Sizes {
    std::size_t bytes, offset, roffset;
};
const std::vector<Sizes> kPairSizes{{0, 0, 0},   {0, 10, 4 * KiB}, {1, 3, 5},       {111, 1, 0},  {112, 0, 9},
                                    {113, 7, 0}, {4 * KiB, 2, 3},  {5 * MiB, 0, 0}, {112, 2, 77}, {5 * MiB, 10, 100}};

void pair_messages_of_all_sizes() {
    as_threads(3, [](const GlooContext &context) {
        const std::size_t all = 5 * MiB + 200;
        const auto seed = [](int from, int to) { return from * 3 + to; };
        for (int peer = 0; peer < context->size; peer++) {
            if (peer == context->rank) {
                continue;
            }
            // Ranks 0 and 1, then 0 and 2, then 1 and 2.
            Bytes out = pattern(all, seed(context->rank, peer)), in(all, 0xee), expected(all, 0xee);
            const Bytes theirs = pattern(all, seed(peer, context->rank));
            const auto sender = make_send(context, peer, 1, out);
            const auto receiver = make_receive(context, peer, 1, in);
            uint64_t round = 1000;
            for (const auto &[bytes, offset, roffset] : kPairSizes) {
                sender->send(offset, bytes, roffset);
                receiver->waitRecv();
                std::copy_n(theirs.begin() + static_cast<std::ptrdiff_t>(offset), bytes,
                            expected.begin() + static_cast<std::ptrdiff_t>(roffset));
                CHECK(in == expected);
                sender->waitSend();
                // The other has looked, and the next may come.
                meet(context, peer, round++);
            }
        }
    });
}

void pair_messages_before_anyone_waits() {
    // With a receive buffer that is there before the messages, and with one that is made after them.
    for (const bool early : {true, false}) {
        as_threads(2, [early](const GlooContext &context) {
            constexpr std::size_t count = 1000, bytes = 100;
            Bytes memory = context->rank == 0 ? pattern(count * bytes, 3) : Bytes(count * bytes);
            const int peer = 1 - context->rank;
            if (context->rank == 0) {
                const auto buffer = make_send(context, peer, 5, memory);
                meet(context, 1, 1);
                for (std::size_t i = 0; i < count; i++) {
                    buffer->send(i * bytes, bytes, i * bytes);
                }
                meet(context, 1, 2);
                for (std::size_t i = 0; i < count; i++) {
                    buffer->waitSend();
                }
            } else {
                Bound buffer;
                if (early) {
                    buffer = make_receive(context, peer, 5, memory);
                }
                meet(context, 0, 1);
                meet(context, 0, 2);
                if (!early) {
                    buffer = make_receive(context, peer, 5, memory);
                }
                for (std::size_t i = 0; i < count; i++) {
                    buffer->waitRecv();
                }
                CHECK(memory == pattern(count * bytes, 3));
            }
        });
    }
}

/* KiB of memory that this process has. */
long resident() {
    std::ifstream file("/proc/self/status");
    std::string word;
    while (file >> word && word != "VmRSS:") {
    }
    long kib = 0;
    file >> kib;
    return kib;
}

void pair_messages_that_nobody_waits_to_have_sent() {
    // Whoever has the answers knows that its messages have been sent.
    std::atomic<long> grown{0};
    as_threads(2, [&](const GlooContext &context) {
        constexpr int count = 50000;
        const int peer = 1 - context->rank;
        Bytes out(8, 1), in(8);
        const auto sender = make_send(context, peer, 1, out);
        const auto receiver = make_receive(context, peer, 1, in);
        const auto play = [&](int messages) {
            for (int i = 0; i < messages; i += 100) {
                for (int j = 0; j < 100; j++) {
                    sender->send();
                }
                for (int j = 0; j < 100; j++) {
                    receiver->waitRecv();
                }
            }
        };
        play(1000);
        barrier(context);
        const long before = resident();
        play(count - 1000);
        grown = resident() - before;
        // The waits are there all the same.
        for (int i = 0; i < count; i++) {
            sender->waitSend();
        }
        CHECK_THROWS(gloo::EnforceNotMet, "waited for", sender->waitSend());
        sender->send();
        receiver->waitRecv();
        sender->waitSend();
        barrier(context);
    });
    if (grown > 20 * 1024) {
        throw std::logic_error(MakeString("the process has grown by ", grown, " KiB"));
    }
}

void pair_messages_keep_their_order() {
    as_threads(2, [](const GlooContext &context) {
        // Short and long ones to one place: what is there at the end is the last.
        constexpr std::size_t bytes = 300 * KiB;
        const int peer = 1 - context->rank;
        if (context->rank == 0) {
            Bytes memory = pattern(bytes * 20, 2);
            const auto buffer = make_send(context, peer, 1, memory);
            for (std::size_t i = 0; i < 20; i++) {
                buffer->send(i * bytes, i % 3 == 0 ? 10 : bytes, 0);
            }
            for (std::size_t i = 0; i < 20; i++) {
                buffer->waitSend();
            }
        } else {
            Bytes memory(bytes);
            const auto buffer = make_receive(context, peer, 1, memory);
            for (std::size_t i = 0; i < 20; i++) {
                buffer->waitRecv();
            }
            const Bytes sent = pattern(bytes * 20, 2);
            Bytes expected(sent.begin() + 17 * bytes, sent.begin() + 18 * bytes);
            std::copy_n(sent.begin() + 18 * bytes, 10, expected.begin());
            std::copy_n(sent.begin() + 19 * bytes, bytes, expected.begin());
            CHECK(memory == expected);
        }
    });
}

void pairs_send_both_ways_at_once() {
    as_threads(3, [](const GlooContext &context) {
        constexpr std::size_t bytes = 5 * MiB;
        struct Peer {
            int rank;
            Bytes out, in;
            Bound sender, receiver;
        };
        std::vector<Peer> peers;
        for (int rank = 0; rank < context->size; rank++) {
            if (rank != context->rank) {
                peers.push_back({rank, Bytes(bytes), Bytes(bytes), nullptr, nullptr});
                auto &peer = peers.back();
                peer.receiver = make_receive(context, rank, 1, peer.in);
                peer.sender = make_send(context, rank, 1, peer.out);
            }
        }
        for (int round = 0; round < 4; round++) {
            for (auto &peer : peers) {
                const Bytes content = pattern(bytes, round * 10 + context->rank);
                std::copy(content.begin(), content.end(), peer.out.begin());
                peer.sender->send();
            }
            for (auto &peer : peers) {
                peer.sender->waitSend();
            }
            for (auto &peer : peers) {
                peer.receiver->waitRecv();
                CHECK(peer.in == pattern(bytes, round * 10 + peer.rank));
            }
            barrier(context);
        }
    });
}

void a_receive_buffer_made_after_the_message() {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{112}, std::size_t{113}, 5 * MiB}) {
        as_threads(2, [bytes](const GlooContext &context) {
            const int peer = 1 - context->rank;
            if (context->rank == 0) {
                Bytes memory = pattern(bytes, 6);
                const auto buffer = make_send(context, peer, 1, memory);
                buffer->send();
                meet(context, 1, 1);
                buffer->waitSend();
            } else {
                Bytes memory(bytes + 8, 0xee), expected(bytes + 8, 0xee);
                const Bytes sent = pattern(bytes, 6);
                std::copy(sent.begin(), sent.end(), expected.begin());
                meet(context, 0, 1);
                pause_for(50);
                const auto buffer = make_receive(context, peer, 1, memory);
                buffer->waitRecv();
                CHECK(memory == expected);
            }
        });
    }
}

void slots_of_pairs_are_independent() {
    as_threads(2, [](const GlooContext &context) {
        // Also of unbound buffers' slots and of collectives' tags, which have the same numbers.
        const std::vector<int> slots{0, 1, 2, 3, 1 << 30, std::numeric_limits<int>::max()};
        const int peer = 1 - context->rank;
        std::vector<Bytes> memory;
        std::vector<Bound> buffers;
        for (unsigned i = 0; i < slots.size(); i++) {
            const std::size_t bytes = i % 2 == 0 ? 64 : MiB;
            memory.push_back(context->rank == 0 ? pattern(bytes, i) : Bytes(bytes));
            buffers.push_back(context->rank == 0 ? make_send(context, peer, slots[i], memory[i])
                                                 : make_receive(context, peer, slots[i], memory[i]));
        }
        if (context->rank == 0) {
            for (const auto &buffer : buffers) {
                buffer->send();
            }
            for (uint64_t slot = 0; slot < 4; slot++) {
                send_now(context, 1, slot, pattern(64, 50));
            }
            barrier(context);
            for (const auto &buffer : buffers) {
                buffer->waitSend();
            }
        } else {
            for (uint64_t slot = 0; slot < 4; slot++) {
                CHECK(receive_now(context, 0, slot, 64) == pattern(64, 50));
            }
            barrier(context);
            for (const unsigned i : {4u, 1u, 5u, 0u, 3u, 2u}) {
                buffers[i]->waitRecv();
                CHECK(memory[i] == pattern(memory[i].size(), i));
            }
        }
    });
}

void pairs_send_unbound_buffers() {
    as_threads(2, [](const GlooContext &context) {
        auto &pair = context->getPair(1 - context->rank);
        CHECK(pair->isConnected());
        pair->setSync(true, true);
        pair->setLocalRank(1);
        CHECK_EQ(pair->getLocalRank(), 1);
        Bytes memory = context->rank == 0 ? pattern(MiB, 1) : Bytes(MiB);
        const auto buffer = make_unbound(context, memory);
        int peer = -1;
        if (context->rank == 0) {
            pair->send(buffer.get(), 3, 1000, MiB - 1000);
            CHECK(buffer->waitSend(&peer));
        } else {
            pair->recv(buffer.get(), 3, 1000, MiB - 1000);
            CHECK(buffer->waitRecv(&peer));
            Bytes expected = pattern(MiB, 1);
            std::fill_n(expected.begin(), 1000, static_cast<unsigned char>(0));
            CHECK(memory == expected);
        }
        CHECK_EQ(peer, 1 - context->rank);
    });
}

void a_message_that_does_not_fit() {
    struct Case {
        std::size_t bytes, roffset;
    };
    for (const auto &[bytes, roffset] : {Case{51, 0}, Case{10, 41}, Case{10, 1000}, Case{5 * MiB, 0},
                                         Case{10, std::numeric_limits<std::size_t>::max() - 5}}) {
        as_threads(2, [bytes = bytes, roffset = roffset](const GlooContext &context) {
            const int peer = 1 - context->rank;
            if (context->rank == 0) {
                Bytes memory(bytes, 1);
                const auto buffer = make_send(context, peer, 1, memory);
                buffer->send(0, bytes, roffset);
                // What was sent cannot be taken back, and a short message may be gone; no wait outlasts the other side.
                within(5, [&] {
                    if (bytes > MiB) {
                        CHECK_THROWS(IoException, "", buffer->waitSend());
                    } else {
                        meet(context, 1, 2);
                    }
                });
            } else {
                Bytes memory(100, 0xee);
                const auto buffer = context->getPair(peer)->createRecvBuffer(1, memory.data(), 50);
                within(5, [&] { CHECK_THROWS(gloo::Exception, MakeString(bytes, " bytes"), buffer->waitRecv()); });
                // And again.
                CHECK_THROWS(gloo::Exception, "of a receive buffer of 50", buffer->waitRecv());
                CHECK(memory == Bytes(100, 0xee));
                if (bytes <= MiB) {
                    meet(context, 0, 2);
                }
            }
        });
    }
}

/* What cannot be sent leaves nothing behind that the other side would wait for. */
void a_send_buffer_without_memory() {
    as_threads(
        2,
        [](const GlooContext &context) {
            const int peer = 1 - context->rank;
            for (const std::size_t bytes : {4 * KiB, std::size_t{100}}) {
                Bytes memory = pattern(bytes, context->rank);
                if (context->rank == 0) {
                    const auto none = context->getPair(peer)->createSendBuffer(1, nullptr, bytes);
                    CHECK_THROWS(gloo::EnforceNotMet, "memory", none->send());
                    const auto buffer = make_send(context, peer, 1, memory);
                    buffer->send();
                    buffer->waitSend();
                } else {
                    make_receive(context, peer, 1, memory)->waitRecv();
                    CHECK(memory == pattern(bytes, peer));
                }
                barrier(context);
            }
        },
        std::chrono::seconds(5));
}

void pair_buffers_are_made_again() {
    as_threads(2, [](const GlooContext &context) {
        const int peer = 1 - context->rank;
        for (int round = 0; round < 60; round++) {
            const std::size_t bytes = round % 2 == 0 ? 100 : 200 * KiB;
            Bytes out = pattern(bytes, round + context->rank), in(bytes);
            {
                auto receiver = make_receive(context, peer, 1, in);
                auto sender = make_send(context, peer, 1, out);
                sender->send();
                receiver->waitRecv();
                CHECK(in == pattern(bytes, round + peer));
                sender->waitSend();
                if (round % 4 < 2) {
                    sender.reset();
                }
            }
            barrier(context);
        }
        // A receive buffer that nothing was sent to gives its memory and its slot back.
        Bytes unused(100, 7), used(100);
        auto receiver = make_receive(context, peer, 2, unused);
        within(1, [&] { receiver.reset(); });
        barrier(context);
        receiver = make_receive(context, peer, 2, used);
        Bytes out = pattern(100, 1);
        const auto sender = make_send(context, peer, 2, out);
        sender->send();
        receiver->waitRecv();
        sender->waitSend();
        CHECK(used == out);
        CHECK(unused == Bytes(100, 7));
    });
}

void pair_buffers_end_with_messages_under_way() {
    as_threads(2, [](const GlooContext &context) {
        std::minstd_rand random(static_cast<unsigned>(context->rank) + 3);
        const int peer = 1 - context->rank;
        for (int round = 0; round < 30; round++) {
            constexpr int count = 8;
            std::vector<Bytes> memory;
            std::vector<Bound> buffers;
            for (int i = 0; i < 2 * count; i++) {
                const std::size_t bytes = i % 3 == 0 ? 50 : i % 3 == 1 ? 2 * MiB : 10 * KiB;
                memory.emplace_back(bytes, static_cast<unsigned char>(i));
            }
            for (int i = 0; i < count; i++) {
                const int slot = round * count + i;
                auto &out = memory[static_cast<std::size_t>(i)], &in = memory[static_cast<std::size_t>(i + count)];
                const std::size_t bytes = std::min(out.size(), in.size());
                buffers.push_back(context->getPair(peer)->createSendBuffer(slot, out.data(), bytes));
                if (random() % 4 > 0) {
                    buffers.back()->send();
                }
                if (random() % 4 > 0) {
                    buffers.push_back(make_receive(context, peer, slot, in));
                }
            }
            std::shuffle(buffers.begin(), buffers.end(), random);
            if (round % 3 == 0) {
                pause_for(5);
            }
            within(5, [&] {
                while (!buffers.empty()) {
                    buffers.pop_back();
                }
            });
            memory.clear();
        }
        // The context goes on.
        barrier(context);
        exchange(context, 1, MiB);
        barrier(context);
    });
}

/* Waits until the end of the buffer's memory is this, which comes as the first message or the second. */
void await_second(gloo::transport::Buffer &buffer, const Bytes &memory, std::size_t first, const Bytes &second) {
    const auto is_there = [&] {
        return std::equal(second.begin(), second.end(), memory.end() - static_cast<std::ptrdiff_t>(second.size()));
    };
    buffer.waitRecv();
    if (!is_there()) {
        buffer.waitRecv();
    }
    CHECK(is_there());
    // The first has come as a whole or not at all.
    const auto middle = memory.begin() + static_cast<std::ptrdiff_t>(first);
    CHECK(std::all_of(memory.begin(), middle, [&](unsigned char value) { return value == memory[0]; }));
}

void a_send_buffer_ends_before_its_message_is_taken() {
    // Of a long message only the announcement has come then, if at all. The next message of the slot is another one.
    constexpr std::size_t first = 9 * MiB, second = 3 * MiB;
    as_threads(2, [](const GlooContext &context) {
        const int peer = 1 - context->rank;
        const Bytes kept = pattern(second, 2);
        if (context->rank == 0) {
            Bytes gone(first, 1), out = kept;
            auto buffer = make_send(context, peer, 1, gone);
            buffer->send();
            pause_for(50);
            within(2, [&] { buffer.reset(); });
            std::fill(gone.begin(), gone.end(), static_cast<unsigned char>(3));
            buffer = make_send(context, peer, 1, out);
            buffer->send(0, second, first);
            meet(context, 1, 1);
            buffer->waitSend();
        } else {
            Bytes memory(first + second);
            meet(context, 0, 1);
            const auto buffer = make_receive(context, peer, 1, memory);
            await_second(*buffer, memory, first, kept);
            CHECK(memory[0] == 0 || memory[0] == 1);
        }
    });
}

/* A short message to a rank that there is no link to yet. */
void a_send_buffer_ends_before_its_link_is_open() {
    as_threads(20, [](const GlooContext &context) {
        if (context->rank == 0) {
            for (int peer = 1; peer < context->size; peer++) {
                Bytes memory = pattern(64, peer);
                make_send(context, peer, 1, memory)->send();
            }
        } else {
            pause_for(400);
            Bytes memory(64);
            within(5, [&] { make_receive(context, 0, 1, memory)->waitRecv(); });
            CHECK(memory == pattern(64, context->rank));
        }
        barrier(context);
    });
}

void a_receive_buffer_ends_as_a_message_comes() {
    // It has taken the message or not; the next receive buffer of the slot gets the next one in any case.
    constexpr std::size_t first = 2 * MiB, second = MiB;
    as_threads(2, [](const GlooContext &context) {
        const int peer = 1 - context->rank;
        for (int round = 0; round < 20; round++) {
            const Bytes kept = pattern(second, round + 2);
            if (context->rank == 0) {
                Bytes gone(first, 1), out = kept;
                const auto one = make_send(context, peer, 1, gone);
                one->send();
                meet(context, 1, 1);
                meet(context, 1, 3);
                const auto other = make_send(context, peer, 1, out);
                other->send(0, second, first);
                meet(context, 1, 2);
            } else {
                Bytes memory(first + second), earlier(first + second);
                meet(context, 0, 1);
                auto buffer = make_receive(context, peer, 1, earlier);
                std::this_thread::sleep_for(std::chrono::microseconds(round * 20));
                within(2, [&] { buffer.reset(); });
                const Bytes left = earlier;
                meet(context, 0, 3);
                buffer = make_receive(context, peer, 1, memory);
                await_second(*buffer, memory, first, kept);
                CHECK(earlier == left);
                meet(context, 0, 2);
            }
        }
    });
}

/* Whether messages have come before or not. */
void closing_ends_the_wait_of_another_thread() {
    for (const int sent : {0, 1, 2}) {
        as_threads(2, [sent](const GlooContext &context) {
            const int peer = 1 - context->rank;
            Bytes memory(100);
            if (context->rank == 1) {
                const auto sender = make_send(context, peer, 1, memory);
                for (int i = 0; i < sent; i++) {
                    sender->send();
                    sender->waitSend();
                }
                // It stays until the other one has closed.
                CHECK_THROWS(IoException, "", receive_now(context, peer, 2, 1));
                return;
            }
            const auto receiver = make_receive(context, peer, 1, memory);
            for (int i = 0; i < sent; i++) {
                receiver->waitRecv();
            }
            double woken = 0;
            auto waiting = std::async(std::launch::async, [&] {
                CHECK_THROWS(IoException, "", receiver->waitRecv());
                woken = seconds_now();
            });
            CHECK(!ended(waiting, 50));
            const double closed = seconds_now();
            context->closeConnections();
            waiting.get();
            CHECK(woken - closed < 5);
            // Nor does another wait begin.
            within(5, [&] { CHECK_THROWS(IoException, "", receiver->waitRecv()); });
        });
    }
}

/* The message has not been taken when the sender's context is closed: it is not sent later, from memory that is the
   program's again. */
void a_wait_that_throws_leaves_nothing_under_way() {
    // Not by messages: one of the two contexts is closed.
    std::promise<void> reused, looked;
    const auto await = [](std::future<void> event) {
        CHECK(event.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
    };
    as_threads(2, [&](const GlooContext &context) {
        Bytes memory(2 * MiB, 1);
        if (context->rank == 0) {
            auto sender = make_send(context, 1, 1, memory);
            sender->send();
            context->closeConnections();
            CHECK_THROWS(IoException, "", sender->waitSend());
            sender.reset();
            std::fill(memory.begin(), memory.end(), 2);
            reused.set_value();
            await(looked.get_future());
        } else {
            await(reused.get_future());
            std::fill(memory.begin(), memory.end(), 0);
            context->setTimeout(std::chrono::milliseconds(300));
            try {
                make_receive(context, 0, 1, memory)->waitRecv();
            } catch (const IoException &) {
            }
            looked.set_value();
            CHECK(std::find(memory.begin(), memory.end(), 2) == memory.end());
        }
    });
}

void buffers_outlive_their_context() {
    for (int round = 0; round < 10; round++) {
        const auto store = std::make_shared<gloo::rendezvous::HashStore>();
        at_once(2, [&](int rank) {
            auto context = connect(rank, 2, store);
            Bytes out(2 * MiB, 1), in(2 * MiB), other(100);
            auto sender = make_send(context, 1 - rank, 1, out);
            auto receiver = make_receive(context, 1 - rank, 1, in);
            auto idle = make_receive(context, 1 - rank, 2, other);
            auto unbound = make_unbound(context, other);
            sender->send();
            unbound->recv(1 - rank, 3);
            // The last that holds the context is a buffer.
            context.reset();
            receiver->waitRecv();
            sender->waitSend();
            CHECK(in == out);
            if (round % 2 == 0) {
                within(2, [&] { idle.reset(), receiver.reset(), sender.reset(), unbound.reset(); });
            } else {
                within(2, [&] { unbound.reset(), sender.reset(), receiver.reset(), idle.reset(); });
            }
        });
    }
}

} // namespace

int main() {
    return run_tests({
        {"pair messages of all sizes", pair_messages_of_all_sizes},
        {"pair messages before anyone waits", pair_messages_before_anyone_waits},
        {"pair messages that nobody waits to have sent", pair_messages_that_nobody_waits_to_have_sent},
        {"pair messages keep their order", pair_messages_keep_their_order},
        {"pairs send both ways at once", pairs_send_both_ways_at_once},
        {"a receive buffer made after the message", a_receive_buffer_made_after_the_message},
        {"slots of pairs are independent", slots_of_pairs_are_independent},
        {"pairs send unbound buffers", pairs_send_unbound_buffers},
        {"a message that does not fit", a_message_that_does_not_fit},
        {"a send buffer without memory", a_send_buffer_without_memory},
        {"pair buffers are made again", pair_buffers_are_made_again},
        {"pair buffers end with messages under way", pair_buffers_end_with_messages_under_way},
        {"a send buffer ends before its message is taken", a_send_buffer_ends_before_its_message_is_taken},
        {"a send buffer ends before its link is open", a_send_buffer_ends_before_its_link_is_open},
        {"a receive buffer ends as a message comes", a_receive_buffer_ends_as_a_message_comes},
        {"closing ends the wait of another thread", closing_ends_the_wait_of_another_thread},
        {"a wait that throws leaves nothing under way", a_wait_that_throws_leaves_nothing_under_way},
        {"buffers outlive their context", buffers_outlive_their_context},
    });
}
