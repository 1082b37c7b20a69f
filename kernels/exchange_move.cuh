// Moving bytes between pairs of ranks: sends, receives, and what is made of them (allgather, all-to-all, gather,
// scatter, long broadcasts between two ranks).
//
// Each peer has blocks of its own, so that a pair that is slow holds up no other. Transfers are cut into parts, the same
// on both sides. A block has parts of each transfer, one after the other, before it comes to the next transfer; two ranks
// may have unlike numbers of blocks for each other. Half of a block sends, the other half receives, each in the order of
// the call and neither waiting for the other: so whichever part of the first transfer of a pair and direction is not
// moved yet, both sides are at the one of the lowest number, whatever else their launches have. Where what comes goes to
// where what is sent lies, as in an all-to-all in place, a receive waits for the send of the same bytes: that is this
// block's, too. Where the caller allows fewer blocks than there are ranks, a block goes from peer to peer.
#pragma once

#include "exchange_lines.cuh"

namespace unisono {

// The most threads of a block.
constexpr u32 MOVE_THREADS = 256;
// Warps of a block that send, at most; as many receive. For tiles each has queues of its own for each part, to and from
// the same warp of the peer's block.
constexpr u32 MOVE_WARPS = MOVE_THREADS / 64;
// How many packets a thread begins to load before it uses the first.
constexpr u32 MOVE_LOADS = 16;

struct Transfer {
    u8 *address;
    u64 bytes;
};

// The parameter of the kernels: `Move` of src/cuda/exchange/arguments.rs. It has room for so many transfers.
template <u32 ROOM>
struct Move {
    Group group;
    // Up to how many bytes a transfer goes by narrow lines, by wide ones.
    u64 narrow, wide;
    // What a block should find to do at least.
    u64 line_part, tile_part;
    // The most parts of a transfer that goes by lines, and of one that goes by tiles.
    u32 line_parts, tile_parts;
    // How many parts the transfer of this launch has that has most.
    u32 parts;
    // Whether each receive goes to the bytes of the send of its turn.
    u32 in_place;
    // How many peers have blocks of their own, and how many each.
    u32 classes, blocks;
    // Where in `transfer` each list ends; the next begins there. Of each peer, by its turn (the peer is `turn + 1` ranks
    // further on), what is sent to it and then what it sends. This rank is its own last peer.
    u32 ends[2 * MAX_RANKS];
    Transfer transfer[ROOM];

    struct List {
        const Transfer *first;
        u32 count;
    };
    DEVICE List list(u32 turn, u32 back) const {
        const u32 at = 2 * turn + back, begin = at == 0 ? 0 : ends[at - 1];
        return List{transfer + begin, ends[at] - begin};
    }
    DEVICE List sends(u32 turn) const { return list(turn, 0); }
    DEVICE List receives(u32 turn) const { return list(turn, 1); }

    DEVICE bool goes_by_lines(u64 bytes) const { return bytes <= narrow || bytes <= wide; }

