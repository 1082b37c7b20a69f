#pragma once

#include <cstdint>
#include <cstring>
#include <iostream>
#include <stdexcept>
#include <string>

#include "gloo/common/common.h"

namespace gloo {
inline namespace over_unisono {

/* What the collectives put before their tag, so that two of different kinds may have the same. */
constexpr uint8_t kGatherSlotPrefix = 0x01;
constexpr uint8_t kAllgatherSlotPrefix = 0x02;
constexpr uint8_t kReduceSlotPrefix = 0x03;
constexpr uint8_t kAllreduceSlotPrefix = 0x04;
constexpr uint8_t kScatterSlotPrefix = 0x05;
constexpr uint8_t kBroadcastSlotPrefix = 0x06;
constexpr uint8_t kBarrierSlotPrefix = 0x07;
constexpr uint8_t kAlltoallSlotPrefix = 0x08;

/* A number by which sends and receives match: 8 bits of prefix, 32 of tag, 16 unused, 8 to tell an operation's messages
   apart. */
class Slot {
  public:
    static Slot build(uint8_t prefix, uint32_t tag) { return Slot(uint64_t{prefix} << 56 | uint64_t{tag} << 24, 0); }

    operator uint64_t() const { return base_ + delta_; }

    Slot operator+(uint8_t more) const {
        const uint64_t delta = delta_ + more;
        if (delta > 0xff) {
            throw std::runtime_error("an operation has 256 slots, not " + std::to_string(delta + 1));
        }
        return Slot(base_, delta);
    }

  protected:
    explicit Slot(uint64_t base, uint64_t delta) : base_(base), delta_(delta) {}

    const uint64_t base_;
    const uint64_t delta_;
};

struct float16;
inline float16 cpu_float2half_rn(float value);
inline float cpu_half2float(float16 value);

/* IEEE half precision. Its arithmetic is done in float and rounded after each step; collectives round once, at the
   end. */
struct alignas(2) float16 {
    uint16_t x;

    float16() : x(0) {}
    float16(const float16 &) = default;
    explicit float16(float value) : x(rounded(value)) {}
    explicit float16(double value) : float16(static_cast<float>(value)) {}
    explicit float16(int value) : float16(static_cast<float>(value)) {}
    explicit float16(unsigned long value) : float16(static_cast<float>(value)) {}
    explicit float16(unsigned long long value) : float16(static_cast<float>(value)) {}

    float16 &operator=(const float16 &) = default;
    float16 &operator=(const int &value) { return *this = float16(value); }

    bool operator==(const float16 &other) const { return x == other.x; }
    bool operator!=(const float16 &other) const { return x != other.x; }
    template <class Number> bool operator==(const Number &other) const { return x == float16(other).x; }
    template <class Number> bool operator!=(const Number &other) const { return x != float16(other).x; }

    float16 &operator+=(const float16 &other) { return *this = float16(value() + other.value()); }
    float16 &operator-=(const float16 &other) { return *this = float16(value() - other.value()); }
    float16 &operator*=(const float16 &other) { return *this = float16(value() * other.value()); }
    float16 &operator/=(const float16 &other) { return *this = float16(value() / other.value()); }

    float value() const {
        const uint32_t sign = static_cast<uint32_t>(x & 0x8000) << 16;
        const uint32_t magnitude = x & 0x7fffu;
        uint32_t bits;
        if (magnitude >= 0x7c00) {
            bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
        } else if (magnitude >= 0x400) {
            bits = sign | (magnitude + (112u << 10)) << 13;
        } else {
            // Subnormal: so many times 2^-24, which float has exactly.
            const float small = static_cast<float>(magnitude) * 5.9604644775390625e-8f;
            return sign != 0 ? -small : small;
        }
        float result;
        std::memcpy(&result, &bits, sizeof(result));
        return result;
    }

  private:
    /* To the nearest, to even in the middle; a NaN stays one. */
    static uint16_t rounded(float value) {
        uint32_t bits;
        std::memcpy(&bits, &value, sizeof(bits));
        const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
        const uint32_t magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) {
            return static_cast<uint16_t>(sign | 0x7fff);
        }
        // From halfway between the largest half and what would follow it.
        if (magnitude >= 0x477ff000) {
            return static_cast<uint16_t>(sign | 0x7c00);
        }
        if (magnitude < 0x38800000) {
            // Subnormal: as a multiple of 2^-24, rounded by the addition of 0.5 in a float that has no finer bits.
            float small;
            std::memcpy(&small, &magnitude, sizeof(small));
            small += 0.5f;
            uint32_t sum;
            std::memcpy(&sum, &small, sizeof(sum));
            return static_cast<uint16_t>(sign | (sum - 0x3f000000));
        }
        const uint32_t odd = magnitude >> 13 & 1;
        return static_cast<uint16_t>(sign | (magnitude - (112u << 23) + 0xfff + odd) >> 13);
    }
};

inline float16 cpu_float2half_rn(float value) { return float16(value); }
inline float cpu_half2float(float16 value) { return value.value(); }

inline std::ostream &operator<<(std::ostream &stream, const float16 &value) { return stream << value.value(); }

inline float16 operator+(float16 left, const float16 &right) { return left += right; }
inline float16 operator-(float16 left, const float16 &right) { return left -= right; }
inline float16 operator*(float16 left, const float16 &right) { return left *= right; }
inline float16 operator/(float16 left, const float16 &right) { return left /= right; }
inline bool operator<(const float16 &left, const float16 &right) { return left.value() < right.value(); }
inline bool operator<=(const float16 &left, const float16 &right) { return left.value() <= right.value(); }
inline bool operator>(const float16 &left, const float16 &right) { return left.value() > right.value(); }
inline bool operator>=(const float16 &left, const float16 &right) { return left.value() >= right.value(); }

} // namespace over_unisono
} // namespace gloo
