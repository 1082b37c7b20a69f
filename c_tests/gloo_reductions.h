/*
 * How the tests of the gloo face reduce: gloo's functions by their operators, functions of the program's own, and calls
 * that take a vector.
 */
#pragma once

#include <functional>

#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/reduce.h>

#include "gloo_messages.h"

using Function = gloo::AllreduceOptions::Func;
using Pointer = void (*)(void *, const void *, const void *, std::size_t);
using Way = gloo::AllreduceOptions::Algorithm;

enum class Op { sum, product, min, max };

template <class T> Pointer gloos(Op op) {
    switch (op) {
    case Op::sum:
        return &gloo::sum<T>;
    case Op::product:
        return &gloo::product<T>;
    case Op::min:
        return &gloo::min<T>;
    default:
        return &gloo::max<T>;
    }
}

/* A function over elements, made of one over two of them. */
template <class T, class Combine> Function elementwise(Combine combine) {
    return [combine](void *c, const void *a, const void *b, std::size_t n) {
        auto *result = static_cast<T *>(c);
        const auto *left = static_cast<const T *>(a), *right = static_cast<const T *>(b);
        for (std::size_t i = 0; i < n; i++) {
            result[i] = combine(left[i], right[i]);
        }
    };
}

/* A sum that unisono does not recognise. */
template <class T> Function own_sum() {
    return elementwise<T>([](T a, T b) { return a + b; });
}

/* In place. The function may be a pointer or an object. */
template <class T, class Given> void allreduce(const AnyContext &context, std::vector<T> &memory, const Given &function,
                                               uint32_t tag = 0, Way way = Way::UNSPECIFIED) {
    gloo::AllreduceOptions options(context);
    options.setOutput(memory.data(), memory.size());
    options.setReduceFunction(function);
    options.setTag(tag);
    options.setAlgorithm(way);
    gloo::allreduce(options);
}

/* The result is the root's; others get nothing. */
template <class T, class Given>
std::vector<T> reduce_to(const AnyContext &context, int root, std::vector<T> in, const Given &function) {
    const auto given = in;
    std::vector<T> out(context->rank == root ? in.size() : 0);
    gloo::ReduceOptions options(context);
    options.setRoot(root);
    options.setReduceFunction(function);
    options.setInput(in.data(), in.size());
    if (context->rank == root) {
        options.setOutput(out.data(), out.size());
    }
    gloo::reduce(options);
    CHECK(in == given);
    return out;
}

/* All ranks' numbers are added up, counted from 1, and the context works. */
inline void check_sum(const AnyContext &context, std::size_t elements = 10000) {
    std::vector<float> memory(elements, static_cast<float>(context->rank + 1));
    allreduce(context, memory, gloos<float>(Op::sum));
    CHECK(memory == std::vector<float>(elements, static_cast<float>(context->size * (context->size + 1) / 2)));
}
