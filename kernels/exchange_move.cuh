// Moving bytes between pairs of ranks: sends, receives, and what is made of them (allgather, all-to-all, gather, scatter).
//
// Each peer has blocks of its own, so that a pair that is slow holds up no other; block j of those talks to block j of the
// peer's. Half of a block sends, the other half receives, each in the order of the call. Where what comes goes to where
// what is sent lies, as in an all-to-all in place, a receive waits for the send of the same bytes: that is this block's, too.
// Where the caller allows fewer blocks than there are ranks, a block goes from peer to peer.
#pragma once

#include "exchange_lines.cuh"

namespace unisono {

constexpr u32 MOVE_THREADS = 256;

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

// What a team's agent, its first thread, tells the others.
struct MoveTable {
    TileTable tile;
    u8 *slot;
    u64 number;
};

template <u32 MANY>
struct Mover {
    const Move<MANY> &call;
    MoveTable &table;
    Team team;
    u32 turn, peer, block;
    // Shared by both halves: how many slots have been filled by this block.
    volatile u32 &filled;

    // Counts a slot as filled: its bytes have been read by all threads.
    DEVICE void fill() const {
        if (is_agent()) filled = filled + 1;
    }
    // Waits until the bytes that the `number`-th slot is to go to have been sent.
    DEVICE bool await_fill(u32 number) const {
        return !call.in_place ||
               call.group.waiter().wait(TILE_ROOM, peer, number, [&] { return filled > number; });
    }

    DEVICE bool is_agent() const { return team.thread == 0; }
    DEVICE Lines lines_for(u64 bytes) const { return Lines{bytes > call.narrow}; }

    DEVICE void send() {
        const u32 count = call.sends[turn];
        if (count == 0) return;
        Outbox<LINES> lines;
        Outbox<MOVES> tiles;
        bool latched = false;
        if (is_agent()) {
            lines = Outbox<LINES>(call.group, block, peer);
            tiles = Outbox<MOVES>(call.group, block, peer);
            latched = call.group.is_latched();
        }
        if (team.sync_or(latched)) return;
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            const Transfer &transfer = call.send[turn][i];
            auto part = call.part(transfer.bytes, block);
            if (part.bytes == 0) continue;
            const u8 *from = transfer.address + part.begin;
            bool well = call.goes_by_lines(transfer.bytes)
                            ? send_lines(lines, lines_for(transfer.bytes), from, static_cast<u32>(part.bytes))
                            : send_tiles(tiles, from, part.bytes);
            if (!well) return;
        }
        if (is_agent()) {
            lines.save(call.group, block, peer);
            tiles.save(call.group, block, peer);
        }
    }

    DEVICE bool send_lines(Outbox<LINES> &out, Lines lines, const u8 *from, u32 bytes) {
        const u32 all = lines.packets(bytes);
        Lines::Data data{};
        if (team.thread < all) data = lines.load(from, bytes, team.thread);
        bool well = true;
        if (is_agent()) {
            well = out.reserve(call.group, peer);
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

    DEVICE bool send_tiles(Outbox<MOVES> &out, const u8 *from, u64 bytes) {
        const u32 slot = call.group.move_slot;
#pragma unroll 1
        for (u64 at = 0; at < bytes; at += slot) {
            const u32 tile = static_cast<u32>(bytes - at < slot ? bytes - at : slot);
            bool well = true;
            if (is_agent()) {
                well = out.reserve(call.group, peer);
                table.tile.set(0, from + at, out.next(call.group), tile);
            }
            if (team.sync_or(!well)) return false;
            stream<TO_SLOTS>(team, table.tile, 1, (tile + 15) / 16, [](u32, u32, Packet) {});
            team.sync();
            fill();
            if (is_agent()) out.publish();
        }
        return true;
    }

    DEVICE void receive() {
        const u32 count = call.receives[turn];
        if (count == 0) return;
        Inbox<LINES> lines;
        Inbox<MOVES> tiles;
        bool latched = false;
        if (is_agent()) {
            lines = Inbox<LINES>(call.group, block, peer);
            tiles = Inbox<MOVES>(call.group, block, peer);
            lines.catch_up();
            latched = call.group.is_latched();
        }
        if (team.sync_or(latched)) return;
        u32 taken = 0;
#pragma unroll 1
        for (u32 i = 0; i < count; i++) {
            const Transfer &transfer = call.receive[turn][i];
            auto part = call.part(transfer.bytes, block);
            if (part.bytes == 0) continue;
            u8 *to = transfer.address + part.begin;
            bool well = call.goes_by_lines(transfer.bytes)
                            ? receive_lines(lines, lines_for(transfer.bytes), to, static_cast<u32>(part.bytes), taken)
                            : receive_tiles(tiles, to, part.bytes, taken);
            if (!well) return;
        }
        if (is_agent()) {
            lines.save(call.group, block, peer);
            tiles.save(call.group, block, peer);
        }
    }

    DEVICE bool receive_lines(Inbox<LINES> &in, Lines lines, u8 *to, u32 bytes, u32 &taken) {
        bool well = true;
        if (is_agent()) {
            well = await_fill(taken++);
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
        const u32 slot = call.group.move_slot;
#pragma unroll 1
        for (u64 at = 0; at < bytes; at += slot) {
            const u32 tile = static_cast<u32>(bytes - at < slot ? bytes - at : slot);
            bool well = true;
            if (is_agent()) {
                well = await_fill(taken++) && in.await(call.group, peer);
                table.tile.set(0, in.next(call.group), to + at, tile);
            }
            if (team.sync_or(!well)) return false;
            stream<FROM_SLOTS>(team, table.tile, 1, (tile + 15) / 16, [](u32, u32, Packet) {});
            team.sync();
            if (is_agent()) in.release();
        }
        return true;
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
            const bool fast = ((reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) & 15) == 0;
            const u64 whole = fast ? part.bytes / 16 * 16 : 0;
#pragma unroll 4
            for (u64 at = threadIdx.x * 16; at < whole; at += MOVE_THREADS * 16) {
                *reinterpret_cast<Packet *>(to + at) = *reinterpret_cast<const Packet *>(from + at);
            }
#pragma unroll 1
            for (u64 at = whole + threadIdx.x * 16; at < part.bytes; at += MOVE_THREADS * 16) {
                const u32 left = static_cast<u32>(part.bytes - at < 16 ? part.bytes - at : 16);
                store_bytes(to + at, 0, left, load_bytes(from + at, 0, left));
            }
        }
    }

    DEVICE static void run(const Move<MANY> &call) {
        __shared__ MoveTable tables[2];
        __shared__ u32 filled;
        const u32 size = call.group.size, rank = call.group.rank, half = threadIdx.x / (MOVE_THREADS / 2);
        const Team team{1 + half, threadIdx.x % (MOVE_THREADS / 2), MOVE_THREADS / 2};
        // The two of a pair meet in the same step, so blocks that have several steps never wait in a circle.
#pragma unroll 1
        for (u32 step = blockIdx.x % call.classes; step < size; step += call.classes) {
            __syncthreads();
            if (threadIdx.x == 0) filled = 0;
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
