// A call that combines: who gives, who combines which part, who takes the results.
//
// Sources give their input, cut into one piece for each owner, or whole to each. Owners combine their piece. Takers get
// what the owners made. An allreduce in one step has everybody as source and owner; in two steps, also as taker. A
// reduction to a root has the root as only owner, or only taker. A broadcast has the root as only source, and `Copy` as
// operator: its other ranks own pieces and are takers of the others'.
#pragma once

#include "exchange_lanes.cuh"

namespace unisono {

// DEALT: by wide lines in two steps, the pieces dealt out to the blocks.
enum Protocol : u32 { NARROW, WIDE, TILES, DEALT };

// A call without its group: `Combine` of src/cuda/exchange/arguments.rs.
struct Combination {
    const u8 *input;
    u8 *output;
    // Of all pieces together, or of the one that all owners have.
    u64 bytes;
    // From piece to piece.
    u64 stride;
    // What a block does of a piece: by lines in all, by tiles in one round.
    u64 share;
    // This rank's scalar of a pre-multiplied sum: an accumulator in the low bytes.
    u64 scale;
    // Masks of ranks.
    u32 sources, owners, takers;
    u32 root;
    u32 protocol;
    // Whether every owner's piece is the whole; whether an owner's result begins at the output's first byte.
    u32 whole, packed;
    u32 scaled;
    // What an average divides by, else 0.
    u32 ranks;
    // The operator's number.
    u32 number;
    // Which block is the first of this call, and how many it has: see `Several`.
    u32 first, blocks;
};

// The same in few bytes, of which a launch has room for several: `PackedCombine` of src/cuda/exchange/arguments.rs.
struct PackedCombination {
    const u8 *input;
    u8 *output;
    u64 bytes, stride, scale;
    u32 share;
    u16 first, blocks;
    u8 sources, owners, takers, root, protocol, ranks, number;
    // Of `whole`, `packed` and `scaled`, from the last bit on.
    u8 flags;

    DEVICE Combination unpacked() const {
        return Combination{input,    output,    bytes,         stride,         share,     scale, sources, owners, takers, root,
                           protocol, flags & 1u, flags >> 1 & 1u, flags >> 2 & 1u, ranks,     number, first,  blocks};
    }
};

// The parameter of the kernels: `Call` of src/cuda/exchange/arguments.rs.
struct Combine : Combination {
    using Packed = PackedCombination;
    Group group;

    DEVICE Combine(const Packed &call, const Group &group) : Combination(call.unpacked()), group(group) {}
    Combine() = default;

    DEVICE u32 block() const { return blockIdx.x - first; }
    DEVICE static bool has(u32 mask, u32 rank) { return mask >> rank & 1; }
    DEVICE u32 me() const { return 1u << group.rank; }
    DEVICE bool is_source() const { return sources & me(); }
    DEVICE bool is_owner() const { return owners & me(); }
    DEVICE bool is_taker() const { return takers & me(); }
    // Whether this rank's input goes to others.
    DEVICE bool pushes() const { return is_source() && (owners & ~me()) != 0; }
    // Whether this rank, an owner, wants its own result.
    DEVICE bool keeps() const { return takers == 0 || is_taker(); }
    // Whether this rank, the source of a broadcast, has another place to put what it sends.
    DEVICE bool copies() const { return output != nullptr && output != input; }

    // Whether every rank sends each other rank one item of lines and hears from it. Then whoever hears from a peer
    // knows that the peer has taken all items but this call's: nobody need say so, and no store is on its way at the
    // end.
    DEVICE bool is_mutual() const { return (whole || packed) && takers == 0 && sources == owners && !scaled; }

