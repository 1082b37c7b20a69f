#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* The elements of all ranks, in the order of the ranks, go to all. Without an input a rank's elements are at their
   place in the output. */
class AllgatherOptions : public detail::InOutOptions {
  public:
    explicit AllgatherOptions(const std::shared_ptr<Context> &context_) : InOutOptions(context_) {}

    friend void allgather(const AllgatherOptions &options);
};

inline void allgather(const AllgatherOptions &options) {
    const auto size = static_cast<std::size_t>(options.context->size);
    GLOO_ENFORCE(options.out.isGiven(), "every rank has an output");
    GLOO_ENFORCE_EQ(options.out.bytes() % size, 0u, "the output has as much room for each rank");
    const std::size_t bytes = options.out.bytes() / size;
    const detail::Span place(options.out.data() + bytes * static_cast<std::size_t>(options.context->rank), bytes);
    if (options.in.isGiven()) {
        GLOO_ENFORCE_EQ(options.in.bytes(), bytes, "bytes of the input, and of the output for each rank");
    }
    const unisono_call_t call = options.call(kAllgatherSlotPrefix);
    const auto native = options.context->native();
    detail::check(unisono_allgather(native.get(), detail::partFrom(options.in, place, options.out), options.out.data(),
                                    bytes, UNISONO_UINT8, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
