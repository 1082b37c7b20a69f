// An item of lines from everybody to everybody: a sum in one step, of the whole (allreduce) or of each rank's piece
// (reduce_scatter), as short as can be. What counts is the number of instructions that a warp runs through: so sizes of
// groups and kinds of lines have code of their own, and each thread looks up itself which slots and numbers are next;
// nothing waits for a barrier before the result is there.
//
// Whoever hears from a peer knows that the peer has taken all items but this call's: nobody says so, and at the end no
// store is on its way to a peer.
#pragma once

#include "exchange_lines.cuh"

namespace unisono {

// After calls of another kind a peer may have to say first what it has taken.
__device__ __noinline__ bool await_mutual_room(const Group &group) {
    const Control &control = *group.control(group.rank, blockIdx.x);
    bool well = true;
#pragma unroll 1
    for (u32 peer = 0; peer < group.size && well; peer++) {
        if (peer == group.rank) continue;
        const u64 sent = control.sent[LINES][peer], implied = control.implied[peer];
        const u64 *acked = &control.acked[LINES][peer];
        well = group.waiter().wait(LINE_ROOM, peer, sent + 1,
                                   [&] { return sent - max(load_relaxed(acked), implied) < LINE_DEPTH; });
    }
    return well;
}

// Asks the host whether to go on waiting for the packet of a line; which peer's it is, is looked up again.
__device__ __noinline__ bool is_mutual_aborted(const Group &group, Lines lines, u32 packet) {
    const Control &control = *group.control(group.rank, blockIdx.x);
    u32 missing = NOBODY;
    u64 number = 0;
#pragma unroll 1
    for (u32 peer = 0; peer < group.size && lines.is_numbered(packet); peer++) {
        if (peer == group.rank) continue;
        const u64 received = control.received[LINES][peer];
        const u8 *slot = group.queue(LINES, blockIdx.x, peer, group.rank) + lines.place(group) +
                         received % LINE_DEPTH * group.slot_bytes(LINES);
        if (load_packet(slot + packet * 16).high == received + 1) continue;
        missing = peer;
        number = received + 1;
    }
    return group.waiter().aborted(LINES_COME, missing, number);
}

constexpr u32 MUTUAL_RANKS = 4;

// Of at most 2^LOG ranks; each rank's piece, or the whole.
template <class T, class Op, u32 LOG, bool WIDE_LINES, bool PIECES>
struct MutualLines {
    using Data = Lines::Data;
    static constexpr u32 OPERANDS = 1u << LOG, PEERS = OPERANDS - 1;
    static constexpr Lines lines{WIDE_LINES};

    const Combine &call;
    const Combiner<T, Op> combiner;
    // This block's share: of the first piece of the input, or of its whole, and of the output.
    const u8 *input;
    u8 *output;
    u32 bytes;
    // How many items went to each peer and came from there, and the next slots.
    u64 sent[PEERS], received[PEERS];
    u8 *to[PEERS];
    const u8 *from[PEERS];

    DEVICE MutualLines(const Combine &call) : call(call), combiner(Combiner<T, Op>::plain(call.group.size)) {
        const u64 begin = call.block() * call.share, length = PIECES ? call.stride : call.bytes;
        input = call.input + begin;
        output = call.output + begin;
        bytes = static_cast<u32>(length - begin < call.share ? length - begin : call.share);
    }

    // Peers are counted without this rank.
    DEVICE bool is_peer(u32 i) const { return LOG == 1 || i + 1 < call.group.size; }
    DEVICE u32 rank_of(u32 i) const { return i + (i >= call.group.rank); }

    DEVICE const u8 *piece(u32 rank) const { return PIECES ? input + rank * call.stride : input; }

    // What is to be sent, and what is this rank's own: of pieces each has another.
    struct Packets {
        Data own, other[PEERS];
    };
    DEVICE Packets load(u32 packet) const {
        Packets packets{};
        packets.own = lines.load(piece(call.group.rank), bytes, packet);
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            packets.other[i] = packets.own;
            if (PIECES && is_peer(i)) packets.other[i] = lines.load(piece(rank_of(i)), bytes, packet);
        }
        return packets;
    }