    DEVICE u64 piece(u32 owner) const { return whole ? 0 : __popc(owners & ((1u << owner) - 1)) * stride; }
    DEVICE u64 length(u32 owner) const {
        u64 begin = piece(owner);
        if (whole) return bytes;
        return begin >= bytes ? 0 : bytes - begin < stride ? bytes - begin : stride;
    }
    // Bytes of an owner's piece from `at`, at most a block's share.
    DEVICE u32 part(u32 owner, u64 at) const {
        u64 all = length(owner);
        return static_cast<u32>(at >= all ? 0 : all - at < share ? all - at : share);
    }
    DEVICE u8 *result(u32 owner) const { return output + (packed ? 0 : piece(owner)); }
};

// What the threads of a block tell each other about its queues of lines: in each of two steps, where lines go to and
// come from, and with which number.
struct LinePorts {
    struct Step {
        u8 *to[MAX_RANKS];
        const u8 *from[MAX_RANKS];
        u64 number_to[MAX_RANKS], number_from[MAX_RANKS];
    };
    Step step[2];
    u64 scale[MAX_RANKS];
};

// The thread that keeps a block's queues of lines to and from one peer, or one that keeps none.
struct LineAgent {
    const Group &group;
    Outbox<LINES> out;
    Inbox<LINES> in;
    u32 peer, mask;
    // Not looked at before it must be: its load is under way beside the others.
    u64 latch;

    DEVICE LineAgent(const Group &group) : group(group), peer(threadIdx.x), mask(0), latch(0) {
        if (peer < group.size && peer != group.rank) {
            mask = 1u << peer;
            out = Outbox<LINES>(group, blockIdx.x, peer);
            in = Inbox<LINES>(group, blockIdx.x, peer);
            latch = group.latch();
        }
    }

    // Makes room for an item to each peer of `to`, and announces one from each of `from`; false if the kernel is to
    // leave. For all threads of the block, which know of it behind the barrier that follows. `place` is that of the
    // kind of lines in a slot.
    DEVICE bool open(LinePorts::Step &step, u32 place, u32 to, u32 from) {
        expect(step, place, from);
        return latch == 0 && reserve(step, place, to);
    }
    DEVICE bool reserve(LinePorts::Step &step, u32 place, u32 to) {
        if ((mask & to) == 0) return true;
        const bool well = out.reserve(group, peer);
        step.to[peer] = out.next(group) + place;
        step.number_to[peer] = ++out.sent;
        return well;
    }
    DEVICE void expect(LinePorts::Step &step, u32 place, u32 from) {
        if ((mask & from) == 0) return;
        step.from[peer] = in.next(group) + place;
        step.number_from[peer] = ++in.received;
    }

    // Tells the peers what earlier calls took.
    DEVICE void catch_up() const {
        if (mask != 0) in.catch_up();
    }

    // Notes that the peers have taken everything but the last item.
    DEVICE void imply() {
        if (mask != 0) out.implied = out.sent - 1;
    }

    // Gives the slots back that items were read from: after a barrier.
    DEVICE void close(u32 from) {
        if (mask & from) store_relaxed(in.acked, in.received);
    }

    // Exchanges the scalars of a pre-multiplied sum, as a line of each.
    DEVICE bool exchange_scales(LinePorts &ports, u32 to, u32 from, u64 own) {
        LinePorts::Step &step = ports.step[1];
        if (peer == group.rank) ports.scale[peer] = own;
        bool well = open(step, group.wide, to, from);
        if (__syncthreads_or(!well)) return false;
        if (mask & to) store_packet(step.to[peer], Packet{own, step.number_to[peer]});
        if (mask & from) {
            Packet packet{0, 0};
            u64 number = step.number_from[peer];
            well = group.waiter().wait(LINES_COME, peer, number, [&] {
                packet = load_packet(step.from[peer]);
                return packet.high == number;
            });
            ports.scale[peer] = packet.low;
        }
        close(from);
        return !__syncthreads_or(!well);
    }

    DEVICE void save() const {
        if (mask == 0) return;
        out.save(group, blockIdx.x, peer);
        in.save(group, blockIdx.x, peer);
    }
};

}  // namespace unisono
