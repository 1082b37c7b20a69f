#pragma once

#include <memory>

#include "gloo/barrier.h"
#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

/* gloo's barriers differ in how they do it, which is unisono's affair. */
class BarrierObject : public Barrier {
  public:
    void run() override { check(unisono_barrier(context_->native().get(), &call_, nullptr)); }

  protected:
    explicit BarrierObject(const std::shared_ptr<Context> &context)
        : Barrier(context), call_(objectCall(*context)) {}

  private:
    const unisono_call_t call_;
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
