// The courier: a kernel on a caller's stream that carries bytes as the host orders, until the host dismisses it.
//
// The host reaches device memory by it without asking the driver for anything: between the courier's start, before which the
// stream has done what it was given, and its end, for which the stream waits, there are only words of pinned memory. It
// serves two desks at a time, so that bytes go both ways over the bus.
//
// A desk has slips, used in turn. The host numbers what it writes on them: each word of a slip bears the order's number, so an
// order is taken when all of its words are there. The blocks of a desk carry every order together, each its share, and each reports
// how far it has come. Numbers go on from courier to courier.
//
// unisono_courier has one parameter, `Courier`: `Call` of src/cuda/courier.rs.
#include "exchange_memory.cuh"

namespace unisono {

constexpr u32 COURIER_THREADS = 1024;
// Slips of a desk, and the most blocks that serve it.
constexpr u32 SLIPS = 64, COURIER_BLOCKS = 16;
// How many accesses a thread has under way.
constexpr u32 ARMFUL = 4;

// What lies in the words of a slip; above it, in each, the number.
enum Field : u32 { TO, TO_HIGH, FROM, FROM_HIGH, BYTES, BYTES_HIGH, LEAVE, SPARE, FIELDS };

struct alignas(64) Slip {
    u64 field[FIELDS];
};

struct Desk {
    Slip slip[SLIPS];
    // The last order that each block has carried out.
    u32 done[COURIER_BLOCKS];
    // The first order of the courier that is here.
    u32 here, apart[15];
};

struct Courier {
    Desk *desk[2];
    // The number of the next order at each desk.
    u32 next[2];
};

template <class Unit>
DEVICE void carry(u8 *to, const u8 *from, u64 units, u32 first, u32 step) {
#pragma unroll 1
    for (u64 at = first; at < units; at += static_cast<u64>(ARMFUL) * step) {
        Unit loaded[ARMFUL];
#pragma unroll
        for (u32 i = 0; i < ARMFUL; i++) {
            if (at + i * step < units) loaded[i] = load_plain<Unit>(from + (at + i * step) * sizeof(Unit));
        }
#pragma unroll
        for (u32 i = 0; i < ARMFUL; i++) {
            if (at + i * step < units) store_plain(to + (at + i * step) * sizeof(Unit), loaded[i]);
        }
    }
}

// This thread's share of an order: in the largest units that both addresses allow, and what is left byte by byte.
DEVICE void carry_share(u8 *to, const u8 *from, u64 bytes, u32 first, u32 step) {
    const u64 addresses = reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from);
    u64 whole = 0;
    if (addresses % 16 == 0) {
        whole = bytes & ~15ull;
        carry<Packet>(to, from, whole / 16, first, step);
    } else if (addresses % 4 == 0) {
        whole = bytes & ~3ull;
        carry<u32>(to, from, whole / 4, first, step);
    }
    carry<u8>(to + whole, from + whole, bytes - whole, first, step);
}

}  // namespace unisono

ENTRY(unisono_courier, unisono::Courier, unisono::COURIER_THREADS, 1) {
    using namespace unisono;
    __shared__ u32 order[FIELDS];
    const u32 side = blockIdx.x % 2, block = blockIdx.x / 2, blocks = gridDim.x / 2;
    Desk &desk = *call.desk[side];
    u32 number = call.next[side];
    if (block == 0 && threadIdx.x == 0) store_relaxed(&desk.here, number);
#pragma unroll 1
    for (;; number++) {
        if (threadIdx.x < 32) {
            const u64 *field = &desk.slip[number % SLIPS].field[threadIdx.x % FIELDS];
            u64 found;
            do {
                pause();
                found = load_relaxed(field);
            } while (!all_together(static_cast<u32>(found >> 32) == number));
            // What the host wrote before the order is seen behind it.
            load_acquire(field);
            if (threadIdx.x < FIELDS) order[threadIdx.x] = static_cast<u32>(found);
        }
        __syncthreads();
        const auto wide = [&](Field low) { return order[low] | static_cast<u64>(order[low + 1]) << 32; };
        u8 *to = reinterpret_cast<u8 *>(wide(TO));
        const u8 *from = reinterpret_cast<const u8 *>(wide(FROM));
        const u64 bytes = wide(BYTES);
        const bool leaves = order[LEAVE] != 0;
        carry_share(to, from, bytes, block * COURIER_THREADS + threadIdx.x, blocks * COURIER_THREADS);
        __syncthreads();
        if (threadIdx.x == 0) store_release(&desk.done[block], number);
        if (leaves) return;
    }
}
