#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* The elements of all ranks, in the order of the ranks, go to the root, which alone has an output. */
class GatherOptions : public detail::Rooted<detail::InOutOptions> {
  public:
    explicit GatherOptions(const std::shared_ptr<Context> &context_) : Rooted(context_) {}

    friend void gather(const GatherOptions &options);
};

inline void gather(const GatherOptions &options) {
    const uint32_t root = options.checkedRoot();
    GLOO_ENFORCE(options.in.isGiven(), "every rank has an input");
    if (options.isRoot()) {
        GLOO_ENFORCE(options.out.isGiven(), "the root has an output");
        GLOO_ENFORCE_EQ(options.in.bytes() * static_cast<std::size_t>(options.context->size), options.out.bytes(),
                        "bytes of all inputs and of the output");
    }
    const unisono_call_t call = options.call(kGatherSlotPrefix);
    detail::check(unisono_gather(options.context->native().get(), options.in.data(), options.out.data(),
                                 options.in.bytes(), UNISONO_UINT8, root, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
