// Combining by tiles: three teams of each block, each with a loop of its own. The first pushes pieces of the input to
// their owners, the second combines what has come and pushes the results, the third takes results. Counters join them
// across ranks; inside a block they share next to nothing, and hide each other's waits. Where a rank has nothing to do
// for a team, the others have its threads.
#pragma once

#include "exchange_combine.cuh"

namespace unisono {

constexpr u32 TILE_THREADS = 256;
// Of the first and the third team, where all three have something to do.
constexpr u32 PUSH_THREADS = 96, TAKE_THREADS = 64;

// How the threads of a warp have the packets of a row, one each: as they lie there,
struct InPackets {
    DEVICE static Packet load(const u8 *base, u32 at) { return load_packet(base + at * 16); }
    DEVICE static void store(u8 *base, u32 at, Packet packet) { store_plain(base + at * 16, packet); }
};
// or in units, each thread one of every 32: so all accesses of the warp are to bytes that follow each other, wherever
// they begin. What is combined so has to lie so in every operand.
template <class Unit>
struct InUnits {
    static constexpr u32 COUNT = 16 / sizeof(Unit);

    DEVICE static u32 place(u32 at, u32 i) { return at / 32 * 512 + (i * 32 + at % 32) * sizeof(Unit); }
    DEVICE static Packet load(const u8 *base, u32 at) {
        Unit unit[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) unit[i] = load_relaxed(reinterpret_cast<const Unit *>(base + place(at, i)));
        Packet packet;
        COPY(&packet, unit, 16);
        return packet;
    }
    DEVICE static void store(u8 *base, u32 at, Packet packet) {
        Unit unit[COUNT];
        COPY(unit, &packet, 16);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) store_plain(base + place(at, i), unit[i]);
    }
};

// What a team keeps in shared memory: its table, and the ends of its queues, each with its agent alone.
struct TeamState {
    TileTable table;
    Outbox<INPUTS> input_out[MAX_RANKS];
    Inbox<INPUTS> input_in[MAX_RANKS];
    Outbox<RESULTS> result_out[MAX_RANKS];
    Inbox<RESULTS> result_in[MAX_RANKS];
};

template <class T, class Op>
struct CombineTiles {
    static constexpr bool COPIES = Same<Op, Copy>::VALUE;

    const Combine &call;
    TeamState &state;
    const Combiner<T, Op> combiner;
    Team team;
    // Shared by the teams: how many rounds of the input have been pushed.
    volatile u32 &pushed;

    // This block's parts of a piece, one a round.
    struct Parts {
        u64 base, length, at, step;
        u32 share;

        DEVICE Parts(const Combine &call, u32 owner)
            : base(call.piece(owner)), length(call.length(owner)), at(call.block() * call.share),
              step(call.blocks * call.share), share(static_cast<u32>(call.share)) {}
        DEVICE u32 bytes() const {
            return static_cast<u32>(at >= length ? 0 : length - at < share ? length - at : share);
        }
        DEVICE u64 begin() const { return base + at; }
        DEVICE void advance() { at += step; }
    };

    DEVICE u32 rounds() const {
        u64 longest = call.whole ? call.bytes : call.stride, all = call.blocks * call.share;
        return static_cast<u32>((longest + all - 1) / all);
    }
    // The rank whose turn is the `turn`-th: another one first for each rank and each block, so that the links are used
    // evenly.
    DEVICE u32 peer_of(u32 turn) const {
        u32 others = call.group.size - 1;
        return (call.group.rank + 1 + (turn + blockIdx.x) % others) % call.group.size;
    }
    DEVICE u32 vectors() const { return static_cast<u32>(call.share + 15) / 16; }

    // Pushes this rank's input to the owners.
    DEVICE void scatter() {
        const u32 turns = call.group.size - 1, peer = peer_of(team.thread);
        const bool is_agent = team.thread < turns, sends = is_agent && Combine::has(call.owners, peer);
        TileTable &table = state.table;
        Outbox<INPUTS> &out = state.input_out[team.thread % MAX_RANKS];
        if (sends) out = Outbox<INPUTS>(call.group, blockIdx.x, peer);
        // Whether this rank's own copy goes the way of what it sends.
        const u64 addresses = reinterpret_cast<u64>(call.input) | reinterpret_cast<u64>(call.output);
        const bool keeps = COPIES && call.copies() && addresses % 16 == 0;
        Parts parts(call, peer);
        const u32 last = rounds();
#pragma unroll 1
        for (u32 round = 0; round < last; round++, parts.advance()) {
            const u32 bytes = sends ? parts.bytes() : 0;
            bool well = bytes == 0 || out.reserve(call.group, peer);
            if (is_agent) table.set(team.thread, call.input + parts.begin(), sends ? out.next(call.group) : nullptr, bytes);
            if (team.sync_or(!well)) return;
            const auto kept_at = [&](u32 turn) { return call.output + (table.from[turn] - call.input); };
            const auto keep = [&](u32 turn, u32 at, Packet packet) {
                if (COPIES && keeps) store_bytes(kept_at(turn), at, table.bytes[turn], packet);
            };
            // Where an own copy is kept, there are no registers for as many loads.
            stream<TO_SLOTS, COPIES ? STREAM_LOG - 1 : STREAM_LOG>(team, table, turns, vectors(), keep);
#pragma unroll 1
            for (u32 turn = 0; COPIES && call.copies() && !keeps && turn < turns; turn++) {
                copy_apart(table.from[turn], kept_at(turn), table.bytes[turn], team.thread, team.threads);
            }
            team.sync();
            if (team.thread == 0) pushed = round + 1;
            if (bytes != 0) out.publish();
        }
        if (sends) out.save(call.group, blockIdx.x, peer);
    }

