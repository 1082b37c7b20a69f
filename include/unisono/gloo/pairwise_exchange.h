#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "gloo/algorithm.h"

namespace gloo {
inline namespace over_unisono {

/* Bytes to and from the ranks at distances 1, 2, 4, …: how fast the pairs of a context are. */
class PairwiseExchange : public Algorithm {
  public:
    PairwiseExchange(const std::shared_ptr<Context> &context, int numBytes, int numDestinations)
        : Algorithm(context), destinations_(numDestinations), bytes_(numBytes / std::max(numDestinations, 1)),
          sent_(static_cast<std::size_t>(numBytes)), received_(sent_.size()) {
        GLOO_ENFORCE_EQ(contextSize_ % 2, 0, "ranks exchange in pairs");
        GLOO_ENFORCE_GT(bytes_, 0, "bytes for each destination");
        GLOO_ENFORCE_LE(uint64_t{1} << destinations_, static_cast<uint64_t>(contextSize_), "destinations");
        for (int i = 0; i < destinations_; i++) {
            const int slot = context->nextSlot(2);
            auto &pair = getPair(contextRank_ ^ 1 << i);
            const auto at = static_cast<std::size_t>(i) * static_cast<std::size_t>(bytes_);
            const auto bytes = static_cast<std::size_t>(bytes_);
            send_.push_back(pair->createSendBuffer(slot, sent_.data() + at, bytes));
            receive_.push_back(pair->createRecvBuffer(slot, received_.data() + at, bytes));
            sendReady_.push_back(pair->createSendBuffer(slot + 1, nullptr, 0));
            receiveReady_.push_back(pair->createRecvBuffer(slot + 1, nullptr, 0));
        }
    }

    void run() override {
        for (std::size_t i = 0; i < send_.size(); i++) {
            send_[i]->send();
            receive_[i]->waitRecv();
            sendReady_[i]->send();
            receiveReady_[i]->waitRecv();
            send_[i]->waitSend();
            sendReady_[i]->waitSend();
        }
    }

  private:
    const int destinations_, bytes_;
    std::vector<char> sent_, received_;
    std::vector<std::unique_ptr<transport::Buffer>> send_, receive_, sendReady_, receiveReady_;
};

} // namespace over_unisono
} // namespace gloo
