#pragma once

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* Allreduce of one or more buffers of each rank, in place: halves of the vector over doubling distances, and back. */
template <class T> class AllreduceHalvingDoubling : public detail::AllreduceObject<T> {
  public:
    AllreduceHalvingDoubling(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                             const ReductionFunction<T> *fn = ReductionFunction<T>::sum)
        : detail::AllreduceObject<T>(context, ptrs, detail::checkedCount(count), fn,
                                     UNISONO_ALGORITHM_HALVING_DOUBLING) {}
};

} // namespace over_unisono
} // namespace gloo
