// Reductions of what lies in windows: each rank combines its part, straight from the inputs of all, and writes the result straight
// into the outputs of all (allreduce) or into its own (reduce_scatter). A part is read and written by its owner alone, each
// packet by one thread: so the outputs may be the inputs.
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

    // A packet of the part, or what there is of it.
    struct Piece {
        u64 at;
        u32 length;
    };

    // Of at most 2^LOG ranks. What is computed is laid out once, for one word: the links are what takes time.
    template <u32 LOG>
    DEVICE void run() const {
        constexpr u32 OPERANDS = 1u << LOG, WORDS = 2 * (BATCH >> LOG);
        const u32 size = call.group.size, takers = this->takers();
        const u64 bytes = length(), address = reinterpret_cast<u64>(result(call.group.rank));
        const u8 *from[OPERANDS];
        // The bits in which addresses differ from each other.
        u64 differ = 0;
#pragma unroll
        for (u32 i = 0; i < OPERANDS; i++) {
            from[i] = i < size ? ranks.input[i] + begin() : nullptr;
            if (i < size) differ |= reinterpret_cast<u64>(from[i]) ^ address;
            if (i < size && takers >> i & 1) differ |= reinterpret_cast<u64>(result(i)) ^ address;
        }
        // Packets are whole ones of memory, if they can be for all ranks alike: then the first may lack some bytes.
        const bool fits = (differ & 15) == 0;
        const u32 lacks = fits ? address & 15 : 0;
        const u64 packets = bytes == 0 ? 0 : (bytes + lacks + 15) / 16, step = gridDim.x * WINDOWED_THREADS;
        const auto piece = [&](u64 packet) {
            const u64 at = packet == 0 ? 0 : packet * 16 - lacks, end = packet * 16 + 16 - lacks;
            return Piece{at, static_cast<u32>((end < bytes ? end : bytes) - at)};
        };
#pragma unroll 1
        for (u64 first = blockIdx.x * WINDOWED_THREADS + threadIdx.x; first < packets; first += step * (WORDS / 2)) {
            u64 word[OPERANDS][WORDS];
#pragma unroll
            for (u32 v = 0; v < WORDS / 2; v++) {
                const u64 packet = first + v * step;
                const Piece here = piece(packet);
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    // What is not loaded is defined, or else it would be kept from one round to the next.
                    Packet found{};
                    if (packet < packets && i < size) {
                        found = fits && here.length == 16 ? load_packet(from[i] + here.at)
                                                          : load_packet_slowly(from[i] + here.at, 0, here.length);
                    }
                    word[i][2 * v] = found.low;
                    word[i][2 * v + 1] = found.high;
                }
            }
            Packet result{};
            u64 packet = first;
#pragma unroll 1
            for (u32 w = 0; w < WORDS; w++) {
                result.low = result.high;
                result.high = combiner.template result<LOG>([&](u32 i) { return word[i][0]; });
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
#pragma unroll
                    for (u32 next = 1; next < WORDS; next++) word[i][next - 1] = word[i][next];
                }
                if (w % 2 == 0) continue;
                if (packet < packets) spread(takers, piece(packet), fits, result);
                packet += step;
            }
        }
    }

    // Stores a packet into each taker's part, another rank's first for each rank.
    DEVICE void spread(u32 takers, Piece piece, bool fits, Packet packet) const {
        const u32 size = call.group.size;
#pragma unroll 1
        for (u32 turn = 1; turn <= size; turn++) {
            const u32 sum = call.group.rank + turn, peer = sum < size ? sum : sum - size;
            if (!(takers >> peer & 1)) continue;
            u8 *to = result(peer) + piece.at;
            if (fits && piece.length == 16) {
                *reinterpret_cast<Packet *>(to) = packet;
            } else {
                store_packet_slowly(to, 0, piece.length, packet);
            }
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
    if (call.group.size == 2) {
        combiner.template run<1>();
    } else if (call.group.size <= 4) {
        combiner.template run<2>();
    } else {
        combiner.template run<3>();
    }
    agent.tell(call.all());
    if (agent.hear(call.all())) agent.save();
}

}  // namespace unisono
