#pragma once

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* One of the root's buffers goes to all buffers of all ranks. */
template <class T> class BroadcastOneToAll : public Algorithm {
  public:
    BroadcastOneToAll(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, std::size_t count,
                      int rootRank = 0, int rootPointerRank = 0)
        : Algorithm(context) {
        GLOO_ENFORCE(rootRank >= 0 && rootRank < contextSize_, "root ", rootRank, " of ", contextSize_, " ranks");
        GLOO_ENFORCE(rootPointerRank >= 0 && static_cast<std::size_t>(rootPointerRank) < ptrs.size(), "buffer ",
                     rootPointerRank, " of ", ptrs.size());
        const std::vector<void *> buffers(ptrs.begin(), ptrs.end());
        const unisono_call_t call = detail::objectCall(*context);
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_BROADCAST;
        options.algorithm = contextSize_ > 1 ? UNISONO_ALGORITHM_ONE_TO_ALL : UNISONO_ALGORITHM_AUTOMATIC;
        options.pointers = buffers.data();
        options.pointer_count = buffers.size();
        options.count = count * sizeof(T);
        options.dtype = UNISONO_UINT8;
        options.root_rank = static_cast<uint32_t>(rootRank);
        options.root_pointer = static_cast<uint64_t>(rootPointerRank);
        options.call = &call;
        algorithm_ = detail::prepared(*context, options);
    }

    void run() override {
        const auto busy = context_->native();
        detail::check(unisono_algorithm_run(algorithm_->native().get()));
    }

  private:
    std::shared_ptr<detail::Prepared> algorithm_;
};

} // namespace over_unisono
} // namespace gloo