    // Combines this rank's piece, keeps the result and pushes it to the takers.
    DEVICE void combine() {
        const u32 rank = call.group.rank, peer = team.thread;
        const bool is_agent = peer < call.group.size && peer != rank;
        const bool hears = is_agent && Combine::has(call.sources, peer);
        const bool tells = is_agent && Combine::has(call.takers, peer);
        TileTable &table = state.table;
        Inbox<INPUTS> &in = state.input_in[peer % MAX_RANKS];
        Outbox<RESULTS> &out = state.result_out[peer % MAX_RANKS];
        if (hears) in = Inbox<INPUTS>(call.group, blockIdx.x, peer);
        if (tells) out = Outbox<RESULTS>(call.group, blockIdx.x, peer);
        u32 round = 0;
#pragma unroll 1
        for (Parts parts(call, rank); parts.bytes() != 0; parts.advance(), round++) {
            bool well = true;
            // Where pieces are the whole and the call is in place, the result goes where the push reads.
            if (call.whole && call.pushes() && hears) {
                well = call.group.waiter().wait(TILE_ROOM, peer, in.received, [&] { return pushed > round; });
            }
            if (hears) {
                well = well && in.await(call.group, peer);
                table.from[peer] = in.next(call.group);
            }
            if (tells) {
                well = well && out.reserve(call.group, peer);
                table.to[peer] = out.next(call.group);
            }
            if (team.sync_or(!well)) return;
            combine_tile(call.input + parts.begin(), call.result(rank) + parts.at, parts.bytes());
            team.sync();
            if (tells) out.publish();
            if (hears) in.release();
        }
        if (hears) in.save(call.group, blockIdx.x, peer);
        if (tells) out.save(call.group, blockIdx.x, peer);
    }

    // What a plain sum is made of at addresses that whole elements suit, but packets do not.
    using Unit = typename Choice<sizeof(typename T::Memory) == 8, u64, u32>::Type;
    DEVICE static bool all_suit(const u8 *input, const u8 *output, u32 size) {
        return ((reinterpret_cast<u64>(COPIES ? nullptr : input) | reinterpret_cast<u64>(output)) & (size - 1)) == 0;
    }
    DEVICE bool sums() const { return Same<Op, Sum>::VALUE && combiner.is_plain(); }

    // Where neither packets nor units suit this rank's memory, they do in its scratch: a tile goes by that, part for part.
    DEVICE void combine_tile(const u8 *input, u8 *output, u32 bytes) {
        const bool apart = !all_suit(input, output, sums() ? sizeof(Unit) : 16);
        const u32 step = apart ? SCRATCH : bytes;
#pragma unroll 1
        for (u32 at = 0; at < bytes; at += step) {
            const u32 length = bytes - at < step ? bytes - at : step;
            const u8 *own = input + at;
            u8 *result = output + at;
            if (apart) {
                own = result = call.group.own_scratch();
                if (!COPIES) copy_apart(input + at, result, length, team.thread, team.threads);
                team.sync();
            }
            if constexpr (COPIES) {
                fold<0>(own, result, at, length);
            } else if (call.group.size == 2) {
                fold<1>(own, result, at, length);
            } else if (call.group.size <= 4) {
                fold<2>(own, result, at, length);
            } else {
                fold<3>(own, result, at, length);
            }
            if (!apart) return;
            team.sync();
            if (call.keeps()) copy_apart(own, output + at, length, team.thread, team.threads);
            team.sync();
        }
    }

