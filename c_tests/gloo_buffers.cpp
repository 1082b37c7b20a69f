// C++17: the gloo face with ranks as threads: unbound buffers.

#include <algorithm>
#include <future>
#include <limits>
#include <map>

#include "gloo_messages.h"
#include "gloo_threads.h"

namespace {

using gloo::EnforceNotMet;
using gloo::InvalidOperationException;
using gloo::IoException;
using std::chrono::milliseconds;

void messages_of_all_sizes() {
    for (int size = 2; size <= 4; size++) {
        as_threads(size, [](const GlooContext &context) {
            uint64_t slot = 100;
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, 4 * KiB, MiB + 3, 9 * MiB}) {
                exchange(context, slot++, bytes);
            }
        });
    }
}

void parts_of_a_buffer() {
    as_threads(2, [](const GlooContext &context) {
        Bytes memory = pattern(10000, 1);
        if (context->rank == 0) {
            const auto buffer = make_unbound(context, memory);
            buffer->send(1, 1, 100, 50);
            buffer->send(1, 2, 9000);
            buffer->send(1, 3, 10000);
            buffer->send(1, 4, 10000, 0);
            buffer->send(1, 5, 0, 0);
            for (int i = 0; i < 5; i++) {
                CHECK(buffer->waitSend());
            }
        } else {
            Bytes got(3000, 0xee);
            const auto buffer = make_unbound(context, got);
            buffer->recv(0, 1, 10, 50);
            buffer->recv(0, 2, 2000);
            buffer->recv(0, 3, 3000);
            buffer->recv(0, 4, 17, 0);
            buffer->recv(std::vector<int>{0}, 5, 0, 0);
            for (int i = 0; i < 5; i++) {
                CHECK(buffer->waitRecv());
            }
            Bytes expected(3000, 0xee);
            std::copy_n(memory.begin() + 100, 50, expected.begin() + 10);
            std::copy_n(memory.begin() + 9000, 1000, expected.begin() + 2000);
            CHECK(got == expected);
        }
    });
}

void messages_of_one_slot_keep_their_order() {
    as_threads(2, [](const GlooContext &context) {
        const auto bytes = [](unsigned i) { return i % 8 == 3 ? 2 * MiB : std::size_t{1} + i; };
        constexpr unsigned count = 40;
        std::vector<Bytes> memory;
        std::vector<Unbound> buffers;
        for (unsigned i = 0; i < count; i++) {
            memory.push_back(context->rank == 0 ? pattern(bytes(i), i) : Bytes(bytes(i), 0xee));
            buffers.push_back(make_unbound(context, memory[i]));
        }
        for (const auto &buffer : buffers) {
            context->rank == 0 ? buffer->send(1, 9) : buffer->recv(0, 9);
        }
        for (unsigned i = 0; i < count; i++) {
            CHECK(context->rank == 0 ? buffers[i]->waitSend() : buffers[i]->waitRecv());
            CHECK(memory[i] == pattern(bytes(i), i));
        }
    });
}

void slots_are_independent() {
    as_threads(2, [](const GlooContext &context) {
        const std::vector<uint64_t> slots{0, 1, 2, uint64_t{1} << 32, uint64_t{0x04} << 56, (uint64_t{1} << 56) - 1};
        if (context->rank == 0) {
            std::vector<Bytes> memory;
            std::vector<Unbound> buffers;
            for (unsigned i = 0; i < slots.size(); i++) {
                memory.push_back(pattern(i % 2 == 0 ? 1000 : 3 * MiB, i));
                buffers.push_back(make_unbound(context, memory[i]));
                buffers[i]->send(1, slots[i]);
            }
            for (const auto &buffer : buffers) {
                CHECK(buffer->waitSend());
            }
        } else {
            // Each is waited for before the next is asked for, in another order than they were sent.
            for (const unsigned i : {5u, 0u, 3u, 4u, 1u, 2u}) {
                const std::size_t bytes = i % 2 == 0 ? 1000 : 3 * MiB;
                CHECK(receive_now(context, 0, slots[i], bytes) == pattern(bytes, i));
            }
        }
        // Nor do collectives of the same number meet them.
        barrier(context);
    });
}

