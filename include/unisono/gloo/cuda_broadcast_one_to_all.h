#pragma once

#include "gloo/cuda_workspace.h"

namespace gloo {
inline namespace over_unisono {

/* One of the root's buffers goes to all buffers of all ranks. */
template <class T, class W = CudaHostWorkspace<T>> class CudaBroadcastOneToAll : public detail::CudaObject {
  public:
    CudaBroadcastOneToAll(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                          int rootRank = 0, int rootPointerRank = 0, const std::vector<cudaStream_t> &streams = {})
        : CudaObject(context) {
        GLOO_ENFORCE(rootRank >= 0 && rootRank < contextSize_, "root ", rootRank, " of ", contextSize_, " ranks");
        GLOO_ENFORCE(rootPointerRank >= 0 && static_cast<std::size_t>(rootPointerRank) < ptrs.size(), "buffer ",
                     rootPointerRank, " of ", ptrs.size());
        const auto native = context->native();
        const unisono_call_t call = detail::objectCall(*context);
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_BROADCAST;
        options.algorithm = contextSize_ > 1 ? UNISONO_ALGORITHM_ONE_TO_ALL : UNISONO_ALGORITHM_AUTOMATIC;
        options.count = detail::checkedCount(count) * sizeof(T);
        options.dtype = UNISONO_UINT8;
        options.root_rank = static_cast<uint32_t>(rootRank);
        options.root_pointer = static_cast<uint64_t>(rootPointerRank);
        options.call = &call;
        prepare(native.get(), options, {ptrs.begin(), ptrs.end()}, streams);
    }
};

} // namespace over_unisono
} // namespace gloo
