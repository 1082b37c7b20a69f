// Memory that several GPUs touch: the caller's at any alignment, the host's page, and waits that end.
#pragma once

#include "machine.cuh"

namespace unisono {

// The caller's memory: at any alignment, and `bytes` long from `base`; what lies beyond reads as 0 and is not written.
//
// What is rare stays out of the loops: the ends, and addresses that the whole access does not suit.
__device__ __noinline__ u64 load_slowly(const u8 *from, u64 bytes) {
    u64 word = 0;
    u32 at = 0;
    if (reinterpret_cast<u64>(from) % 4 == 0) {
        if (bytes >= 4) word = load_plain<u32>(from);
        if (bytes >= 8) word |= static_cast<u64>(load_plain<u32>(from + 4)) << 32;
        at = bytes >= 8 ? 8 : bytes >= 4 ? 4 : 0;
    }
#pragma unroll 1
    for (; at < 8 && at < bytes; at++) word |= static_cast<u64>(load_plain<u8>(from + at)) << 8 * at;
    return word;
}

// The same of 8 bytes that lie across two words, in memory that has both.
DEVICE u64 load_across(const u8 *from) {
    const u32 bits = static_cast<u32>(reinterpret_cast<u64>(from)) % 8 * 8;
    const u8 *first = from - bits / 8;
    return load_plain<u64>(first) >> bits | load_plain<u64>(first + 8) << 1 << (63 - bits);
}

__device__ __noinline__ void store_slowly(u8 *to, u64 bytes, u64 word) {
    const u32 all = bytes < 8 ? static_cast<u32>(bytes) : 8;
    // By the largest pieces that suit.
#pragma unroll 1
    for (u32 at = 0, piece; at < all; at += piece) {
        const u32 suits = static_cast<u32>(reinterpret_cast<u64>(to + at)), left = all - at;
        if (suits % 4 == 0 && left >= 4) {
            piece = 4;
            store_plain(to + at, static_cast<u32>(word >> 8 * at));
        } else if (suits % 2 == 0 && left >= 2) {
            piece = 2;
            store_plain(to + at, static_cast<u16>(word >> 8 * at));
        } else {
            piece = 1;
            store_plain(to + at, static_cast<u8>(word >> 8 * at));
        }
    }
}

DEVICE bool suits(const u8 *address, u32 at, u32 bytes, u32 size) {
    return at + size <= bytes && (reinterpret_cast<u64>(address) & (size - 1)) == 0;
}

DEVICE u64 load_word(const u8 *base, u32 at, u32 bytes) {
    const u8 *from = base + at;
    if (suits(from, at, bytes, 8)) return load_plain<u64>(from);
    if (at >= 8 && at + 16 <= bytes) return load_across(from);
    if (at >= bytes) return 0;
    return load_slowly(from, bytes - at);
}

DEVICE void store_word(u8 *base, u32 at, u32 bytes, u64 word) {
    u8 *to = base + at;
    if (suits(to, at, bytes, 8)) {
        store_plain(to, word);
    } else if (at >= bytes) {
        return;
    } else {
        store_slowly(to, bytes - at, word);
    }
}

__device__ __noinline__ Packet load_packet_slowly(const u8 *base, u32 at, u32 bytes) {
    return Packet{load_word(base, at, bytes), load_word(base, at + 8, bytes)};
}

__device__ __noinline__ void store_packet_slowly(u8 *base, u32 at, u32 bytes, Packet packet) {
    store_word(base, at, bytes, packet.low);
    store_word(base, at + 8, bytes, packet.high);
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

// Copies `bytes` between addresses that whole packets do not suit, by some threads: in packets that suit where they go, each made
// of the two that it lies across. Nothing beyond the bytes is touched. What a peer has written is read with an order, so all is.
__device__ __noinline__ void copy_apart(const u8 *from, u8 *to, u32 bytes, u32 thread, u32 threads) {
    constexpr u32 LOADS = 8;
    // Packet k goes to `goal + 16 k`, and lies in those at `base + 16 k` and behind it, from the `by`-th byte on.
    const u32 head = -static_cast<u32>(reinterpret_cast<u64>(to)) & 15;
    const u32 by = static_cast<u32>(reinterpret_cast<u64>(from + head)) & 15, behind = by == 0 ? 0 : 16;
    const u8 *base = from + head - by;
    u8 *goal = to + head;
    // Those from `first` to `last` lie in the memory with all that is loaded for them.
    const u32 first = head < by, span = head + 16 + behind;
    const u32 last = bytes + by < span ? 0 : (bytes + by - span) / 16 + 1;
#pragma unroll 1
    for (u32 packet = first + thread; packet < last; packet += LOADS * threads) {
        Packet low[LOADS], high[LOADS];
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            // Beyond the last there are none: that again.
            const u8 *at = base + min(packet + i * threads, last - 1) * 16;
            low[i] = load_packet(at);
            high[i] = load_packet(at + behind);
        }
#pragma unroll
        for (u32 i = 0; i < LOADS; i++) {
            const u32 at = packet + i * threads;
            if (at < last) store_plain(goal + at * 16, shifted(low[i], high[i], by));
        }
    }
    // The bytes before and behind them.
    const bool none = last <= first;
    const u32 begin = none ? bytes : head + first * 16, between = none ? 0 : (last - first) * 16;
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

// Whether the host has aborted. One of all who wait for a peer asks for it, now and then, and tells the others by the latch: its page
// answers one read after the other, and a thousand warps would hear nothing else for half a millisecond. The first thread that finds
// so and waits for a peer leaves the record.
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
