// The arena of a rank, and what two blocks tell each other through it.
//
// Block b of a kernel talks to block b of its peers' kernels, and to nobody else. From each rank to each other rank,
// and for each block, there is a queue in each of four areas of the receiver's arena: lines, tiles of inputs, tiles of
// results, and tiles that are moved from rank to rank as they are. A queue has a few slots. The sender counts what it
// has sent, the receiver what it has taken and reads no more; both counts live in device memory and go on from kernel
// to kernel, so launches and replays of graphs mix freely. They have 64 bits and never wrap. The sender waits until the
// receiver has told it that the slot is free: so no operation needs a barrier, in whichever direction data goes.
#pragma once

#include "exchange_memory.cuh"

namespace unisono {

constexpr u32 MAX_RANKS = 8;
// A slot for lines has a place for wide ones, then one of so many bytes for narrow ones. Each kind has its own, since
// data of the one could look like a number of the other.
constexpr u32 NARROW_BYTES = 4096;
constexpr u32 LINE_DEPTH = 2;
// Bytes in which a block lays what its rank has at addresses that packets do not suit.
constexpr u32 SCRATCH = 16384;

enum Area : u32 { LINES, INPUTS, RESULTS, MOVES, AREAS };
// Tiles of inputs and tiles that are moved are counted as one queue: no call has both, and ranks agree on the order of
// their calls. So the two areas may be the same memory, where they are cut alike.
constexpr u32 COUNTS = 3;
DEVICE constexpr u32 count_of(Area area) { return area == MOVES ? INPUTS : area; }

// The counters of a block. All are indexed by the peer.
struct alignas(2048) Control {
    // This rank's own.
    u64 sent[COUNTS][MAX_RANKS];
    u64 received[COUNTS][MAX_RANKS];
    // How many lines the peers must have taken, by what they have sent since.
    u64 implied[MAX_RANKS];
    u64 apart[8];
    // Written by the peers: how many items of ours they have taken, how many of theirs are there. Lines need no
    // `ready`.
    u64 acked[COUNTS][MAX_RANKS];
    u64 ready[COUNTS][MAX_RANKS];
};

// What is the same for every launch: `Group` of src/cuda/exchange/arguments.rs.
struct Group {
    u8 *arena[MAX_RANKS];
    Page *page;
    // Where the areas begin; that of moves may be that of inputs.
    u64 area[AREAS];
    u32 rank, size;
    // Bytes of a slot for tiles, and how many there are: a power of two. Bytes for wide lines in a slot for lines.
    // Bytes of a slot for tiles that are moved.
    u32 slot, depth, wide, move_slot;
    // Where each block that combines by tiles has SCRATCH bytes of its own.
    u64 scratch;

    DEVICE u8 *own_scratch() const { return arena[rank] + scratch + blockIdx.x * SCRATCH; }
    DEVICE Control *control(u32 of, u32 block) const { return reinterpret_cast<Control *>(arena[of] + 4096) + block; }
    DEVICE Waiter waiter() const { return Waiter{page, reinterpret_cast<Latch *>(arena[rank])}; }
    // Not 0 once kernels are to leave at once.
    DEVICE u64 latch() const { return reinterpret_cast<const Latch *>(arena[rank])->set; }
    DEVICE bool is_latched() const { return latch() != 0; }

    DEVICE u32 slots(Area of) const { return of == LINES ? LINE_DEPTH : depth; }
    DEVICE u32 slot_bytes(Area of) const {
        return of == LINES ? wide + NARROW_BYTES : of == MOVES ? move_slot : slot;
    }

    // The slots of the queue from `source` to `target`, in the target's arena.
    DEVICE u8 *queue(Area of, u32 block, u32 source, u32 target) const {
        const u32 channel = block * (size - 1) + source - (source > target);
        // An arena has less than 4 GiB.
        return arena[target] + (static_cast<u32>(area[of]) + channel * (slots(of) * slot_bytes(of)));
    }
};

// Calls that are one launch: each has blocks of its own, whose queues are those of the same blocks on the other ranks.
// `Several` of src/cuda/exchange/arguments.rs.
template <class Parameter>
struct Several {
    static constexpr u32 MOST = 64;

