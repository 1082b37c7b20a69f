// Elements, accumulators and operators: the rules of src/reduce, bit for bit, for the device and for the host.
//
// An element is what a buffer holds. A value is what is computed with: an accumulator, or a 32-bit integer for the
// 8-bit types. This header includes nothing, since the device compiler runs without headers, and compiles as plain
// C++17 too: so the rules are tested against src/reduce without a GPU (tests/kernels.rs). What a GPU does with
// instructions of its own stands behind HARDWARE; scripts/gpu/kernels_check.py compares that with the portable code
// over every input.
#pragma once

#if defined(__CUDACC__)
#define BOTH __host__ __device__ __forceinline__
#define COPY memcpy
#else
#define BOTH inline
#define COPY __builtin_memcpy
#endif

// The generation whose conversion instructions may be used: 0 for none.
#if defined(__CUDA_ARCH__) && !defined(UNISONO_PORTABLE)
#define HARDWARE __CUDA_ARCH__
#else
#define HARDWARE 0
#endif

namespace unisono {

using u8 = unsigned char;
using i8 = signed char;
using u16 = unsigned short;
using u32 = unsigned int;
using i32 = int;
using u64 = unsigned long long;
using i64 = long long;

template <class To, class From>
BOTH To bit_cast(From from) {
    static_assert(sizeof(To) == sizeof(From), "a cast of bits keeps the size");
    To to;
    COPY(&to, &from, sizeof(To));
    return to;
}

template <bool FIRST, class A, class B>
struct Choice {
    using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
    using Type = B;
};

// A float format of at most 16 bits: a sign, EXPONENT bits with the usual bias, MANTISSA bits. See
// src/reduce/convert.rs.
template <u32 EXPONENT, u32 MANTISSA, bool INFINITE>
struct Format {
    static constexpr u32 SIGN = 1u << (EXPONENT + MANTISSA);
    static constexpr u32 BIAS = (1u << (EXPONENT - 1)) - 1;
    // How far the mantissa lies below that of a float.
    static constexpr u32 SHIFT = 23 - MANTISSA;
    // All exponent bits: infinity where the format has one.
    static constexpr u32 TOP = ((1u << EXPONENT) - 1) << MANTISSA;
    // The canonical NaN.
    static constexpr u32 NOT_A_NUMBER = INFINITE ? TOP | 1u << (MANTISSA - 1) : SIGN - 1;
    // The magnitude above which there are NaNs only.
    static constexpr u32 LAST = INFINITE ? TOP : SIGN - 2;
    // The bits of the float 2^(1 - bias - mantissa), the lowest mantissa bit of a subnormal number; and of 2^23 of
    // them: adding that to a smaller number rounds it to a multiple of the step.
    static constexpr u32 STEP = (127 + 1 - BIAS - MANTISSA) << 23;
    static constexpr u32 MAGIC = STEP + (23u << 23);

    BOTH static float widen(u32 bits) {
        u32 magnitude = bits & (SIGN - 1);
        u32 sign = (bits & SIGN) << (31 - EXPONENT - MANTISSA);
        u32 special_from = INFINITE ? TOP : NOT_A_NUMBER;
        u32 wide;
        if (magnitude >= special_from) {
            wide = INFINITE ? 0x7f800000u | magnitude << SHIFT : 0x7fc00000u;
        } else if (magnitude < 1u << MANTISSA) {
            wide = bit_cast<u32>(static_cast<float>(magnitude) * bit_cast<float>(STEP));
        } else {
            wide = (magnitude << SHIFT) + ((127 - BIAS) << 23);
        }
        return bit_cast<float>(sign | wide);
    }

    // To nearest, ties to even.
    BOTH static u32 narrow(float value) {
        u32 bits = bit_cast<u32>(value);
        u32 magnitude = bits & 0x7fffffffu;
        u32 rounded;
        if (magnitude < (127 + 1 - BIAS) << 23) {
            rounded = bit_cast<u32>(bit_cast<float>(magnitude) + bit_cast<float>(MAGIC)) - MAGIC;
        } else {
            // A carry out of the mantissa moves into the exponent, as it should.
            u32 odd = magnitude >> SHIFT & 1;
            rounded = (magnitude - ((127 - BIAS) << 23) + (1u << (SHIFT - 1)) - 1 + odd) >> SHIFT;
        }
        u32 narrowed = rounded > LAST ? (INFINITE ? TOP : NOT_A_NUMBER) : rounded;
        bool is_nan = magnitude > 0x7f800000u || (!INFINITE && narrowed == NOT_A_NUMBER);
        return is_nan ? NOT_A_NUMBER : bits >> 31 << (EXPONENT + MANTISSA) | narrowed;
    }
};

// Types. Each has:
//   Memory      an element as it lies in a buffer
//   Accumulator an accumulator as it lies in a buffer
//   Value       what is computed with
//   load, store from and to an element; storing rounds and makes NaNs canonical
//   load_all, store_all  the same for the elements that lie in N 32-bit words
//   widen, keep from and to an accumulator
// The primary template of the word forms takes elements one by one; types with paired instructions have their own.

template <class T, u32 WORDS>
BOTH void load_one_by_one(const u32 (&words)[WORDS], typename T::Value (&values)[4 * WORDS / sizeof(typename T::Memory)]) {
    constexpr u32 COUNT = 4 * WORDS / sizeof(typename T::Memory);
    typename T::Memory elements[COUNT];
    COPY(elements, words, sizeof(elements));
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) values[i] = T::load(elements[i]);
}

