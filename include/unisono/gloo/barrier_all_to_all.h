#pragma once

#include "gloo/detail/barrier_object.h"

namespace gloo {
inline namespace over_unisono {

/* run returns when all ranks have called it. */
class BarrierAllToAll : public detail::BarrierObject {
  public:
    explicit BarrierAllToAll(const std::shared_ptr<Context> &context) : BarrierObject(context) {}
};

} // namespace over_unisono
} // namespace gloo