    Group group;
    // The first block of each call; beyond the last call no block has that number.
    u16 begins[MOST];
    typename Parameter::Packed call[MOST];

    // The call of this block.
    DEVICE Parameter own() const {
        u32 number = 0;
#pragma unroll
        for (u32 step = MOST / 2; step > 0; step /= 2) {
            if (blockIdx.x >= begins[number + step]) number += step;
        }
        return Parameter(call[number], group);
    }

    // The same, kept in shared memory, where it needs no registers.
    DEVICE const Parameter &own(Parameter &room) const {
        if (threadIdx.x == 0) room = own();
        __syncthreads();
        return room;
    }
};

// The sending end of a queue. One thread of the block has it.
template <Area AREA>
struct Outbox {
    static constexpr u32 COUNT = count_of(AREA);

    u8 *slots;
    const u64 *acked;
    u64 *ready;
    u64 sent, implied;

    Outbox() = default;
    DEVICE Outbox(const Group &group, u32 block, u32 peer)
        : slots(group.queue(AREA, block, group.rank, peer)),
          acked(&group.control(group.rank, block)->acked[COUNT][peer]),
          ready(&group.control(peer, block)->ready[COUNT][group.rank]),
          sent(group.control(group.rank, block)->sent[COUNT][peer]),
          implied(AREA == LINES ? group.control(group.rank, block)->implied[peer] : 0) {}

    // Waits until the next slot is free.
    DEVICE bool reserve(const Group &group, u32 peer) const {
        constexpr Phase ROOM = AREA == LINES ? LINE_ROOM : AREA == RESULTS ? RESULT_ROOM : TILE_ROOM;
        if (AREA == LINES && sent - implied < group.slots(AREA)) return true;
        return group.waiter().wait(ROOM, peer, sent + 1,
                                   [&] { return sent - max(load_relaxed(acked), implied) < group.slots(AREA); });
    }
    DEVICE u8 *next(const Group &group) const {
        return slots + (static_cast<u32>(sent) & (group.slots(AREA) - 1)) * group.slot_bytes(AREA);
    }
    // Tells the peer that a tile is there: after a barrier behind the stores of all threads.
    DEVICE void publish() { announce(++sent); }
    // The same where several threads count what is sent: `number` is what that has come to.
    DEVICE void announce(u64 number) const { store_release(ready, number); }
    DEVICE void save(const Group &group, u32 block, u32 peer) const {
        group.control(group.rank, block)->sent[COUNT][peer] = sent;
        if (AREA == LINES) group.control(group.rank, block)->implied[peer] = implied;
    }
};

// The receiving end of a queue. One thread of the block has it.
template <Area AREA>
struct Inbox {
    static constexpr u32 COUNT = count_of(AREA);

    u8 *slots;
    const u64 *ready;
    u64 *acked;
    u64 received;

    Inbox() = default;
    DEVICE Inbox(const Group &group, u32 block, u32 peer)
        : slots(group.queue(AREA, block, peer, group.rank)),
          ready(&group.control(group.rank, block)->ready[COUNT][peer]),
          acked(&group.control(peer, block)->acked[COUNT][group.rank]),
          received(group.control(group.rank, block)->received[COUNT][peer]) {}

    // Waits until the next tile is there, and for what was written before it.
    DEVICE bool await(const Group &group, u32 peer) const {
        constexpr Phase COME = AREA == RESULTS ? RESULTS_COME : TILES_COME;
        bool came = group.waiter().wait(COME, peer, received + 1, [&] { return load_relaxed(ready) != received; });
        load_acquire(ready);
        return came;
    }
    DEVICE u8 *next(const Group &group) const {
        return slots + (static_cast<u32>(received) & (group.slots(AREA) - 1)) * group.slot_bytes(AREA);
    }
    // Tells the peer that an item was taken: after a barrier behind the last use of what was loaded. Loads whose values
    // have been used are complete, so the store needs no order of its own.
    DEVICE void release() { acknowledge(++received); }
    // The same where several threads count what is received: `number` is what that has come to.
    DEVICE void acknowledge(u64 number) const { store_relaxed(acked, number); }
    // Tells the peer what earlier calls took and kept to themselves: see `Combine::is_mutual`.
    DEVICE void catch_up() const { acknowledge(received); }
    DEVICE void save(const Group &group, u32 block, u32 peer) const {
        group.control(group.rank, block)->received[COUNT][peer] = received;
    }
};

// Some warps of a block that work together, with a barrier of their own.
struct Team {
    u32 barrier, thread, threads;