template <class T, u32 WORDS>
BOTH void store_one_by_one(const typename T::Value (&values)[4 * WORDS / sizeof(typename T::Memory)], u32 (&words)[WORDS]) {
    constexpr u32 COUNT = 4 * WORDS / sizeof(typename T::Memory);
    typename T::Memory elements[COUNT];
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) elements[i] = T::store(values[i]);
    COPY(words, elements, sizeof(elements));
}

#define ONE_BY_ONE(T)                                                                                                  \
    template <u32 WORDS>                                                                                               \
    BOTH static void load_all(const u32 (&words)[WORDS], Value (&values)[4 * WORDS / sizeof(Memory)]) {                \
        load_one_by_one<T, WORDS>(words, values);                                                                      \
    }                                                                                                                  \
    template <u32 WORDS>                                                                                               \
    BOTH static void store_all(const Value (&values)[4 * WORDS / sizeof(Memory)], u32 (&words)[WORDS]) {               \
        store_one_by_one<T, WORDS>(values, words);                                                                     \
    }

// Integers of MEMORY, computed with as VALUE: wrapping is what is left after the store. UNSIGNED is VALUE's twin.
template <class MEMORY, class VALUE, class UNSIGNED>
struct Integer {
    using Memory = MEMORY;
    using Accumulator = MEMORY;
    using Value = VALUE;
    static constexpr bool FLOAT = false;

    BOTH static Value load(Memory element) { return element; }
    BOTH static Memory store(Value value) { return static_cast<Memory>(value); }
    BOTH static Value widen(Accumulator accumulator) { return accumulator; }
    BOTH static Accumulator keep(Value value) { return static_cast<Accumulator>(value); }
    ONE_BY_ONE(Integer)

    // Overflow is defined for unsigned integers only.
    BOTH static Value add(Value a, Value b) {
        return static_cast<Value>(static_cast<UNSIGNED>(a) + static_cast<UNSIGNED>(b));
    }
    BOTH static Value multiply(Value a, Value b) {
        return static_cast<Value>(static_cast<UNSIGNED>(a) * static_cast<UNSIGNED>(b));
    }
    BOTH static Value minimum(Value a, Value b) { return b < a ? b : a; }
    BOTH static Value maximum(Value a, Value b) { return b > a ? b : a; }

    // Divides by one number again and again, truncating toward zero.
    struct Divider {
        UNSIGNED by;
        BOTH explicit Divider(u32 ranks) : by(ranks) {
            // 8 bits: 2^16 / ranks, rounded up. No 8-bit magnitude reaches a quotient that the rounding could spoil.
            if (sizeof(Memory) == 1) by = (65535 + (ranks < 256 ? ranks : 256)) / (ranks < 256 ? ranks : 256);
        }
        BOTH Value operator()(Value sum) const {
            Value value = static_cast<Memory>(sum);
            bool negative = static_cast<Value>(-1) < static_cast<Value>(1) && value < static_cast<Value>(1) && value != 0;
            UNSIGNED magnitude = negative ? 0 - static_cast<UNSIGNED>(value) : static_cast<UNSIGNED>(value);
            UNSIGNED quotient = sizeof(Memory) == 1 ? magnitude * by >> 16 : magnitude / by;
            return static_cast<Value>(negative ? 0 - quotient : quotient);
        }
    };
};

using I8 = Integer<i8, i32, u32>;
using U8 = Integer<u8, u32, u32>;
using I32 = Integer<i32, i32, u32>;
using U32 = Integer<u32, u32, u32>;
using I64 = Integer<i64, i64, u64>;
using U64 = Integer<u64, u64, u64>;

// The arithmetic of float and double. Bits is the integer of the same size, QUIET the canonical NaN.
template <class VALUE, class Bits, Bits QUIET>
struct Real {
    using Value = VALUE;
    using Accumulator = VALUE;
    static constexpr bool FLOAT = true;

