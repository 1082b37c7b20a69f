// Memory that several GPUs touch: the caller's at any alignment, the host's page, and waits that end.
#pragma once

#include "machine.cuh"

namespace unisono {

// The caller's memory: at any alignment, and `bytes` long from `base`; what lies beyond reads as 0 and is not written.
//
// What is rare stays out of the loops: the ends, and addresses that the whole access does not suit.
DEVICE bool suits(const u8 *address, u32 at, u32 bytes, u32 size) {
    return at + size <= bytes && (reinterpret_cast<u64>(address) & (size - 1)) == 0;
}

// Elements of a type from an address on, one after the other, of `left` bytes that are there: all loads are under way
// at once.
template <class T>
DEVICE Packet load_pieces(const u8 *from, u32 left) {
    u64 word[2]{};
#pragma unroll
    for (u32 at = 0; at < 16; at += sizeof(T)) {
        if (at < left) word[at / 8] |= static_cast<u64>(load_plain<T>(from + at)) << at % 8 * 8;
    }
    return Packet{word[0], word[1]};
}
template <class T>
DEVICE void store_pieces(u8 *to, u32 left, const Packet &packet) {
#pragma unroll
    for (u32 at = 0; at < 16; at += sizeof(T)) {
        if (at < left) store_plain(to + at, static_cast<T>((at < 8 ? packet.low : packet.high) >> at % 8 * 8));
    }
}

// 16 bytes that are not whole, or where a packet does not suit. What is not there is 0; nothing beyond `bytes` is
// touched.
__device__ __noinline__ Packet load_packet_slowly(const u8 *base, u32 at, u32 bytes) {
    const u8 *from = base + at;
    const u32 left = at < bytes ? bytes - at : 0, by = static_cast<u32>(reinterpret_cast<u64>(from)) % 8, bits = 8 * by;
    if (by <= at && left >= 24 - by) {
        // The words that they lie across are there.
        const u64 first = load_plain<u64>(from - by), second = load_plain<u64>(from - by + 8), third = load_plain<u64>(from - by + 16);
        return Packet{first >> bits | second << 1 << (63 - bits), second >> bits | third << 1 << (63 - bits)};
    }
    return (by | min(left, 16u)) % 4 == 0 ? load_pieces<u32>(from, left) : load_pieces<u8>(from, left);
}
__device__ __noinline__ void store_packet_slowly(u8 *base, u32 at, u32 bytes, Packet packet) {
    u8 *to = base + at;
    const u32 left = at < bytes ? min(bytes - at, 16u) : 0, behind = static_cast<u32>(reinterpret_cast<u64>(to)) % 4;
    if (left % 4 != 0) {
        if ((behind | left) % 2 == 0) {
            store_pieces<u16>(to, left, packet);
        } else {
            store_pieces<u8>(to, left, packet);
        }
    } else if (behind == 0) {
        store_pieces<u32>(to, left, packet);
    } else if (left > 0) {
        // Words lie across two: few bytes, the words that are whole there, and the bytes that are left of the last.
        const u32 word[4]{static_cast<u32>(packet.low), static_cast<u32>(packet.low >> 32), static_cast<u32>(packet.high), static_cast<u32>(packet.high >> 32)};
        const u32 head = 4 - behind, words = left / 4;
        u32 last = word[0];
        if (head & 1) store_plain(to, static_cast<u8>(word[0]));
        if (head & 2) store_plain(to + head % 2, static_cast<u16>(word[0] >> head % 2 * 8));
        to += head;
#pragma unroll
        for (u32 i = 1; i < 4; i++) {
            if (i >= words) continue;
            store_plain(to, static_cast<u32>((static_cast<u64>(word[i]) << 32 | word[i - 1]) >> head * 8));
            last = word[i];
            to += 4;
        }
        last >>= head * 8;
        if (behind & 2) store_plain(to, static_cast<u16>(last));
        if (behind & 1) store_plain(to + (behind & 2), static_cast<u8>(last >> (behind & 2) * 8));
    }
}

DEVICE Packet load_bytes(const u8 *base, u32 at, u32 bytes) {
    if (suits(base + at, at, bytes, 16)) return load_plain<Packet>(base + at);
    return load_packet_slowly(base, at, bytes);
}

DEVICE void store_bytes(u8 *base, u32 at, u32 bytes, Packet packet) {
    if (suits(base + at, at, bytes, 16)) {
        store_plain(base + at, packet);
    } else {
        store_packet_slowly(base, at, bytes, packet);
    }
}

// The 16 bytes from the `by`-th on of two packets that follow each other; `by` is less than 16.
DEVICE Packet shifted(Packet first, Packet second, u32 by) {
    u32 word[8];
    COPY(word, &first, 16);
    COPY(word + 4, &second, 16);
#pragma unroll
    for (u32 i = 0; i < 6; i++) word[i] = by & 8 ? word[i + 2] : word[i];
#pragma unroll
    for (u32 i = 0; i < 5; i++) word[i] = by & 4 ? word[i + 1] : word[i];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        word[i] = static_cast<u32>((static_cast<u64>(word[i + 1]) << 32 | word[i]) >> by % 4 * 8);
    }
    Packet all;
    COPY(&all, word, 16);
    return all;
}

