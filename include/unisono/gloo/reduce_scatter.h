#pragma once

#include <algorithm>
#include <numeric>

#include "gloo/detail/object.h"

namespace gloo {
inline namespace over_unisono {

/* The buffers of all ranks are combined, and each rank gets its part of the result at the beginning of each of its
   buffers: as many elements as recvElems says, behind those of the ranks before it. */
template <class T> class ReduceScatterHalvingDoubling : public Algorithm {
  public:
    ReduceScatterHalvingDoubling(const std::shared_ptr<Context> &context, const std::vector<T *> &ptrs, int count,
                                 const std::vector<int> &recvElems,
                                 const ReductionFunction<T> *fn = ReductionFunction<T>::sum)
        : Algorithm(context), ptrs_(ptrs), count_(detail::checkedCount(count)), shares_(sharesOf(recvElems)),
          counts_(shares_.begin(), shares_.end()), operator_(detail::operatorFor(fn)),
          call_(detail::objectCall(*context)) {
        GLOO_ENFORCE(!ptrs.empty(), "no buffer was given");
        GLOO_ENFORCE_LE(std::accumulate(shares_.begin(), shares_.end(), std::size_t{0}), count_,
                        "the counts of all ranks");
        result_.reset(new T[mine() + 1]);
    }

    void run() override {
        const auto context = context_->native();
        if (operator_.isNative()) {
            if (ptrs_.size() > 1) {
                detail::reduceLocally(operator_, {ptrs_.begin(), ptrs_.end()}, ptrs_[0], count_);
            }
            detail::check(unisono_reduce_scatterv(context.get(), ptrs_[0], result_.get(), counts_.data(),
                                                  operator_.element.dtype, operator_.op, &call_, nullptr));
        } else {
            const unisono_call_t call = detail::call(call_.tag, context_->getTimeout());
            detail::OwnReduction own(context.get(), call, operator_);
            own.combine({ptrs_.begin(), ptrs_.end()}, ptrs_[0], count_);
            own.reduceScatter(ptrs_[0], result_.get(), shares_);
        }
        for (T *const buffer : ptrs_) {
            std::copy_n(result_.get(), mine(), buffer);
        }
    }

  private:
    /* A group of one has the whole, whatever it is told, as in gloo. */
    std::vector<std::size_t> sharesOf(const std::vector<int> &recvElems) const {
        if (contextSize_ == 1) {
            return {count_};
        }
        GLOO_ENFORCE_EQ(recvElems.size(), static_cast<std::size_t>(contextSize_), "a count for each rank");
        GLOO_ENFORCE(std::all_of(recvElems.begin(), recvElems.end(), [](int share) { return share >= 0; }),
                     "a count is not negative");
        return std::vector<std::size_t>(recvElems.begin(), recvElems.end());
    }

    std::size_t mine() const { return shares_[static_cast<std::size_t>(contextRank_)]; }

    const std::vector<T *> ptrs_;
    const std::size_t count_;
    const std::vector<std::size_t> shares_;
    const std::vector<uint64_t> counts_;
    const detail::Operator operator_;
    const unisono_call_t call_;
    std::unique_ptr<T[]> result_;
};

} // namespace over_unisono
} // namespace gloo
