/* What the collectives that are objects share: an algorithm of the native face, prepared once. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "gloo/algorithm.h"
#include "gloo/detail/element.h"
#include "gloo/detail/native.h"
#include "gloo/detail/reduction.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

/* The options of an object's calls. Objects run beside each other and beside the collectives that are functions: each
   has a tag of its own. The timeout is what the context's is when it runs. */
inline unisono_call_t objectCall(Context &context) {
    unisono_call_t options = UNISONO_CALL_INIT;
    options.tag = uint64_t{0xa0} << 56 | static_cast<uint64_t>(context.nextSlot());
    return options;
}

/* unisono's operator, if the function is what gloo has for the type; a program may name a type and bring its own. */
template <class T> int32_t operatorOf(const ReductionFunction<T> &function) {
    if constexpr (HasOperators<T>::value) {
        const auto is = [&](ReductionType type, const ReductionFunction<T> *known) {
            return function.type() == type && function.function() == known->function();
        };
        return is(SUM, ReductionFunction<T>::sum)           ? UNISONO_SUM
               : is(PRODUCT, ReductionFunction<T>::product) ? UNISONO_PRODUCT
               : is(MAX, ReductionFunction<T>::max)         ? UNISONO_MAX
               : is(MIN, ReductionFunction<T>::min)         ? UNISONO_MIN
                                                            : kUnknown;
    } else {
        return kUnknown;
    }
}

/* gloo counts the elements of objects by int. */
inline std::size_t checkedCount(int count) {
    GLOO_ENFORCE_GE(count, 0, "a count is not negative");
    return static_cast<std::size_t>(count);
}

template <class T> Operator operatorFor(const ReductionFunction<T> *function) {
    GLOO_ENFORCE(function != nullptr, "no function to reduce by was given");
    return Operator(Element::of<T>(), operatorOf(*function),
                    [function](void *c, const void *a, const void *b, std::size_t n) {
                        if (c != a && n > 0) {
                            std::memcpy(c, a, n * sizeof(T));
                        }
                        function->call(static_cast<T *>(c), static_cast<const T *>(b), n);
                    });
}

/* A collective over this rank's buffers, prepared, until it is closed. */
class Prepared : public Closable {
  public:
    /* Before this, it is enlisted with the context. That is asked for under the lock, for which whoever closes it
       waits: it is closed already, or what is made of it is found then, and does not have it in use. */
    void make(Context &context, const unisono_algorithm_options_t &options) {
        std::lock_guard<std::mutex> hold(mutex_);
        algorithm_ = makeAlgorithm(context.native().get(), options);
    }

    /* To be held while a run is under way. */
    std::shared_ptr<unisono_algorithm_t> native() {
        std::lock_guard<std::mutex> hold(mutex_);
        if (!algorithm_) {
            throw IoException("the connections of this object's context are closed");
        }
        return algorithm_;
    }

    void close() override {
        std::unique_lock<std::mutex> hold(mutex_);
        const auto algorithm = std::move(algorithm_);
        algorithm_.reset();
    }

  private:
    std::mutex mutex_;
    std::shared_ptr<unisono_algorithm_t> algorithm_;
};

/* One that goes with its context. */
inline std::shared_ptr<Prepared> prepared(Context &context, const unisono_algorithm_options_t &options) {
    auto prepared = std::make_shared<Prepared>();
    context.enlist(prepared);
    prepared->make(context, options);
    return prepared;
}

/* An allreduce over one or more buffers of each rank, in place. */
template <class T> class AllreduceObject : public Algorithm {
  public:
    void run() override {
        const auto context = context_->native();
        if (algorithm_) {
            check(unisono_algorithm_run(algorithm_->native().get()));
            return;
        }
        const unisono_call_t own_call = call(call_.tag, context_->getTimeout());
        OwnReduction own(context.get(), own_call, operator_);
        own.combine({pointers_.begin(), pointers_.end()}, pointers_[0], count_);
        own.allreduce(pointers_[0], pointers_[0], count_);
        for (std::size_t i = 1; i < pointers_.size() && count_ > 0; i++) {
            std::memcpy(pointers_[i], pointers_[0], count_ * sizeof(T));
        }
    }

  protected:
    AllreduceObject(const std::shared_ptr<Context> &context, const std::vector<T *> &pointers, std::size_t count,
                    const ReductionFunction<T> *function, unisono_algorithm_kind kind)
        : Algorithm(context), pointers_(pointers), count_(count), operator_(operatorFor(function)),
          call_(objectCall(*context)) {
        GLOO_ENFORCE(!pointers.empty(), "no buffer was given");
        if (!operator_.isNative()) {
            return;
        }
        const std::vector<void *> buffers(pointers.begin(), pointers.end());
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_ALLREDUCE;
        options.algorithm = contextSize_ > 1 ? kind : UNISONO_ALGORITHM_AUTOMATIC;
        options.pointers = buffers.data();
        options.pointer_count = buffers.size();
        options.count = count;
        options.dtype = operator_.element.dtype;
        options.op = operator_.op;
        options.call = &call_;
        algorithm_ = prepared(*context, options);
    }

  private:
    const std::vector<T *> pointers_;
    const std::size_t count_;
    const Operator operator_;
    const unisono_call_t call_;
    std::shared_ptr<Prepared> algorithm_;
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
