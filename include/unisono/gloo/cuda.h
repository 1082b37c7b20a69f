/* What the Cuda… algorithms share. No header of CUDA's is needed, and nothing of CUDA is linked. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "gloo/algorithm.h"
#include "gloo/config.h"
#include "gloo/detail/object.h"

/* As CUDA's own headers have it. */
struct CUstream_st;
typedef struct CUstream_st *cudaStream_t;

namespace gloo {
inline namespace over_unisono {
namespace detail {

/* A collective over buffers in the memory of GPUs, with a stream for each, or none. With streams a run begins when they
   have come to it, and what they are given afterwards finds the result; without, the result is there on return. */
class CudaObject : public Algorithm {
  public:
    /* The ranks have exchanged when it returns, as gloo's have: a program may leave then. */
    void run() override {
        const auto busy = active();
        if (!ordered_ || contextSize_ == 1) {
            check(unisono_algorithm_run(algorithm_.get()));
            return;
        }
        unisono_work_t *started = nullptr;
        check(unisono_algorithm_start(algorithm_.get(), &started));
        const Work work(started);
        check(unisono_work_wait(work.get()));
    }

  protected:
    explicit CudaObject(const std::shared_ptr<Context> &context) : Algorithm(context) {}

    void prepare(const unisono_context_t *native, unisono_algorithm_options_t options,
                 const std::vector<void *> &buffers, const std::vector<cudaStream_t> &streams) {
        GLOO_ENFORCE(!buffers.empty(), "no buffer was given");
        GLOO_ENFORCE(streams.empty() || streams.size() == buffers.size(), streams.size(), " streams for ",
                     buffers.size(), " buffers");
        options.pointers = buffers.data();
        options.pointer_count = buffers.size();
        options.streams = streams.empty() ? nullptr : streams.data();
        ordered_ = !streams.empty();
        // Not enlisted: the streams may be at work when the context is closed.
        algorithm_ = makeAlgorithm(native, options);
    }

    /* Held while a run is under way. */
    virtual std::shared_ptr<unisono_context_t> active() { return context_->native(); }

  private:
    AlgorithmHandle algorithm_;
    /* Whether the program gave streams. */
    bool ordered_ = false;
};

template <class T> class CudaAllreduce : public CudaObject {
  protected:
    CudaAllreduce(const std::shared_ptr<Context> &context, const std::vector<T *> &pointers, int count,
                  const std::vector<cudaStream_t> &streams, unisono_algorithm_kind kind)
        : CudaObject(context) {
        const auto native = context->native();
        const unisono_call_t call = objectCall(*context);
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_ALLREDUCE;
        options.algorithm = contextSize_ > 1 ? kind : UNISONO_ALGORITHM_AUTOMATIC;
        options.count = checkedCount(count);
        options.dtype = typeOf<T>();
        options.op = UNISONO_SUM;
        options.call = &call;
        prepare(native.get(), options, {pointers.begin(), pointers.end()}, streams);
    }
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
