// A call in windows: what it is, and how its blocks begin and end together.
#pragma once

#include "exchange_arena.cuh"

namespace unisono {

constexpr u32 WINDOWED_THREADS = 512;

enum WindowedKind : u32 { ALLGATHER, ALLTOALL, BROADCAST, ALLREDUCE, REDUCE_SCATTER };

// The parameter of the kernels: `Arguments` of src/cuda/exchange/windowed.rs.
struct Windowed {
    Group group;
    const u8 *input;
    u8 *output;
    // Input and output as each rank reaches them, where others do.
    u64 input_seen[MAX_RANKS], output_seen[MAX_RANKS];
    // Bytes of one rank's part, or of the whole of an allreduce and a broadcast.
    u64 bytes;
    // From part to part.
    u64 stride;
    // Of a broadcast: what a block moves of a part at once.
    u64 chunk;
    // This rank's scalar of a pre-multiplied sum: an accumulator in the low bytes.
    u64 scale;
    u32 kind, root;
    u32 scaled;
    // What an average divides by, else 0.
    u32 ranks;
    // The operator's number.
    u32 number;

    DEVICE u32 me() const { return 1u << group.rank; }
    DEVICE u32 all() const { return (1u << group.size) - 1; }
};

// What a block knows of all ranks, in shared memory: where their memory lies, and their scalars.
struct WindowedRanks {
    const u8 *input[MAX_RANKS];
    u8 *output[MAX_RANKS];
    u64 scale[MAX_RANKS];
};

// The thread that keeps a block's queues to and from one peer, or one that keeps none.
struct WindowAgent {
    const Windowed &call;
    const Group &group;
    const u32 peer;
    const bool is_agent;
    Outbox<INPUTS> out;
    Inbox<INPUTS> in;

    DEVICE WindowAgent(const Windowed &call)
        : call(call), group(call.group), peer(threadIdx.x), is_agent(peer < group.size && peer != group.rank) {
        if (is_agent) {
            out = Outbox<INPUTS>(group, blockIdx.x, peer);
            in = Inbox<INPUTS>(group, blockIdx.x, peer);
        }
    }

    // Tells the peers of a mask that this rank has come so far; what all threads have stored before is seen by who hears of it.
    DEVICE void tell(u32 mask) {
        __syncthreads();
        if (is_agent && mask >> peer & 1) out.publish();
    }

    // Waits for the peers of a mask. For all threads; false if the kernel is to leave.
    DEVICE bool hear(u32 mask) {
        bool well = true;
        if (is_agent && mask >> peer & 1) {
            well = in.await(group, peer);
            in.release();
        }
        return !__syncthreads_or(!well);
    }

    // Tells each peer where this rank's memory lies, so that it may be read and written, and hears where theirs does. For all
    // threads; false if the kernel is to leave.
    DEVICE bool open(WindowedRanks &ranks) {
        if (threadIdx.x == group.rank) {
            ranks.input[group.rank] = call.input;
            ranks.output[group.rank] = call.output;
            ranks.scale[group.rank] = call.scale;
        }
        if (__syncthreads_or(group.is_latched())) return false;
        bool well = true;
        if (is_agent) {
            well = out.reserve(group, peer);
            if (well) {
                u64 *told = reinterpret_cast<u64 *>(out.next(group));
                store_relaxed(told, call.input_seen[peer]);
                store_relaxed(told + 1, call.output_seen[peer]);
                store_relaxed(told + 2, call.scale);
                out.publish();
                well = in.await(group, peer);
                const u64 *heard = reinterpret_cast<const u64 *>(in.next(group));
                ranks.input[peer] = reinterpret_cast<const u8 *>(load_relaxed(heard));
                ranks.output[peer] = reinterpret_cast<u8 *>(load_relaxed(heard + 1));
                ranks.scale[peer] = load_relaxed(heard + 2);
                in.release();
            }
        }
        return !__syncthreads_or(!well);
    }

    DEVICE void save() const {
        if (!is_agent) return;
        out.save(group, blockIdx.x, peer);
        in.save(group, blockIdx.x, peer);
    }
};

}  // namespace unisono
