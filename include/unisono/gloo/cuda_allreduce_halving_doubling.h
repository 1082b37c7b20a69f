#pragma once

#include "gloo/cuda_workspace.h"

namespace gloo {
inline namespace over_unisono {

/* The sum of all buffers of all ranks, in each of them: halves of the vector over doubling distances, and back. */
template <class T, class W = CudaHostWorkspace<T>> class CudaAllreduceHalvingDoubling
    : public detail::CudaAllreduce<T> {
  public:
    CudaAllreduceHalvingDoubling(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                                 const std::vector<cudaStream_t> &streams = {}, bool pipelineBroadcastAndReduce = false)
        : detail::CudaAllreduce<T>(context, ptrs, count, streams,
                                   pipelineBroadcastAndReduce ? UNISONO_ALGORITHM_HALVING_DOUBLING_PIPELINED
                                                              : UNISONO_ALGORITHM_HALVING_DOUBLING) {}
};

} // namespace over_unisono
} // namespace gloo
