// Sums by wide lines in two steps, between few ranks: inputs to the owners of their pieces, results to who takes them.
// The pieces are dealt out to the blocks: each has parts of one owner's piece, and does one thing on each rank. On the
// owner it combines; elsewhere it pushes its rank's input, takes the results, or half of its threads do the one and
// half the other. So results travel while inputs still do, and nobody waits for stores to arrive: the data has its
// number with it.
//
// What counts is how little is under way and how short the code is that a warp runs through: a thread has one packet of
// each peer at a time. More of them, or more blocks, take longer.
//
// A block talks to the same block of its peers, through queues that it has to itself. There are as many numbers of
// queues as blocks for one piece; block b of n owners has those of number b / n. Where owners take results, too, those
// go through queues of their own.
#pragma once

#include "exchange_mutual.cuh"

namespace unisono {

// At most: an even number of warps. With 64 registers two blocks fit a multiprocessor: two communicators a GPU.
constexpr u32 DEALT_THREADS = 512;

// Some of a warp's packets are beyond the end, or addresses do not suit.
__device__ __noinline__ Lines::Data load_end(const u8 *base, u32 bytes, u32 packet) {
    return Lines{true}.load(base, bytes, packet);
}
__device__ __noinline__ void store_end(u8 *base, u32 bytes, u32 packet, Lines::Data data) {
    Lines{true}.store(base, bytes, packet, data);
}

// What the agents of a block's queues tell its other threads: where the slots are, and how many items went before. By
// peer.
struct DealtPorts {
    struct Queue {
        u8 *slots;
        u64 before;
    };
    Queue in[MUTUAL_RANKS], out[MUTUAL_RANKS];
};

template <class T>
struct DealtLines {
    using Data = Lines::Data;
    static constexpr u32 PEERS = MUTUAL_RANKS - 1;
    // Bytes of data that a warp's packets carry, and their own.
    static constexpr u32 DATA = 480, PACKETS = 512;
    static constexpr Lines lines{true};

    const Combine &call;
    DealtPorts &ports;
    // Whose piece; how many blocks have parts of it, and which of them this is, which is the number of its queues, too.
    u32 owner, lanes, lane;
    // This thread's packet of its warp's: whether it has the number, and where its data begins.
    u32 packet, data_at;
    bool numbered;

    DEVICE DealtLines(const Combine &call, DealtPorts &ports)
        : call(call), ports(ports), packet(threadIdx.x % 32), data_at(lines.offset(packet)), numbered(lines.is_numbered(packet)) {
        const u32 owners = __popc(call.owners);
        lanes = call.blocks / owners;
        lane = blockIdx.x / owners;
        u32 left = call.owners;
#pragma unroll 1
        for (u32 turn = blockIdx.x % owners; turn > 0; turn--) left &= left - 1;
        owner = __ffs(left) - 1;
    }

    // The number of the queues that results go through. Where no owner takes them none sends both ways.
    DEVICE u32 result_lane() const { return call.owners & call.takers ? lanes + lane : lane; }

    // This block's parts of the piece: items.
    struct Parts {
        u64 begin, end, step;
        u32 share, round;

        DEVICE explicit Parts(const DealtLines &of)
            : begin(of.call.piece(of.owner)), step(of.lanes * of.call.share), share(static_cast<u32>(of.call.share)), round(0) {
            end = begin + of.call.length(of.owner);
            begin += of.lane * of.call.share;
        }
        DEVICE bool any() const { return begin < end; }
        DEVICE u32 bytes() const { return static_cast<u32>(end - begin < share ? end - begin : share); }
        DEVICE void advance() {
            begin += step;
            round++;
        }
    };

    // The number of the item of this round in a queue, and where this thread's packets of it begin.
    DEVICE static u64 number_of(const DealtPorts::Queue &queue, u32 round) { return queue.before + round + 1; }
    DEVICE u8 *slot_of(const DealtPorts::Queue &queue, u32 round) const {
        const u32 turn = (static_cast<u32>(queue.before) + round) % LINE_DEPTH;
        return queue.slots + turn * call.group.slot_bytes(LINES) + packet * 16;
    }

