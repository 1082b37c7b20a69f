// Memory that several GPUs touch: accesses with an order, packets, and waits that end.
//
// What a peer writes while a kernel runs is read with relaxed accesses at system scope, which pass the first-level cache.
// Whoever waits for a counter spins relaxed and then loads it once more with acquire order; the barrier that follows passes
// that on to the other threads.
#pragma once

#include "element.cuh"

#define DEVICE __device__ __forceinline__

namespace unisono {

// What one access moves. Its two halves arrive together: 128-bit accesses are single for memory order.
struct alignas(16) Packet {
    u64 low, high;
};

DEVICE u64 load_relaxed(const u64 *from) {
    u64 value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

DEVICE u64 load_acquire(const u64 *from) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

DEVICE void store_relaxed(u64 *to, u64 value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

DEVICE void store_release(u64 *to, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(to), "l"(value) : "memory");
}

// What was stored before it, also by threads behind a barrier, is seen by who sees what is stored after it.
DEVICE void fence() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

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

// The caller's memory: at any alignment, and `bytes` long from `base`; what lies beyond reads as 0 and is not written.
//
// What is rare stays out of the loops: the ends, and addresses that the whole access does not suit.
__device__ __noinline__ u64 load_slowly(const u8 *from, u64 bytes) {
    u64 word = 0;
    u32 at = 0;
    if (reinterpret_cast<u64>(from) % 4 == 0) {
        const u32 *half = reinterpret_cast<const u32 *>(from);
        if (bytes >= 4) word = half[0];
        if (bytes >= 8) word |= static_cast<u64>(half[1]) << 32;
        at = bytes >= 8 ? 8 : bytes >= 4 ? 4 : 0;
    }
#pragma unroll 1
    for (; at < 8 && at < bytes; at++) word |= static_cast<u64>(from[at]) << 8 * at;
    return word;
}

__device__ __noinline__ void store_slowly(u8 *to, u64 bytes, u64 word) {
    u32 at = 0;
    if (reinterpret_cast<u64>(to) % 4 == 0) {
        u32 *half = reinterpret_cast<u32 *>(to);
        if (bytes >= 4) half[0] = static_cast<u32>(word);
        if (bytes >= 8) half[1] = static_cast<u32>(word >> 32);
        at = bytes >= 8 ? 8 : bytes >= 4 ? 4 : 0;
    }
#pragma unroll 1
    for (; at < 8 && at < bytes; at++) to[at] = static_cast<u8>(word >> 8 * at);
}

DEVICE bool suits(const u8 *address, u32 at, u32 bytes, u32 size) {
    return at + size <= bytes && (reinterpret_cast<u64>(address) & (size - 1)) == 0;
}

DEVICE u64 load_word(const u8 *base, u32 at, u32 bytes) {
    const u8 *from = base + at;
    if (suits(from, at, bytes, 8)) return *reinterpret_cast<const u64 *>(from);
    if (at >= bytes) return 0;
    // A call of one float, which is not rare.
    if (bytes - at == 4 && reinterpret_cast<u64>(from) % 4 == 0) return *reinterpret_cast<const u32 *>(from);
    return load_slowly(from, bytes - at);
}

DEVICE void store_word(u8 *base, u32 at, u32 bytes, u64 word) {
    u8 *to = base + at;
    if (suits(to, at, bytes, 8)) {
        *reinterpret_cast<u64 *>(to) = word;
    } else if (at >= bytes) {
        return;
    } else if (bytes - at == 4 && reinterpret_cast<u64>(to) % 4 == 0) {
        *reinterpret_cast<u32 *>(to) = static_cast<u32>(word);
    } else {
        store_slowly(to, bytes - at, word);
    }
}

__device__ __noinline__ Packet load_packet_slowly(const u8 *base, u32 at, u32 bytes) {
    return Packet{load_word(base, at, bytes), load_word(base, at + 8, bytes)};
}

__device__ __noinline__ void store_packet_slowly(u8 *base, u32 at, u32 bytes, Packet packet) {
    store_word(base, at, bytes, packet.low);
    store_word(base, at + 8, bytes, packet.high);
}

DEVICE Packet load_bytes(const u8 *base, u32 at, u32 bytes) {
    if (suits(base + at, at, bytes, 16)) return *reinterpret_cast<const Packet *>(base + at);
    return load_packet_slowly(base, at, bytes);
}

DEVICE void store_bytes(u8 *base, u32 at, u32 bytes, Packet packet) {
    if (suits(base + at, at, bytes, 16)) {
        *reinterpret_cast<Packet *>(base + at) = packet;
    } else {
        store_packet_slowly(base, at, bytes, packet);
    }
}

// The host's page: `Page` of src/cuda/exchange/fault.rs is the same.
struct Page {
    u64 abort, apart[15];
    u64 recorded, phase, block, peer, sequence;
};

// What is waited for; fault.rs has the words.
enum Phase : u32 { LINE_ROOM, LINES_COME, TILE_ROOM, TILES_COME, RESULT_ROOM, RESULTS_COME, STAGE };

// The first line of an arena, its owner's own: once `latch` is set, kernels leave at once.
struct Latch {
    u64 set, claimed;
};

// Whether the host has aborted. The first block that finds so leaves the record.
__device__ __noinline__ bool is_aborted(Page *page, Latch *latch, Phase phase, u32 peer, u64 sequence) {
    if (load_relaxed(&page->abort) == 0) return false;
    store_relaxed(&latch->set, 1);
    if (atomicExch(&latch->claimed, 1ull) == 0) {
        page->phase = phase;
        page->block = blockIdx.x;
        page->peer = peer;
        page->sequence = sequence;
        store_release(&page->recorded, 1);
    }
    return true;
}

struct Waiter {
    Page *page;
    Latch *latch;

    // How often a wait asks before it looks at the page, which is a microsecond or two away.
    static constexpr u32 POLLS = 1024;

    DEVICE bool aborted(Phase phase, u32 peer, u64 sequence) const {
        return is_aborted(page, latch, phase, peer, sequence);
    }

    // Asks until `ready` says yes, or until the host aborts: then it says so, and answers false.
    template <class Ready>
    DEVICE bool wait(Phase phase, u32 peer, u64 sequence, Ready ready) const {
#pragma unroll 1
        for (u32 polls = 1; !ready(); polls++) {
            if (polls % POLLS == 0 && aborted(phase, peer, sequence)) return false;
        }
        return true;
    }
};

}  // namespace unisono