void a_receive_from_several_reports_the_rank() {
    as_threads(4, [](const GlooContext &context) {
        constexpr int count = 100;
        if (context->rank != 0) {
            std::vector<int> values(count);
            const auto buffer = make_unbound(context, values);
            for (int i = 0; i < count; i++) {
                values[static_cast<std::size_t>(i)] = context->rank * 1000 + i;
                buffer->send(0, 7, static_cast<std::size_t>(i) * sizeof(int), sizeof(int));
            }
            for (int i = 0; i < count; i++) {
                int to = -1;
                CHECK(buffer->waitSend(&to));
                CHECK_EQ(to, 0);
            }
            return;
        }
        std::map<int, int> next;
        int value = 0;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        for (int i = 0; i < 3 * count; i++) {
            int from = -1;
            buffer->recv(std::vector<int>{1, 2, 3}, 7);
            CHECK(buffer->waitRecv(&from));
            CHECK_EQ(value, from * 1000 + next[from]);
            next[from]++;
        }
        CHECK(next == (std::map<int, int>{{1, count}, {2, count}, {3, count}}));
    });
}

void several_receives_from_several() {
    as_threads(4, [](const GlooContext &context) {
        if (context->rank != 0) {
            send_now(context, 0, 8, pattern(100 * KiB, context->rank));
            return;
        }
        Bytes memory(300 * KiB, 0xee);
        const auto buffer = make_unbound(context, memory);
        for (std::size_t i = 0; i < 3; i++) {
            buffer->recv(std::vector<int>{3, 1, 2}, 8, i * 100 * KiB, 100 * KiB);
        }
        std::set<int> from;
        for (int i = 0; i < 3; i++) {
            int rank = -1;
            CHECK(buffer->waitRecv(&rank));
            from.insert(rank);
        }
        CHECK(from == (std::set<int>{1, 2, 3}));
        std::vector<Bytes> parts, expected;
        for (unsigned i = 0; i < 3; i++) {
            const auto begin = memory.begin() + static_cast<std::ptrdiff_t>(i * 100 * KiB);
            parts.emplace_back(begin, begin + 100 * KiB);
            expected.push_back(pattern(100 * KiB, i + 1));
        }
        std::sort(parts.begin(), parts.end());
        std::sort(expected.begin(), expected.end());
        CHECK(parts == expected);
    });
}

void a_list_of_ranks_takes_no_other_message() {
    as_threads(4, [](const GlooContext &context) {
        const auto mine = pattern(64, context->rank);
        if (context->rank == 1) {
            // Sent before all others, and taken last.
            send_now(context, 0, 5, mine);
        }
        barrier(context);
        if (context->rank == 0) {
            for (const int expected : {2, 3}) {
                Bytes got(64);
                const auto buffer = make_unbound(context, got);
                buffer->recv(std::vector<int>{2, 3}, 5);
                // The two are told to send one after the other.
                send_now(context, expected, 6, Bytes(1));
                int from = -1;
                CHECK(buffer->waitRecv(&from));
                CHECK_EQ(from, expected);
                CHECK(got == pattern(64, expected));
            }
            CHECK(receive_now(context, 1, 5, 64) == pattern(64, 1));
        } else if (context->rank > 1) {
            receive_now(context, 0, 6, 1);
            send_now(context, 0, 5, mine);
        }
    });
}

