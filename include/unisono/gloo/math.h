#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "gloo/types.h"

namespace gloo {
inline namespace over_unisono {

/* c[i] = a[i] ∘ b[i], for n elements; c may be a or b. Given to a collective as they are, these are recognised, and
   unisono's own loops run in their place. */
template <class T> void sum(void *c_, const void *a_, const void *b_, std::size_t n) {
    T *c = static_cast<T *>(c_);
    const T *a = static_cast<const T *>(a_);
    const T *b = static_cast<const T *>(b_);
    for (std::size_t i = 0; i < n; i++) {
        c[i] = static_cast<T>(a[i] + b[i]);
    }
}

template <class T> void product(void *c_, const void *a_, const void *b_, std::size_t n) {
    T *c = static_cast<T *>(c_);
    const T *a = static_cast<const T *>(a_);
    const T *b = static_cast<const T *>(b_);
    for (std::size_t i = 0; i < n; i++) {
        c[i] = static_cast<T>(a[i] * b[i]);
    }
}

template <class T> void max(void *c_, const void *a_, const void *b_, std::size_t n) {
    T *c = static_cast<T *>(c_);
    const T *a = static_cast<const T *>(a_);
    const T *b = static_cast<const T *>(b_);
    for (std::size_t i = 0; i < n; i++) {
        c[i] = std::max(a[i], b[i]);
    }
}

template <class T> void min(void *c_, const void *a_, const void *b_, std::size_t n) {
    T *c = static_cast<T *>(c_);
    const T *a = static_cast<const T *>(a_);
    const T *b = static_cast<const T *>(b_);
    for (std::size_t i = 0; i < n; i++) {
        c[i] = std::min(a[i], b[i]);
    }
}

/* a[i] = a[i] ∘ b[i]. */
template <class T> void sum(T *a, const T *b, std::size_t n) { sum<T>(a, a, b, n); }
template <class T> void product(T *a, const T *b, std::size_t n) { product<T>(a, a, b, n); }
template <class T> void max(T *a, const T *b, std::size_t n) { max<T>(a, a, b, n); }
template <class T> void min(T *a, const T *b, std::size_t n) { min<T>(a, a, b, n); }

/* The next multiple of `multiple`. */
template <class T> T roundUp(T value, T multiple) {
    const T beyond = value % multiple;
    return beyond == 0 ? value : value + multiple - beyond;
}

/* The least number of bits that can count to `value` - 1. */
inline uint32_t log2ceil(uint32_t value) {
    uint32_t bits = 0;
    while (bits < 32 && (uint64_t{1} << bits) < value) {
        bits++;
    }
    return bits;
}

} // namespace over_unisono
} // namespace gloo
