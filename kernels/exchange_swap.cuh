// A part from everybody to everybody else, by lines: short allgathers and all-to-alls. What counts is the number of
// instructions that a warp runs through: so each warp serves one peer, and looks up itself which slots and numbers are
// next; nothing waits for a barrier before everything is there.
//
// As in sums of this shape (exchange_mutual.cuh), whoever hears from a peer knows that the peer has taken all items but
// this call's: nobody says so, and at the end no store is on its way to a peer.
#pragma once

#include "exchange_lines.cuh"

namespace unisono {

constexpr u32 SWAP_THREADS = 512;

// A call without its group: `Swap` of src/cuda/exchange/arguments.rs.
struct Swapping {
    const u8 *input;
    u8 *output;
    // Of one part.
    u64 bytes;
    // From part to part of the input; 0 where all get the same.
    u64 stride;
    // What a block does of a part.
    u64 share;
    u32 wide;
    // Which block is the first of this call: see `Several`.
    u32 first;
};

// The parameter of the kernel: `Call` of src/cuda/exchange/arguments.rs.
struct Swap : Swapping {
    using Packed = Swapping;
    Group group;

    DEVICE Swap(const Swapping &call, const Group &group) : Swapping(call), group(group) {}
    Swap() = default;
};

// A warp's part of the work: every `step`-th packet from `first` on, of what goes to a peer and of what comes from
// there. A thread begins BATCH loads before it uses the first. What comes may go to where what is sent lies: both are
// this thread's, and it sends all of its packets first.
template <bool WIDE_LINES, u32 BATCH>
struct Swapper {
    using Data = Lines::Data;
    static constexpr Lines lines{WIDE_LINES};

    const Group &group;
    const u8 *from;
    u8 *to;
    u32 peer, bytes, first, step;

    DEVICE u32 all() const { return lines.packets(bytes); }

    // Calls `handle(packet, data)` for a batch that begins with a packet.
    template <class Handle>
    DEVICE void for_each(u32 packet, Data (&data)[BATCH], Handle handle) const {
#pragma unroll
        for (u32 i = 0; i < BATCH; i++) {
            if (packet + i * step < all()) handle(packet + i * step, data[i]);
        }
    }
    DEVICE void load(u32 packet, Data (&data)[BATCH]) const {
        for_each(packet, data, [&](u32 at, Data &one) { one = lines.load(from, bytes, at); });
    }
    DEVICE void store(u32 packet, Data (&data)[BATCH]) const {
        for_each(packet, data, [&](u32 at, Data &one) { lines.store(to, bytes, at, one); });
    }

    // Copies this rank's own part.
    DEVICE void copy() const {
#pragma unroll 1
        for (u32 packet = first; packet < all(); packet += BATCH * step) {
            Data data[BATCH]{};
            load(packet, data);
            store(packet, data);
        }
    }

    DEVICE void send(u8 *slot, u64 number, Data (&data)[BATCH]) const {
        u32 packet = first;
#pragma unroll 1
        while (packet < all()) {
            for_each(packet, data, [&](u32 at, Data &one) { lines.send(slot, at, one, number); });
            packet += BATCH * step;
            load(packet, data);
        }
    }

    DEVICE bool receive(const u8 *slot, u64 number) const {
#pragma unroll 1
        for (u32 packet = first; packet < all(); packet += BATCH * step) {
            Data data[BATCH]{};
#pragma unroll 1
            for (u32 polls = 1;; polls++) {
                bool came = true;
                for_each(packet, data, [&](u32 at, Data &one) { came = lines.peek(slot, at, number, one) && came; });
                if (lines.all(came)) break;
                if (polls % POLLS == 0 && !lines.all(!group.waiter().aborted(LINES_COME, peer, number))) {
                    return false;
                }
            }
            store(packet, data);
        }
        return true;
    }

    // For all threads of the block.
    DEVICE void run() const {
        const bool is_own = peer == group.rank;
        // All of these loads are under way together.
        const u64 latch = group.latch();
        Outbox<LINES> out;
        Inbox<LINES> in;
        if (!is_own) {
            out = Outbox<LINES>(group, blockIdx.x, peer);
            in = Inbox<LINES>(group, blockIdx.x, peer);
        }
        Data data[BATCH]{};
        load(first, data);
        // Of threads whose packets make lines together, none goes on where another leaves.
        bool well = lines.all(latch == 0 && (is_own || out.reserve(group, peer)));
        if (well && is_own) {
            if (from != to) copy();
        } else if (well) {
            const u32 place = lines.place(group);
            send(out.next(group) + place, out.sent + 1, data);
            well = receive(in.next(group) + place, in.received + 1);
        }
        // Every warp knows its slots by now.
        if (__syncthreads_or(!well) || is_own || first != 0) return;
        out.implied = out.sent++;
        in.received++;
        out.save(group, blockIdx.x, peer);
        in.save(group, blockIdx.x, peer);
    }
};

template <bool WIDE_LINES>
DEVICE void swap_lines(const Swap &call) {
    const u32 size = call.group.size, warp = threadIdx.x / 32, turn = warp % size;
    const u32 sum = call.group.rank + 1 + turn, peer = sum < size ? sum : sum - size;
    const u64 begin = (blockIdx.x - call.first) * call.share, left = call.bytes - begin;
    const u8 *from = call.input + peer * call.stride + begin;
    u8 *to = call.output + peer * call.bytes + begin;
    const u32 bytes = static_cast<u32>(left < call.share ? left : call.share);
    const u32 first = warp / size * 32 + threadIdx.x % 32, step = blockDim.x / size;
    if (Lines{WIDE_LINES}.packets(bytes) <= step) {
        Swapper<WIDE_LINES, 1>{call.group, from, to, peer, bytes, first, step}.run();
    } else {
        Swapper<WIDE_LINES, 4>{call.group, from, to, peer, bytes, first, step}.run();
    }
}

DEVICE void swap(const Swap &call) {
    if (call.wide) return swap_lines<true>(call);
    swap_lines<false>(call);
}

}  // namespace unisono
