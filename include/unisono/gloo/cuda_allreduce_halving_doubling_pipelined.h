#pragma once

#include "gloo/cuda_allreduce_halving_doubling.h"

namespace gloo {
inline namespace over_unisono {

/* CudaAllreduceHalvingDoubling, in pieces. */
template <class T, class W = CudaHostWorkspace<T>> class CudaAllreduceHalvingDoublingPipelined
    : public CudaAllreduceHalvingDoubling<T, W> {
  public:
    CudaAllreduceHalvingDoublingPipelined(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs,
                                          int count, const std::vector<cudaStream_t> &streams = {})
        : CudaAllreduceHalvingDoubling<T, W>(context, ptrs, count, streams, true) {}
};

} // namespace over_unisono
} // namespace gloo
