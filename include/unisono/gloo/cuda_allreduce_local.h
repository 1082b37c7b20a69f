#pragma once

#include "gloo/cuda.h"

namespace gloo {
inline namespace over_unisono {

/* The sum of this rank's buffers alone, in each of them. */
template <class T> class CudaAllreduceLocal : public detail::CudaObject {
  public:
    CudaAllreduceLocal(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                       const std::vector<cudaStream_t> &streams = {})
        : CudaObject(context) {
        unisono_store_t *store = nullptr;
        detail::check(unisono_store_create_hash(&store));
        const std::unique_ptr<unisono_store_t, detail::Destroy<unisono_store_destroy>> meeting(store);
        unisono_context_options_t alone = UNISONO_CONTEXT_OPTIONS_INIT;
        alone.rank_count = 1;
        alone.store = store;
        unisono_context_t *made = nullptr;
        detail::check(unisono_context_create(&alone, &made));
        alone_.reset(made, unisono_context_destroy);
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_ALLREDUCE;
        options.count = detail::checkedCount(count);
        options.dtype = detail::typeOf<T>();
        options.op = UNISONO_SUM;
        prepare(made, options, {ptrs.begin(), ptrs.end()}, streams);
    }

  protected:
    std::shared_ptr<unisono_context_t> active() override { return alone_; }

  private:
    /* A group of this rank. */
    std::shared_ptr<unisono_context_t> alone_;
};

} // namespace over_unisono
} // namespace gloo
