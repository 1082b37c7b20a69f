#pragma once

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* Allreduce of one or more buffers of each rank, in place: four ranks along each edge of a cube. */
template <class T> class AllreduceBcube : public detail::AllreduceObject<T> {
  public:
    AllreduceBcube(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                   const ReductionFunction<T> *fn = ReductionFunction<T>::sum)
        : detail::AllreduceObject<T>(context, ptrs, detail::checkedCount(count), fn, UNISONO_ALGORITHM_BCUBE) {}
};

} // namespace over_unisono
} // namespace gloo
