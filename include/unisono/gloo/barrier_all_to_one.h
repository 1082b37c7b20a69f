#pragma once

#include "gloo/detail/barrier_object.h"

namespace gloo {
inline namespace over_unisono {

/* run returns when all ranks have called it. */
class BarrierAllToOne : public detail::BarrierObject {
  public:
    explicit BarrierAllToOne(const std::shared_ptr<Context> &context, int = 0) : BarrierObject(context) {}
};

} // namespace over_unisono
} // namespace gloo