    BOTH static Value widen(Accumulator accumulator) { return accumulator; }
    BOTH static Accumulator keep(Value value) { return value; }
    BOTH static Value canonical(Value value) { return value == value ? value : bit_cast<Value>(QUIET); }

    BOTH static Value add(Value a, Value b) { return a + b; }
    BOTH static Value multiply(Value a, Value b) { return a * b; }

    // -0 is below +0, a NaN on either side gives NaN. Each choice gives its second operand when neither is smaller, so
    // the two differ for zeros and NaNs alone: there the bits of both sides meet.
    BOTH static Value minimum(Value a, Value b) {
#if HARDWARE
        if constexpr (sizeof(Value) == 4) {
            float least;
            asm("min.NaN.f32 %0, %1, %2;" : "=f"(least) : "f"(a), "f"(b));
            return least;
        }
#endif
        Value first = a < b ? a : b;
        Value second = b < a ? b : a;
        return bit_cast<Value>(bit_cast<Bits>(first) | bit_cast<Bits>(second));
    }
    // As the minimum, but that the bits two NaNs share need not make a NaN.
    BOTH static Value maximum(Value a, Value b) {
#if HARDWARE
        if constexpr (sizeof(Value) == 4) {
            float most;
            asm("max.NaN.f32 %0, %1, %2;" : "=f"(most) : "f"(a), "f"(b));
            return most;
        }
#endif
        Value first = a > b ? a : b;
        Value second = b > a ? b : a;
        Value either = bit_cast<Value>(bit_cast<Bits>(first) & bit_cast<Bits>(second));
        return a == a && b == b ? either : bit_cast<Value>(QUIET);
    }

    // Divides by one number again and again. By a power of two it multiplies, which rounds the same quotient.
    struct Divider {
        Value by, inverse;
        bool multiplies;
        BOTH explicit Divider(u32 ranks)
            : by(static_cast<Value>(ranks)), inverse(1 / by), multiplies((ranks & (ranks - 1)) == 0) {}
        BOTH Value operator()(Value value) const { return multiplies ? value * inverse : value / by; }
    };
};

using Single = Real<float, u32, 0x7fc00000u>;

struct F32 : Single {
    using Memory = float;
    BOTH static float load(float element) { return element; }
    BOTH static float store(float value) { return canonical(value); }
    ONE_BY_ONE(F32)
};

struct F64 : Real<double, u64, 0x7ff8000000000000ull> {
    using Memory = double;
    BOTH static double load(double element) { return element; }
    BOTH static double store(double value) { return canonical(value); }
    ONE_BY_ONE(F64)
};

struct F16 : Single {
    using Memory = u16;
    using Bits = Format<5, 10, true>;

#if HARDWARE
    BOTH static float load(u16 element) {
        float value;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(element));
        return value;
    }
    BOTH static u16 store(float value) {
        u16 element;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(element) : "f"(value));
        return value == value ? element : Bits::NOT_A_NUMBER;
    }
#else
    BOTH static float load(u16 element) { return Bits::widen(element); }
    BOTH static u16 store(float value) { return static_cast<u16>(Bits::narrow(value)); }
#endif
    ONE_BY_ONE(F16)
};

struct Bf16 : Single {
    using Memory = u16;

    BOTH static float load(u16 element) { return bit_cast<float>(static_cast<u32>(element) << 16); }
#if HARDWARE
    BOTH static u16 store(float value) {
        u16 element;
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(element) : "f"(value));
        return value == value ? element : 0x7fc0;
    }
#else
    BOTH static u16 store(float value) {
        u32 bits = bit_cast<u32>(value);
        u32 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        return static_cast<u16>(value == value ? rounded : 0x7fc0);
    }
#endif
    ONE_BY_ONE(Bf16)
};

// The 8-bit types: conversion instructions take pairs.
#define PAIRED(T)                                                                                                      \
    BOTH static float load(u8 element) {                                                                               \
        float values[2];                                                                                               \
        load_pair(element, values);                                                                                    \
        return values[0];                                                                                              \
    }                                                                                                                  \
    BOTH static u8 store(float value) { return static_cast<u8>(store_pair(value, 0.0f)); }                             \
    template <u32 WORDS>                                                                                               \
    BOTH static void load_all(const u32 (&words)[WORDS], float (&values)[4 * WORDS]) {                                 \
        _Pragma("unroll") for (u32 i = 0; i < 2 * WORDS; i++) {                                                        \
            float pair[2];                                                                                             \
            load_pair(static_cast<u16>(words[i / 2] >> 16 * (i % 2)), pair);                                           \
            values[2 * i] = pair[0];                                                                                   \
            values[2 * i + 1] = pair[1];                                                                               \
        }                                                                                                              \
    }                                                                                                                  \
    template <u32 WORDS>                                                                                               \
    BOTH static void store_all(const float (&values)[4 * WORDS], u32 (&words)[WORDS]) {                                \
        _Pragma("unroll") for (u32 i = 0; i < WORDS; i++) {                                                            \
            words[i] = static_cast<u32>(store_pair(values[4 * i], values[4 * i + 1])) |                                \
                       static_cast<u32>(store_pair(values[4 * i + 2], values[4 * i + 3])) << 16;                       \
        }                                                                                                              \
    }

