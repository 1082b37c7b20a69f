#pragma once

#include "gloo/allreduce_ring.h"

namespace gloo {
inline namespace over_unisono {

/* AllreduceRing under its other name: how data is cut is unisono's affair. */
template <class T> class AllreduceRingChunked : public AllreduceRing<T> {
  public:
    using AllreduceRing<T>::AllreduceRing;
};

} // namespace over_unisono
} // namespace gloo
