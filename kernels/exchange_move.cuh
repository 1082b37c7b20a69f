// Moving bytes between pairs of ranks: sends, receives, and what is made of them (allgather, all-to-all, gather,
// scatter, long broadcasts between two ranks).
//
// Each peer has blocks of its own, so that a pair that is slow holds up no other; block j of those talks to block j of
// the peer's. Half of a block sends, the other half receives, each in the order of the call. Where what comes goes to
// where what is sent lies, as in an all-to-all in place, a receive waits for the send of the same bytes: that is this
// block's, too. Where the caller allows fewer blocks than there are ranks, a block goes from peer to peer.
#pragma once

#include "exchange_lines.cuh"

namespace unisono {

constexpr u32 MOVE_THREADS = 256;
// Warps of a block that send; as many receive. For tiles each has queues of its own, to and from the same warp of the
// peer's block.
constexpr u32 MOVE_WARPS = MOVE_THREADS / 64;
// How many packets a thread begins to load before it uses the first.
constexpr u32 MOVE_LOADS = 16;

struct Transfer {
    u8 *address;
    u64 bytes;
};

struct OwnCopy {
    const u8 *from;
    u8 *to;
    u64 bytes;
};

// The parameter of the kernels: `Move` of src/cuda/exchange/arguments.rs.
template <u32 MANY>
struct Move {
    Group group;
    // Up to how many bytes a transfer goes by narrow lines, by wide ones.
    u64 narrow, wide;
    // What a block should find to do at least.
    u64 line_part, tile_part;
    // The most blocks for one transfer.
    u32 parts;
    u32 copies;
    // Whether each receive goes to the bytes of the send of its turn.
    u32 in_place;
    // How many peers have blocks of their own.
    u32 classes;
    // By turn: of the peer `turn + 1` ranks further on.
    u32 sends[MAX_RANKS], receives[MAX_RANKS];
    Transfer send[MAX_RANKS - 1][MANY], receive[MAX_RANKS - 1][MANY];
    OwnCopy copy[MANY];

    DEVICE bool goes_by_lines(u64 bytes) const { return bytes <= narrow || bytes <= wide; }

    // A block's part of a transfer: the same on both sides.
    struct Part {
        u64 begin, bytes;
    };
    DEVICE Part part(u64 bytes, u32 block) const {
        u64 least = goes_by_lines(bytes) ? line_part : tile_part;
        u64 wanted = (bytes + least - 1) / least;
        u64 count = wanted < parts ? wanted : parts;
        u64 share = ((bytes + count - 1) / count + 63) / 64 * 64;
        u64 begin = share * block;
        return Part{begin, begin >= bytes ? 0 : bytes - begin < share ? bytes - begin : share};
    }
};

// Copies what a thread has of a round: packets 512 bytes apart, ALL or only those whose number is below `limit`.
template <Way WAY, bool ALL>
DEVICE void copy_round(const u8 *from, u8 *to, u32 limit) {
    // What is not loaded is defined, or else it would be kept from one round to the next.
    Packet loaded[MOVE_LOADS]{};
#pragma unroll
    for (u32 i = 0; i < MOVE_LOADS; i++) {
        const u8 *at = from + i * 512;
        if (ALL || i < limit) loaded[i] = WAY == TO_SLOTS ? load_plain<Packet>(at) : load_packet(at);
    }
#pragma unroll
    for (u32 i = 0; i < MOVE_LOADS; i++) {
        if (ALL || i < limit) store_plain(to + i * 512, loaded[i]);
    }
}

// Copies a tile between the caller's memory and a slot, which is aligned and whole, by the threads of a warp.
template <Way WAY>
DEVICE void copy_tile(u32 lane, const u8 *from, u8 *to, u32 bytes) {
    if (((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) & 15) != 0) {
        return copy_apart(from, to, bytes, lane, 32);
    }
    const u32 whole = bytes / 16 * 16;
    u32 at = lane * 16;
#pragma unroll 1
    for (; at + MOVE_LOADS * 512 <= whole + lane * 16; at += MOVE_LOADS * 512) {
        copy_round<WAY, true>(from + at, to + at, MOVE_LOADS);
    }
    if (at < whole) copy_round<WAY, false>(from + at, to + at, (whole - at + 511) / 512);
#pragma unroll 1
    for (at = whole + lane * 16; at < bytes; at += 512) {
        if (WAY == TO_SLOTS) {
            store_plain(to + at, load_bytes(from, at, bytes));
        } else {
            store_bytes(to, at, bytes, load_packet(from + at));
        }
    }
}

// What a team's agent, its first thread, tells the others of the next item of lines; and the ends of its queues of
// lines, which it has alone.
struct LineTable {
    u8 *slot;
    u64 number;
    Outbox<LINES> out;
    Inbox<LINES> in;
};

template <u32 MANY>
struct Mover {
    const Move<MANY> &call;
    LineTable &table;
    Team team;
    u32 turn, peer, block;
    // Shared by both halves: how many slots each warp has filled.
    volatile u32 *filled;

