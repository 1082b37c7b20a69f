// The courier: a kernel on a caller's stream that does as the host orders, until the host dismisses it.
//
// The host reaches device memory by it without asking the driver for anything: between the courier's start, before
// which the stream has done what it was given, and its end, for which the stream waits, there are only words of pinned
// memory. It serves up to three desks at a time, so that bytes go both ways over the bus while others are combined.
//
// A desk has slips, used in turn. The host numbers what it writes on them: each word of a slip bears the order's
// number, so an order is taken when all of its words are there. What an order needs besides stands on the back of its
// slip, numbered likewise. The blocks of a desk carry out every order together, each its share, and each reports how
// far it has come. Numbers go on from courier to courier.
//
// Asking the host's memory for orders is slow where many blocks do. Of a desk that has more than a few only the first
// does. It writes them on slips of the same shape in the device's memory, where the others look now and then. Of those
// there are few; couriers beyond do without.
#pragma once

#include "exchange_memory.cuh"

namespace unisono {

// The most threads of a block.
constexpr u32 COURIER_THREADS = 1024;
// Slips of a desk, and the most blocks that serve it.
constexpr u32 DESKS = 3, SLIPS = 64, DESK_BLOCKS = 16;
// Words of the back of a slip, one for each thread of a warp.
constexpr u32 BACK_WORDS = 32;
// How many couriers have desks in the device's memory, and how many blocks of a desk all ask the host's.
constexpr u32 NEARS = 16, FEW_BLOCKS = 4;
// How many accesses a thread has under way.
constexpr u32 ARMFUL = 4;

// What lies in the words of a slip; above it, in each, the number.
enum Field : u32 { TO, TO_HIGH, FROM, FROM_HIGH, BYTES, BYTES_HIGH, ACTION, ON_BACK, FIELDS };

enum Action : u32 {
    CARRY,
    // When all blocks have carried out what was ordered before.
    CARRY_BEHIND,
    // What a sheet at FROM says.
    COMBINE,
    LEAVE,
    // Writes bytes that stand where FROM does, or on the back if they are more than eight.
    PLACE,
    // Writes to TO words of four bytes from FROM and the number: who sees a word knows that it is this order's.
    TELL,
    // Combines BYTES elements at FROM with those at the address that the back begins with; behind it stands what an
    // average divides by.
    PAIR
};

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

// What a courier finds in pinned memory; `Room` of src/cuda/courier/desk.rs. Slips of the first desk, which takes bytes
// to the host, have nothing on their backs.
struct Stand {
    Desk desk[DESKS];
    u64 back[DESKS - 1][SLIPS][BACK_WORDS];
};

// The parameter of a courier; `Call` of src/cuda/courier/desk.rs.
struct Courier {
    Stand *stand;
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
    // What stands on the back.
    const u32 *back;
    // Whether the courier leaves behind it, as far as is known.
    bool last;
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
//
// Each look at the host's memory takes a microsecond, so a warp looks at as many slips at a time as it has words for,
// and what it loads is seen together with what the host wrote before it. It looks at the back of the first of them at
// the same time.
struct Clerk {
    // How many slips a warp sees.
    static constexpr u32 VIEW = 32 / FIELDS;

    Desk *far, *near;
    const u64 (*backs)[BACK_WORDS];
    u32 block, blocks, number;
    // Of the first warp: this thread's word of the slips that it has seen, and of the back of the first, how many of
    // those bear orders, and how many of these have been taken.
    u64 seen = 0, seen_behind = 0;
    u32 found = 0, taken = 0;

    DEVICE explicit Clerk(const Courier &call) {
        u32 side = 0;
        block = blockIdx.x;
        while (block >= call.blocks[side]) block -= call.blocks[side++];
        blocks = call.blocks[side];
        far = call.stand->desk + side;
        backs = side > 0 ? call.stand->back[side - 1] : nullptr;
        near = call.near < NEARS && blocks > FEW_BLOCKS ? &near_desks[call.near][side] : nullptr;
        number = call.next[side];
        // What has been ordered already is seen while what the stream was given before comes to its end.
        if (threadIdx.x < 32 && asks_host()) see();
        await_stream();
        if (blockIdx.x == 0 && threadIdx.x == 0) store_relaxed(&far->here, number);
    }

