// One-sided operations: how a rank hears that another one has written into its window.
//
// A rank counts in its arena how many signals each rank has sent it; nobody but kernels of that rank writes there.
// Those may run beside each other where graphs send: each takes its numbers, and writes when those before have been
// written. Kernels that wait beside each other take different signals: each adds to what this rank has taken, and waits
// for that many.
//
// unisono_signal and unisono_await_signals have one parameter, `Signals`, and one block. src/cuda/exchange/signals.rs
// launches them.
#pragma once

#include "exchange_arena.cuh"

namespace unisono {

constexpr u32 SIGNAL_THREADS = 32;
static_assert(SIGNAL_THREADS >= MAX_RANKS, "a thread for each rank");

// A rank's part of its arena: `TALLY_BYTES` of src/cuda/exchange/signals.rs. Zeroed once.
struct Tally {
    // Written by the peers: how many they have sent.
    u64 come[MAX_RANKS];
    // How many this rank sends to each, how many of them it has told that rank of, and how many it has waited for of
    // each.
    u64 sent[MAX_RANKS], told[MAX_RANKS], taken[MAX_RANKS];
};

// The parameter of the kernels: `Arguments` of src/cuda/exchange/signals.rs.
struct Signals {
    Group group;
    // Where the tally begins in an arena.
    u64 tally;
    // How many, to each rank or from it.
    u32 counts[MAX_RANKS];

    DEVICE Tally &tally_of(u32 rank) const { return *reinterpret_cast<Tally *>(group.arena[rank] + tally); }
    DEVICE Tally &own() const { return tally_of(group.rank); }
    // Whether a thread has something to do for the rank of its number.
    DEVICE bool concerns(u32 peer) const { return peer < group.size && counts[peer] != 0 && !group.is_latched(); }
};

}  // namespace unisono

ENTRY(unisono_signal, unisono::Signals, unisono::SIGNAL_THREADS, 1) {
    const unisono::u32 peer = threadIdx.x;
    if (!call.concerns(peer)) return;
    const unisono::u64 count = call.counts[peer], before = atomicAdd(&call.own().sent[peer], count);
    unisono::u64 *told = &call.own().told[peer];
    // Whoever took the numbers before runs, and waits for nobody but those before it.
    const auto ready = [&] { return unisono::load_relaxed(told) == before; };
    if (!call.group.waiter().wait(unisono::SIGNALS_COME, peer, before, ready)) return;
    unisono::load_acquire(told);
    // Behind all that the stream was given before.
    unisono::store_release(&call.tally_of(peer).come[call.group.rank], before + count);
    unisono::store_release(told, before + count);
}

ENTRY(unisono_await_signals, unisono::Signals, unisono::SIGNAL_THREADS, 1) {
    const unisono::u32 peer = threadIdx.x;
    if (!call.concerns(peer)) return;
    const unisono::u64 *come = &call.own().come[peer];
    const unisono::u64 last = atomicAdd(&call.own().taken[peer], static_cast<unisono::u64>(call.counts[peer])) + call.counts[peer];
    const auto ready = [&] { return unisono::load_relaxed(come) >= last; };
    if (call.group.waiter().wait(unisono::SIGNALS_COME, peer, last, ready)) unisono::load_acquire(come);
}
