#pragma once

#include <cstddef>
#include <new>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {

constexpr std::size_t kBufferAlignment = 32;

/* For containers whose elements begin at a multiple of so many bytes. */
template <class T, int ALIGNMENT = kBufferAlignment> class aligned_allocator {
    static_assert((ALIGNMENT & (ALIGNMENT - 1)) == 0, "an alignment is a power of 2");

  public:
    using value_type = T;
    using pointer = T *;
    template <class U> struct rebind {
        using other = aligned_allocator<U, ALIGNMENT>;
    };

    aligned_allocator() = default;
    template <class U> aligned_allocator(const aligned_allocator<U, ALIGNMENT> &) {}

    T *allocate(std::size_t count) {
        return static_cast<T *>(::operator new(count * sizeof(T), std::align_val_t(ALIGNMENT)));
    }
    void deallocate(T *memory, std::size_t) { ::operator delete(memory, std::align_val_t(ALIGNMENT)); }

    friend bool operator==(const aligned_allocator &, const aligned_allocator &) { return true; }
    friend bool operator!=(const aligned_allocator &, const aligned_allocator &) { return false; }
};

} // namespace over_unisono
} // namespace gloo