    DEVICE void run() {
        const Group &group = call.group;
        Control &control = *group.control(group.rank, blockIdx.x);
        const u32 all = lines.packets(bytes), slot_bytes = group.slot_bytes(LINES);
        // All of these loads are under way together.
        const u64 latch = group.latch();
        u64 implied[PEERS]{};
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            const u32 peer = rank_of(i);
            sent[i] = is_peer(i) ? control.sent[LINES][peer] : 0;
            implied[i] = is_peer(i) ? control.implied[peer] : 0;
            received[i] = is_peer(i) ? control.received[LINES][peer] : 0;
        }
        Packets first{};
        if (threadIdx.x < all) first = load(threadIdx.x);
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            to[i] = group.queue(LINES, blockIdx.x, group.rank, rank_of(i)) + lines.place(group);
            from[i] = group.queue(LINES, blockIdx.x, rank_of(i), group.rank) + lines.place(group);
        }
        bool has_room = true;
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            has_room = has_room && sent[i] - implied[i] < LINE_DEPTH;
            to[i] += static_cast<u32>(sent[i]) % LINE_DEPTH * slot_bytes;
            from[i] += static_cast<u32>(received[i]) % LINE_DEPTH * slot_bytes;
        }
        // Of threads whose packets make lines together, none goes on where another leaves.
        bool well = lines.all(latch == 0 && (has_room || await_mutual_room(group)));
        well = well && exchange(all, first);
        if (__syncthreads_or(!well)) return;
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            if (threadIdx.x != i || !is_peer(i)) continue;
            const u32 peer = rank_of(i);
            control.sent[LINES][peer] = sent[i] + 1;
            control.implied[peer] = sent[i];
            control.received[LINES][peer] = received[i] + 1;
        }
    }

    DEVICE bool exchange(u32 all, const Packets &first) const {
#pragma unroll 1
        for (u32 packet = threadIdx.x; packet < all; packet += blockDim.x) {
            Packets packets = first;
            if (packet != threadIdx.x) packets = load(packet);
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (is_peer(i)) lines.send(to[i], packet, packets.other[i], sent[i] + 1);
            }
        }
        const u32 rank = call.group.rank;
#pragma unroll 1
        for (u32 packet = threadIdx.x; packet < all; packet += blockDim.x) {
            Data mine = first.own;
            if (packet != threadIdx.x) mine = lines.load(piece(rank), bytes, packet);
            u64 low[PEERS]{}, high[PEERS]{};
            if (!receive(packet, low, high)) return false;
            // The operands in the order of ranks.
            const auto operand = [&](const u64(&theirs)[PEERS], u64 own, u32 i) {
                const u64 before = i < PEERS ? theirs[i] : own, after = i > 0 ? theirs[i - 1] : own;
                return i == rank ? own : i < rank ? before : after;
            };
            Data result{};
            result.word[0] =
                combiner.template result<LOG, true>([&](u32 i) { return operand(low, mine.word[0], i); });
            if (WIDE_LINES) {
                result.word[1] =
                    combiner.template result<LOG, true>([&](u32 i) { return operand(high, mine.word[1], i); });
            }
            lines.store(output, bytes, packet, result);
        }
        return true;
    }

    // Waits for a packet of each peer.
    DEVICE bool receive(u32 packet, u64 (&low)[PEERS], u64 (&high)[PEERS]) const {
#pragma unroll 1
        for (u32 polls = 1;; polls++) {
            // All loads are under way before the first is looked at.
            lines.together();
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (!is_peer(i)) continue;
                const Packet found = load_packet(from[i] + packet * 16);
                low[i] = found.low;
                high[i] = found.high;
            }
            bool came = true;
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (is_peer(i) && lines.is_numbered(packet)) came = came && high[i] == received[i] + 1;
            }
            if (lines.all(came)) return true;
            if (polls % POLLS == 0 && !lines.all(!is_mutual_aborted(call.group, lines, packet))) return false;
        }
    }
};

// The code that suits a call of at most MUTUAL_RANKS. More would take longer this way than by agents.
template <class T, class Op, u32 LOG>
DEVICE void exchange_mutually(const Combine &call) {
    const bool wide = call.protocol == WIDE;
    if (call.whole) {
        if (wide) return MutualLines<T, Op, LOG, true, false>(call).run();
        return MutualLines<T, Op, LOG, false, false>(call).run();
    }
    if (wide) return MutualLines<T, Op, LOG, true, true>(call).run();
    MutualLines<T, Op, LOG, false, true>(call).run();
}

template <class T, class Op>
DEVICE void exchange_mutually(const Combine &call) {
    if (call.group.size == 2) return exchange_mutually<T, Op, 1>(call);
    exchange_mutually<T, Op, 2>(call);
}

}  // namespace unisono
