/*
 * Reductions. Those that unisono knows, it runs; the others exchange bytes, and combine them here by the program's
 * function, in the thread that called: it need not be safe to call from others.
 */
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "gloo/common/string.h"
#include "gloo/detail/element.h"
#include "gloo/detail/native.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

/* How elements are combined: by an operator of unisono's, or by a function. */
struct Operator {
    Operator(const Element &element_, Function function_)
        : element(element_), op(element_.operatorOf(function_)), function(std::move(function_)) {}
    /* One that is known already. */
    Operator(const Element &element_, int32_t op_, Function function_)
        : element(element_), op(element_.dtype == kUnknown ? kUnknown : op_), function(std::move(function_)) {}

    Element element;
    int32_t op;
    Function function;

    bool isNative() const { return op != kUnknown; }
};

/* This rank's inputs alone, combined at `out` as unisono combines those of ranks; one of them may be there. */
inline void reduceLocally(const Operator &operation, const std::vector<void *> &inputs, void *out,
                          std::size_t elements) {
    check(unisono_reduce_local(inputs.data(), inputs.size(), out, elements, operation.element.dtype, operation.op,
                               nullptr));
}

/* The same in place, prepared on a group of this rank alone: each of the buffers gets the result. */
class LocalReduction {
  public:
    LocalReduction(const unisono_context_t *alone, const Operator &operation, const std::vector<void *> &buffers,
                   std::size_t elements) {
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_ALLREDUCE;
        options.pointers = buffers.data();
        options.pointer_count = buffers.size();
        options.count = elements;
        options.dtype = operation.element.dtype;
        options.op = operation.op;
        algorithm_ = makeAlgorithm(alone, options);
    }

    void run() const { check(unisono_algorithm_run(algorithm_.get())); }

  private:
    AlgorithmHandle algorithm_;
};

/* `blocks` of the same length, one after the other, are combined into the first, in the canonical order: the left
   half of a block's tree is the largest power of two below its size. */
class Fold {
  public:
    Fold(const Operator &operation, char *blocks, std::size_t elements)
        : operation_(operation), blocks_(blocks), elements_(elements) {}

    void run(uint32_t first, uint32_t count) const {
        if (count < 2) {
            return;
        }
        uint32_t left = 1;
        while (left * 2 < count) {
            left *= 2;
        }
        run(first, left);
        run(first + left, count - left);
        operation_.function(block(first), block(first), block(first + left), elements_);
    }

  private:
    char *block(uint32_t index) const { return blocks_ + index * elements_ * operation_.element.size; }

    const Operator &operation_;
    char *const blocks_;
    const std::size_t elements_;
};

/* A context and a call, for reductions by the program's function. */
class OwnReduction {
  public:
    OwnReduction(const unisono_context_t *context, const unisono_call_t &call, const Operator &operation)
        : context_(context), call_(call), begun_(Clock::now()), operation_(operation),
          rank_(unisono_context_rank(context)), size_(unisono_context_size(context)) {}

    /* This rank's inputs, in their order, become one: at `out`, if there are several. */
    const void *combine(const std::vector<void *> &inputs, void *out, std::size_t elements) const {
        const void *in = inputs.front();
        calling([&] {
            for (std::size_t i = 1; i < inputs.size(); i++) {
                operation_.function(out, in, inputs[i], elements);
                in = out;
            }
        });
        return in;
    }

    void allreduce(const void *in, void *out, std::size_t elements) {
        const auto shares = evenly(elements);
        gatherShare(in, shares);
        const auto counts = bytes(shares);
        const auto call = rest();
        check(unisono_allgatherv(context_, share_.get(), out, counts.data(), UNISONO_UINT8, &call, nullptr));
    }

    void reduce(const void *in, void *out, std::size_t elements, uint32_t root) {
        const auto shares = evenly(elements);
        gatherShare(in, shares);
        const auto counts = bytes(shares);
        const auto call = rest();
        check(unisono_gatherv(context_, share_.get(), out, counts.data(), UNISONO_UINT8, root, &call, nullptr));
    }

    /* This rank's share of the result goes to `out`. */
    void reduceScatter(const void *in, void *out, const std::vector<std::size_t> &shares) {
        gatherShare(in, shares);
        if (shares[rank_] > 0) {
            std::memcpy(out, share_.get(), shares[rank_] * operation_.element.size);
        }
    }

  private:
    using Clock = std::chrono::steady_clock;

    /* Of what a function is given; any type's. */
    static constexpr std::align_val_t kAlignment{64};
    struct Free {
        void operator()(char *memory) const { ::operator delete(memory, kAlignment); }
    };

    /* The call's options, with what is left of its time. */
    unisono_call_t rest() const {
        unisono_call_t options = call_;
        if (options.timeout_ms != UNISONO_FOREVER) {
            const auto past = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begun_).count();
            const auto gone = static_cast<uint64_t>(past);
            options.timeout_ms = gone < options.timeout_ms ? options.timeout_ms - gone : 1;
        }
        return options;
    }

    std::vector<std::size_t> evenly(std::size_t elements) const {
        std::vector<std::size_t> shares(size_);
        for (uint32_t rank = 0; rank < size_; rank++) {
            shares[rank] = elements / size_ + (rank < elements % size_);
        }
        return shares;
    }

    std::vector<uint64_t> bytes(const std::vector<std::size_t> &shares) const {
        std::vector<uint64_t> counts;
        for (const std::size_t share : shares) {
            counts.push_back(share * operation_.element.size);
        }
        return counts;
    }

    /* Everybody's part of this rank's share comes here, and is combined. */
    void gatherShare(const void *in, const std::vector<std::size_t> &shares) {
        const auto send = bytes(shares);
        const std::vector<uint64_t> receive(size_, send[rank_]);
        share_.reset(static_cast<char *>(::operator new(size_ * send[rank_] + 1, kAlignment)));
        check(
            unisono_alltoallv(context_, in, share_.get(), send.data(), receive.data(), UNISONO_UINT8, &call_, nullptr));
        calling([&] { Fold(operation_, share_.get(), shares[rank_]).run(0, shares[rank_] > 0 ? size_ : 0); });
    }

    /* Calls the program's function, which may throw. */
    template <class Combine> void calling(const Combine &combine) const {
        try {
            combine();
        } catch (const std::exception &cause) {
            abort(cause.what());
            throw;
        } catch (...) {
            abort("no std::exception");
            throw;
        }
    }

    /* The others would wait for this rank's share. */
    void abort(const char *cause) const {
        if (size_ > 1) {
            unisono_context_abort_because(context_,
                                          MakeString("the function to reduce by has thrown: ", cause).c_str());
        }
    }

    const unisono_context_t *const context_;
    const unisono_call_t &call_;
    const Clock::time_point begun_;
    const Operator &operation_;
    const uint32_t rank_, size_;
    std::unique_ptr<char, Free> share_;
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