    // A part of a transfer: the same on both sides.
    struct Part {
        u64 begin, bytes;
    };
    DEVICE Part part(u64 bytes, u32 number) const {
        const bool by_lines = goes_by_lines(bytes);
        const u64 least = by_lines ? line_part : tile_part;
        const u32 most = by_lines ? line_parts : tile_parts;
        u64 wanted = (bytes + least - 1) / least;
        u64 count = wanted < most ? wanted : most;
        u64 share = ((bytes + count - 1) / count + 63) / 64 * 64;
        u64 begin = share * number;
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

template <u32 ROOM>
struct Mover {
    const Move<ROOM> &call;
    LineTable &table;
    Team team;
    // The peer's, and which of the peer's blocks this is.
    u32 turn, peer, place;
    // Shared by both halves: how many slots each warp has filled.
    volatile u32 *filled;

    DEVICE u32 warps() const { return team.threads / 32; }
    DEVICE u32 warp() const { return team.thread / 32; }
    DEVICE u32 lane() const { return team.thread % 32; }
    // Which queues for tiles are this warp's, for a part.
    DEVICE u32 tile_queue(u32 number) const { return number * warps() + warp(); }

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

    // Calls `handle(number, part)` for this block's parts of a transfer.
    template <class Handle>
    DEVICE void for_each_part(u64 bytes, Handle handle) const {
#pragma unroll 1
        for (u32 number = place; number < call.parts; number += call.blocks) {
            const auto part = call.part(bytes, number);
            if (part.bytes == 0) return;
            handle(number, part);
        }
    }

    // Leaves the queues of one part for those of another.
    template <class Lines, class Tiles>
    DEVICE void turn_to(u32 next, u32 &number, Lines &lines, Tiles &tiles) const {
        if (next == number) return;
        save(number, lines, tiles);
        __syncwarp();
        number = next;
        tiles = Tiles(call.group, tile_queue(number), peer);
        if (is_agent()) lines = Lines(call.group, number, peer);
    }
    template <class Lines, class Tiles>
    DEVICE void save(u32 number, const Lines &lines, const Tiles &tiles) const {
        if (is_agent()) lines.save(call.group, number, peer);
        if (lane() == 0) tiles.save(call.group, tile_queue(number), peer);
    }

    DEVICE void send() {
        const auto sends = call.sends(turn);
        if (sends.count == 0) return;
        u32 number = place;
        Outbox<LINES> &lines = table.out;
        Outbox<MOVES> tiles(call.group, tile_queue(number), peer);
        bool latched = false;
        if (is_agent()) {
            lines = Outbox<LINES>(call.group, number, peer);
            latched = call.group.is_latched();
        }
        if (team.sync_or(latched)) return;
        bool well = true;
#pragma unroll 1
        for (u32 i = 0; i < sends.count; i++) {
            const Transfer &transfer = sends.first[i];
            for_each_part(transfer.bytes, [&](u32 next, auto part) {
                turn_to(next, number, lines, tiles);
                const u8 *from = transfer.address + part.begin;
                // A warp that is to leave still comes to the barriers of the others.
                if (call.goes_by_lines(transfer.bytes)) {
                    well = send_lines(lines, lines_for(transfer.bytes), from, static_cast<u32>(part.bytes), well);
                } else {
                    well = well && send_tiles(tiles, from, part.bytes);
                }
            });
        }
        if (well) save(number, lines, tiles);
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
        const u64 even = ((bytes + warps() - 1) / warps() + 511) / 512 * 512;
        const u32 tile = static_cast<u32>(even < call.group.move_slot ? even : call.group.move_slot);
#pragma unroll 1
        for (u64 at = warp() * tile; at < bytes; at += warps() * tile) {
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
        const auto receives = call.receives(turn);
        if (receives.count == 0) return;
        u32 number = place;
        Inbox<LINES> &lines = table.in;
        Inbox<MOVES> tiles(call.group, tile_queue(number), peer);
        bool latched = false;
        if (is_agent()) {
            lines = Inbox<LINES>(call.group, number, peer);
            lines.catch_up();
            latched = call.group.is_latched();
        }
        if (team.sync_or(latched)) return;
        u32 taken = 0;
        bool well = true;
#pragma unroll 1
        for (u32 i = 0; i < receives.count; i++) {
            const Transfer &transfer = receives.first[i];
            for_each_part(transfer.bytes, [&](u32 next, auto part) {
                const bool turns = next != number;
                turn_to(next, number, lines, tiles);
                if (turns && is_agent()) lines.catch_up();
                u8 *to = transfer.address + part.begin;
                if (call.goes_by_lines(transfer.bytes)) {
                    const u32 bytes = static_cast<u32>(part.bytes);
                    well = receive_lines(lines, lines_for(transfer.bytes), to, bytes, taken, well);
                } else {
                    well = well && receive_tiles(tiles, to, part.bytes, taken);
                }
            });
        }
        if (well) save(number, lines, tiles);
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

    // Copies what this rank sends itself.
    DEVICE void copy() const {
        const auto sends = call.sends(turn), receives = call.receives(turn);
        if (call.group.is_latched()) return;
#pragma unroll 1
        for (u32 i = 0; i < sends.count; i++) {
            for_each_part(sends.first[i].bytes, [&](u32, auto part) {
                copy_part(sends.first[i].address + part.begin, receives.first[i].address + part.begin, part.bytes);
            });
        }
    }

    DEVICE static void copy_part(const u8 *from, u8 *to, u64 bytes) {
        if (((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) & 15) != 0) {
            constexpr u32 MOST = 1u << 30;
#pragma unroll 1
            for (u64 at = 0; at < bytes; at += MOST) {
                const u32 length = bytes - at < MOST ? static_cast<u32>(bytes - at) : MOST;
                copy_apart(from + at, to + at, length, threadIdx.x, blockDim.x);
            }
            return;
        }
        const u64 whole = bytes / 16 * 16;
#pragma unroll 8
        for (u64 at = threadIdx.x * 16; at < whole; at += blockDim.x * 16) {
            store_plain(to + at, load_plain<Packet>(from + at));
        }
#pragma unroll 1
        for (u64 at = whole + threadIdx.x; at < bytes; at += blockDim.x) {
            store_plain(to + at, load_plain<u8>(from + at));
        }
    }

    DEVICE static void run(const Move<ROOM> &call) {
        __shared__ LineTable tables[2];
        __shared__ u32 filled[MOVE_WARPS];
        const u32 size = call.group.size, rank = call.group.rank, threads = blockDim.x / 2;
        const u32 half = threadIdx.x >= threads;
        const Team team{1 + half, threadIdx.x - half * threads, threads};
        // Blocks of one peer follow each other: so they are spread over the device, however many peers there are.
        const u32 first = blockIdx.x / call.blocks, place = blockIdx.x - first * call.blocks;
        // The two of a pair meet in the same step, so blocks that have several steps never wait in a circle.
#pragma unroll 1
        for (u32 step = first; step < size; step += call.classes) {
            __syncthreads();
            if (threadIdx.x < MOVE_WARPS) filled[threadIdx.x] = 0;
            __syncthreads();
            const u32 peer = step + (step < rank ? size : 0) - rank;
            const u32 turn = peer + (peer <= rank ? size : 0) - rank - 1;
            Mover mover{call, tables[half], team, turn, peer, place, filled};
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
