#pragma once

#include "gloo/detail/options.h"
#include "gloo/detail/reduction.h"

namespace gloo {
inline namespace over_unisono {

namespace detail {

/* Where gloo's programs look for these. */
struct AllreduceOptionsImpl {
    using Func = detail::Function;

    /* A ring combines in an order that depends on the number of elements; nobody who names it asks for that. So
       unisono chooses there, too, and always combines in the same order. */
    enum Algorithm {
        UNSPECIFIED = 0,
        RING = 1,
        BCUBE = 2,
    };
};

} // namespace detail

/* The elements of all inputs of all ranks are combined, and go to all outputs. Without inputs a rank's are in its
   outputs. */
class AllreduceOptions : public detail::CollectiveOptions {
  public:
    using Func = detail::AllreduceOptionsImpl::Func;
    using Algorithm = detail::AllreduceOptionsImpl::Algorithm;

    explicit AllreduceOptions(const std::shared_ptr<Context> &context_) : CollectiveOptions(context_) {}

    void setAlgorithm(Algorithm algorithm_) { algorithm = algorithm_; }

    template <class T> void setInput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        takeOne<T>(in, std::move(buffer));
    }
    template <class T> void setInput(T *memory, std::size_t elements) { setInputs(&memory, 1, elements); }
    template <class T> void setInputs(std::vector<std::unique_ptr<transport::UnboundBuffer>> buffers) {
        take<T>(in, std::move(buffers));
    }
    template <class T> void setInputs(std::vector<T *> memory, std::size_t elements) {
        setInputs(memory.data(), memory.size(), elements);
    }
    template <class T> void setInputs(T **memory, std::size_t count, std::size_t elements) {
        take(in, memory, count, elements);
    }

    template <class T> void setOutput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        takeOne<T>(out, std::move(buffer));
    }
    template <class T> void setOutput(T *memory, std::size_t elements) { setOutputs(&memory, 1, elements); }
    template <class T> void setOutputs(std::vector<std::unique_ptr<transport::UnboundBuffer>> buffers) {
        take<T>(out, std::move(buffers));
    }
    template <class T> void setOutputs(std::vector<T *> memory, std::size_t elements) {
        setOutputs(memory.data(), memory.size(), elements);
    }
    template <class T> void setOutputs(T **memory, std::size_t count, std::size_t elements) {
        take(out, memory, count, elements);
    }

    /* One of gloo's functions, which unisono's own loops replace, or the program's own, which this thread calls. */
    void setReduceFunction(Func function) { reduction = std::move(function); }
    /* How data is cut is unisono's affair: this changes nothing. */
    void setMaxSegmentSize(std::size_t) {}

    friend void allreduce(const AllreduceOptions &options);

  protected:
    template <class T>
    void takeOne(std::vector<detail::Span> &place, std::unique_ptr<transport::UnboundBuffer> buffer) {
        std::vector<std::unique_ptr<transport::UnboundBuffer>> buffers;
        buffers.push_back(std::move(buffer));
        take<T>(place, std::move(buffers));
    }
    template <class T>
    void take(std::vector<detail::Span> &place, std::vector<std::unique_ptr<transport::UnboundBuffer>> buffers) {
        element = detail::Element::of<T>();
        place.clear();
        for (auto &buffer : buffers) {
            place.emplace_back(std::move(buffer));
        }
    }
    template <class T>
    void take(std::vector<detail::Span> &place, T **memory, std::size_t count, std::size_t elements) {
        element = detail::Element::of<T>();
        place.clear();
        for (std::size_t i = 0; i < count; i++) {
            place.emplace_back(memory[i], elements * sizeof(T));
        }
    }

    std::vector<detail::Span> in, out;
    detail::Element element;
    Func reduction;
    Algorithm algorithm = Algorithm::UNSPECIFIED;
};

inline void allreduce(const AllreduceOptions &options) {
    GLOO_ENFORCE(!options.out.empty(), "no output was given");
    GLOO_ENFORCE(options.reduction, "no function to reduce by was given");
    const auto &inputs = options.in.empty() ? options.out : options.in;
    const detail::Span &out = options.out.front();
    for (const auto *spans : {&inputs, &options.out}) {
        for (const auto &span : *spans) {
            GLOO_ENFORCE_EQ(span.bytes(), out.bytes(), "bytes of an input or output, and of the first output");
        }
    }
    const std::size_t elements = out.bytes() / options.element.size;
    std::vector<void *> buffers;
    for (const auto &input : inputs) {
        buffers.push_back(input.data());
    }
    const auto context = options.context->native();
    unisono_call_t call = options.call(kAllreduceSlotPrefix);
    const detail::Operator operation(options.element, options.reduction);
    if (operation.isNative()) {
        const void *mine = buffers.front();
        if (buffers.size() > 1) {
            detail::reduceLocally(operation, buffers, out.data(), elements);
            mine = out.data();
        }
        call.algorithm = options.algorithm == AllreduceOptions::Algorithm::BCUBE ? UNISONO_ALGORITHM_BCUBE
                                                                                 : UNISONO_ALGORITHM_AUTOMATIC;
        detail::check(unisono_allreduce(context.get(), mine, out.data(), elements, options.element.dtype, operation.op,
                                        &call, nullptr));
    } else {
        detail::OwnReduction own(context.get(), call, operation);
        own.allreduce(own.combine(buffers, out.data(), elements), out.data(), elements);
    }
    for (const auto &other : options.out) {
        detail::copy(out, other);
    }
}

} // namespace over_unisono
} // namespace gloo
