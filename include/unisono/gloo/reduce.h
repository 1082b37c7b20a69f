#pragma once

#include "gloo/detail/options.h"
#include "gloo/detail/reduction.h"

namespace gloo {
inline namespace over_unisono {

/* The elements of all ranks are combined at the root. Without an input a rank's elements are in its output. */
class ReduceOptions : public detail::Rooted<detail::InOutOptions> {
  public:
    using Func = detail::Function;

    explicit ReduceOptions(const std::shared_ptr<Context> &context_) : Rooted(context_) {}

    /* One of gloo's functions, which unisono's own loops replace, or the program's own, which this thread calls. */
    void setReduceFunction(Func function) { reduction = std::move(function); }
    /* How data is cut is unisono's affair: this changes nothing. */
    void setMaxSegmentSize(std::size_t) {}

    friend void reduce(const ReduceOptions &options);

  protected:
    Func reduction;
};

inline void reduce(const ReduceOptions &options) {
    const uint32_t root = options.checkedRoot();
    GLOO_ENFORCE(options.reduction, "no function to reduce by was given");
    const detail::Span &in = options.in.isGiven() ? options.in : options.out;
    GLOO_ENFORCE(in.isGiven(), "neither an input nor an output was given");
    GLOO_ENFORCE(options.out.isGiven() || !options.isRoot(), "the root has an output");
    if (options.out.isGiven()) {
        GLOO_ENFORCE_EQ(in.bytes(), options.out.bytes(), "bytes of the input and of the output");
    }
    const auto context = options.context->native();
    const unisono_call_t call = options.call(kReduceSlotPrefix);
    const detail::Operator operation(options.element, options.reduction);
    const std::size_t elements = in.bytes() / options.element.size;
    if (operation.isNative()) {
        detail::check(unisono_reduce(context.get(), in.data(), options.out.data(), elements, options.element.dtype,
                                     operation.op, root, &call, nullptr));
    } else {
        detail::OwnReduction(context.get(), call, operation).reduce(in.data(), options.out.data(), elements, root);
    }
}

} // namespace over_unisono
} // namespace gloo
