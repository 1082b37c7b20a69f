#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* Each rank's n-th part of its input goes to rank n. Input and output have as many elements for each rank. */
class AlltoallOptions : public detail::InOutOptions {
  public:
    explicit AlltoallOptions(const std::shared_ptr<Context> &context_) : InOutOptions(context_) {}

    friend void alltoall(const AlltoallOptions &options);
};

inline void alltoall(const AlltoallOptions &options) {
    const auto size = static_cast<std::size_t>(options.context->size);
    GLOO_ENFORCE(options.in.isGiven() && options.out.isGiven(), "every rank has an input and an output");
    GLOO_ENFORCE_EQ(options.in.bytes(), options.out.bytes(), "bytes of the input and of the output");
    GLOO_ENFORCE_EQ(options.in.bytes() % size, 0u, "the input has as much for each rank");
    const unisono_call_t call = options.call(kAlltoallSlotPrefix);
    detail::check(unisono_alltoall(options.context->native().get(), options.in.data(), options.out.data(),
                                   options.in.bytes() / size, UNISONO_UINT8, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
