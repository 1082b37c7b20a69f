// The elements in 8 bytes, and the canonical tree over those of several ranks.
#pragma once

#include "exchange_arena.cuh"

namespace unisono {

// Operators that have no kernels of their own, chosen by the call: sums are what is hot. The numbers are those of
// `Operator::number` in src/reduce.
struct Various : Plain {
    static constexpr bool DIVIDES = true;
    enum Number : u32 { SUM, PRODUCT, MAX, MIN, AVERAGE, PREMULSUM, AND, OR, XOR };
};

// One operand, passed on as it is.
struct Copy : Plain {
    static constexpr bool BITWISE = true;
};

template <class A, class B>
struct Same {
    static constexpr bool VALUE = false;
};
template <class A>
struct Same<A, A> {
    static constexpr bool VALUE = true;
};

template <class T, class Op>
struct Lanes {
    using Memory = typename T::Memory;
    using Accumulator = typename T::Accumulator;
    using Value = typename T::Value;
    using Divider = typename T::Divider;
    static constexpr bool COPIES = Same<Op, Copy>::VALUE;
    static constexpr bool DIVIDES = T::FLOAT ? Op::SCALES : Op::DIVIDES;
    static constexpr u32 COUNT = Op::BITWISE ? 2 : 8 / sizeof(Memory);

    // Bitwise operators see words, whatever the elements.
    typename Choice<Op::BITWISE, u32, Value>::Type lane[COUNT];

    DEVICE static Lanes unpack(u64 bits) {
        Lanes lanes;
        if constexpr (Op::BITWISE) {
            COPY(lanes.lane, &bits, 8);
        } else {
            u32 words[2];
            COPY(words, &bits, 8);
            T::template load_all<2>(words, lanes.lane);
        }
        return lanes;
    }

    // By the bits of an accumulator.
    DEVICE void scale(u64 bits) {
        if constexpr (Op::SCALES) {
            Accumulator accumulator;
            COPY(&accumulator, &bits, sizeof(accumulator));
            Value scale = T::widen(accumulator);
#pragma unroll
            for (auto &one : lane) one = T::multiply(one, scale);
        }
    }

    template <class Function>
    DEVICE void each_with(const Lanes &right, Function function) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) lane[i] = function(lane[i], right.lane[i]);
    }

    // `number` is the operator's, where the type does not say.
    DEVICE void combine_with(const Lanes &right, u32 number) {
        if constexpr (Same<Op, Various>::VALUE) {
            if (number == Various::PRODUCT) {
                each_with(right, [](Value a, Value b) { return T::multiply(a, b); });
            } else if (number == Various::MIN) {
                each_with(right, [](Value a, Value b) { return T::minimum(a, b); });
            } else if (number == Various::MAX) {
                each_with(right, [](Value a, Value b) { return T::maximum(a, b); });
            } else if constexpr (!T::FLOAT) {
                if (number == Various::AND) {
                    each_with(right, [](Value a, Value b) { return a & b; });
                } else if (number == Various::OR) {
                    each_with(right, [](Value a, Value b) { return a | b; });
                } else if (number == Various::XOR) {
                    each_with(right, [](Value a, Value b) { return a ^ b; });
                } else {
                    each_with(right, [](Value a, Value b) { return T::add(a, b); });
                }
            }
        } else if constexpr (Same<Op, Sum>::VALUE) {
            each_with(right, [](Value a, Value b) { return T::add(a, b); });
        }
    }

    DEVICE u64 pack(bool divides, const Divider &divider) {
        u64 bits;
        if constexpr (Op::BITWISE) {
            COPY(&bits, lane, 8);
        } else {
            if (DIVIDES && divides) {
#pragma unroll
                for (auto &one : lane) one = divider(one);
            }
            u32 words[2];
            T::template store_all<2>(lane, words);
            COPY(&bits, words, 8);
        }
        return bits;
    }
};

// Combines operands as src/reduce does.
template <class T, class Op>
struct Combiner {
    using Sum = Lanes<T, Op>;

    typename Sum::Divider divider;
    bool divides, scaled;
    u32 number, operands;
    // In shared memory: each operand's.
    const u64 *scales;

    // One that only combines.
    DEVICE static Combiner plain(u32 operands) {
        return Combiner{typename Sum::Divider(1), false, false, 0, operands, nullptr};
    }
    DEVICE bool is_plain() const { return !divides && !scaled; }

    // The subtree of at most 2^LOG operands from `first`; `word(i)` are the 8 bytes of operand i. PLAIN: known to be.
    template <u32 LOG, bool PLAIN, class Word>
    DEVICE Sum tree(u32 first, Word word) const {
        if constexpr (LOG == 0) {
            Sum sum = Sum::unpack(word(first));
            if (Op::SCALES && !PLAIN && scaled) sum.scale(scales[first]);
            return sum;
        } else {
            constexpr u32 HALF = 1u << (LOG - 1);
            Sum sum = tree<LOG - 1, PLAIN>(first, word);
            if (first + HALF < operands) sum.combine_with(tree<LOG - 1, PLAIN>(first + HALF, word), number);
            return sum;
        }
    }

    template <u32 LOG, bool PLAIN = false, class Word>
    DEVICE u64 result(Word word) const {
        return tree<LOG, PLAIN>(0, word).pack(!PLAIN && divides, divider);
    }
};

}  // namespace unisono
