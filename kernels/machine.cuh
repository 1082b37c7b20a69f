// What a GPU does that the language does not say: accesses with an order, barriers, the edges of a kernel. Everything
// else under kernels/ is plain C++; compiled for a processor, it runs on threads that kernels/double plays, in
// adversarial orders.
//
// What a peer writes while a kernel runs is read with relaxed accesses at system scope, which pass the first-level
// cache. Whoever waits for a counter spins relaxed and then loads it once more with acquire order; the barrier that
// follows passes that on to the other threads.
#pragma once

#include "element.cuh"

namespace unisono {

// What one access moves. Its two halves arrive together: 128-bit accesses are single for memory order.
struct alignas(16) Packet {
    u64 low, high;
};

}  // namespace unisono

#if defined(__CUDACC__)

#define DEVICE __device__ __forceinline__

// A kernel of one parameter, `call`.
#define ENTRY(name, Call, threads, blocks)                                                                             \
    extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Call call)

namespace unisono {

#define ACCESSES(type, suffix, constraint)                                                                             \
    DEVICE type load_relaxed(const type *from) {                                                                       \
        type value;                                                                                                    \
        asm volatile("ld.relaxed.sys.global." suffix " %0, [%1];" : "=" constraint(value) : "l"(from) : "memory");     \
        return value;                                                                                                  \
    }                                                                                                                  \
    DEVICE type load_acquire(const type *from) {                                                                       \
        type value;                                                                                                    \
        asm volatile("ld.acquire.sys.global." suffix " %0, [%1];" : "=" constraint(value) : "l"(from) : "memory");     \
        return value;                                                                                                  \
    }                                                                                                                  \
    DEVICE void store_relaxed(type *to, type value) {                                                                  \
        asm volatile("st.relaxed.sys.global." suffix " [%0], %1;" ::"l"(to), constraint(value) : "memory");            \
    }                                                                                                                  \
    DEVICE void store_release(type *to, type value) {                                                                  \
        asm volatile("st.release.sys.global." suffix " [%0], %1;" ::"l"(to), constraint(value) : "memory");            \
    }
ACCESSES(u32, "u32", "r")
ACCESSES(u64, "u64", "l")
#undef ACCESSES

// What was stored before it, also by threads behind a barrier, is seen by who sees what is stored after it.
DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

DEVICE u8 load_byte(const void *from) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u8 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return static_cast<u8>(value);
}

DEVICE Packet load_packet(const void *from) {
    Packet packet;
    asm volatile("{ .reg .b128 all;\n"
                 "ld.relaxed.sys.global.b128 all, [%2];\n"
                 "mov.b128 {%0, %1}, all; }"
                 : "=l"(packet.low), "=l"(packet.high)
                 : "l"(from)
                 : "memory");
    return packet;
}

DEVICE void store_packet(void *to, Packet packet) {
    asm volatile("{ .reg .b128 all;\n"
                 "mov.b128 all, {%1, %2};\n"
                 "st.relaxed.sys.global.b128 [%0], all; }" ::"l"(to),
                 "l"(packet.low), "l"(packet.high)
                 : "memory");
}

// Accesses without any order, to memory of this rank or of another.
template <class T>
DEVICE T load_plain(const void *from) {
    return *static_cast<const T *>(from);
}
template <class T>
DEVICE void store_plain(void *to, T value) {
    *static_cast<T *>(to) = value;
}

// The threads of a warp make their next accesses to packets by one instruction each: those of a line of 128 bytes are
// one.
DEVICE void begin_together() { __syncwarp(); }
// Whether all threads of a warp say so.
DEVICE bool all_together(bool mine) { return __all_sync(~0u, mine); }

// A barrier of so many threads of the block, whole warps, and one that tells all whether any said yes.
DEVICE void team_barrier(u32 barrier, u32 threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
DEVICE bool team_barrier_or(u32 barrier, u32 threads, bool mine) {
    u32 any;
    asm volatile("{ .reg .pred mine, any;\n"
                 "setp.ne.u32 mine, %3, 0;\n"
                 "bar.red.or.pred any, %1, %2, mine;\n"
                 "selp.u32 %0, 1, 0, any; }"
                 : "=r"(any)
                 : "r"(barrier), "r"(threads), "r"(static_cast<u32>(mine))
                 : "memory");
    return any != 0;
}

// Waits for the kernel before this one in its stream, where this one may have been launched before that has ended.
DEVICE void await_stream() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the kernel after this one be launched.
DEVICE void release_stream() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Before somebody asks again, and where there are many who do.
DEVICE void pause() {}
DEVICE void nap() { __nanosleep(200); }

// The time in nanoseconds, in steps of a microsecond or less.
DEVICE u64 now() {
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// How often a wait looks before it asks whether to go on.
constexpr u32 POLLS = 256;

}  // namespace unisono

#else
#include "double/machine.h"
#endif
