// The broadcast that pulls: ranks read the root's input out of the root's memory, or, if the others do not reach it,
// out of the root's payload, where the root puts it first.
//
// One stage: all begin together, everybody reads everything, all end together. Two stages: rank r reads part r from the
// root, keeps it in its payload and its output; when all have, everybody else but the root reads the others' parts from
// their payloads. A part is the whole packets of the n-th part, the last rank's the rest, too.
//
// Block b waits for block b of the other ranks, and for nobody else: which packets a block moves depends on their
// number alone. The signals of a block count how often it has waited; a peer is at most one wait ahead, so counts of
// odd and even waits have a place each. They are zeroed once and go on from kernel to kernel.
//
// unisono_pull has one parameter, `Pull`. src/cuda/exchange/stages.rs says which grid suits a call.
#include "exchange_arena.cuh"

namespace unisono {

constexpr u32 STAGE_BLOCKS = 384;
constexpr u32 STAGE_THREADS = 256;
// How many blocks a multiprocessor has room for: `RESIDENT` of src/cuda/exchange/stages.rs.
constexpr u32 STAGE_RESIDENT = 3;

struct StageSignals {
    // Where the root's input lies, as this rank reaches it, or 0 if it goes through the root's payload: for each block.
    u64 source[STAGE_BLOCKS];
    // How often this rank has waited, for each block and peer.
    u32 waited[STAGE_BLOCKS][MAX_RANKS];
    // Written by the peers: how often they have.
    u32 arrived[2][STAGE_BLOCKS][MAX_RANKS];
};

// The parameter of the kernel: `Arguments` of src/cuda/exchange/stages.rs.
struct Pull {
    Group group;
    const u8 *input;
    u8 *output;
    u64 bytes;
    // Where the signals and the payload begin in an arena, and how long the payload may be.
    u64 signals, payload, room;
    u32 root;
    // Whether there are two stages; the level of dependent launch.
    u32 two, overlap, reserved;
    // On the root, the input as each rank reaches it, or zeros.
    u64 seen[MAX_RANKS];

    DEVICE StageSignals *signals_of(u32 rank) const { return reinterpret_cast<StageSignals *>(group.arena[rank] + signals); }
    DEVICE u8 *payload_of(u32 rank) const { return group.arena[rank] + payload; }
    DEVICE bool is_root() const { return group.rank == root; }
};

struct Puller {
    const Pull &call;

    // Waits for the same block of all ranks. What was written before a fenced one is seen behind it. For all threads;
    // false if the kernel is to leave.
    template <bool FENCED>
    DEVICE bool barrier() const {
        __syncthreads();
        bool well = true;
        const u32 peer = threadIdx.x;
        if (peer < call.group.size) {
            StageSignals &own = *call.signals_of(call.group.rank);
            const u32 number = ++own.waited[blockIdx.x][peer];
            u32 *to = &call.signals_of(peer)->arrived[number & 1][blockIdx.x][call.group.rank];
            const u32 *from = &own.arrived[number & 1][blockIdx.x][peer];
            if (FENCED) {
                store_release(to, number);
            } else {
                store_relaxed(to, number);
            }
            well = call.group.waiter().wait(STAGE, peer, number, [&] { return load_relaxed(from) == number; });
            load_acquire(from);
        }
        return !__syncthreads_or(!well);
    }

