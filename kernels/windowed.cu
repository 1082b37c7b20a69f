// Moving bytes straight into the other ranks' outputs, where those lie in windows: memory that all ranks have mapped.
//
// At the beginning every rank tells every other where its output lies, as that one reaches it: then it may be written. At the
// end each tells that it has written all. Both are items of the queues of inputs, whose slots and counters do the rest. What
// is in between needs no slots: an allgather is one pass over the input, each packet stored to all outputs; an all-to-all
// a pass for each peer; in a broadcast the root puts a part into the output of each other rank, chunk by chunk, and that rank
// passes chunks on from there, as the root announces them.
//
// unisono_windowed has one parameter, `Windowed`. src/cuda/exchange/windowed.rs says which grid suits a call.

#include "exchange_arena.cuh"

namespace unisono {

constexpr u32 WINDOWED_THREADS = 512;

enum WindowedKind : u32 { ALLGATHER, ALLTOALL, BROADCAST };

// The parameter of the kernel: `Arguments` of src/cuda/exchange/windowed.rs.
struct Windowed {
    Group group;
    const u8 *input;
    u8 *output;
    // The output as each rank reaches it.
    u64 seen[MAX_RANKS];
    // Bytes of one rank's part, or of the whole of a broadcast.
    u64 bytes;
    // Of a broadcast: from part to part, and what a block moves of a part at once.
    u64 stride, chunk;
    u32 kind, root;
};

// The thread that keeps a block's queues to and from one peer, or one that keeps none.
struct WindowAgent {
    const Group &group;
    const u32 peer;
    const bool is_agent;
    Outbox<INPUTS> out;
    Inbox<INPUTS> in;

    DEVICE WindowAgent(const Group &group)
        : group(group), peer(threadIdx.x), is_agent(peer < group.size && peer != group.rank) {
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

    // Tells each peer where this rank's output lies, and hears where theirs do.
    DEVICE bool open(const u64 *seen, u8 **outputs) {
        bool well = true;
        if (is_agent) {
            well = out.reserve(group, peer);
            if (well) {
                store_relaxed(reinterpret_cast<u64 *>(out.next(group)), seen[peer]);
                out.publish();
                well = in.await(group, peer);
                outputs[peer] = reinterpret_cast<u8 *>(load_relaxed(reinterpret_cast<const u64 *>(in.next(group))));
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

struct Spreader {
    const Windowed &call;
    u8 *const *outputs;

    // Copies bytes to the same place in the outputs of a mask, packet `first` and every `step`-th from there on.
    __device__ __noinline__ void spread(const u8 *from, u64 at, u32 mask, u64 bytes, u64 first, u64 step) const {
        const u32 size = call.group.size, rank = call.group.rank;
        u64 addresses = reinterpret_cast<u64>(from);
#pragma unroll 1
        for (u32 left = mask; left != 0; left &= left - 1) addresses |= reinterpret_cast<u64>(outputs[__ffs(left) - 1]) + at;
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
                u8 *to = outputs[peer] + at;
#pragma unroll
                for (u32 i = 0; i < BATCH; i++) {
                    if (packet + i * step < whole) *reinterpret_cast<Packet *>(to + (packet + i * step) * 16) = loaded[i];
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
                store_bytes(outputs[__ffs(left) - 1] + at + packet * 16, 0, length, found);
            }
        }
    }

    // The same by all blocks.
    DEVICE void spread_all(const u8 *from, u64 at, u32 mask, u64 bytes) const {
        spread(from, at, mask, bytes, blockIdx.x * WINDOWED_THREADS + threadIdx.x, gridDim.x * WINDOWED_THREADS);
    }

    DEVICE u32 me() const { return 1u << call.group.rank; }
    DEVICE u32 all() const { return (1u << call.group.size) - 1; }

    DEVICE void allgather() const {
        const u64 at = call.group.rank * call.bytes;
        const bool in_place = call.input == call.output + at;
        spread_all(call.input, at, in_place ? all() & ~me() : all(), call.bytes);
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

    DEVICE bool broadcast(WindowAgent &agent) const {
        const u32 parts = call.group.size - 1, others = all() & ~(1u << call.root);
        const u64 round_bytes = gridDim.x * call.chunk, rounds = (call.stride + round_bytes - 1) / round_bytes;
        const bool is_root = call.group.rank == call.root;
        const u32 kept = is_root && call.input != call.output ? me() : 0;
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
                spread(call.output + at, at, others & ~me(), length(own, round), threadIdx.x, WINDOWED_THREADS);
            }
        }
        return true;
    }

    DEVICE void run(WindowAgent &agent, u8 **outputs) const {
        if (!agent.open(call.seen, outputs)) return;
        if (call.kind == ALLGATHER) {
            allgather();
        } else if (call.kind == ALLTOALL) {
            alltoall();
        } else if (!broadcast(agent)) {
            return;
        }
        agent.tell(all());
        if (agent.hear(all())) agent.save();
    }
};

}  // namespace unisono

extern "C" __global__ void __launch_bounds__(unisono::WINDOWED_THREADS, 1)
    unisono_windowed(const __grid_constant__ unisono::Windowed call) {
    __shared__ unisono::u8 *outputs[unisono::MAX_RANKS];
    unisono::WindowAgent agent(call.group);
    if (threadIdx.x == 0) outputs[call.group.rank] = call.output;
    if (__syncthreads_or(call.group.is_latched())) return;
    unisono::Spreader{call, outputs}.run(agent, outputs);
}
