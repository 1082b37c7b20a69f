// Combining by lines: each line carries the number of its item, so that whoever sees the number has the data too. No
// barrier, no counter, one way across the links for each step.
//
// A narrow line has 16 bytes: 8 of data and 8 of number, by one thread. A wide one has 128: 120 of data, by 8 threads
// of a warp, whose one store of all arrives as one over NVLink and in a device's own memory.
#pragma once

#include "exchange_combine.cuh"

namespace unisono {

constexpr u32 LINE_THREADS = 512;

// How bytes are laid out as lines of one kind. A thread handles packets of 16 bytes, a warp 32 that follow each other.
struct Lines {
    bool wide;

    // What a packet carries: the second word only if it has no number there.
    struct Data {
        u64 word[2];
    };

    // Where such lines lie in a slot.
    DEVICE u32 place(const Group &group) const { return wide ? 0 : group.wide; }
    // How many packets carry `bytes`. A warp is in one of the last or is not.
    DEVICE u32 packets(u32 bytes) const {
        return wide ? ((bytes + 119) / 120 * 8 + 31) / 32 * 32 : (bytes + 7) / 8;
    }
    // Where a packet's first word lies.
    DEVICE u32 offset(u32 packet) const { return wide ? packet / 8 * 120 + packet % 8 * 16 : packet * 8; }
    // Whether the packet's upper half is the number.
    DEVICE bool is_numbered(u32 packet) const { return !wide || packet % 8 == 7; }

    // Whether a packet's words are whole and where 8-byte accesses can have them.
    DEVICE bool suits(const u8 *base, u32 bytes, u32 packet) const {
        return offset(packet) + (is_numbered(packet) ? 8 : 16) <= bytes && reinterpret_cast<u64>(base) % 8 == 0;
    }

    // Whether all that is left is one element of 4 bytes: a call of one float is not rare.
    DEVICE static bool is_one(const u8 *base, u32 bytes, u32 at) {
        return bytes - at == 4 && reinterpret_cast<u64>(base + at) % 4 == 0;
    }

    DEVICE Data load(const u8 *base, u32 bytes, u32 packet) const {
        const u32 at = offset(packet);
        Data data{};
        if (suits(base, bytes, packet)) {
            data.word[0] = load_plain<u64>(base + at);
            if (!is_numbered(packet)) data.word[1] = load_plain<u64>(base + at + 8);
        } else if (is_one(base, bytes, at)) {
            data.word[0] = load_plain<u32>(base + at);
        } else {
            const Packet words = load_packet_slowly(base, at, bytes);
            data.word[0] = words.low;
            if (!is_numbered(packet)) data.word[1] = words.high;
        }
        return data;
    }

    DEVICE void store(u8 *base, u32 bytes, u32 packet, const Data &data) const {
        const u32 at = offset(packet);
        if (suits(base, bytes, packet)) {
            store_plain(base + at, data.word[0]);
            if (!is_numbered(packet)) store_plain(base + at + 8, data.word[1]);
        } else if (is_one(base, bytes, at)) {
            store_plain(base + at, static_cast<u32>(data.word[0]));
        } else {
            const u32 end = is_numbered(packet) ? min(bytes, at + 8) : bytes;
            store_packet_slowly(base, at, end, Packet{data.word[0], data.word[1]});
        }
    }

    // The threads of a warp store, and load, their parts of a wide line by one instruction: that is what makes it one.
    DEVICE void together() const {
        if (wide) begin_together();
    }

    DEVICE void send(u8 *slot, u32 packet, const Data &data, u64 number) const {
        together();
        store_packet(slot + packet * 16, Packet{data.word[0], is_numbered(packet) ? number : data.word[1]});
    }

    // A packet as it is in the slot now; answers whether it has the number.
    DEVICE bool peek(const u8 *slot, u32 packet, u64 number, Data &data) const {
        together();
        Packet found = load_packet(slot + packet * 16);
        data.word[0] = found.low;
        data.word[1] = found.high;
        return !is_numbered(packet) || found.high == number;
    }

    // Whether all say so whose packets make lines together.
    DEVICE bool all(bool mine) const { return wide ? all_together(mine) : mine; }

