#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* The root's elements go to all ranks. Every rank has an output; the root may have an input apart from it. */
class BroadcastOptions : public detail::Rooted<detail::InOutOptions> {
  public:
    explicit BroadcastOptions(const std::shared_ptr<Context> &context_) : Rooted(context_) {}

    friend void broadcast(const BroadcastOptions &options);
};

inline void broadcast(const BroadcastOptions &options) {
    const uint32_t root = options.checkedRoot();
    GLOO_ENFORCE(options.out.isGiven(), "every rank has an output");
    if (options.in.isGiven()) {
        GLOO_ENFORCE(options.isRoot(), "only the root has an input");
        GLOO_ENFORCE_EQ(options.in.bytes(), options.out.bytes(), "bytes of the input and of the output");
        detail::copy(options.in, options.out);
    }
    const unisono_call_t call = options.call(kBroadcastSlotPrefix);
    detail::check(unisono_broadcast(options.context->native().get(), options.out.data(), options.out.bytes(),
                                    UNISONO_UINT8, root, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
