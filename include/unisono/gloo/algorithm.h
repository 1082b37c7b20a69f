#pragma once

#include <cstddef>
#include <memory>

#include "gloo/common/logging.h"
#include "gloo/context.h"
#include "gloo/math.h"

namespace gloo {
inline namespace over_unisono {

/* Of gloo's CUDA algorithms; here what is done on the host and what on devices is unisono's affair. */
constexpr std::size_t kOnDeviceThreshold = 256 * 1024;

/* A collective over fixed buffers, made once and run many times. Every rank makes the same ones in the same order. */
class Algorithm {
  public:
    explicit Algorithm(const std::shared_ptr<Context> &context)
        : context_(context), contextRank_(context->rank), contextSize_(context->size) {}
    virtual ~Algorithm() noexcept(false) = default;

    virtual void run() = 0;

  protected:
    std::shared_ptr<Context> context_;
    const int contextRank_;
    const int contextSize_;

    std::unique_ptr<transport::Pair> &getPair(int peer) { return context_->getPair(peer); }
    std::unique_ptr<transport::Pair> &getLeftPair() { return neighbour(contextSize_ - 1); }
    std::unique_ptr<transport::Pair> &getRightPair() { return neighbour(1); }

  private:
    std::unique_ptr<transport::Pair> &neighbour(int distance) {
        auto &pair = getPair((contextRank_ + distance) % contextSize_);
        GLOO_ENFORCE(pair, "a group of one has no neighbours");
        return pair;
    }
};

enum ReductionType {
    SUM = 1,
    PRODUCT = 2,
    MAX = 3,
    MIN = 4,
    CUSTOM = 1000,
};

/* x[i] = x[i] ∘ y[i]: one of the four that are here, which unisono's own loops serve, or the program's own. */
template <class T> class ReductionFunction {
  public:
    using Function = void(T *, const T *, std::size_t n);

    static const ReductionFunction<T> *sum;
    static const ReductionFunction<T> *product;
    static const ReductionFunction<T> *min;
    static const ReductionFunction<T> *max;

    ReductionFunction(ReductionType type, Function *fn) : type_(type), fn_(fn) {}

    ReductionType type() const { return type_; }
    Function *function() const { return fn_; }
    void call(T *x, const T *y, std::size_t n) const { fn_(x, y, n); }

  protected:
    ReductionType type_;
    Function *fn_;
};

namespace detail {

template <class T>
const ReductionFunction<T> *reductionOf(ReductionType type, typename ReductionFunction<T>::Function *fn) {
    // Never destroyed: algorithms may run while the program's statics end.
    return new ReductionFunction<T>(type, fn);
}

} // namespace detail

template <class T> const ReductionFunction<T> *ReductionFunction<T>::sum = detail::reductionOf<T>(SUM, &::gloo::sum<T>);
template <class T> const ReductionFunction<T> *ReductionFunction<T>::product =
    detail::reductionOf<T>(PRODUCT, &::gloo::product<T>);
template <class T> const ReductionFunction<T> *ReductionFunction<T>::min = detail::reductionOf<T>(MIN, &::gloo::min<T>);
template <class T> const ReductionFunction<T> *ReductionFunction<T>::max = detail::reductionOf<T>(MAX, &::gloo::max<T>);

/* Among the pointers of one process. */
template <class T> class LocalOp {
  public:
    virtual ~LocalOp() noexcept(false) {}
    virtual void runAsync() = 0;
    virtual void wait() = 0;
    void run() {
        runAsync();
        wait();
    }
};

} // namespace over_unisono
} // namespace gloo