    // Waits for a packet from a peer.
    DEVICE bool take(const Waiter &waiter, const u8 *slot, u32 packet, u64 number, u32 peer, Data &data) const {
#pragma unroll 1
        for (u32 polls = 1; !all(peek(slot, packet, number, data)); polls++) {
            if (polls % POLLS == 0 && !all(!waiter.aborted(LINES_COME, peer, number))) return false;
        }
        return true;
    }
};

template <class T, class Op>
struct CombineLines {
    using Data = Lines::Data;
    // A broadcast has one operand, the root's.
    static constexpr bool COPIES = Same<Op, Copy>::VALUE;
    static constexpr u32 LOG = COPIES ? 0 : 3;
    static constexpr u32 OPERANDS = 1u << LOG;

    const Combine &call;
    LinePorts &ports;
    const Combiner<T, Op> combiner;
    Lines lines;
    // Where this block's share of a piece begins, and what of this rank's own piece is in it.
    u64 begin;
    u32 own;

    DEVICE CombineLines(const Combine &call, LinePorts &ports, const Combiner<T, Op> &with)
        : call(call), ports(ports), combiner(with), lines{call.protocol == WIDE}, begin(call.block() * call.share),
          own(call.is_owner() ? call.part(call.group.rank, begin) : 0) {}

    // The peers of a mask whose part, in this block, has anything in it.
    DEVICE u32 peers_with_parts(u32 mask) const {
        if (call.whole) return mask & ~call.me();
        u32 found = 0;
#pragma unroll 1
        for (u32 peer = 0; peer < call.group.size; peer++) {
            if (peer != call.group.rank && Combine::has(mask, peer) && call.part(peer, begin) != 0) found |= 1u << peer;
        }
        return found;
    }

    DEVICE void run(LineAgent &agent) {
        const u32 others = ((1u << call.group.size) - 1) & ~call.me();
        const bool sends = call.is_source(), sends_whole = sends && call.whole;
        const u32 to = sends ? peers_with_parts(call.owners) : 0, from = own != 0 ? call.sources & others : 0;
        // What all peers get is on its way before anybody waits.
        const u32 bytes = call.part(__ffs(call.owners) - 1, begin);
        Data first{};
        if (sends_whole && threadIdx.x < lines.packets(bytes)) first = lines.load(call.input + begin, bytes, threadIdx.x);
        if (!call.is_mutual()) agent.catch_up();
        if (Op::SCALES && call.scaled && !agent.exchange_scales(ports, to, from, call.scale)) return;
        const u32 place = lines.place(call.group);
        if (__syncthreads_or(!agent.open(ports.step[0], place, to, from))) return;
        if (sends_whole) {
            send_whole(to, bytes, first);
        } else if (sends) {
            send_pieces(to);
        }
        const u32 results_to = own != 0 ? call.takers & others : 0;
        const u32 results_from = call.is_taker() ? peers_with_parts(call.owners) : 0;
        if (call.takers != 0 && __syncthreads_or(!agent.open(ports.step[1], place, results_to, results_from))) return;
        bool well = own == 0 || combine(from, results_to, first);
        if (__syncthreads_or(!well)) return;
        if (results_from != 0 && __syncthreads_or(!take_results(results_from))) return;
        if (call.is_mutual()) {
            agent.imply();
        } else {
            agent.close(from | results_from);
        }
        agent.save();
    }

    DEVICE void send_whole(u32 to, u32 bytes, Data data) {
        const LinePorts::Step &step = ports.step[0];
#pragma unroll 1
        for (u32 packet = threadIdx.x; packet < lines.packets(bytes); packet += blockDim.x) {
            if (packet != threadIdx.x) data = lines.load(call.input + begin, bytes, packet);
#pragma unroll
            for (u32 peer = 0; peer < MAX_RANKS; peer++) {
                if (Combine::has(to, peer)) lines.send(step.to[peer], packet, data, step.number_to[peer]);
            }
            if (COPIES && call.copies()) lines.store(call.output + begin, bytes, packet, data);
        }
    }

