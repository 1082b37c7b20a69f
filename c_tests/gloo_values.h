/*
 * The elements that the tests of the gloo face move and combine, and what comes of combining them.
 */
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

// Long messages take other ways than short ones.
constexpr int kLong = 300001;

/* Bits that tell three numbers from any others. */
inline uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t bits = a * 0x9e3779b97f4a7c15u + b * 0xc2b2ae3d27d4eb4fu + c * 0x165667b19e3779f9u + 0x27d4eb2f165667c5u;
    bits = (bits ^ bits >> 29) * 0xbf58476d1ce4e5b9u;
    return bits ^ bits >> 32;
}

/* A function x -> factor * x + offset of 64-bit integers, and how many it was composed of. Composition is associative
   and does not commute. */
struct Map {
    uint64_t factor, offset, steps;

    bool operator==(const Map &other) const {
        return factor == other.factor && offset == other.offset && steps == other.steps;
    }
};
static_assert(sizeof(Map) == 24, "no type of unisono's has this size");

inline Map compose(const Map &left, const Map &right) {
    return {left.factor * right.factor, left.factor * right.offset + left.offset, left.steps + right.steps};
}

// ---- marks

/* What rank `from` has at place i, in its buffer `which` or for the rank of that number, in a round. */
template <class T> T mark(int from, std::size_t which, std::size_t i, int round = 0) {
    const uint64_t bits = mix(static_cast<uint64_t>(from + 100 * round), which, i);
    if constexpr (std::is_same_v<T, Map>) {
        return {bits | 1, ~bits, 1};
    } else {
        return static_cast<T>(bits);
    }
}

template <class T> std::vector<T> marks(int from, int which, std::size_t count, int round = 0) {
    std::vector<T> all;
    all.reserve(count);
    for (std::size_t i = 0; i < count; i++) {
        all.push_back(mark<T>(from, static_cast<std::size_t>(which), i, round));
    }
    return all;
}

/* How many buffers each rank has, if all have the same number. */
inline std::vector<std::size_t> everyone(int size, std::size_t buffers) {
    return std::vector<std::size_t>(static_cast<std::size_t>(size), buffers);
}

/* All ranks' buffers combined, in the order of the ranks and of each one's buffers. */
template <class T, class Combine> std::vector<T> combined_marks(const std::vector<std::size_t> &buffers,
                                                                std::size_t count, int round, std::vector<T> all,
                                                                const Combine &combine) {
    for (std::size_t rank = 0; rank < buffers.size(); rank++) {
        for (std::size_t which = 0; which < buffers[rank]; which++) {
            for (std::size_t i = 0; i < count; i++) {
                all[i] = combine(all[i], mark<T>(static_cast<int>(rank), which, i, round));
            }
        }
    }
    return all;
}

inline std::vector<uint32_t> sum_of_marks(const std::vector<std::size_t> &buffers, std::size_t count, int round = 0) {
    return combined_marks(buffers, count, round, std::vector<uint32_t>(count),
                          [](uint32_t a, uint32_t b) { return a + b; });
}

inline std::vector<Map> composition_of_marks(const std::vector<std::size_t> &buffers, std::size_t count) {
    return combined_marks(buffers, count, 0, std::vector<Map>(count, Map{1, 0, 0}), compose);
}

// ---- floats whose sum depends on the order

/* From 2^-20 to 2^20, of either sign. */
inline float scattered(int rank, std::size_t i) {
    const uint64_t bits = mix(static_cast<uint64_t>(rank), i, 5);
    const float fraction = static_cast<float>(bits % 0x1000000) / 0x1000000;
    return std::ldexp(bits & uint64_t{1} << 40 ? fraction : -fraction, static_cast<int>(bits >> 50) % 41 - 20);
}

inline std::vector<float> scattered_values(int rank, std::size_t count) {
    std::vector<float> all;
    for (std::size_t i = 0; i < count; i++) {
        all.push_back(scattered(rank, i));
    }
    return all;
}

/* The sum of `count` ranks from `first` on: of the left part, the largest power of two below their number, and of
   the rest. */
inline float balanced_sum(int first, int count, std::size_t i) {
    if (count == 1) {
        return scattered(first, i);
    }
    int left = 1;
    while (left * 2 < count) {
        left *= 2;
    }
    return balanced_sum(first, left, i) + balanced_sum(first + left, count - left, i);
}

inline std::vector<float> balanced_sums(int size, std::size_t count) {
    std::vector<float> all;
    for (std::size_t i = 0; i < count; i++) {
        all.push_back(balanced_sum(0, size, i));
    }
    return all;
}
