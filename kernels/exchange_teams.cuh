// Sums by wide lines in two steps, between few ranks: inputs to the owners of their pieces, results to who takes them. Teams of a
// block push inputs, combine, and take results side by side, so that results travel while inputs still do. What counts is the
// number of instructions that a warp runs through, as in exchange_mutual.cuh: a thread knows from the start where its packets
// lie, and has those of all peers under way together.
#pragma once

#include "exchange_mutual.cuh"

namespace unisono {

// Some of a warp's packets are beyond the end, or addresses do not suit.
__device__ __noinline__ Lines::Data load_end(const u8 *base, u32 bytes, u32 packet) {
    return Lines{true}.load(base, bytes, packet);
}
__device__ __noinline__ void store_end(u8 *base, u32 bytes, u32 packet, Lines::Data data) {
    Lines{true}.store(base, bytes, packet, data);
}

template <class T, class Op>
struct TeamLines {
    using Data = Lines::Data;
    static constexpr u32 PEERS = MUTUAL_RANKS - 1;
    // Bytes of data that a warp's packets carry, and their own.
    static constexpr u32 DATA = 480, PACKETS = 512;
    static constexpr Lines lines{true};

    const Combine &call;
    LinePorts &ports;
    const Combiner<T, Op> combiner;
    // Where this block's share of a piece begins.
    u64 begin;
    // This thread's packet of its warp's: whether it has the number, and where it begins.
    u32 lane, lane_at;
    bool numbered;

    DEVICE TeamLines(const Combine &call, LinePorts &ports)
        : call(call), ports(ports), combiner(Combiner<T, Op>::plain(call.group.size)), begin(call.block() * call.share),
          lane(threadIdx.x % 32), lane_at(lines.offset(lane)), numbered(lines.is_numbered(lane)) {}

    // Peers are counted without this rank; some are none.
    DEVICE u32 rank_of(u32 i) const { return i + (i >= call.group.rank); }
    // Of a mask of ranks: as one of peers that have a part in this block.
    DEVICE u32 peers_of(u32 mask, bool with_parts) const {
        u32 peers = 0;
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            const u32 peer = rank_of(i);
            const bool is = i + 1 < call.group.size && Combine::has(mask, peer) && (!with_parts || call.part(peer, begin) != 0);
            peers |= static_cast<u32>(is) << i;
        }
        return peers;
    }
    DEVICE u32 ranks_of(u32 peers) const {
        const u32 below = (1u << call.group.rank) - 1;
        return (peers & below) | (peers & ~below) << 1;
    }

    // The bytes of parts from the first on that are whole packets at addresses that suit.
    DEVICE static u32 suiting(const u8 *base, u32 bytes) { return reinterpret_cast<u64>(base) % 8 == 0 ? bytes : 0; }
    // The data at `at` from `from`, which is this thread's.
    DEVICE Data load(const u8 *from) const {
        Data data{};
        data.word[0] = load_plain<u64>(from);
        if (!numbered) data.word[1] = load_plain<u64>(from + 8);
        return data;
    }
    DEVICE void store(u8 *to, const Data &data) const {
        store_plain(to, data.word[0]);
        if (!numbered) store_plain(to + 8, data.word[1]);
    }
    DEVICE void send(u8 *slot, const Data &data, u64 number) const {
        begin_together();
        store_packet(slot, Packet{data.word[0], numbered ? number : data.word[1]});
    }

    DEVICE void run(LineAgent &agent) {
        const u32 place = lines.place(call.group), own = call.is_owner() ? call.part(call.group.rank, begin) : 0;
        const u32 to = call.is_source() ? peers_of(call.owners, true) : 0, from = own != 0 ? peers_of(call.sources, false) : 0;
        const u32 results_to = own != 0 ? peers_of(call.takers, false) : 0;
        const u32 results_from = call.is_taker() ? peers_of(call.owners, true) : 0;
        agent.catch_up();
        bool well = agent.open(ports.step[0], place, ranks_of(to), ranks_of(from));
        agent.expect(ports.step[1], place, ranks_of(results_from));
        if (__syncthreads_or(!well)) return;
        // The first threads, which are the agents of the queues, combine if any do.
        const bool pushes = to != 0, combines = own != 0, takes = results_from != 0;
        const u32 all = blockDim.x, each = all / 32 / max(1u, combines + pushes + takes) * 32;
        const u32 taken = all - (takes ? each : 0), combined = combines ? taken - (pushes ? each : 0) : 0;
        if (threadIdx.x < combined) {
            if (results_to != 0) {
                well = !team_barrier_or(1, combined, !agent.reserve(ports.step[1], place, ranks_of(results_to)));
            }
            well = well && combine(threadIdx.x, combined, own, from, results_to);
        } else if (threadIdx.x < taken) {
            push(threadIdx.x - combined, taken - combined, to);
        } else {
            well = take(threadIdx.x - taken, all - taken, results_from);
        }
        if (__syncthreads_or(!well)) return;
        agent.close(ranks_of(from | results_from));
        agent.save();
    }

    // Of peers, those whose parts are longer than `at`: a part may be shorter than the others, and then ends before them.
    DEVICE static u32 having(const u32 (&bytes)[PEERS], u32 peers, u32 at) {
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            if (at >= bytes[i]) peers &= ~(1u << i);
        }
        return peers;
    }

    DEVICE void push(u32 thread, u32 threads, u32 to) const {
        const u8 *from[PEERS]{};
        u8 *slot[PEERS]{};
        u64 number[PEERS]{};
        u32 bytes[PEERS]{}, whole = ~0u;
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            if (!Combine::has(to, i)) continue;
            const u32 peer = rank_of(i);
            from[i] = call.input + call.piece(peer) + begin + lane_at;
            bytes[i] = call.part(peer, begin);
            slot[i] = ports.step[0].to[peer] + lane * 16;
            number[i] = ports.step[0].number_to[peer];
            whole = min(whole, suiting(from[i], bytes[i]));
        }
