// The courier: a kernel on a caller's stream that does as the host orders, until the host dismisses it.
//
// The host reaches device memory by it without asking the driver for anything: between the courier's start, before which the
// stream has done what it was given, and its end, for which the stream waits, there are only words of pinned memory. It
// serves up to three desks at a time, so that bytes go both ways over the bus while others are combined.
//
// A desk has slips, used in turn. The host numbers what it writes on them: each word of a slip bears the order's number, so an
// order is taken when all of its words are there. The blocks of a desk carry out every order together, each its share, and each
// reports how far it has come. Numbers go on from courier to courier.
//
// Asking the host's memory for orders is slow where many blocks do. Of a desk that has more than a few only the first does. It writes
// them on slips of the same shape in the device's memory, where the others look now and then. Of those there are few; couriers
// beyond do without.
#pragma once

#include "exchange_memory.cuh"

namespace unisono {

// Slips of a desk, and the most blocks that serve it.
constexpr u32 COURIER_THREADS = 1024;
constexpr u32 DESKS = 3, SLIPS = 64, DESK_BLOCKS = 16;
// How many couriers have desks in the device's memory, and how many blocks of a desk all ask the host's.
constexpr u32 NEARS = 16, FEW_BLOCKS = 4;
// How many accesses a thread has under way.
constexpr u32 ARMFUL = 4;

// What lies in the words of a slip; above it, in each, the number.
enum Field : u32 { TO, TO_HIGH, FROM, FROM_HIGH, BYTES, BYTES_HIGH, ACTION, SPARE, FIELDS };

// To carry bytes; the same when all blocks have carried out what was ordered before; to do what a sheet at FROM says; to leave.
enum Action : u32 { CARRY, CARRY_BEHIND, COMBINE, LEAVE };

struct alignas(64) Slip {
    u64 field[FIELDS];
};

struct Desk {
    Slip slip[SLIPS];
    // The last order that each block has carried out.
    u32 done[DESK_BLOCKS];
    // The first order of the courier that is here.
    u32 here, apart[15];
};

// The parameter of a courier; `Call` of src/cuda/courier.rs.
struct Courier {
    // In pinned memory.
    Desk *desks;
    // Which of the desks in the device's memory are its.
    u32 near;
    // The number of the next order at each desk.
    u32 next[DESKS];
    // How many blocks serve each.
    u32 blocks[DESKS];
};

__device__ Desk near_desks[NEARS][DESKS];

struct Order {
    u8 *to;
    const u8 *from;
    u64 bytes;
    u32 action;
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

// One block at its desk. All threads of the block make all calls.
struct Clerk {
    Desk *far, *near;
    u32 block, blocks, number;

    DEVICE explicit Clerk(const Courier &call) {
        u32 side = 0;
        block = blockIdx.x;
        while (block >= call.blocks[side]) block -= call.blocks[side++];
        blocks = call.blocks[side];
        far = call.desks + side;
        near = call.near < NEARS && blocks > FEW_BLOCKS ? &near_desks[call.near][side] : nullptr;
        number = call.next[side];
        if (blockIdx.x == 0 && threadIdx.x == 0) store_relaxed(&far->here, number);
    }

    // The next order, when it is there.
    DEVICE Order take() const {
        __shared__ u32 order[FIELDS];
        if (threadIdx.x < 32) {
            const u32 slip = number % SLIPS, word = threadIdx.x % FIELDS;
            const u64 *field = &(near != nullptr && block != 0 ? near : far)->slip[slip].field[word];
            u64 found;
            do {
                if (near != nullptr && block != 0) nap();
                found = load_relaxed(field);
            } while (!all_together(static_cast<u32>(found >> 32) == number));
            // What the host wrote before the order is seen behind it.
            load_acquire(field);
            if (threadIdx.x < FIELDS) order[threadIdx.x] = static_cast<u32>(found);
            if (near != nullptr && block == 0 && threadIdx.x < FIELDS) {
                store_release(&near->slip[slip].field[threadIdx.x], found);
            }
            if (static_cast<u32>(__shfl_sync(~0u, found, ACTION)) == CARRY_BEHIND && blocks > 1) await_others();
        }
        __syncthreads();
        const auto wide = [&](Field low) { return order[low] | static_cast<u64>(order[low + 1]) << 32; };
        return Order{reinterpret_cast<u8 *>(wide(TO)), reinterpret_cast<const u8 *>(wide(FROM)), wide(BYTES), order[ACTION]};
    }

    // This thread's share: in the largest units that both addresses allow, and what is left byte by byte.
    DEVICE void carry_share(const Order &order) const {
        const u32 first = block * blockDim.x + threadIdx.x, step = blocks * blockDim.x;
        const u64 addresses = reinterpret_cast<u64>(order.to) | reinterpret_cast<u64>(order.from);
        u64 whole = 0;
        if (addresses % 16 == 0) {
            whole = order.bytes & ~15ull;
            carry<Packet>(order.to, order.from, whole / 16, first, step);
        } else if (addresses % 4 == 0) {
            whole = order.bytes & ~3ull;
            carry<u32>(order.to, order.from, whole / 4, first, step);
        }
        carry<u8>(order.to + whole, order.from + whole, order.bytes - whole, first, step);
    }

    // This block has carried out its share.
    DEVICE void report() {
        __syncthreads();
        if (threadIdx.x == 0) {
            store_release(&far->done[block], number);
            if (near != nullptr) store_release(&near->done[block], number);
        }
        number++;
    }

private:
    // A warp of each block waits until all have carried out the order before this one.
    DEVICE void await_others() const {
        const u32 *done = &(near != nullptr ? near : far)->done[threadIdx.x % blocks];
        while (static_cast<int>(load_relaxed(done) - (number - 1)) < 0) pause();
        load_acquire(done);
        __syncwarp();
    }
};

}  // namespace unisono