    // Calls `handle(peer, packet, bytes)` for the packets of the parts of all peers of a mask, dealt out over the
    // threads. Each rank begins with the next one.
    template <class Handle>
    DEVICE bool for_each_packet(u32 mask, Handle handle) {
        const u32 each = (lines.packets(static_cast<u32>(call.share)) + 31) / 32 * 32, all = each * (call.group.size - 1);
#pragma unroll 1
        for (u32 i = threadIdx.x; i < all; i += blockDim.x) {
            const u32 turn = i / each, packet = i - turn * each;
            u32 peer = call.group.rank + 1 + turn;
            peer = peer < call.group.size ? peer : peer - call.group.size;
            if (!Combine::has(mask, peer)) continue;
            const u32 bytes = call.part(peer, begin);
            if (packet < lines.packets(bytes) && !handle(peer, packet, bytes)) return false;
        }
        return true;
    }

    DEVICE void send_pieces(u32 to) {
        const LinePorts::Step &step = ports.step[0];
        for_each_packet(to, [&](u32 peer, u32 packet, u32 bytes) {
            const u64 at = call.piece(peer) + begin;
            Data data = lines.load(call.input + at, bytes, packet);
            lines.send(step.to[peer], packet, data, step.number_to[peer]);
            if (COPIES && call.copies()) lines.store(call.output + at, bytes, packet, data);
            return true;
        });
    }

    // Combines this rank's part with those that come, keeps the result and passes it on.
    DEVICE bool combine(u32 from, u32 results_to, const Data &first) {
        const u32 rank = call.group.rank;
        const u8 *input = call.input + call.piece(rank) + begin;
        u8 *output = call.result(rank) + begin;
        const LinePorts::Step &results = ports.step[1];
#pragma unroll 1
        for (u32 packet = threadIdx.x; packet < lines.packets(own); packet += blockDim.x) {
            Data data[OPERANDS]{};
            Data mine = first;
            if constexpr (!COPIES) {
                if (packet != threadIdx.x || !call.whole) mine = lines.load(input, own, packet);
            }
            if (!receive(from, packet, data)) return false;
            if constexpr (!COPIES) {
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    if (i == rank) data[i] = mine;
                }
            }
            // One word after the other, by the same code.
            Data result{};
#pragma unroll 1
            for (u32 word = 0; word < 2; word++) {
                result.word[0] = result.word[1];
                result.word[1] = combiner.template result<LOG>([&](u32 i) { return data[i].word[0]; });
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) data[i].word[0] = data[i].word[1];
            }
#pragma unroll 1
            for (u32 peer = 0; peer < call.group.size; peer++) {
                if (Combine::has(results_to, peer)) {
                    lines.send(results.to[peer], packet, result, results.number_to[peer]);
                }
            }
            if (call.keeps()) lines.store(output, own, packet, result);
        }
        return true;
    }

    // Waits for a packet of each source.
    DEVICE bool receive(u32 from, u32 packet, Data (&data)[OPERANDS]) {
        const LinePorts::Step &step = ports.step[0];
        if constexpr (COPIES) {
            const u32 root = call.root;
            return lines.take(call.group.waiter(), step.from[root], packet, step.number_from[root], root, data[0]);
        } else {
#pragma unroll 1
            for (u32 polls = 1;; polls++) {
                // All loads are under way before the first is looked at.
                lines.together();
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    if (!Combine::has(from, i)) continue;
                    const Packet found = load_packet(step.from[i] + packet * 16);
                    data[i] = Data{{found.low, found.high}};
                }
                u32 missing = NOBODY;
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    const bool numbered = Combine::has(from, i) && lines.is_numbered(packet);
                    if (numbered && data[i].word[1] != step.number_from[i]) missing = i;
                }
                if (lines.all(missing == NOBODY)) return true;
                if (polls % POLLS == 0) {
                    const u64 number = missing == NOBODY ? 0 : step.number_from[missing];
                    if (!lines.all(!call.group.waiter().aborted(LINES_COME, missing, number))) return false;
                }
            }
        }
    }

    DEVICE bool take_results(u32 from) {
        const LinePorts::Step &step = ports.step[1];
        return for_each_packet(from, [&](u32 peer, u32 packet, u32 bytes) {
            Data data;
            if (!lines.take(call.group.waiter(), step.from[peer], packet, step.number_from[peer], peer, data)) return false;
            lines.store(call.output + call.piece(peer) + begin, bytes, packet, data);
            return true;
        });
    }
};

}  // namespace unisono
