#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* As AllgatherOptions, with a number of elements for each rank, the same on every rank. */
class AllgathervOptions : public detail::CollectiveOptions {
  public:
    explicit AllgathervOptions(const std::shared_ptr<Context> &context_) : CollectiveOptions(context_) {}

    template <class T> void setInput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        in = detail::Span(std::move(buffer));
    }
    template <class T> void setInput(T *memory, std::size_t elements) {
        in = detail::Span(memory, elements * sizeof(T));
    }
    template <class T>
    void setOutput(std::unique_ptr<transport::UnboundBuffer> buffer, const std::vector<std::size_t> &elements) {
        out = detail::Parts(detail::Span(std::move(buffer)), detail::inBytes(elements, sizeof(T)));
    }
    template <class T> void setOutput(T *memory, const std::vector<std::size_t> &elements) {
        out = detail::Parts::at(memory, elements, sizeof(T));
    }

    friend void allgatherv(const AllgathervOptions &options);

  protected:
    detail::Span in;
    detail::Parts out;
};

inline void allgatherv(const AllgathervOptions &options) {
    GLOO_ENFORCE(options.out.isGiven(), "every rank has an output");
    GLOO_ENFORCE(options.out.areOf(options.context->size), "a count for each of the ", options.context->size, " ranks");
    const detail::Span place = options.out.of(options.context->rank);
    if (options.in.isGiven()) {
        GLOO_ENFORCE_EQ(options.in.bytes(), place.bytes(), "bytes of the input, and of the output for this rank");
    }
    const unisono_call_t call = options.call(kAllgatherSlotPrefix);
    const auto native = options.context->native();
    detail::check(unisono_allgatherv(native.get(), detail::partFrom(options.in, place, options.out.span()),
                                     options.out.span().data(), options.out.bytes().data(), UNISONO_UINT8, &call,
                                     nullptr));
}

} // namespace over_unisono
} // namespace gloo