    // The next order, when it is there.
    DEVICE Order take() {
        __shared__ u32 order[FIELDS], back[BACK_WORDS];
        __shared__ bool leaves;
        if (threadIdx.x < 32) {
            if (taken == found) look();
            const auto field = [&](u32 slip, u32 field) {
                return static_cast<u32>(__shfl_sync(~0u, seen, (slip * FIELDS + field) % 32));
            };
            const u32 mine = field(taken, threadIdx.x % FIELDS), action = field(taken, ACTION);
            const bool leaves_next = field(taken + 1, ACTION) == LEAVE && taken + 1 < found;
            taken++;
            if (threadIdx.x < FIELDS) order[threadIdx.x] = mine;
            if (threadIdx.x == 0) leaves = leaves_next || action == LEAVE;
            // Only the first block places anything.
            const u32 words = action != PLACE || block == 0 ? field(taken - 1, ON_BACK) : 0;
            if (words > 0) back[threadIdx.x] = look_behind(words);
            if (action == CARRY_BEHIND && blocks > 1) await_others();
        }
        __syncthreads();
        // From here on this block waits for nobody, so what the stream was given next takes its place from nobody.
        if (leaves) release_stream();
        const auto wide = [&](Field low) { return order[low] | static_cast<u64>(order[low + 1]) << 32; };
        return Order{reinterpret_cast<u8 *>(wide(TO)), reinterpret_cast<const u8 *>(wide(FROM)), wide(BYTES), order[ACTION], back, leaves};
    }

    // This thread's share: in the largest units that both addresses allow, and what is left byte by byte.
    DEVICE void carry_share(const Order &order) const {
        if (order.action == PLACE || order.action == TELL) {
            if (block == 0) order.action == PLACE ? place(order) : tell(order);
            return;
        }
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

    // This block has carried out its share of an order; and leaves, if that is all that is ordered behind it.
    DEVICE void report(const Order &order) {
        if (order.last && order.action != LEAVE) number++;
        __syncthreads();
        if (threadIdx.x == 0) {
            // Once the host knows, another courier may use the desks.
            if (near != nullptr) store_release(&near->done[block], number);
            store_release(&far->done[block], number);
        }
        number++;
    }

private:
    DEVICE void place(const Order &order) const {
        const u64 few = reinterpret_cast<u64>(order.from);
#pragma unroll 1
        for (u32 at = threadIdx.x; at < order.bytes; at += blockDim.x) {
            const u64 byte = order.bytes > 8 ? order.back[at / 4] >> at % 4 * 8 : few >> at * 8;
            store_plain(order.to + at, static_cast<u8>(byte));
        }
    }

    DEVICE void tell(const Order &order) const {
#pragma unroll 1
        for (u32 at = threadIdx.x * 4; at < order.bytes; at += blockDim.x * 4) {
            const u8 *from = order.from + at;
            u32 word = 0;
            if (order.bytes - at >= 4 && reinterpret_cast<u64>(from) % 4 == 0) {
                word = load_plain<u32>(from);
            } else {
#pragma unroll 1
                for (u32 i = 0; i < 4 && at + i < order.bytes; i++) word |= static_cast<u32>(load_plain<u8>(from + i)) << i * 8;
            }
            store_relaxed(reinterpret_cast<u64 *>(order.to) + at / 4, static_cast<u64>(number) << 32 | word);
        }
    }

    DEVICE bool asks_host() const { return near == nullptr || block == 0; }

    // Waits until the next slip bears its order.
    DEVICE void look() {
        do {
            if (!asks_host()) nap();
        } while (!see());
    }

    // Whether the next slip bears its order. Sees those behind it that do, too. The first block of many passes on what
    // it has seen: a slip that the host has written again has been taken by all.
    DEVICE bool see() {
        // Not behind the other load, which nothing passes: both are under way together.
        if (backs != nullptr && asks_host()) seen_behind = load_relaxed(&backs[number % SLIPS][threadIdx.x]);
        const u32 order = number + threadIdx.x / FIELDS, slip = order % SLIPS, field = threadIdx.x % FIELDS;
        seen = load_acquire(&(asks_host() ? far : near)->slip[slip].field[field]);
        const u32 there = __ballot_sync(~0u, static_cast<u32>(seen >> 32) == order);
        taken = found = 0;
        while (found < VIEW && (there >> found * FIELDS & ALL_FIELDS) == ALL_FIELDS) found++;
        if (near != nullptr && asks_host() && threadIdx.x / FIELDS < found) {
            store_release(&near->slip[slip].field[field], seen);
        }
        return found > 0;
    }
    static constexpr u32 ALL_FIELDS = (1u << FIELDS) - 1;

    // This thread's word of the back of the order that is taken. The host has written it before the front.
    DEVICE u32 look_behind(u32 words) {
        while (!all_together(threadIdx.x >= words || static_cast<u32>(seen_behind >> 32) == number)) {
            seen_behind = load_relaxed(&backs[number % SLIPS][threadIdx.x]);
        }
        return static_cast<u32>(seen_behind);
    }

    // A warp of each block waits until all have carried out the order before this one.
    DEVICE void await_others() const {
        const u32 *done = &(near != nullptr ? near : far)->done[threadIdx.x % blocks];
        while (static_cast<int>(load_relaxed(done) - (number - 1)) < 0) pause();
        load_acquire(done);
        __syncwarp();
    }
};

}  // namespace unisono