void many_buffers_at_once() {
    as_threads(3, [](const GlooContext &context) {
        struct Message {
            int peer;
            Bytes out, in;
            Unbound sender, receiver;
        };
        std::vector<Message> messages;
        constexpr int count = 150;
        const auto seed = [](int from, int to, int i) { return from * 5 + to * 11 + i; };
        const auto bytes = [](int i) { return std::size_t{1} + static_cast<std::size_t>(i) * 997 % (64 * KiB); };
        for (int peer = 0; peer < context->size; peer++) {
            for (int i = 0; i < count && peer != context->rank; i++) {
                Message message{peer, pattern(bytes(i), seed(context->rank, peer, i)), Bytes(bytes(i)), nullptr,
                                nullptr};
                message.sender = make_unbound(context, message.out);
                message.receiver = make_unbound(context, message.in);
                messages.push_back(std::move(message));
            }
        }
        for (std::size_t k = 0; k < messages.size(); k++) {
            messages[k].sender->send(messages[k].peer, k % count);
        }
        for (std::size_t k = messages.size(); k-- > 0;) {
            messages[k].receiver->recv(messages[k].peer, k % count);
        }
        for (std::size_t k = 0; k < messages.size(); k++) {
            const int i = static_cast<int>(k % count);
            int from = -1, to = -1;
            CHECK(messages[k].receiver->waitRecv(&from));
            CHECK(messages[k].sender->waitSend(&to));
            CHECK_EQ(from, messages[k].peer);
            CHECK_EQ(to, messages[k].peer);
            CHECK(messages[k].in == pattern(bytes(i), seed(from, context->rank, i)));
        }
    });
}

void threads_share_a_context() {
    as_threads(2, [](const GlooContext &context) {
        at_once(6, [&context](int thread) {
            for (std::size_t i = 0; i < 50; i++) {
                exchange(context, static_cast<uint64_t>(thread), i * 1000);
            }
        });
    });
}

void waits_until_a_time() {
    as_threads(2, [](const GlooContext &context) {
        int value = context->rank;
        const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
        const auto steady = std::chrono::steady_clock::now() + std::chrono::seconds(20);
        const auto system = std::chrono::system_clock::now() + std::chrono::seconds(20);
        if (context->rank == 0) {
            buffer->send(1, 1);
            CHECK(buffer->waitSend(steady));
            buffer->send(1, 2);
            CHECK(buffer->waitSend(system));
            buffer->send(1, 3);
            CHECK(buffer->waitSend(std::chrono::seconds(20)));
            barrier(context);
        } else {
            buffer->recv(0, 1);
            CHECK(buffer->waitRecv(steady));
            CHECK_EQ(value, 0);
            buffer->recv(0, 2);
            CHECK(buffer->waitRecv(system));
            // What is there is there, even when the time is over.
            buffer->recv(0, 3);
            barrier(context);
            pause_for(100);
            CHECK(buffer->waitRecv(std::chrono::steady_clock::now() - std::chrono::seconds(1)));
        }
        barrier(context);
    });
    // The other rank stays until it is over.
    std::promise<void> done;
    auto over = done.get_future();
    as_threads(2, [&](const GlooContext &context) {
        if (context->rank == 0) {
            int value = 0;
            const auto buffer = context->createUnboundBuffer(&value, sizeof(value));
            buffer->recv(1, 1);
            const double took = within(5, [&] {
                CHECK_THROWS(IoException, "Timed out",
                             buffer->waitRecv(std::chrono::system_clock::now() + milliseconds(200)));
            });
            done.set_value();
            CHECK(took > 0.15);
        } else {
            over.wait_for(std::chrono::seconds(10));
        }
    });
}

void memory_comes_back_at_once() {
    as_threads(2, [](const GlooContext &context) {
        for (const std::size_t bytes : {std::size_t{8}, 2 * MiB}) {
            if (context->rank == 1) {
                barrier(context);
                send_now(context, 0, 3, pattern(bytes, 1));
                continue;
            }
            Bytes memory(bytes, 7);
            auto buffer = make_unbound(context, memory);
            buffer->recv(1, 3);
            buffer->recv(std::vector<int>{1}, 3);
            pause_for(20);
            within(1, [&] { buffer.reset(); });
            barrier(context);
            CHECK(receive_now(context, 1, 3, bytes) == pattern(bytes, 1));
            CHECK(memory == Bytes(bytes, 7));
        }
    });
}