    // Copies bytes to one place or two: this thread's share of them.
    __device__ __noinline__ static void copy(const u8 *from, u8 *to, u8 *also, u64 bytes) {
        const u64 step = gridDim.x * STAGE_THREADS, first = blockIdx.x * STAGE_THREADS + threadIdx.x;
        const u64 addresses = reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to) | reinterpret_cast<u64>(also);
        const u64 whole = addresses & 15 ? 0 : bytes / 16;
        u64 packet = first;
#pragma unroll 1
        for (; packet < whole; packet += BATCH * step) {
            Packet loaded[BATCH];
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (packet + i * step < whole) loaded[i] = load_packet(from + (packet + i * step) * 16);
            }
#pragma unroll
            for (u32 i = 0; i < BATCH; i++) {
                if (packet + i * step >= whole) break;
                store_plain(to + (packet + i * step) * 16, loaded[i]);
                if (also != nullptr) store_plain(also + (packet + i * step) * 16, loaded[i]);
            }
        }
        // Ends, and other addresses: packets of the same threads.
        packet = first < whole ? first + (whole - first + step - 1) / step * step : first;
#pragma unroll 1
        for (; packet * 16 < bytes; packet += step) {
            const u32 left = static_cast<u32>(bytes - packet * 16 < 16 ? bytes - packet * 16 : 16);
            const Packet found = load_bytes(from + packet * 16, 0, left);
            store_bytes(to + packet * 16, 0, left, found);
            if (also != nullptr) store_bytes(also + packet * 16, 0, left, found);
        }
    }

    // The parts of a piece.
    struct Parts {
        u64 bytes, each;
        u32 ranks;

        DEVICE Parts(u64 bytes, u32 ranks) : bytes(bytes), each(bytes / 16 / ranks * 16), ranks(ranks) {}
        DEVICE u64 begin(u32 rank) const { return rank * each; }
        DEVICE u64 length(u32 rank) const { return rank + 1 == ranks ? bytes - begin(rank) : each; }
    };

    DEVICE void run() const {
        if (__syncthreads_or(call.group.is_latched())) return;
        const bool copies = call.is_root() && call.output != nullptr && call.output != call.input;
        if (call.is_root() && threadIdx.x < call.group.size) {
            store_relaxed(&call.signals_of(threadIdx.x)->source[blockIdx.x], call.seen[threadIdx.x]);
        }
        const u32 own = call.group.rank;
        const u64 half = staged_stride() * call.group.size;
        if (call.is_root() && call.seen[own] == 0) stage(Parts(call.bytes < half ? call.bytes : half, call.group.size), 0);
        if (!barrier<true>()) return;
        const u8 *input =
            reinterpret_cast<const u8 *>(load_relaxed(&call.signals_of(own)->source[blockIdx.x]));
        const bool in_place = input != nullptr;
        // What the payload holds: the root's input, the last part of which may be a little longer than the stride, then
        // a part of it.
        const u64 piece = call.two ? (in_place ? half * call.group.size : half) : (in_place ? call.bytes : half);
        const u64 part_at = in_place ? 0 : half + 256;
#pragma unroll 1
        for (u64 at = 0; at < call.bytes; at += piece) {
            const u64 bytes = call.bytes - at < piece ? call.bytes - at : piece;
            const Parts parts(bytes, call.group.size);
            if (!in_place && at != 0) {
                if (call.is_root()) stage(parts, at);
                if (!barrier<true>()) return;
            }
            // Where the bytes of this piece come from: all of them, or this rank's part.
            const u8 *source = call.is_root() ? call.input + at : in_place ? input + at : nullptr;
            u8 *output = call.output + at;
            if (!call.two) {
                if (source == nullptr) source = call.payload_of(call.root);
                if (!call.is_root() || copies) copy(source, output, nullptr, bytes);
            } else {
                const u8 *from = source != nullptr ? source + parts.begin(own) : call.payload_of(call.root) + own * staged_stride();
                u8 *kept = call.payload_of(own) + part_at;
                copy(from, kept, !call.is_root() || copies ? output + parts.begin(own) : nullptr, parts.length(own));
                if (!barrier<true>()) return;
                gather(parts, part_at, output, copies ? source : nullptr);
            }
            if (!barrier<false>()) return;
        }
    }

    // From part to part of what the root puts into its payload: the same for every piece, so that what a block writes
    // there was read by the same block of the others, whatever the piece's length.
    DEVICE u64 staged_stride() const { return call.room / 2 / 16 / call.group.size * 16; }

    // Puts a piece of the root's input into its payload, each block the packets that its peers read.
    DEVICE void stage(const Parts &parts, u64 at) const {
        u8 *to = call.payload_of(call.root);
        if (!call.two) return copy(call.input + at, to, nullptr, parts.bytes);
#pragma unroll 1
        for (u32 rank = 0; rank < parts.ranks; rank++) {
            copy(call.input + at + parts.begin(rank), to + rank * staged_stride(), nullptr, parts.length(rank));
        }
    }

    // Reads the other ranks' parts, another one first for each rank and block; the root copies its own, from `local`,
    // if it wants them elsewhere.
    DEVICE void gather(const Parts &parts, u64 part_at, u8 *output, const u8 *local) const {
        if (call.is_root() && local == nullptr) return;
        const u32 others = parts.ranks - 1;
#pragma unroll 1
        for (u32 turn = 0; turn < others; turn++) {
            const u32 peer = (call.group.rank + 1 + (turn + blockIdx.x) % others) % parts.ranks;
            const u8 *from = local != nullptr ? local + parts.begin(peer) : call.payload_of(peer) + part_at;
            copy(from, output + parts.begin(peer), nullptr, parts.length(peer));
        }
    }
};

}  // namespace unisono

ENTRY(unisono_pull, unisono::Pull, unisono::STAGE_THREADS, unisono::STAGE_RESIDENT) {
    // Before anything of what the stream was given is touched, and anything of the peers.
    if (call.overlap == 2) unisono::release_stream();
    if (call.overlap != 0) unisono::await_stream();
    unisono::Puller{call}.run();
}
