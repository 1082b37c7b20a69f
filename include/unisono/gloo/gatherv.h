#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* As GatherOptions, with a number of elements for each rank, which the root gives. Another rank that gives them, too,
   sends its number of elements of an input that may be longer. */
class GathervOptions : public detail::Rooted<detail::CollectiveOptions> {
  public:
    explicit GathervOptions(const std::shared_ptr<Context> &context_) : Rooted(context_) {}

    template <class T> void setInput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        in = detail::Span(std::move(buffer));
    }
    template <class T> void setInput(T *memory, std::size_t elements) {
        in = detail::Span(memory, elements * sizeof(T));
    }
    template <class T>
    void setOutput(std::unique_ptr<transport::UnboundBuffer> buffer, const std::vector<std::size_t> &elementsPerRank) {
        out = detail::Parts(detail::Span(std::move(buffer)), detail::inBytes(elementsPerRank, sizeof(T)));
    }
    template <class T> void setOutput(T *memory, const std::vector<std::size_t> &elementsPerRank) {
        out = detail::Parts::at(memory, elementsPerRank, sizeof(T));
    }

    friend void gatherv(const GathervOptions &options);

  protected:
    detail::Span in;
    detail::Parts out;
};

inline void gatherv(const GathervOptions &options) {
    const uint32_t root = options.checkedRoot();
    const auto rank = static_cast<std::size_t>(options.context->rank);
    GLOO_ENFORCE(options.in.isGiven(), "every rank has an input");
    // Of the other ranks only the root need know.
    std::vector<uint64_t> bytes(static_cast<std::size_t>(options.context->size));
    bytes[rank] = options.in.bytes();
    if (options.isRoot()) {
        GLOO_ENFORCE(options.out.isGiven(), "the root has an output");
        GLOO_ENFORCE(options.out.areOf(options.context->size), "a count for each of the ", options.context->size,
                     " ranks");
        GLOO_ENFORCE_EQ(options.out.bytes()[rank], options.in.bytes(),
                        "bytes of the input, and of the output for the root");
        bytes = options.out.bytes();
    } else if (options.out.isGiven()) {
        GLOO_ENFORCE(options.out.areOf(options.context->size), "a count for each of the ", options.context->size,
                     " ranks");
        GLOO_ENFORCE_LE(options.out.bytes()[rank], options.in.bytes(), "what is sent lies in the input");
        bytes[rank] = options.out.bytes()[rank];
    }
    const unisono_call_t call = options.call(kGatherSlotPrefix);
    detail::check(unisono_gatherv(options.context->native().get(), options.in.data(), options.out.span().data(),
                                  bytes.data(), UNISONO_UINT8, root, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