    DEVICE u32 warp() const { return team.thread / 32; }
    DEVICE u32 lane() const { return team.thread % 32; }
    // Which queues for tiles are this warp's.
    DEVICE u32 tile_queue() const { return block * MOVE_WARPS + warp(); }

    // Counts a slot as filled: its bytes have been read by all threads of this warp.
    DEVICE void fill() const {
        if (lane() == 0) filled[warp()] = filled[warp()] + 1;
    }
    // Waits until the bytes that the `number`-th slot is to go to have been sent.
    DEVICE bool await_fill(u32 number) const {
        return !call.in_place ||
               call.group.waiter().wait(TILE_ROOM, peer, number, [&] { return filled[warp()] > number; });
    }

    DEVICE bool is_agent() const { return team.thread == 0; }
    DEVICE Lines lines_for(u64 bytes) const { return Lines{bytes > call.narrow}; }

    DEVICE void send() {
        const u32 count = call.sends[turn];
        if (count == 0) return;
        Outbox<LINES> &lines = table.out;
        Outbox<MOVES> tiles(call.group, tile_queue(), peer);
        bool latched = false;
        if (is_agent()) {
            lines = Outbox<LINES>(call.group, block, peer);
            latched = call.group.is_latched();
        }
        if (team.sync_or(latched)) return;
        bool well = true;
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            const Transfer &transfer = call.send[turn][i];
            auto part = call.part(transfer.bytes, block);
            if (part.bytes == 0) continue;
            const u8 *from = transfer.address + part.begin;
            // A warp that is to leave still comes to the barriers of the others.
            if (call.goes_by_lines(transfer.bytes)) {
                const u32 bytes = static_cast<u32>(part.bytes);
                if (!send_lines(lines, lines_for(transfer.bytes), from, bytes, well)) return;
            } else {
                well = well && send_tiles(tiles, from, part.bytes);
            }
        }
        if (!well) return;
        if (is_agent()) lines.save(call.group, block, peer);
        if (lane() == 0) tiles.save(call.group, tile_queue(), peer);
    }

    DEVICE bool send_lines(Outbox<LINES> &out, Lines lines, const u8 *from, u32 bytes, bool well) {
        const u32 all = lines.packets(bytes);
        Lines::Data data{};
        if (team.thread < all) data = lines.load(from, bytes, team.thread);
        if (is_agent()) {
            well = well && out.reserve(call.group, peer);
            table.slot = out.next(call.group) + lines.place(call.group);
            table.number = ++out.sent;
        }
        if (team.sync_or(!well)) return false;
#pragma unroll 1
        for (u32 packet = team.thread; packet < all; packet += team.threads) {
            if (packet != team.thread) data = lines.load(from, bytes, packet);
            lines.send(table.slot, packet, data, table.number);
        }
        team.sync();
        fill();
        return true;
    }

    // Calls `handle(at, length)` for this warp's tiles of a part; ends when that says no.
    template <class Handle>
    DEVICE bool for_each_tile(u64 bytes, Handle handle) const {
        const u64 even = ((bytes + MOVE_WARPS - 1) / MOVE_WARPS + 511) / 512 * 512;
        const u32 tile = static_cast<u32>(even < call.group.move_slot ? even : call.group.move_slot);
#pragma unroll 1
        for (u64 at = warp() * tile; at < bytes; at += MOVE_WARPS * tile) {
            if (!handle(at, static_cast<u32>(bytes - at < tile ? bytes - at : tile))) return false;
        }
        return true;
    }

    DEVICE bool send_tiles(Outbox<MOVES> &out, const u8 *from, u64 bytes) {
        return for_each_tile(bytes, [&](u64 at, u32 length) {
            if (!all_together(out.reserve(call.group, peer))) return false;
            copy_tile<TO_SLOTS>(lane(), from + at, out.next(call.group), length);
            __syncwarp();
            fill();
            out.sent++;
            if (lane() == 0) out.announce(out.sent);
            return true;
        });
    }

