#pragma once

#include "gloo/cuda_allreduce_ring.h"

namespace gloo {
inline namespace over_unisono {

/* CudaAllreduceRing under its other name: how data is cut is unisono's affair. */
template <class T, class W = CudaHostWorkspace<T>> class CudaAllreduceRingChunked : public CudaAllreduceRing<T, W> {
  public:
    using CudaAllreduceRing<T, W>::CudaAllreduceRing;
};

} // namespace over_unisono
} // namespace gloo