void wrong_arguments() {
    as_threads(2, [](const GlooContext &context) {
        Bytes memory(100);
        const int peer = 1 - context->rank;
        const auto buffer = make_unbound(context, memory);
        CHECK_THROWS(EnforceNotMet, "101", buffer->send(peer, 1, 101));
        CHECK_THROWS(EnforceNotMet, "101", buffer->recv(peer, 1, 101));
        CHECK_THROWS(EnforceNotMet, "51", buffer->send(peer, 1, 50, 51));
        CHECK_THROWS(EnforceNotMet, "51", buffer->recv(peer, 1, 50, 51));
        CHECK_THROWS(EnforceNotMet, "", buffer->recv(std::vector<int>{peer}, 1, 0, 101));
        // A sum that does not fit in 64 bits.
        CHECK_THROWS(EnforceNotMet, "", buffer->send(peer, 1, 50, std::numeric_limits<std::size_t>::max() - 10));
        CHECK_THROWS(EnforceNotMet, "", buffer->recv(std::vector<int>{}, 1));
        for (const int rank : {2, -1, 1000000}) {
            CHECK_THROWS(InvalidOperationException, "", buffer->send(rank, 1));
            CHECK_THROWS(InvalidOperationException, "", buffer->recv(rank, 1));
            CHECK_THROWS(InvalidOperationException, "", buffer->recv(std::vector<int>{peer, rank}, 1));
            CHECK_THROWS(std::out_of_range, "", context->getPair(rank));
        }
        auto &pair = context->getPair(peer);
        const auto sender = make_send(context, peer, 1, memory);
        const auto receiver = make_receive(context, peer, 2, memory);
        CHECK_THROWS(EnforceNotMet, "", sender->send(101, 0));
        CHECK_THROWS(EnforceNotMet, "", sender->send(50, 51));
        CHECK_THROWS(EnforceNotMet, "", sender->send(50, std::numeric_limits<std::size_t>::max() - 10));
        CHECK_THROWS(EnforceNotMet, "", sender->waitSend());
        CHECK_THROWS(InvalidOperationException, "", sender->waitRecv());
        CHECK_THROWS(InvalidOperationException, "", receiver->waitSend());
        CHECK_THROWS(InvalidOperationException, "", receiver->send());

        struct Key : gloo::transport::RemoteKey {
            Key() : RemoteKey(0, 100) {}
            std::string serialize() const override { return "key"; }
        };
        CHECK_THROWS(std::runtime_error, "", buffer->put(Key(), 1, 0, 0, 1));
        CHECK_THROWS(std::runtime_error, "", buffer->get(Key(), 1, 0, 0, 1));
        CHECK_THROWS(std::runtime_error, "", buffer->getRemoteKey());
        CHECK_THROWS(std::runtime_error, "", pair->put(buffer.get(), Key(), 1, 0, 0, 1));
        CHECK_THROWS(std::runtime_error, "", pair->get(buffer.get(), Key(), 1, 0, 0, 1));
        CHECK_THROWS(std::runtime_error, "", context->deserializeRemoteKey("key"));

        // Nothing of that was started, and the context goes on.
        exchange(context, 1, 100);
        barrier(context);
    });
    CHECK_THROWS(EnforceNotMet, "", gloo::rendezvous::Context(2, 2));
    CHECK_THROWS(EnforceNotMet, "", gloo::rendezvous::Context(-1, 2));
    gloo::rendezvous::Context unconnected(0, 2);
    CHECK_THROWS(EnforceNotMet, "", unconnected.createUnboundBuffer(nullptr, 0));
    CHECK_THROWS(EnforceNotMet, "", unconnected.getPair(1));
    CHECK_THROWS(EnforceNotMet, "", unconnected.getDevice());
}

} // namespace

int main() {
    return run_tests({
        {"messages of all sizes", messages_of_all_sizes},
        {"parts of a buffer", parts_of_a_buffer},
        {"messages of one slot keep their order", messages_of_one_slot_keep_their_order},
        {"slots are independent", slots_are_independent},
        {"a receive from several reports the rank", a_receive_from_several_reports_the_rank},
        {"several receives from several", several_receives_from_several},
        {"a list of ranks takes no other message", a_list_of_ranks_takes_no_other_message},
        {"many buffers at once", many_buffers_at_once},
        {"threads share a context", threads_share_a_context},
        {"waits until a time", waits_until_a_time},
        {"memory comes back at once", memory_comes_back_at_once},
        {"wrong arguments", wrong_arguments},
    });
}