struct F8E4M3 : Single {
    using Memory = u8;
    using Bits = Format<4, 3, false>;

#if HARDWARE >= 890
    BOTH static void load_pair(u16 elements, float (&values)[2]) {
        asm("{ .reg .b32 pair; .reg .b16 low, high;\n"
            "cvt.rn.f16x2.e4m3x2 pair, %2;\n"
            "mov.b32 {low, high}, pair;\n"
            "cvt.f32.f16 %0, low;\n"
            "cvt.f32.f16 %1, high; }"
            : "=f"(values[0]), "=f"(values[1])
            : "h"(elements));
    }
    // The instruction saturates. Above 464, the middle between the last number and the one that would follow, comes
    // NaN.
    BOTH static u16 store_pair(float low, float high) {
        constexpr float MIDDLE = 464.0f;
        const float nan = bit_cast<float>(0x7fc00000u);
        low = low <= MIDDLE && low >= -MIDDLE ? low : nan;
        high = high <= MIDDLE && high >= -MIDDLE ? high : nan;
        u16 elements;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(elements) : "f"(high), "f"(low));
        return elements;
    }
#else
    BOTH static void load_pair(u16 elements, float (&values)[2]) {
        values[0] = Bits::widen(elements & 0xff);
        values[1] = Bits::widen(elements >> 8);
    }
    BOTH static u16 store_pair(float low, float high) {
        return static_cast<u16>(Bits::narrow(low) | Bits::narrow(high) << 8);
    }
#endif
    PAIRED(F8E4M3)
};

struct F8E5M2 : Single {
    using Memory = u8;
    using Bits = Format<5, 2, true>;

    // The upper half of an f16.
    BOTH static void load_pair(u16 elements, float (&values)[2]) {
        values[0] = F16::load(static_cast<u16>(elements << 8));
        values[1] = F16::load(static_cast<u16>(elements & 0xff00));
    }
#if HARDWARE >= 890
    // The instruction saturates, and its NaN is not the canonical one.
    BOTH static u32 special(float value, u32 element) {
        constexpr float MIDDLE = 61440.0f;
        if (value < MIDDLE && value > -MIDDLE) return element;
        return value == value ? Bits::TOP | bit_cast<u32>(value) >> 31 << 7 : Bits::NOT_A_NUMBER;
    }
    BOTH static u16 store_pair(float low, float high) {
        u16 elements;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(elements) : "f"(high), "f"(low));
        return static_cast<u16>(special(low, elements & 0xff) | special(high, elements >> 8) << 8);
    }
#else
    BOTH static u16 store_pair(float low, float high) {
        return static_cast<u16>(Bits::narrow(low) | Bits::narrow(high) << 8);
    }
#endif
    PAIRED(F8E5M2)
};

#undef ONE_BY_ONE
#undef PAIRED

// Operators. SCALES: elements may have to be multiplied by their operand's scalar when they are loaded. DIVIDES: the
// final step may have to divide by the number of ranks; a sum of floats does both, so that pre-multiplied sums and
// averages need no kernels of their own. BITWISE: what an element is makes no difference.
struct Plain {
    static constexpr bool SCALES = false;
    static constexpr bool DIVIDES = false;
    static constexpr bool BITWISE = false;
    static constexpr bool ARITHMETIC = true;
};

#define OPERATOR(name, flag, expression)                                                                               \
    struct name : Plain {                                                                                              \
        static constexpr bool flag = true;                                                                             \
        template <class T, class V>                                                                                    \
        BOTH static V combine(V a, V b) {                                                                              \
            return expression;                                                                                         \
        }                                                                                                              \
    };
OPERATOR(Sum, SCALES, T::add(a, b))
OPERATOR(Average, DIVIDES, T::add(a, b))
OPERATOR(Product, ARITHMETIC, T::multiply(a, b))
OPERATOR(Min, ARITHMETIC, T::minimum(a, b))
OPERATOR(Max, ARITHMETIC, T::maximum(a, b))
OPERATOR(And, BITWISE, a & b)
OPERATOR(Or, BITWISE, a | b)
OPERATOR(Xor, BITWISE, a ^ b)
#undef OPERATOR

}  // namespace unisono
