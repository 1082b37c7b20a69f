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

// The thread by which a block meets that of one peer, at its beginning and at its end, or one that meets none. Each is
// an item of the queue of lines, of packets with its number. Whoever has heard a peer's beginning knows that the peer
// has taken all items of calls before; its end, that the peer has taken this beginning, too: so there is always room,
// and nobody says what was taken.
struct WindowAgent {
    const Windowed &call;
    const Group &group;
    const u32 peer;
    const bool is_agent;
    Outbox<LINES> out;
    Inbox<LINES> in;

    DEVICE WindowAgent(const Windowed &call)
        : call(call), group(call.group), peer(threadIdx.x), is_agent(peer < group.size && peer != group.rank) {
        if (is_agent) {
            out = Outbox<LINES>(group, blockIdx.x, peer);
            in = Inbox<LINES>(group, blockIdx.x, peer);
        }
    }

    // Tells each peer where this rank's memory lies, so that it may be read and written, and hears where theirs does.
    // What the stream did before is seen by all: those kernels have ended. For all threads; false if the kernel is to
    // leave.
    DEVICE bool open(WindowedRanks &ranks) {
        if (threadIdx.x == group.rank) {
            ranks.input[group.rank] = call.input;
            ranks.output[group.rank] = call.output;
            ranks.scale[group.rank] = call.scale;
        }
        bool well = true;
        if (is_agent) {
            // Its load is under way beside that of the counters.
            const u64 latch = group.latch(), input = call.input_seen[peer], output = call.output_seen[peer];
            well = latch == 0 && out.reserve(group, peer);
            if (well) {
                u8 *to = place(out.next(group));
                out.sent++;
                store_packet(to, Packet{input, out.sent});
                store_packet(to + 16, Packet{output, out.sent});
                store_packet(to + 32, Packet{call.scale, out.sent});
                Packet found[3];
                const u8 *from = place(in.next(group));
                well = hear([&] {
#pragma unroll
                    for (u32 i = 0; i < 3; i++) found[i] = load_packet(from + 16 * i);
                    return found[0].high == in.received && found[1].high == in.received && found[2].high == in.received;
                });
                // The memory is read from now on, not what this multiprocessor knew of it.
                load_acquire(reinterpret_cast<const u64 *>(from));
                ranks.input[peer] = reinterpret_cast<const u8 *>(found[0].low);
                ranks.output[peer] = reinterpret_cast<u8 *>(found[1].low);
                ranks.scale[peer] = found[2].low;
            }
        }
        return !__syncthreads_or(!well);
    }

    // Tells each peer that this rank's block has read and written all, and hears the same. `writes`: others' memory, so
    // that this has to arrive first. For all threads, as their last.
    DEVICE void close(bool writes) {
        __syncthreads();
        if (!is_agent) return;
        if (writes) fence();
        u8 *to = place(out.next(group));
        out.sent++;
        store_packet(to, Packet{0, out.sent});
        const u64 *from = reinterpret_cast<const u64 *>(place(in.next(group))) + 1;
        if (!hear([&] { return load_acquire(from) == in.received; })) return;
        out.implied = out.sent - 1;
        out.save(group, blockIdx.x, peer);
        in.save(group, blockIdx.x, peer);
    }

private:
    // Where narrow lines are in a slot.
    DEVICE u8 *place(u8 *slot) const { return slot + group.wide; }

    // Waits for the next item, which is there once `came` says so.
    template <class Came>
    DEVICE bool hear(Came came) {
        in.received++;
        return group.waiter().wait(LINES_COME, peer, in.received, came);
    }
};

// The thread that keeps a block's queues of inputs to and from one peer, or one that keeps none: for kernels that tell
// each other more.
struct RoundAgent {
    const Group &group;
    const u32 peer;
    const bool is_agent;
    Outbox<INPUTS> out;
    Inbox<INPUTS> in;

    DEVICE RoundAgent(const Group &group)
        : group(group), peer(threadIdx.x), is_agent(peer < group.size && peer != group.rank) {
        if (is_agent) {
            out = Outbox<INPUTS>(group, blockIdx.x, peer);
            in = Inbox<INPUTS>(group, blockIdx.x, peer);
        }
    }

    // Tells the peers of a mask that this rank has come so far; what all threads have stored before is seen by who
    // hears of it.
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

    DEVICE void save() const {
        if (!is_agent) return;
        out.save(group, blockIdx.x, peer);
        in.save(group, blockIdx.x, peer);
    }
};

}  // namespace unisono
