#pragma once

#include "gloo/cuda.h"

namespace gloo {
inline namespace over_unisono {

/* In whose memory a gloo algorithm works. Here that follows from where the ranks' GPUs are: those of one host that reach each
   other exchange themselves, others by way of the host's memory. So the two are the same. */
template <class T> class CudaHostWorkspace {};
template <class T> class CudaDeviceWorkspace {};

} // namespace over_unisono
} // namespace gloo