    // Whether data at an address can be loaded and stored by 8 bytes.
    DEVICE static bool suits(const u8 *base) { return reinterpret_cast<u64>(base) % 8 == 0; }
    // This thread's data of the warp's turn that begins at `at` in a part of `bytes`.
    DEVICE Data load(const u8 *part, u32 at, u32 bytes) const {
        if (at + DATA > bytes || !suits(part)) return load_end(part, bytes, at / DATA * 32 + packet);
        Data data{};
        data.word[0] = load_plain<u64>(part + at + data_at);
        if (!numbered) data.word[1] = load_plain<u64>(part + at + data_at + 8);
        return data;
    }
    DEVICE void store(u8 *part, u32 at, u32 bytes, const Data &data) const {
        if (at + DATA > bytes || !suits(part)) return store_end(part, bytes, at / DATA * 32 + packet, data);
        store_plain(part + at + data_at, data.word[0]);
        if (!numbered) store_plain(part + at + data_at + 8, data.word[1]);
    }
    DEVICE void send(u8 *slot, const Data &data, u64 number) const {
        begin_together();
        store_packet(slot, Packet{data.word[0], numbered ? number : data.word[1]});
    }
    // Asks the host whether to go on waiting for a packet; for whole warps, of which some threads have what they wait
    // for.
    DEVICE bool is_aborted(u32 missing, u64 number) const {
        return !all_together(!call.group.waiter().aborted(LINES_COME, missing, number));
    }

    DEVICE void run() const {
        const u32 rank = call.group.rank;
        if (rank == owner) return combine();
        const bool pushes = call.is_source(), takes = call.is_taker();
        const u32 first = !takes ? blockDim.x : pushes ? blockDim.x / 2 : 0;
        if (threadIdx.x < first) {
            if (pushes) push(Team{1, threadIdx.x, first});
        } else {
            take(Team{2, threadIdx.x - first, blockDim.x - first});
        }
    }

    // Pushes this rank's parts to their owner.
    DEVICE void push(const Team &team) const {
        const Group &group = call.group;
        const bool is_agent = team.thread == 0;
        DealtPorts::Queue &queue = ports.out[owner];
        Outbox<LINES> out;
        if (is_agent) {
            out = Outbox<LINES>(group, lane, owner);
            queue = {out.slots, out.sent};
        }
        bool well = !is_agent || !group.is_latched();
#pragma unroll 1
        for (Parts parts(*this); parts.any(); parts.advance()) {
            if (is_agent) {
                well = well && out.reserve(group, owner);
                out.sent++;
            }
            if (team.sync_or(!well)) return;
            const u8 *input = call.input + parts.begin;
            const u32 bytes = parts.bytes();
            const u64 number = number_of(queue, parts.round);
            u8 *slot = slot_of(queue, parts.round);
#pragma unroll 1
            for (u32 turn = team.thread / 32; turn * DATA < bytes; turn += team.threads / 32) {
                send(slot + turn * PACKETS, load(input, turn * DATA, bytes), number);
            }
        }
        if (is_agent) out.save(group, lane, owner);
    }

    // Takes the results of this block's parts.
    DEVICE void take(const Team &team) const {
        const Group &group = call.group;
        const bool is_agent = team.thread == 0;
        DealtPorts::Queue &queue = ports.in[owner];
        Inbox<LINES> in;
        if (is_agent) {
            in = Inbox<LINES>(group, result_lane(), owner);
            in.catch_up();
            queue = {in.slots, in.received};
        }
        if (team.sync_or(is_agent && group.is_latched())) return;
#pragma unroll 1
        for (Parts parts(*this); parts.any(); parts.advance()) {
            u8 *output = call.output + parts.begin;
            const u32 bytes = parts.bytes();
            const u64 number = number_of(queue, parts.round);
            const u8 *slot = slot_of(queue, parts.round);
            bool well = true;
#pragma unroll 1
            for (u32 turn = team.thread / 32; well && turn * DATA < bytes; turn += team.threads / 32) {
                Data data;
                well = await(slot + turn * PACKETS, number, data);
                if (well) store(output, turn * DATA, bytes, data);
            }
            if (team.sync_or(!well)) return;
            if (is_agent) in.release();
        }
        if (is_agent) in.save(group, result_lane(), owner);
    }

    // Waits for a packet of a result.
    DEVICE bool await(const u8 *slot, u64 number, Data &data) const {
#pragma unroll 1
        for (u32 polls = 1;; polls++) {
            begin_together();
            const Packet found = load_packet(slot);
            data = Data{{found.low, found.high}};
            if (all_together(!numbered || found.high == number)) return true;
            if (polls % POLLS == 0 && is_aborted(owner, number)) return false;
        }
    }

