#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* As AlltoallOptions, with a number of elements for each rank, and from each. */
class AlltoallvOptions : public detail::CollectiveOptions {
  public:
    explicit AlltoallvOptions(const std::shared_ptr<Context> &context_) : CollectiveOptions(context_) {}

    template <class T>
    void setInput(std::unique_ptr<transport::UnboundBuffer> buffer, const std::vector<int64_t> &elementsPerRank) {
        in = detail::Parts(detail::Span(std::move(buffer)), detail::inBytes(elementsPerRank, sizeof(T)));
    }
    template <class T> void setInput(T *memory, const std::vector<int64_t> &elementsPerRank) {
        in = detail::Parts::at(memory, elementsPerRank, sizeof(T));
    }
    template <class T>
    void setOutput(std::unique_ptr<transport::UnboundBuffer> buffer, const std::vector<int64_t> &elementsPerRank) {
        out = detail::Parts(detail::Span(std::move(buffer)), detail::inBytes(elementsPerRank, sizeof(T)));
    }
    template <class T> void setOutput(T *memory, const std::vector<int64_t> &elementsPerRank) {
        out = detail::Parts::at(memory, elementsPerRank, sizeof(T));
    }

    friend void alltoallv(const AlltoallvOptions &options);

  protected:
    detail::Parts in, out;
};

inline void alltoallv(const AlltoallvOptions &options) {
    GLOO_ENFORCE(options.in.isGiven() && options.out.isGiven(), "every rank has an input and an output");
    for (const detail::Parts *parts : {&options.in, &options.out}) {
        GLOO_ENFORCE(parts->areOf(options.context->size), "a count for each of the ", options.context->size, " ranks");
    }
    const auto own = static_cast<std::size_t>(options.context->rank);
    GLOO_ENFORCE_EQ(options.in.bytes()[own], options.out.bytes()[own], "rank ", own,
                    " receives from itself as many bytes as it sends there");
    const unisono_call_t call = options.call(kAlltoallSlotPrefix);
    detail::check(unisono_alltoallv(options.context->native().get(), options.in.span().data(),
                                    options.out.span().data(), options.in.bytes().data(), options.out.bytes().data(),
                                    UNISONO_UINT8, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
