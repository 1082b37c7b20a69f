#pragma once

#include "gloo/detail/options.h"
#include "gloo/algorithm.h"

namespace gloo {
inline namespace over_unisono {

/* The barriers that are objects. */
class Barrier : public Algorithm {
  public:
    explicit Barrier(const std::shared_ptr<Context> &context) : Algorithm(context) {}
};

/* Returns when all ranks have called it. */
class BarrierOptions : public detail::CollectiveOptions {
  public:
    explicit BarrierOptions(const std::shared_ptr<Context> &context_) : CollectiveOptions(context_) {}

    friend void barrier(const BarrierOptions &options);
};

inline void barrier(const BarrierOptions &options) {
    const unisono_call_t call = options.call(kBarrierSlotPrefix);
    detail::check(unisono_barrier(options.context->native().get(), &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