#pragma unroll 1
        for (u32 turn = thread / 32; turn * DATA < call.share; turn += threads / 32) {
            const u32 at = turn * DATA, packet = turn * 32 + lane;
            if (at + DATA > whole) to = having(bytes, to, at);
            Data data[PEERS]{};
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (!Combine::has(to, i)) continue;
                data[i] = at + DATA <= whole ? load(from[i] + at) : load_end(from[i] - lane_at, bytes[i], packet);
            }
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (Combine::has(to, i)) send(slot[i] + turn * PACKETS, data[i], number[i]);
            }
        }
    }

    // Loads packets of peers until all have come.
    DEVICE bool await(const LinePorts::Step &step, const u8 *const (&slot)[PEERS], const u64 (&number)[PEERS], u32 from, u32 at,
                      Data (&data)[PEERS]) const {
#pragma unroll 1
        for (u32 polls = 1;; polls++) {
            begin_together();
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (!Combine::has(from, i)) continue;
                const Packet found = load_packet(slot[i] + at);
                data[i] = Data{{found.low, found.high}};
            }
            u32 missing = NOBODY;
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (Combine::has(from, i) && numbered && data[i].word[1] != number[i]) missing = rank_of(i);
            }
            if (all_together(missing == NOBODY)) return true;
            if (polls % POLLS != 0) continue;
            const u64 sequence = missing == NOBODY ? 0 : step.number_from[missing];
            if (!all_together(!call.group.waiter().aborted(LINES_COME, missing, sequence))) return false;
        }
    }

    // Combines this rank's part with those that come, keeps the result and passes it on.
    DEVICE bool combine(u32 thread, u32 threads, u32 own, u32 from, u32 results_to) const {
        const u32 rank = call.group.rank;
        const u8 *input = call.input + call.piece(rank) + begin;
        u8 *output = call.result(rank) + begin;
        const u8 *slot[PEERS]{};
        u8 *to[PEERS]{};
        u64 number[PEERS]{}, number_to[PEERS]{};
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            const u32 peer = rank_of(i);
            if (Combine::has(from, i)) {
                slot[i] = ports.step[0].from[peer] + lane * 16;
                number[i] = ports.step[0].number_from[peer];
            }
            if (Combine::has(results_to, i)) {
                to[i] = ports.step[1].to[peer] + lane * 16;
                number_to[i] = ports.step[1].number_to[peer];
            }
        }
        const bool keeps = call.keeps();
        const u32 whole = min(suiting(input, own), keeps ? suiting(output, own) : own);
#pragma unroll 1
        for (u32 turn = thread / 32; turn * DATA < own; turn += threads / 32) {
            const u32 at = turn * DATA, packet = turn * 32 + lane;
            Data mine, data[PEERS]{};
            if (at + DATA <= whole) {
                mine = load(input + at + lane_at);
            } else {
                mine = load_end(input, own, packet);
            }
            if (!await(ports.step[0], slot, number, from, turn * PACKETS, data)) return false;
            Data result{};
#pragma unroll
            for (u32 word = 0; word < 2; word++) {
                // The operands in the order of ranks.
                result.word[word] = combiner.template result<2, true>([&](u32 i) {
                    const u64 before = i < PEERS ? data[i].word[word] : 0, after = i > 0 ? data[i - 1].word[word] : 0;
                    return i == rank ? mine.word[word] : i < rank ? before : after;
                });
            }
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (Combine::has(results_to, i)) send(to[i] + turn * PACKETS, result, number_to[i]);
            }
            if (!keeps) continue;
            if (at + DATA <= whole) {
                store(output + at + lane_at, result);
            } else {
                store_end(output, own, packet, result);
            }
        }
        return true;
    }

    // Takes the owners' results.
    DEVICE bool take(u32 thread, u32 threads, u32 from) const {
        const u8 *slot[PEERS]{};
        u8 *to[PEERS]{};
        u64 number[PEERS]{};
        u32 bytes[PEERS]{}, whole = ~0u;
#pragma unroll
        for (u32 i = 0; i < PEERS; i++) {
            if (!Combine::has(from, i)) continue;
            const u32 peer = rank_of(i);
            to[i] = call.output + call.piece(peer) + begin + lane_at;
            bytes[i] = call.part(peer, begin);
            slot[i] = ports.step[1].from[peer] + lane * 16;
            number[i] = ports.step[1].number_from[peer];
            whole = min(whole, suiting(to[i] - lane_at, bytes[i]));
        }
#pragma unroll 1
        for (u32 turn = thread / 32; turn * DATA < call.share; turn += threads / 32) {
            const u32 at = turn * DATA, packet = turn * 32 + lane;
            if (at + DATA > whole) from = having(bytes, from, at);
            Data data[PEERS]{};
            if (!await(ports.step[1], slot, number, from, turn * PACKETS, data)) return false;
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (!Combine::has(from, i)) continue;
                if (at + DATA <= whole) {
                    store(to[i] + at, data[i]);
                } else {
                    store_end(to[i] - lane_at, bytes[i], packet, data[i]);
                }
            }
        }
        return true;
    }
};

}  // namespace unisono