    DEVICE void receive() {
        const u32 count = call.receives[turn];
        if (count == 0) return;
        Inbox<LINES> &lines = table.in;
        Inbox<MOVES> tiles(call.group, tile_queue(), peer);
        bool latched = false;
        if (is_agent()) {
            lines = Inbox<LINES>(call.group, block, peer);
            lines.catch_up();
            latched = call.group.is_latched();
        }
        if (team.sync_or(latched)) return;
        u32 taken = 0;
        bool well = true;
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            const Transfer &transfer = call.receive[turn][i];
            auto part = call.part(transfer.bytes, block);
            if (part.bytes == 0) continue;
            u8 *to = transfer.address + part.begin;
            if (call.goes_by_lines(transfer.bytes)) {
                const u32 bytes = static_cast<u32>(part.bytes);
                if (!receive_lines(lines, lines_for(transfer.bytes), to, bytes, taken, well)) return;
            } else {
                well = well && receive_tiles(tiles, to, part.bytes, taken);
            }
        }
        if (!well) return;
        if (is_agent()) lines.save(call.group, block, peer);
        if (lane() == 0) tiles.save(call.group, tile_queue(), peer);
    }

    DEVICE bool receive_lines(Inbox<LINES> &in, Lines lines, u8 *to, u32 bytes, u32 &taken, bool well) {
        const u32 number = taken++;
        if (is_agent()) {
            well = well && await_fill(number);
            table.slot = in.next(call.group) + lines.place(call.group);
            table.number = in.received + 1;
        }
        if (team.sync_or(!well)) return false;
#pragma unroll 1
        for (u32 packet = team.thread; well && packet < lines.packets(bytes); packet += team.threads) {
            Lines::Data data;
            well = lines.take(call.group.waiter(), table.slot, packet, table.number, peer, data);
            if (well) lines.store(to, bytes, packet, data);
        }
        if (team.sync_or(!well)) return false;
        if (is_agent()) in.release();
        return true;
    }

    DEVICE bool receive_tiles(Inbox<MOVES> &in, u8 *to, u64 bytes, u32 &taken) {
        return for_each_tile(bytes, [&](u64 at, u32 length) {
            if (!all_together(await_fill(taken++) && in.await(call.group, peer))) return false;
            copy_tile<FROM_SLOTS>(lane(), in.next(call.group), to + at, length);
            __syncwarp();
            in.received++;
            if (lane() == 0) in.acknowledge(in.received);
            return true;
        });
    }

    // Copies within this rank.
    DEVICE void copy() const {
        if (call.group.is_latched()) return;
#pragma unroll 1
        for (u32 i = 0; i < call.copies; i++) {
            const OwnCopy &own = call.copy[i];
            auto part = call.part(own.bytes, block);
            const u8 *from = own.from + part.begin;
            u8 *to = own.to + part.begin;
            if (((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) & 15) != 0) {
                constexpr u32 MOST = 1u << 30;
#pragma unroll 1
                for (u64 at = 0; at < part.bytes; at += MOST) {
                    const u32 length = part.bytes - at < MOST ? static_cast<u32>(part.bytes - at) : MOST;
                    copy_apart(from + at, to + at, length, threadIdx.x, MOVE_THREADS);
                }
                continue;
            }
            const u64 whole = part.bytes / 16 * 16;
#pragma unroll 4
            for (u64 at = threadIdx.x * 16; at < whole; at += MOVE_THREADS * 16) {
                store_plain(to + at, load_plain<Packet>(from + at));
            }
#pragma unroll 1
            for (u64 at = whole + threadIdx.x; at < part.bytes; at += MOVE_THREADS) {
                store_plain(to + at, load_plain<u8>(from + at));
            }
        }
    }

    DEVICE static void run(const Move<MANY> &call) {
        __shared__ LineTable tables[2];
        __shared__ u32 filled[MOVE_WARPS];
        const u32 size = call.group.size, rank = call.group.rank, half = threadIdx.x / (MOVE_THREADS / 2);
        const Team team{1 + half, threadIdx.x % (MOVE_THREADS / 2), MOVE_THREADS / 2};
        // The two of a pair meet in the same step, so blocks that have several steps never wait in a circle.
#pragma unroll 1
        for (u32 step = blockIdx.x % call.classes; step < size; step += call.classes) {
            __syncthreads();
            if (threadIdx.x < MOVE_WARPS) filled[threadIdx.x] = 0;
            __syncthreads();
            const u32 peer = (step + size - rank) % size, turn = (peer + 2 * size - rank - 1) % size;
            Mover mover{call, tables[half], team, turn, peer, blockIdx.x / call.classes, filled};
            if (peer == rank) {
                mover.copy();
            } else if (half == 0) {
                mover.send();
            } else {
                mover.receive();
            }
        }
    }
};

}  // namespace unisono
