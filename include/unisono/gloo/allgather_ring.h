#pragma once

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* The elements of all inputs of all ranks go to each rank's output, in the order of the ranks and of their inputs. */
template <class T> class AllgatherRing : public Algorithm {
  public:
    AllgatherRing(const std::shared_ptr<Context> &context, const std::vector<const T *> &inPtrs, T *outPtr, int count)
        : Algorithm(context), in_(inPtrs), out_(reinterpret_cast<char *>(outPtr)),
          bytes_(detail::checkedCount(count) * sizeof(T)), call_(detail::objectCall(*context)) {
        GLOO_ENFORCE(!inPtrs.empty(), "no input was given");
    }

    void run() override {
        char *const place = out_ + static_cast<std::size_t>(contextRank_) * in_.size() * bytes_;
        for (std::size_t i = 0; i < in_.size() && bytes_ > 0; i++) {
            std::memmove(place + i * bytes_, in_[i], bytes_);
        }
        detail::check(unisono_allgather(context_->native().get(), place, out_, in_.size() * bytes_, UNISONO_UINT8,
                                        &call_, nullptr));
    }

  protected:
    const std::vector<const T *> in_;
    char *const out_;
    const std::size_t bytes_;
    const unisono_call_t call_;
};

} // namespace over_unisono
} // namespace gloo
