#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* Combines the buffers of this rank alone; each gets the result. */
template <class T> class AllreduceLocal : public Algorithm {
  public:
    AllreduceLocal(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                   const ReductionFunction<T> *fn = ReductionFunction<T>::sum)
        : Algorithm(context), ptrs_(ptrs), count_(detail::checkedCount(count)), fn_(fn) {
        const detail::Operator operation = detail::operatorFor(fn);
        if (ptrs.size() > 1 && operation.isNative()) {
            const std::vector<void *> buffers(ptrs.begin(), ptrs.end());
            native_.emplace(context->alone().get(), operation, buffers, count_);
        }
    }

    void run() override {
        if (native_) {
            native_->run();
            return;
        }
        for (std::size_t i = 1; i < ptrs_.size(); i++) {
            fn_->call(ptrs_[0], ptrs_[i], count_);
        }
        for (std::size_t i = 1; i < ptrs_.size() && count_ > 0; i++) {
            std::memcpy(ptrs_[i], ptrs_[0], count_ * sizeof(T));
        }
    }

  protected:
    const std::vector<T *> ptrs_;
    const std::size_t count_;
    const ReductionFunction<T> *const fn_;

  private:
    std::optional<detail::LocalReduction> native_;
};

} // namespace over_unisono
} // namespace gloo