    // Peers are counted without this rank; some are none.
    DEVICE u32 rank_of(u32 i) const { return i + (i >= owner); }

    // Combines this rank's parts with those that come, keeps the results and passes them on.
    DEVICE void combine() const {
        const Group &group = call.group;
        const u32 peer = threadIdx.x;
        const bool is_agent = peer < group.size && peer != owner;
        const bool hears = is_agent && Combine::has(call.sources, peer), tells = is_agent && Combine::has(call.takers, peer);
        Inbox<LINES> in;
        Outbox<LINES> out;
        if (hears) {
            in = Inbox<LINES>(group, lane, peer);
            in.catch_up();
            ports.in[peer] = {in.slots, in.received};
        }
        if (tells) {
            out = Outbox<LINES>(group, result_lane(), peer);
            ports.out[peer] = {out.slots, out.sent};
        }
        const Combiner<T, Sum> combiner = Combiner<T, Sum>::plain(group.size);
        const bool keeps = call.keeps();
        bool well = !is_agent || !group.is_latched();
#pragma unroll 1
        for (Parts parts(*this); parts.any(); parts.advance()) {
            if (tells) {
                well = well && out.reserve(group, peer);
                out.sent++;
            }
            if (__syncthreads_or(!well)) return;
            const u8 *input = call.input + parts.begin;
            u8 *output = call.output + parts.begin;
            const u32 bytes = parts.bytes();
            const u8 *slot[PEERS]{};
            u64 number[PEERS]{};
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (i + 1 >= group.size) continue;
                const DealtPorts::Queue &queue = ports.in[rank_of(i)];
                slot[i] = slot_of(queue, parts.round);
                number[i] = number_of(queue, parts.round);
            }
#pragma unroll 1
            for (u32 turn = threadIdx.x / 32; well && turn * DATA < bytes; turn += blockDim.x / 32) {
                const Data mine = load(input, turn * DATA, bytes);
                Data data[PEERS]{};
                well = await_all(slot, turn * PACKETS, number, data);
                if (!well) continue;
                Data result{};
#pragma unroll
                for (u32 word = 0; word < 2; word++) {
                    // The operands in the order of ranks.
                    result.word[word] = combiner.template result<2, true>([&](u32 i) {
                        const u64 before = i < PEERS ? data[i].word[word] : 0, after = i > 0 ? data[i - 1].word[word] : 0;
                        return i == owner ? mine.word[word] : i < owner ? before : after;
                    });
                }
#pragma unroll
                for (u32 i = 0; i < PEERS; i++) {
                    const u32 to = rank_of(i);
                    if (i + 1 >= group.size || !Combine::has(call.takers, to)) continue;
                    const DealtPorts::Queue &queue = ports.out[to];
                    send(slot_of(queue, parts.round) + turn * PACKETS, result, number_of(queue, parts.round));
                }
                if (keeps) store(output, turn * DATA, bytes, result);
            }
            if (__syncthreads_or(!well)) return;
            if (hears) in.release();
        }
        if (hears) in.save(group, lane, peer);
        if (tells) out.save(group, result_lane(), peer);
    }

    // Loads packets of all peers until they have come.
    DEVICE bool await_all(const u8 *const (&slot)[PEERS], u32 at, const u64 (&number)[PEERS], Data (&data)[PEERS]) const {
        const u32 size = call.group.size;
#pragma unroll 1
        for (u32 polls = 1;; polls++) {
            begin_together();
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (i + 1 >= size) continue;
                const Packet found = load_packet(slot[i] + at);
                data[i] = Data{{found.low, found.high}};
            }
            u32 missing = NOBODY;
            u64 awaited = 0;
#pragma unroll
            for (u32 i = 0; i < PEERS; i++) {
                if (i + 1 < size && numbered && data[i].word[1] != number[i]) {
                    missing = rank_of(i);
                    awaited = number[i];
                }
            }
            if (all_together(missing == NOBODY)) return true;
            if (polls % POLLS == 0 && is_aborted(missing, awaited)) return false;
        }
    }
};

template <class T>
DEVICE void sum_dealt(const Combine &call) {
    __shared__ DealtPorts ports;
    DealtLines<T>(call, ports).run();
}

}  // namespace unisono
