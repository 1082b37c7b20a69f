#pragma once

#include "gloo/cuda.h"

namespace gloo {
inline namespace over_unisono {

/* The sum of this rank's buffers alone, in each of them. */
template <class T> class CudaAllreduceLocal : public detail::CudaObject {
  public:
    CudaAllreduceLocal(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                       const std::vector<cudaStream_t> &streams = {})
        : CudaObject(context), alone_(detail::alone()) {
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_ALLREDUCE;
        options.count = detail::checkedCount(count);
        options.dtype = detail::typeOf<T>();
        options.op = UNISONO_SUM;
        // No number of the context's is taken: the other ranks need not make one of these.
        prepare(alone_.get(), options, {ptrs.begin(), ptrs.end()}, streams);
    }

  protected:
    std::shared_ptr<unisono_context_t> active() override {
        detail::check(unisono_context_set_timeout(alone_.get(), detail::milliseconds(context_->getTimeout())));
        return alone_;
    }

  private:
    const std::shared_ptr<unisono_context_t> alone_;
};

} // namespace over_unisono
} // namespace gloo