    // The part of a tile that begins at `begin`, of at most 2^LOG operands.
    template <u32 LOG>
    DEVICE void fold(const u8 *input, u8 *output, u32 begin, u32 bytes) {
        constexpr u32 OPERANDS = 1u << LOG;
        const u32 rank = call.group.rank, size = call.group.size;
        const u8 *from[OPERANDS];
#pragma unroll
        for (u32 i = 0; i < OPERANDS; i++) {
            const u32 of = COPIES ? call.root : i;
            from[i] = !COPIES && i == rank ? input : COPIES || i < size ? state.table.from[of] + begin : nullptr;
        }
        // How many packets from the first are whole; by units, whole rows.
        u32 fast = bytes / 16;
        if (!all_suit(input, output, 16)) {
            fast = fast / 32 * 32;
            if constexpr (Same<Op, Sum>::VALUE) fold_whole<LOG, true, InUnits<Unit>>(from, output, begin, fast);
        } else if (COPIES || sums()) {
            fold_whole<LOG, true, InPackets>(from, output, begin, fast);
        } else {
            fold_whole<LOG, false, InPackets>(from, output, begin, fast);
        }
        // The end.
#pragma unroll 1
        for (u32 at = (fast + team.thread) * 16; at < bytes; at += team.threads * 16) {
            const Packet own = COPIES ? Packet{} : load_bytes(input, at, bytes);
            Packet packet[OPERANDS]{};
#pragma unroll
            for (u32 i = 0; i < OPERANDS; i++) {
                if (!COPIES && i == rank) {
                    packet[i] = own;
                } else if (COPIES || i < size) {
                    packet[i] = load_packet(from[i] + at);
                }
            }
            Packet result{};
#pragma unroll 1
            for (u32 half = 0; half < 2; half++) {
                result.low = result.high;
                result.high = combiner.template result<LOG>([&](u32 i) { return packet[i].low; });
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) packet[i].low = packet[i].high;
            }
            each_taker([&](u8 *to) { store_plain(to + begin + at, result); });
            if (call.keeps()) store_bytes(output, at, bytes, result);
        }
    }

    // `packets` whole ones, BATCH loads of a thread at a time. PLAIN: nothing depends on the call, and what is done
    // with them is laid out one after the other; else the same code does it one word after the other.
    template <u32 LOG, bool PLAIN, class Access, u32 OPERANDS>
    DEVICE void fold_whole(const u8 *const (&from)[OPERANDS], u8 *output, u32 begin, u32 packets) {
        constexpr u32 WORDS = 2 * (BATCH >> LOG);
        const u32 size = call.group.size;
        const bool keeps = call.keeps();
#pragma unroll 1
        for (u32 first = team.thread; first < packets; first += team.threads * (WORDS / 2)) {
            u64 word[OPERANDS][WORDS];
#pragma unroll
            for (u32 v = 0; v < WORDS / 2; v++) {
                const u32 at = first + v * team.threads;
#pragma unroll
                for (u32 i = 0; i < OPERANDS; i++) {
                    // What is not loaded is defined, or else it would be kept from one round to the next.
                    Packet packet{};
                    if (at < packets && (COPIES || i < size)) packet = Access::load(from[i], at);
                    word[i][2 * v] = packet.low;
                    word[i][2 * v + 1] = packet.high;
                }
            }
            Packet result{};
            u32 at = first;
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
                if (at < packets) {
                    each_taker([&](u8 *to) { Access::store(to + begin, at, result); });
                    if (keeps) Access::store(output, at, result);
                }
                at += team.threads;
            }
        }
    }

    // Calls `push` with the tile of each taker.
    template <class Push>
    DEVICE void each_taker(Push push) {
#pragma unroll 1
        for (u32 left = call.takers & ~call.me(); left != 0; left &= left - 1) push(state.table.to[__ffs(left) - 1]);
    }

    // Takes the owners' results.
    DEVICE void gather() {
        const u32 turns = call.group.size - 1, peer = peer_of(team.thread);
        const bool is_agent = team.thread < turns, hears = is_agent && Combine::has(call.owners, peer);
        TileTable &table = state.table;
        Inbox<RESULTS> &in = state.result_in[team.thread % MAX_RANKS];
        if (hears) in = Inbox<RESULTS>(call.group, blockIdx.x, peer);
        Parts parts(call, peer);
        const u32 last = rounds();
#pragma unroll 1
        for (u32 round = 0; round < last; round++, parts.advance()) {
            const u32 bytes = hears ? parts.bytes() : 0;
            bool well = bytes == 0 || in.await(call.group, peer);
            if (is_agent) table.set(team.thread, hears ? in.next(call.group) : nullptr, call.output + parts.begin(), bytes);
            if (team.sync_or(!well)) return;
            stream<FROM_SLOTS>(team, table, turns, vectors(), [](u32, u32, Packet) {});
            team.sync();
            if (bytes != 0) in.release();
        }
        if (hears) in.save(call.group, blockIdx.x, peer);
    }
};

}  // namespace unisono
