#pragma once

#include "gloo/cuda_workspace.h"

namespace gloo {
inline namespace over_unisono {

/* The sum of all buffers of all ranks, in each of them: four ranks along each edge of a cube. */
template <class T, class W = CudaHostWorkspace<T>> class CudaAllreduceBcube : public detail::CudaAllreduce<T> {
  public:
    CudaAllreduceBcube(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                       const std::vector<cudaStream_t> &streams = {})
        : detail::CudaAllreduce<T>(context, ptrs, count, streams, UNISONO_ALGORITHM_BCUBE) {}
};

} // namespace over_unisono
} // namespace gloo