    DEVICE void sync() const { team_barrier(barrier, threads); }
    // A barrier that tells everybody whether anybody said yes.
    DEVICE bool sync_or(bool mine) const { return team_barrier_or(barrier, threads, mine); }
};

// Tiles that a team moves in one round: what the agents, one for each peer, tell the other threads.
struct TileTable {
    const u8 *from[MAX_RANKS];
    u8 *to[MAX_RANKS];
    u32 bytes[MAX_RANKS];
    // How many packets from the first are whole, at addresses that suit them.
    u32 fast[MAX_RANKS];

    DEVICE void set(u32 turn, const u8 *source, u8 *target, u32 length) {
        from[turn] = source;
        to[turn] = target;
        bytes[turn] = length;
        fast[turn] = is_apart(turn) ? 0 : length / 16;
    }
    // Whether the addresses are none that packets suit.
    DEVICE bool is_apart(u32 turn) const {
        return ((reinterpret_cast<u64>(from[turn]) | reinterpret_cast<u64>(to[turn])) & 15) != 0;
    }
};

// How many loads a thread begins before it uses the first: where it combines, and the logarithm where it only moves.
constexpr u32 BATCH = 8;
constexpr u32 STREAM_LOG = 4;

enum Way { TO_SLOTS, FROM_SLOTS };

// Moves the tiles of `turns` peers, of at most `vectors` packets each, between the caller's memory and slots, which are
// aligned and whole; `keep(turn, at, packet)` sees each packet of tiles at addresses that suit.
template <Way WAY, u32 BATCH_LOG = STREAM_LOG, class Keep>
DEVICE void stream(const Team &team, const TileTable &table, u32 turns, u32 vectors, Keep keep) {
    u32 log = turns <= 1 ? 0 : turns <= 2 ? 1 : turns <= 4 ? 2 : 3;
    u32 mask = (1u << log) - 1;
    u32 step = team.threads << (BATCH_LOG - log);
#pragma unroll 1
    for (u32 first = team.thread; first < vectors; first += step) {
        // What is not loaded is defined, or else it would be kept from one round to the next.
        Packet loaded[1u << BATCH_LOG]{};
#pragma unroll
        for (u32 i = 0; i < 1u << BATCH_LOG; i++) {
            u32 vector = first + (i >> log) * team.threads, turn = i & mask;
            if (turn < turns && vector < table.fast[turn]) {
                const u8 *from = table.from[turn] + vector * 16;
                loaded[i] = WAY == TO_SLOTS ? load_plain<Packet>(from) : load_packet(from);
            }
        }
#pragma unroll
        for (u32 i = 0; i < 1u << BATCH_LOG; i++) {
            u32 vector = first + (i >> log) * team.threads, turn = i & mask;
            if (turn < turns && vector < table.fast[turn]) {
                store_plain(table.to[turn] + vector * 16, loaded[i]);
                keep(turn, vector * 16, loaded[i]);
            }
        }
    }
    // Tiles at other addresses, and ends.
#pragma unroll 1
    for (u32 turn = 0; turn < turns; turn++) {
        u32 bytes = table.bytes[turn];
        if (table.is_apart(turn)) {
            copy_apart(table.from[turn], table.to[turn], bytes, team.thread, team.threads);
            continue;
        }
#pragma unroll 1
        for (u32 at = (table.fast[turn] + team.thread) * 16; at < bytes; at += team.threads * 16) {
            Packet packet;
            if (WAY == TO_SLOTS) {
                packet = load_bytes(table.from[turn], at, bytes);
                store_plain(table.to[turn] + at, packet);
            } else {
                packet = load_packet(table.from[turn] + at);
                store_bytes(table.to[turn], at, bytes, packet);
            }
            keep(turn, at, packet);
        }
    }
}

}  // namespace unisono