// Copies `bytes` between addresses that whole packets do not suit, by some threads: in packets that suit where they go,
// each made of the two that it lies across. Nothing beyond the bytes is touched. What a peer has written is read with
// an order, so all is.
__device__ __noinline__ void copy_apart(const u8 *from, u8 *to, u32 bytes, u32 thread, u32 threads) {
    constexpr u32 LOADS = 8;
    // Packet k goes to `goal + 16 k`, and lies in those at `base + 16 k` and behind it, from the `by`-th byte on.
    const u32 head = -static_cast<u32>(reinterpret_cast<u64>(to)) & 15;
    const u32 by = static_cast<u32>(reinterpret_cast<u64>(from + head)) & 15, behind = by == 0 ? 0 : 16;
    const u8 *base = from + head - by;
    u8 *goal = to + head;
    // Those from `first` on, before `last`, lie in the memory with all that is loaded for them.
    const u32 first = head < by, span = head + 16 + behind;
    const u32 last = bytes + by < span ? 0 : (bytes + by - span) / 16 + 1, count = last > first ? last - first : 0;
    // The first thread begins where a line of the memory does that they go to: what a warp stores are whole lines.
    const u32 skew = static_cast<u32>(reinterpret_cast<u64>(goal) / 16) % 8, end = count == 0 ? 0 : last + skew;
#pragma unroll 1
    for (u32 packet = thread; packet < end; packet += LOADS * threads) {
        Packet low[LOADS], high[LOADS];
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            // Where there are none: the nearest.
            const u8 *at = base + (min(max(packet + i * threads, first + skew), end - 1) - skew) * 16;
            low[i] = load_packet(at);
            high[i] = load_packet(at + behind);
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            const u32 at = packet + i * threads - skew;
            if (at - first < count) store_plain(goal + at * 16, shifted(low[i], high[i], by));
        }
    }
    // The bytes before and behind them.
    const u32 begin = count == 0 ? bytes : head + first * 16, between = count * 16;
#pragma unroll 1
    for (u32 i = thread; i < bytes - between; i += threads) {
        const u32 at = i < begin ? i : i + between;
        store_plain(to + at, load_byte(from + at));
    }
}

// The host's page: `Page` of src/cuda/exchange/fault.rs is the same.
struct Page {
    u64 abort, apart[15];
    u64 recorded, phase, block, peer, sequence;
};

// What is waited for; fault.rs has the words.
enum Phase : u32 { LINE_ROOM, LINES_COME, TILE_ROOM, TILES_COME, RESULT_ROOM, RESULTS_COME, STAGE, SIGNALS_COME };

// The first line of an arena, its owner's own: once it is `set`, kernels leave at once. When the host was asked last.
struct Latch {
    u64 set, claimed, asked;
};

// How long after somebody has asked the host another may: nanoseconds.
constexpr u64 ASK_AGAIN = 50000;

// The peer of a thread that waits only because others do.
constexpr u32 NOBODY = ~0u;

// Whether the host has aborted. One of all who wait for a peer asks for it, now and then, and tells the others by the
// latch: its page answers one read after the other, and a thousand warps would hear nothing else for half a
// millisecond. The first thread that finds so and waits for a peer leaves the record.
__device__ __noinline__ bool is_aborted(Page *page, Latch *latch, Phase phase, u32 peer, u64 sequence) {
    if (load_relaxed(&latch->set) == 0) {
        if (peer == NOBODY) return false;
        const u64 asked = load_relaxed(&latch->asked), time = now();
        if (time - asked < ASK_AGAIN || atomicCAS(&latch->asked, asked, time) != asked) return false;
        if (load_relaxed(&page->abort) == 0) return false;
        store_relaxed(&latch->set, 1);
    }
    if (peer != NOBODY && atomicExch(&latch->claimed, 1ull) == 0) {
        page->phase = phase;
        page->block = blockIdx.x;
        page->peer = peer;
        page->sequence = sequence;
        store_release(&page->recorded, 1);
    }
    return true;
}

struct Waiter {
    Page *page;
    Latch *latch;

    DEVICE bool aborted(Phase phase, u32 peer, u64 sequence) const {
        return is_aborted(page, latch, phase, peer, sequence);
    }

    // Asks until `ready` says yes, or until the host aborts: then it says so, and answers false.
    template <class Ready>
    DEVICE bool wait(Phase phase, u32 peer, u64 sequence, Ready ready) const {
#pragma unroll 1
        for (u32 polls = 1; !ready(); polls++) {
            if (polls % POLLS == 0 && aborted(phase, peer, sequence)) return false;
            pause();
        }
        return true;
    }
};

}  // namespace unisono
