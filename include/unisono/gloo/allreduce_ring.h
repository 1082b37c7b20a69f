#pragma once

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* Allreduce of one or more buffers of each rank, in place. A ring combines in an order that depends on the number of
   elements; nobody who names it asks for that. So unisono chooses how, and always combines in the same order. */
template <class T> class AllreduceRing : public detail::AllreduceObject<T> {
  public:
    AllreduceRing(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                  const ReductionFunction<T> *fn = ReductionFunction<T>::sum)
        : detail::AllreduceObject<T>(context, ptrs, detail::checkedCount(count), fn, UNISONO_ALGORITHM_AUTOMATIC) {}
};

} // namespace over_unisono
} // namespace gloo
