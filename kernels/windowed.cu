// Calls on memory that all ranks have mapped, windows: nothing is staged.
//
// At the beginning every rank tells every other where its memory lies, as that one reaches it: then it may be read and
// written. At the end each tells that it has done both. What is in between needs no slots. An allgather is one pass
// over the input, each packet stored to all outputs; an all-to-all a pass for each peer; in a broadcast the root puts a
// part into the output of each other rank, chunk by chunk, and that rank passes chunks on from there, as the root
// announces them. Reductions are in windowed_combine.cuh.
//
// unisono_windowed, which moves, and unisono_windowed_<operator>_<type> have one parameter, `Windowed`.
// src/cuda/exchange/windowed.rs says which grid suits a call. Signals of what one rank alone writes into windows are in
// signals.cuh.

#include "signals.cuh"
#include "windowed_combine.cuh"

namespace unisono {

struct Spreader {
    const Windowed &call;
    const WindowedRanks &ranks;

    // Copies bytes to the same place in the outputs of a mask, packet `first` and every `step`-th from there on.
    __device__ __noinline__ void spread(const u8 *from, u64 at, u32 mask, u64 bytes, u64 first, u64 step) const {
        const u32 size = call.group.size, rank = call.group.rank;
        u64 addresses = reinterpret_cast<u64>(from);
#pragma unroll 1
        for (u32 left = mask; left != 0; left &= left - 1) addresses |= reinterpret_cast<u64>(ranks.output[__ffs(left) - 1]) + at;
        const u64 whole = addresses & 15 ? 0 : bytes / 16;
#pragma unroll 1
        for (u64 packet = first; packet < whole; packet += BATCH * step) {
            Packet loaded[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (packet + i * step < whole) loaded[i] = load_packet(from + (packet + i * step) * 16);
            }
#pragma unroll 1
            for (u32 turn = 1; turn <= size; turn++) {
                const u32 sum = rank + turn, peer = sum < size ? sum : sum - size;
                if (!(mask >> peer & 1)) continue;
                u8 *to = ranks.output[peer] + at;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) {
                    if (packet + i * step < whole) store_plain(to + (packet + i * step) * 16, loaded[i]);
                }
            }
        }
        // Ends, and other addresses.
        const u64 rest = first < whole ? first + (whole - first + step - 1) / step * step : first;
#pragma unroll 1
        for (u64 packet = rest; packet * 16 < bytes; packet += step) {
            const u32 length = static_cast<u32>(bytes - packet * 16 < 16 ? bytes - packet * 16 : 16);
            const Packet found = load_bytes(from + packet * 16, 0, length);
#pragma unroll 1
            for (u32 left = mask; left != 0; left &= left - 1) {
                store_bytes(ranks.output[__ffs(left) - 1] + at + packet * 16, 0, length, found);
            }
        }
    }

    // The same by all blocks.
    DEVICE void spread_all(const u8 *from, u64 at, u32 mask, u64 bytes) const {
        spread(from, at, mask, bytes, blockIdx.x * WINDOWED_THREADS + threadIdx.x, gridDim.x * WINDOWED_THREADS);
    }

    DEVICE void allgather() const {
        const u64 at = call.group.rank * call.bytes;
        const bool in_place = call.input == call.output + at;
        spread_all(call.input, at, in_place ? call.all() & ~call.me() : call.all(), call.bytes);
    }

    DEVICE void alltoall() const {
        const u32 size = call.group.size;
#pragma unroll 1
        for (u32 turn = 0; turn < size; turn++) {
            // Another one first for each rank and each block, so that the links are used evenly.
            const u32 peer = (call.group.rank + 1 + (turn + blockIdx.x) % size) % size;
            spread_all(call.input + peer * call.bytes, call.group.rank * call.bytes, 1u << peer, call.bytes);
        }
    }

    // The rank whose part is the `part`-th.
    DEVICE u32 owner(u32 part) const { return part < call.root ? part : part + 1; }

    // This block's chunk of a part.
    DEVICE u64 begin(u32 part, u64 round) const {
        return part * call.stride + (round * gridDim.x + blockIdx.x) * call.chunk;
    }
    DEVICE u64 length(u32 part, u64 round) const {
        const u64 at = begin(part, round), part_end = (part + 1) * call.stride;
        const u64 end = part_end < call.bytes ? part_end : call.bytes;
        return at >= end ? 0 : end - at < call.chunk ? end - at : call.chunk;
    }

    // False if the kernel is to leave.
    DEVICE bool broadcast() const {
        RoundAgent agent(call.group);
        const u32 parts = call.group.size - 1, others = call.all() & ~(1u << call.root);
        const u64 round_bytes = gridDim.x * call.chunk, rounds = (call.stride + round_bytes - 1) / round_bytes;
        const bool is_root = call.group.rank == call.root;
        const u32 kept = is_root && call.input != call.output ? call.me() : 0;
        const u32 own = call.group.rank - (call.group.rank > call.root);
        if (parts == 1 && !is_root) return true;
#pragma unroll 1
        for (u64 round = 0; round < rounds; round++) {
            if (is_root) {
#pragma unroll 1
                for (u32 turn = 0; turn < parts; turn++) {
                    const u32 part = (turn + blockIdx.x) % parts;
                    const u64 at = begin(part, round);
                    spread(call.input + at, at, 1u << owner(part) | kept, length(part, round), threadIdx.x, WINDOWED_THREADS);
                }
                if (parts > 1) agent.tell(others);
            } else {
                if (!agent.hear(1u << call.root)) return false;
                const u64 at = begin(own, round);
                spread(call.output + at, at, others & ~call.me(), length(own, round), threadIdx.x, WINDOWED_THREADS);
            }
        }
        agent.save();
        return true;
    }

    // False if the kernel is to leave.
    DEVICE bool run() const {
        if (call.kind == BROADCAST) return broadcast();
        if (call.kind == ALLGATHER) {
            allgather();
        } else {
            alltoall();
        }
        return true;
    }
};

}  // namespace unisono

ENTRY(unisono_windowed, unisono::Windowed, unisono::WINDOWED_THREADS, 1) {
    __shared__ unisono::WindowedRanks ranks;
    unisono::WindowAgent agent(call);
    if (agent.open(ranks) && unisono::Spreader{call, ranks}.run()) agent.close(true);
}

#define KERNEL(op, type)                                                                                               \
    ENTRY(unisono_windowed_##op##_##type, unisono::Windowed, unisono::WINDOWED_THREADS, 1) {                           \
        unisono::combine_in_windows<unisono::type, unisono::op>(call);                                                 \
    }

// As in exchange.cu.
KERNEL(Sum, F32)
#ifdef UNISONO_FEW
KERNEL(Sum, Bf16) KERNEL(Various, I32)
#else
KERNEL(Sum, F16) KERNEL(Sum, F64) KERNEL(Sum, Bf16) KERNEL(Sum, F8E4M3) KERNEL(Sum, F8E5M2)
KERNEL(Sum, U8) KERNEL(Sum, U32) KERNEL(Sum, U64)
KERNEL(Various, F16) KERNEL(Various, F32) KERNEL(Various, F64)
KERNEL(Various, Bf16) KERNEL(Various, F8E4M3) KERNEL(Various, F8E5M2)
KERNEL(Various, I8) KERNEL(Various, U8) KERNEL(Various, I32)
KERNEL(Various, U32) KERNEL(Various, I64) KERNEL(Various, U64)
#endif
