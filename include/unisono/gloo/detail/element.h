/* Which of unisono's types and operators a program's are. */
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#include "gloo/detail/native.h"
#include "gloo/math.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

using Function = std::function<void(void *, const void *, const void *, std::size_t)>;
using FunctionPointer = void (*)(void *, const void *, const void *, std::size_t);

/* No type of unisono's, or no operator: combined by the program's own function. */
constexpr int32_t kUnknown = -1;

template <class T, class = void> struct HasOperators : std::false_type {};
template <class T>
struct HasOperators<T, std::void_t<decltype(static_cast<T>(std::declval<const T &>() + std::declval<const T &>())),
                                   decltype(static_cast<T>(std::declval<const T &>() * std::declval<const T &>())),
                                   decltype(static_cast<bool>(std::declval<const T &>() < std::declval<const T &>()))>>
    : std::true_type {};

/* Whether the value that has these bits in T is 1, 2 and -1, and `large` that of others. */
template <class T, class Bits> bool reads(Bits one, Bits two, Bits minusOne, Bits others, float large) {
    const auto value = [](Bits bits) {
        T element;
        std::memcpy(static_cast<void *>(&element), &bits, sizeof(element));
        return static_cast<float>(element);
    };
    return value(one) == 1.0f && value(two) == 2.0f && value(minusOne) == -1.0f && value(others) == large;
}

/* A short float of the program's own, such as PyTorch's, is told by how it reads its bits. Types that share their
   exponents' lengths differ where the exponent is the largest: it stands for infinity and NaN alone, or, in unisono's
   e4m3, for numbers. */
template <class T> int32_t shortFloat() {
    if constexpr (sizeof(T) == 2) {
        return reads<T, uint16_t>(0x3c00, 0x4000, 0xbc00, 0x7c00, HUGE_VALF)   ? UNISONO_FLOAT16
               : reads<T, uint16_t>(0x3f80, 0x4000, 0xbf80, 0x7f80, HUGE_VALF) ? UNISONO_BFLOAT16
                                                                       : kUnknown;
    } else {
        return reads<T, uint8_t>(0x38, 0x40, 0xb8, 0x78, 256.0f)      ? UNISONO_FLOAT8_E4M3
               : reads<T, uint8_t>(0x3c, 0x40, 0xbc, 0x7c, HUGE_VALF) ? UNISONO_FLOAT8_E5M2
                                                                      : kUnknown;
    }
}

/* unisono's type for T. */
template <class T> int32_t typeOf() {
    if constexpr (std::is_same_v<T, bool> || !HasOperators<T>::value) {
        return kUnknown;
    } else if constexpr (std::is_integral_v<T>) {
        constexpr bool isSigned = std::is_signed_v<T>;
        switch (sizeof(T)) {
        case 1:
            return isSigned ? UNISONO_INT8 : UNISONO_UINT8;
        case 4:
            return isSigned ? UNISONO_INT32 : UNISONO_UINT32;
        case 8:
            return isSigned ? UNISONO_INT64 : UNISONO_UINT64;
        default:
            return kUnknown;
        }
    } else if constexpr (std::is_same_v<T, float>) {
        return UNISONO_FLOAT32;
    } else if constexpr (std::is_same_v<T, double>) {
        return UNISONO_FLOAT64;
    } else if constexpr (std::is_same_v<T, float16>) {
        return UNISONO_FLOAT16;
    } else if constexpr (std::is_class_v<T> && sizeof(T) <= 2 && std::is_trivially_copyable_v<T> &&
                         std::is_default_constructible_v<T> && std::is_constructible_v<float, T>) {
        static const int32_t found = shortFloat<T>();
        return found;
    } else {
        return kUnknown;
    }
}

/* A type as collectives keep it: its size, unisono's type for it, and gloo's functions over it. */
struct Element {
    std::size_t size = 0;
    int32_t dtype = kUnknown;
    FunctionPointer sum = nullptr, product = nullptr, max = nullptr, min = nullptr;

    template <class T> static Element of() {
        Element element;
        element.size = sizeof(T);
        element.dtype = typeOf<T>();
        if constexpr (HasOperators<T>::value && !std::is_same_v<T, bool>) {
            element.sum = &::gloo::sum<T>;
            element.product = &::gloo::product<T>;
            element.max = &::gloo::max<T>;
            element.min = &::gloo::min<T>;
        }
        return element;
    }

    /* unisono's operator, if the function is one of gloo's over a type of unisono's. */
    int32_t operatorOf(const Function &function) const {
        const FunctionPointer *pointer = function.target<FunctionPointer>();
        if (pointer == nullptr || dtype == kUnknown) {
            return kUnknown;
        }
        return *pointer == sum       ? UNISONO_SUM
               : *pointer == product ? UNISONO_PRODUCT
               : *pointer == max     ? UNISONO_MAX
               : *pointer == min     ? UNISONO_MIN
                                     : kUnknown;
    }
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
