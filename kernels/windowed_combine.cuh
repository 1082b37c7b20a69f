// Reductions of what lies in windows: each rank combines its part, straight from the inputs of all, and writes the
// result straight into the outputs of all (allreduce) or into its own (reduce_scatter). A part is read and written by
// its owner alone, each packet by one thread: so the outputs may be the inputs.
#pragma once

#include "exchange_lanes.cuh"
#include "windowed_agent.cuh"

namespace unisono {

template <class T, class Op>
struct WindowedCombiner {
    const Windowed &call;
    const WindowedRanks &ranks;
    const Combiner<T, Op> combiner;

    // This rank's part.
    DEVICE u64 begin() const { return call.group.rank * call.stride; }
    DEVICE u64 length() const {
        if (call.kind == REDUCE_SCATTER) return call.bytes;
        return begin() >= call.bytes ? 0 : call.bytes - begin() < call.stride ? call.bytes - begin() : call.stride;
    }
    // Where a rank wants this rank's part.
    DEVICE u8 *result(u32 rank) const { return ranks.output[rank] + (call.kind == REDUCE_SCATTER ? 0 : begin()); }
    // Who wants it.
    DEVICE u32 takers() const { return call.kind == REDUCE_SCATTER ? call.me() : call.all(); }

    DEVICE void run() const {
        const u32 size = call.group.size;
        const u64 bytes = length(), address = reinterpret_cast<u64>(result(call.group.rank));
        // The bits in which addresses differ from each other, and by which they miss the beginnings of elements.
        u64 differ = address % sizeof(typename T::Memory);
#pragma unroll 1
        for (u32 i = 0; i < size; i++) {
            differ |= reinterpret_cast<u64>(ranks.input[i] + begin()) ^ address;
            if (takers() >> i & 1) differ |= reinterpret_cast<u64>(result(i)) ^ address;
        }
        // Whole packets lie between a head and a tail, if addresses allow.
        const bool fits = (differ & 15) == 0;
        const u64 lead = fits ? -address & 15 : 0, head = lead < bytes ? lead : bytes;
        const u64 packets = fits ? (bytes - head) / 16 : 0;
        const u64 done = head + 16 * sweep_all(head, packets);
        // The head, then packet by packet what is left.
        const u64 pieces = 1 + (bytes - done + 15) / 16;
#pragma unroll 1
        for (u64 piece = first(); piece < pieces; piece += step()) {
            const u64 at = piece == 0 ? 0 : done + (piece - 1) * 16, left = (piece == 0 ? head : bytes) - at;
            fold_bytes(at, static_cast<u32>(left < 16 ? left : 16));
        }
    }

    DEVICE u64 first() const { return blockIdx.x * WINDOWED_THREADS + threadIdx.x; }
    DEVICE u64 step() const { return gridDim.x * WINDOWED_THREADS; }

    // Combines whole packets, as far as there is code for the call: how many. What is summed often has code for all
    // sizes, everything else for two ranks.
    DEVICE u64 sweep_all(u64 head, u64 packets) const {
        const u32 size = call.group.size;
        if constexpr (Same<Op, Sum>::VALUE && sizeof(typename T::Memory) > 1) {
            if (combiner.is_plain()) {
                if (size == 2) {
                    sweep<1, true>(head, packets);
                } else if (size <= 4) {
                    sweep<2, true>(head, packets);
                } else {
                    sweep<3, true>(head, packets);
                }
                return packets;
            }
        }
        if (size > 2) return 0;
        sweep<1, false>(head, packets);
        return packets;
    }

    // BATCH loads of a thread at a time. PLAIN: nothing depends on the call, and what is done with packets is laid out
    // one after the other; else the same code does it one word after the other.
    template <u32 LOG, bool PLAIN>
    DEVICE void sweep(u64 head, u64 packets) const {
        constexpr u32 OPERANDS = 1u << LOG, WORDS = 2 * (BATCH >> LOG);
        const u32 size = call.group.size, takers = this->takers();
        const u64 step = this->step();
        const u8 *from[OPERANDS];
        u8 *to[OPERANDS];
#pragma unroll
        for (u32 i = 0; i < OPERANDS; i++) {
            from[i] = i < size ? ranks.input[i] + begin() + head : nullptr;
            to[i] = i < size && takers >> i & 1 ? result(i) + head : nullptr;
        }
#pragma unroll 1
        for (u64 first = this->first(); first < packets; first += step * (WORDS / 2)) {
            u64 word[OPERANDS][WORDS];
#pragma unroll
            for (u32 v = 0; v < WORDS / 2; v++) {
                const u64 packet = first + v * step;
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    // What is not loaded is defined, or else it would be kept from one round to the next.
                    Packet found{};
                    if (packet < packets && from[i] != nullptr) found = load_packet(from[i] + packet * 16);
                    word[i][2 * v] = found.low;
                    word[i][2 * v + 1] = found.high;
                }
            }
            Packet result{};
            u64 packet = first;
#pragma unroll(PLAIN ? WORDS : 1)
            for (u32 w = 0; w < WORDS; w++) {
                result.low = result.high;
                result.high = combiner.template result<LOG, PLAIN>([&](u32 i) { return word[i][0]; });
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
#pragma unroll
                    for (u32 next = 1; next < WORDS; next++) word[i][next - 1] = word[i][next];
                }
                if (w % 2 == 0) continue;
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    if (packet < packets && to[i] != nullptr) store_plain(to[i] + packet * 16, result);
                }
                packet += step;
            }
        }
    }

    // At most a packet, at any addresses.
    DEVICE void fold_bytes(u64 at, u32 length) const {
        Packet packet[MAX_RANKS]{};
#pragma unroll
        for (u32 i = 0; i < MAX_RANKS; i++) {
            if (i < call.group.size) packet[i] = load_bytes(ranks.input[i] + begin() + at, 0, length);
        }
        Packet whole{};
#pragma unroll 1
        for (u32 half = 0; half < 2; half++) {
            whole.low = whole.high;
            whole.high = combiner.template result<3>([&](u32 i) { return packet[i].low; });
#pragma unroll
            for (u32 i = 0; i < MAX_RANKS; i++) packet[i].low = packet[i].high;
        }
#pragma unroll 1
        for (u32 left = takers(); left != 0; left &= left - 1) {
            store_bytes(result(__ffs(left) - 1) + at, 0, length, whole);
        }
    }
};

template <class T, class Op>
DEVICE void combine_in_windows(const Windowed &call) {
    __shared__ WindowedRanks ranks;
    WindowAgent agent(call);
    if (!agent.open(ranks)) return;
    using Divider = typename Lanes<T, Op>::Divider;
    const WindowedCombiner<T, Op> combiner{
        call, ranks,
        Combiner<T, Op>{Divider(call.ranks == 0 ? 1 : call.ranks), call.ranks != 0, call.scaled != 0, call.number,
                        call.group.size, ranks.scale}};
    combiner.run();
    // A reduce_scatter writes into this rank's memory alone.
    agent.close(call.kind == ALLREDUCE);
}

}  // namespace unisono
