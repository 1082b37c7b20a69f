// C++17, gloo's headers: algorithms of a client's own, over pairs, and objects beside each other.

#include <algorithm>
#include <future>

#include <gloo/algorithm.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_ring.h>
#include <gloo/barrier_all_to_all.h>

#include "gloo_messages.h"
#include "gloo_reductions.h"
#include "gloo_threads.h"
#include "gloo_values.h"

namespace {

// ---- algorithms of a client's own

/* Adds up what the ranks have, by passing it round the ring. */
class RingSum : public gloo::Algorithm {
  public:
    RingSum(const std::shared_ptr<gloo::Context> &context, std::vector<uint32_t> &values)
        : Algorithm(context), values_(values), sent_(values.size()), received_(values.size()) {
        if (contextSize_ == 1) {
            return;
        }
        const std::size_t bytes = values.size() * sizeof(uint32_t);
        const int slot = context_->nextSlot(2);
        auto &left = getLeftPair();
        auto &right = getRightPair();
        send_ = right->createSendBuffer(slot, sent_.data(), bytes);
        receive_ = left->createRecvBuffer(slot, received_.data(), bytes);
        // Says that the next value may come.
        sendReady_ = left->createSendBuffer(slot + 1, &ready_, sizeof(ready_));
        receiveReady_ = right->createRecvBuffer(slot + 1, &othersReady_, sizeof(othersReady_));
    }

    void run() override {
        sent_ = values_;
        for (int step = 1; step < contextSize_; step++) {
            send_->send();
            receive_->waitRecv();
            send_->waitSend();
            sent_ = received_;
            for (std::size_t i = 0; i < values_.size(); i++) {
                values_[i] += received_[i];
            }
            ready_ = 1000 * contextRank_ + step;
            sendReady_->send();
            receiveReady_->waitRecv();
            sendReady_->waitSend();
            CHECK_EQ(othersReady_, 1000 * ((contextRank_ + 1) % contextSize_) + step);
        }
    }

  private:
    std::vector<uint32_t> &values_;
    std::vector<uint32_t> sent_, received_;
    int ready_ = 0, othersReady_ = 0;
    Bound send_, receive_, sendReady_, receiveReady_;
};

void own_algorithm() {
    on_each_size([](const GlooContext &context) {
        for (const std::size_t count : {0, 1, 28, 29, 1000, kLong}) {
            std::vector<uint32_t> values(count);
            RingSum algorithm(context, values);
            for (int round = 0; round < 2; round++) {
                values = marks<uint32_t>(context->rank, 0, count, round);
                algorithm.run();
                CHECK(values == sum_of_marks(everyone(context->size, 1), count, round));
            }
        }
    });
}

/* Sends its memory to the right in pieces of all lengths, the last one first, and to where they belong. */
class Pieces : public gloo::Algorithm {
  public:
    Pieces(const std::shared_ptr<gloo::Context> &context, std::vector<char> &from, std::vector<char> &to)
        : Algorithm(context) {
        const int slot = context_->nextSlot();
        send_ = getRightPair()->createSendBuffer(slot, from.data(), from.size());
        receive_ = getLeftPair()->createRecvBuffer(slot, to.data(), to.size());
        for (const std::size_t length : {5000, 1, 0, 111, 112, 113, 70000, 128}) {
            pieces_.emplace_back(total_, length);
            total_ += length;
        }
        CHECK_EQ(total_, from.size());
        CHECK_EQ(2 * total_, to.size());
    }

    void run() override {
        for (auto piece = pieces_.rbegin(); piece != pieces_.rend(); ++piece) {
            send_->send(piece->first, piece->second, 2 * total_ - piece->first - piece->second);
        }
        for (std::size_t i = 0; i < pieces_.size(); i++) {
            receive_->waitRecv();
        }
        for (std::size_t i = 0; i < pieces_.size(); i++) {
            send_->waitSend();
        }
    }

    /* What the left neighbour's memory becomes here. */
    std::vector<char> expected(const std::vector<char> &from) const {
        std::vector<char> all(2 * total_);
        for (const auto &[offset, length] : pieces_) {
            std::copy_n(from.data() + offset, length, all.data() + 2 * total_ - offset - length);
        }
        return all;
    }

