#pragma once

#include <algorithm>
#include <chrono>

#include "gloo/common/error.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

/* How long a wait that begins now may last, as one that is made of several. */
class Patience {
  public:
    explicit Patience(std::chrono::milliseconds timeout) : end_(Clock::now() + bounded(timeout)) {}

    std::chrono::steady_clock::time_point end() const { return end_; }
    bool isOver() const { return Clock::now() > end_; }

    /* At least a millisecond, since none is no limit. */
    std::chrono::milliseconds left() const {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end_ - Clock::now());
        return std::max(left, std::chrono::milliseconds(1));
    }

  private:
    using Clock = std::chrono::steady_clock;

    /* A year is as long as for ever, and no clock overflows. */
    static std::chrono::milliseconds bounded(std::chrono::milliseconds timeout) {
        constexpr std::chrono::milliseconds year = std::chrono::hours(24 * 365);
        return timeout == kNoTimeout ? year : std::min(timeout, year);
    }

    const Clock::time_point end_;
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