  private:
    std::vector<std::pair<std::size_t, std::size_t>> pieces_;
    std::size_t total_ = 0;
    Bound send_, receive_;
};

void pieces_of_buffers() {
    for (const int size : {2, 3, 5}) {
        as_threads(size, [](const GlooContext &context) {
            constexpr std::size_t bytes = 75465;
            const int left = (context->rank + context->size - 1) % context->size;
            std::vector<char> from(bytes), to(2 * bytes);
            Pieces algorithm(context, from, to);
            gloo::BarrierAllToAll barrier(context);
            for (int round = 0; round < 3; round++) {
                const auto source = marks<char>(context->rank, 0, bytes, round);
                std::copy(source.begin(), source.end(), from.begin());
                std::fill(to.begin(), to.end(), '\0');
                // What is sent arrives without being asked for.
                barrier.run();
                algorithm.run();
                CHECK(to == algorithm.expected(marks<char>(left, 0, bytes, round)));
                barrier.run();
            }
        });
    }
}

/* A group of one has no neighbours; objects that never run leave nothing behind; and buffers are used as what they
   are. */
void pairs_and_buffers() {
    class Neighbours : public gloo::Algorithm {
      public:
        using Algorithm::Algorithm;
        using Algorithm::getLeftPair;
        using Algorithm::getPair;
        using Algorithm::getRightPair;
        void run() override {}
    };
    as_threads(1, [](const GlooContext &context) {
        Neighbours algorithm(context);
        CHECK(algorithm.getPair(0) == nullptr);
        CHECK_THROWS(gloo::EnforceNotMet, "", algorithm.getLeftPair());
        CHECK_THROWS(gloo::EnforceNotMet, "", algorithm.getRightPair());
    });
    as_threads(3, [](const GlooContext &context) {
        Neighbours algorithm(context);
        CHECK(&algorithm.getLeftPair() == &algorithm.getPair((context->rank + 2) % 3));
        CHECK(&algorithm.getRightPair() == &algorithm.getPair((context->rank + 1) % 3));
        CHECK(algorithm.getPair(context->rank) == nullptr);
        CHECK(algorithm.getLeftPair()->isConnected());

        std::vector<uint32_t> unused(5000);
        RingSum{context, unused};
        char memory[8] = {};
        const int slot = context->nextSlot();
        const auto send = algorithm.getRightPair()->createSendBuffer(slot, memory, sizeof(memory));
        const auto receive = algorithm.getLeftPair()->createRecvBuffer(slot, memory, sizeof(memory));
        CHECK_THROWS(gloo::EnforceNotMet, "", send->send(9, 0));
        CHECK_THROWS(gloo::EnforceNotMet, "", send->send(4, 5));
        CHECK_THROWS(gloo::EnforceNotMet, "", send->waitSend());
        CHECK_THROWS(gloo::InvalidOperationException, "", send->waitRecv());
        CHECK_THROWS(gloo::InvalidOperationException, "", receive->send());
        CHECK_THROWS(gloo::InvalidOperationException, "", receive->waitSend());

        std::vector<uint32_t> values(100, 1);
        RingSum(context, values).run();
        CHECK(values == std::vector<uint32_t>(100, 3));
    });
}

void message_beyond_a_buffer() {
    as_threads(2, [](const GlooContext &context) {
        std::vector<char> memory(context->rank == 0 ? 200 : 150);
        const int slot = context->nextSlot(), peer = 1 - context->rank;
        gloo::BarrierAllToAll barrier(context);
        if (context->rank == 0) {
            const auto send = make_send(context, peer, slot, memory);
            send->send(0, 100, 60);
            barrier.run();
        } else {
            const auto receive = make_receive(context, peer, slot, memory);
            CHECK_THROWS(gloo::IoException, "rank 0 sent 100 bytes to offset 60", receive->waitRecv());
            barrier.run();
        }
    });
}

// ---- beside each other

void objects_at_the_same_time() {
    for (const int size : {2, 3}) {
        as_threads(size, [](const GlooContext &context) {
            std::vector<uint32_t> shorter(5), longer(30000), rung(700);
            gloo::AllreduceHalvingDoubling<uint32_t> one(context, {shorter.data()}, 5);
            gloo::AllreduceRing<uint32_t> other(context, {longer.data()}, 30000);
            RingSum ring(context, rung);
            const auto often = [&](gloo::Algorithm &algorithm, std::vector<uint32_t> &memory) {
                for (uint32_t round = 1; round <= 30; round++) {
                    std::fill(memory.begin(), memory.end(), round * static_cast<uint32_t>(context->rank + 1));
                    algorithm.run();
                    const auto ranks = static_cast<uint32_t>(context->size);
                    CHECK(memory == std::vector<uint32_t>(memory.size(), round * (ranks * (ranks + 1) / 2)));
                }
            };
            staggered(context->rank,
                      {[&] { often(one, shorter); }, [&] { often(other, longer); }, [&] { often(ring, rung); },
                       [&] {
                           for (int round = 0; round < 30; round++) {
                               check_sum(context, 1000);
                           }
                       }});
        });
    }
}

/* Objects are told apart by the order of their making, not of their runs. */
void objects_in_another_order() {
    as_threads(2, [](const GlooContext &context) {
        std::vector<float> a(10, 1), b(20, 2);
        std::vector<std::unique_ptr<gloo::Algorithm>> algorithms;
        algorithms.push_back(std::make_unique<gloo::AllreduceRing<float>>(context, std::vector<float *>{a.data()}, 10));
        algorithms.push_back(
            std::make_unique<gloo::AllreduceBcube<float>>(context, std::vector<float *>{b.data()}, 20));
        auto first = std::async(std::launch::async, [&] { algorithms[context->rank == 0 ? 0 : 1]->run(); });
        pause_for(10);
        algorithms[context->rank == 0 ? 1 : 0]->run();
        first.get();
        CHECK(a == std::vector<float>(10, 2));
        CHECK(b == std::vector<float>(20, 4));
    });
}

} // namespace

int main() {
    return run_tests({
        {"an algorithm of the client's own", own_algorithm},
        {"pieces of buffers", pieces_of_buffers},
        {"pairs and buffers", pairs_and_buffers},
        {"a message beyond a buffer", message_beyond_a_buffer},
        {"objects at the same time", objects_at_the_same_time},
        {"objects in another order", objects_in_another_order},
    });
}
