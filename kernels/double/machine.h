// The words of CUDA C++ for a processor, so that the kernels run where there is no GPU, in orders that a GPU would
// seldom choose.
//
// Each block is a thread of the host, of which one runs at a time; each of its threads is a context that goes on until
// it has to wait, or until chance says that it is another's turn. A seed decides everything.
//
// Memory is as weak as PTX allows, as far as kernels could notice. What a thread stores lies *pending* in its block
// until chance, a release or a fence behind it, or the end of the kernel commits it; threads of its block see it before
// if a barrier or their own program orders it before them. What a thread loads may be old: anything that was there
// since its *horizon*, which acquires and barriers move on, or since it last looked there. Memory that nobody else
// touches while a kernel runs may be used by plain expressions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif


#define DEVICE inline
// How long the parameter is stands beside each kernel.
#define ENTRY(name, Call, threads, blocks)                                                                             \
    extern "C" {                                                                                                       \
    extern const unisono::u64 name##_bytes = sizeof(Call);                                                             \
    void name(const Call &call);                                                                                       \
    }                                                                                                                  \
    void name(const Call &call)
#define __device__
#define __noinline__ __attribute__((noinline))
// Each block is a thread.
#define __shared__ static thread_local
#define threadIdx (machine::index_of_thread())
#define blockIdx (machine::index_of_block())
#define blockDim (machine::threads_of_block())
#define gridDim (machine::blocks_of_grid())
#define __ffs __builtin_ffs
#define __popc __builtin_popcount

namespace machine {

using unisono::Packet;
using unisono::u32;
using unisono::u64;
using unisono::u8;

constexpr u32 WARP = 32, WARPS = 16, BARRIERS = 16;

// How adverse a run is: chances in 256. `Chances` of src/cuda/exchange/tests/play.rs.
struct Chances {
    // That another thread goes on after an access; that a load is old; that something pending is committed after a
    // turn.
    u32 yield, stale, commit;
    // That a rank stands still for a while when it would be somebody's turn.
    u32 freeze;
    // What does not do what it should.
    u32 without;
};

enum Weakness : u32 { RELEASE = 1, ACQUIRE = 2, FENCE = 4, WARP_BARRIER = 8, TEAM_BARRIER = 16, BLOCK_BARRIER = 32, LINE = 64,
                      // What never orders anything.
                      BALLOT = 128,
                      STREAM = 256 };

struct Dice {
    u64 state;

    u64 next() {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        return state * 0x2545f4914f6cdd1dull;
    }
    u64 below(u64 sides) { return (next() >> 11) % sides; }
    bool says(u32 chance) { return (next() >> 24) % 256 < chance; }
};

// What all blocks share; one of them runs at a time.
struct World {
    // What a granule of 8 bytes held before commits.
    struct Change {
        u64 time, before;
    };
    Dice dice;
    Chances chances;
    // How many commits there were.
    u64 clock = 0;
    // What somebody was told last who asked for the time.
    u64 time = 1000000;
    // The ranks' abort words, and how often they were read.
    std::vector<u64> aborts;
    u64 asked = 0;
    std::unordered_map<u64, std::vector<Change>> history;

    static constexpr size_t KEPT = 6;

    bool has(Weakness weakness) const { return weakness != BALLOT && (chances.without & weakness) == 0; }

    void commit(u64 address, const u8 *data, u32 length) {
        clock++;
        for (u64 granule = address & ~7ull; granule < address + length; granule += 8) {
            std::vector<Change> &changes = history[granule];
            if (changes.size() == KEPT) changes.erase(changes.begin());
            u64 before;
            memcpy(&before, reinterpret_cast<const void *>(granule), 8);
            changes.push_back(Change{clock, before});
        }
        memcpy(reinterpret_cast<void *>(address), data, length);
    }

    // The earliest time at which all of this can still be told.
    u64 earliest(u64 granule) const {
        const auto found = history.find(granule);
        return found == history.end() || found->second.size() < KEPT ? 0 : found->second.front().time;
    }
    // A granule as it was, and when it had become so.
    u64 at(u64 granule, u64 time, u64 &since) const {
        const auto found = history.find(granule);
        since = 0;
        if (found != history.end()) {
            for (const Change &change : found->second) {
                if (change.time > time) return change.before;
                since = change.time;
            }
        }
        u64 value;
        memcpy(&value, reinterpret_cast<const void *>(granule), 8);
        return value;
    }
};

// What a thread or the scheduler has in registers: it goes on where it switched to another.
#if defined(__x86_64__)

class Context {
    void *stack = nullptr;

public:
    // One that begins with `begin`, on a stack.
    void make(u8 *bottom, size_t bytes, Context &, void (*begin)()) {
        void **top = reinterpret_cast<void **>(reinterpret_cast<u64>(bottom + bytes) & ~15ull);
        // Nobody returns from `begin`.
        *--top = nullptr;
        *--top = reinterpret_cast<void *>(begin);
        stack = top;
    }
    __attribute__((noinline)) void switch_to(Context &other) {
        // Below what the compiler may use without saying so.
        asm volatile("leaq -128(%%rsp), %%rsp\n"
                     "pushq %%rbp\n pushq %%rbx\n pushq %%r12\n pushq %%r13\n pushq %%r14\n pushq %%r15\n"
                     "leaq 1f(%%rip), %%rax\n pushq %%rax\n"
                     "movq %%rsp, (%0)\n movq (%1), %%rsp\n ret\n"
                     "1:\n"
                     "popq %%r15\n popq %%r14\n popq %%r13\n popq %%r12\n popq %%rbx\n popq %%rbp\n"
                     "leaq 128(%%rsp), %%rsp\n"
                     :
                     : "D"(&stack), "S"(&other.stack)
                     : "rax", "rcx", "rdx", "r8", "r9", "r10", "r11", "memory", "cc");
    }
};

#else

class Context {
    ucontext_t context;

public:
    void make(u8 *bottom, size_t bytes, Context &after, void (*begin)()) {
        getcontext(&context);
        context.uc_stack.ss_sp = bottom;
        context.uc_stack.ss_size = bytes;
        context.uc_link = &after.context;
        makecontext(&context, begin, 0);
    }
    void switch_to(Context &other) { swapcontext(&context, &other.context); }
};

#endif

// A store that is not committed.
struct Store {
    u64 id, address;
    u32 thread, length;
    u8 data[128];

    bool meets(u64 from, u32 bytes) const { return from < address + length && address < from + bytes; }
};

// What threads that meet tell each other: what they have seen, and which stores of which warps are before what comes.
struct Clock {
    u64 horizon = 0;
    u64 ordered[WARPS] = {};

    void join(const Clock &other) {
        horizon = std::max(horizon, other.horizon);
        for (u32 i = 0; i < WARPS; i++) ordered[i] = std::max(ordered[i], other.ordered[i]);
    }
};

struct Thread {
    enum State { READY, WAITING, ENDED };
    Context context;
    std::unique_ptr<u8[]> stack;
    State state = READY;
    Clock clock;
    // The latest that it has read by loads without an order.
    u64 relaxed = 0;
    // When what it has read somewhere was there.
    std::unordered_map<u64, u64> looked;
    // Between `begin_together` and what ends that.
    bool together = false;
    Packet packet;
    u64 address = 0;
};

// Where threads meet.
struct Meeting {
    std::vector<u32> arrived;
    bool any = false, every = true;
    u64 said[WARP] = {};
    Clock clock;
    // What was said last.
    bool was_any = false, was_every = true;
    u64 was_said[WARP] = {};
};

struct Block {
    World &world;
    u32 index, blocks;
    std::vector<Thread> threads;
    u32 current = 0, living;
    Context scheduler;
    std::vector<Store> pending;
    u64 stores = 0;
    // When what was stored here was committed, by granule.
    struct Committed {
        u64 time, store;
        u32 thread;
    };
    std::unordered_map<u64, std::vector<Committed>> committed;
    Meeting barriers[BARRIERS], warps[WARPS];
    std::vector<u32> ready;
    void (*entry)(const void *);
    const void *call;
    // Whether the kernel before this one in its stream goes on, and whether this block has let the next one begin.
    bool waits, released = false;

    static constexpr size_t STACK = 48 << 10;
    // More is committed as it comes.
    static constexpr size_t ROOM = 32;

    Block(World &world, u32 index, u32 blocks, u32 count, void (*entry)(const void *), const void *call, bool waits)
        : world(world), index(index), blocks(blocks), threads(count), living(count), entry(entry), call(call), waits(waits) {
        for (u32 i = 0; i < count; i++) {
            threads[i].clock.horizon = world.clock;
            ready.push_back(i);
        }
    }

    Thread &self() { return threads[current]; }
    u32 warp() const { return current / WARP; }

    // ---- contexts

    static void begin();

    // Runs threads, at most so many turns; false once all have ended.
    bool run(u64 turns) {
        for (; turns > 0 && living > 0; turns--) {
            // All wait for each other: what they wait for is never complete.
            if (ready.empty()) return true;
            commit_some();
            const size_t pick = world.dice.below(ready.size());
            current = ready[pick];
            Thread &thread = threads[current];
            if (!thread.stack) {
                thread.stack.reset(new u8[STACK]);
                thread.context.make(thread.stack.get(), STACK, scheduler, begin);
            }
            scheduler.switch_to(thread.context);
            if (thread.state != Thread::READY) {
                const auto found = std::find(ready.begin(), ready.end(), current);
                *found = ready.back();
                ready.pop_back();
            }
            if (thread.state == Thread::ENDED) {
                living--;
                thread.stack.reset();
                // Those that are left may be all that a barrier of the block waits for.
                complete(barriers[0], living);
                complete(warps[warp()], living_of_warp(warp()));
            }
        }
        return living > 0;
    }
    void yield() { self().context.switch_to(scheduler); }
    bool is_stuck() const { return living > 0 && ready.empty(); }

    u32 living_of_warp(u32 warp) const {
        u32 count = 0;
        for (u32 i = warp * WARP; i < threads.size() && i < (warp + 1) * WARP; i++) count += threads[i].state != Thread::ENDED;
        return count;
    }

    // ---- meetings

    // Waits for `count` threads; `last` runs once, when all are there. A weak one orders nothing.
    template <class Last>
    void meet(Meeting &meeting, Weakness weakness, u32 count, bool mine, Last last) {
        Thread &thread = self();
        meeting.arrived.push_back(current);
        meeting.any |= mine;
        meeting.every &= mine;
        if (world.has(weakness)) {
            meeting.clock.join(thread.clock);
            meeting.clock.ordered[warp()] = stores;
        }
        thread.state = Thread::WAITING;
        if (meeting.arrived.size() == count) {
            last();
            complete(meeting, count);
        }
        yield();
    }
    void complete(Meeting &meeting, u32 count) {
        if (meeting.arrived.empty() || meeting.arrived.size() < count) return;
        for (u32 one : meeting.arrived) {
            threads[one].clock.join(meeting.clock);
            threads[one].state = Thread::READY;
            ready.push_back(one);
        }
        // The last one has been there all the time.
        std::sort(ready.begin(), ready.end());
        ready.erase(std::unique(ready.begin(), ready.end()), ready.end());
        Meeting next;
        next.was_any = meeting.any;
        next.was_every = meeting.every;
        std::copy(std::begin(meeting.said), std::end(meeting.said), next.was_said);
        meeting = next;
    }

    // ---- memory

    bool is_before(u64 store, u32 thread) const {
        return thread == current || store <= threads[current].clock.ordered[thread / WARP];
    }
    bool is_before(const Store &store) const { return is_before(store.id, store.thread); }

    // Commits the `at`-th store, behind those to the same bytes that were made before.
    void commit(size_t at) {
        const Store store = pending[at];
        for (size_t i = 0; i < at; i++) {
            if (pending[i].meets(store.address, store.length)) return commit(i);
        }
        pending.erase(pending.begin() + static_cast<long>(at));
        world.commit(store.address, store.data, store.length);
        for (u64 granule = store.address & ~7ull; granule < store.address + store.length; granule += 8) {
            std::vector<Committed> &all = committed[granule];
            if (all.size() == World::KEPT) all.erase(all.begin());
            all.push_back(Committed{world.clock, store.id, store.thread});
        }
    }
    void commit_some() {
        if (!pending.empty() && (pending.size() > ROOM || world.dice.says(world.chances.commit))) {
            commit(world.dice.below(pending.size()));
        }
    }
    void commit_all() {
        while (!pending.empty()) commit(world.dice.below(pending.size()));
    }
    // What is ordered before this thread's next store.
    void commit_before() {
        for (;;) {
            std::vector<size_t> before;
            for (size_t i = 0; i < pending.size(); i++) {
                if (is_before(pending[i])) before.push_back(i);
            }
            if (before.empty()) return;
            commit(before[world.dice.below(before.size())]);
        }
    }

    // Other threads may go on before an access.
    void turn() {
        if (world.dice.says(world.chances.yield)) yield();
    }

    void store(u64 address, const void *data, u32 length) {
        Store store{++stores, address, current, length, {}};
        memcpy(store.data, data, length);
        pending.push_back(store);
    }

    // Since when this thread may see a granule: it has looked, or it comes after what was stored, or nobody knows more.
    u64 earliest(u64 granule) const {
        const Thread &thread = threads[current];
        u64 earliest = std::max(thread.clock.horizon, world.earliest(granule));
        const auto looked = thread.looked.find(granule);
        if (looked != thread.looked.end()) earliest = std::max(earliest, looked->second);
        const auto found = committed.find(granule);
        if (found != committed.end()) {
            for (const Committed &one : found->second) {
                if (is_before(one.store, one.thread)) earliest = std::max(earliest, one.time);
            }
        }
        return earliest;
    }
    // When a load of such bytes may take place.
    u64 moment(u64 address, u32 length) {
        if (!world.dice.says(world.chances.stale)) return world.clock;
        u64 least = 0;
        for (u64 granule = address & ~7ull; granule < address + length; granule += 8) least = std::max(least, earliest(granule));
        return least + world.dice.below(world.clock - least + 1);
    }
    // Loads at a moment; answers since when what it found has been there.
    u64 load(u64 address, void *data, u32 length, u64 moment) {
        Thread &thread = self();
        u64 latest = 0;
        for (u64 granule = address & ~7ull; granule < address + length; granule += 8) {
            u64 since;
            const u64 value = world.at(granule, moment, since);
            latest = std::max(latest, since);
            if (world.chances.stale != 0) thread.looked[granule] = moment;
            const u64 from = std::max(granule, address), to = std::min(granule + 8, address + length);
            memcpy(static_cast<u8 *>(data) + (from - address), reinterpret_cast<const u8 *>(&value) + (from - granule), to - from);
        }
        for (const Store &store : pending) {
            if (!store.meets(address, length) || !is_before(store)) continue;
            const u64 from = std::max(store.address, address), to = std::min(store.address + store.length, address + length);
            memcpy(static_cast<u8 *>(data) + (from - address), store.data + (from - store.address), to - from);
        }
        thread.relaxed = std::max(thread.relaxed, latest);
        return latest;
    }

    // The packets of a warp by one instruction: those of a line are one access.
    void load_lines() {
        const u32 first = warp() * WARP, thread = current;
        for (u32 line = 0; line < WARP; line += 8) {
            u64 time = world.clock;
            for (u32 i = 0; i < 8; i++) {
                current = first + line + i;
                if (i == 0) time = moment(self().address, 16);
                time = std::max({time, earliest(self().address), earliest(self().address + 8)});
            }
            for (u32 i = 0; i < 8; i++) {
                current = first + line + i;
                load(self().address, &self().packet, 16, time);
            }
        }
        current = thread;
    }
    void store_lines() {
        const u32 first = warp() * WARP;
        for (u32 line = 0; line < WARP; line += 8) {
            const u64 address = threads[first + line].address;
            Store store{++stores, address, first + line, 128, {}};
            for (u32 i = 0; i < 8; i++) memcpy(store.data + 16 * i, &threads[first + line + i].packet, 16);
            pending.push_back(store);
        }
    }
};

inline thread_local Block *running = nullptr;

inline void Block::begin() {
    running->entry(running->call);
    running->self().state = Thread::ENDED;
    // Back to the scheduler for good.
    running->yield();
}

struct Index {
    u32 x;
};
inline Index index_of_thread() { return {running->current}; }
inline Index index_of_block() { return {running->index}; }
inline Index threads_of_block() { return {static_cast<u32>(running->threads.size())}; }
inline Index blocks_of_grid() { return {running->blocks}; }

template <class T>
T load(const void *from, bool acquires) {
    Block &block = *running;
    block.turn();
    T value;
    const u64 address = reinterpret_cast<u64>(from);
    for (u64 word : block.world.aborts) block.world.asked += address == word;
    const u64 since = block.load(address, &value, sizeof(T), block.moment(address, sizeof(T)));
    if (acquires && block.world.has(ACQUIRE)) block.self().clock.horizon = std::max(block.self().clock.horizon, since);
    return value;
}
template <class T>
void store(void *to, T value, bool releases) {
    Block &block = *running;
    block.turn();
    if (releases && block.world.has(RELEASE)) block.commit_before();
    block.store(reinterpret_cast<u64>(to), &value, sizeof(T));
}

inline bool meet(Meeting &meeting, Weakness weakness, u32 count, bool mine) {
    running->meet(meeting, weakness, count, mine, [] {});
    return meeting.was_any;
}
inline Meeting &own_warp() { return running->warps[running->warp()]; }
inline u32 width_of_warp() { return running->living_of_warp(running->warp()); }
// What the threads of a warp say when they meet, which orders nothing.
inline const u64 *tell_warp(u64 mine) {
    Meeting &warp = own_warp();
    warp.said[running->current % WARP] = mine;
    meet(warp, BALLOT, width_of_warp(), false);
    return warp.was_said;
}

}  // namespace machine

inline bool __syncthreads_or(bool mine) {
    return machine::meet(machine::running->barriers[0], machine::BLOCK_BARRIER, machine::running->living, mine);
}
inline void __syncthreads() { __syncthreads_or(false); }
inline void __syncwarp() { machine::meet(machine::own_warp(), machine::WARP_BARRIER, machine::width_of_warp(), false); }

inline machine::u32 __ballot_sync(machine::u32, bool mine) {
    const machine::u64 *said = machine::tell_warp(mine);
    machine::u32 ballot = 0;
    for (machine::u32 i = 0; i < machine::WARP; i++) ballot |= static_cast<machine::u32>(said[i]) << i;
    return ballot;
}
template <class T>
T __shfl_sync(machine::u32, T mine, machine::u32 lane) {
    return static_cast<T>(machine::tell_warp(mine)[lane]);
}

namespace unisono {

template <class T>
T load_relaxed(const T *from) {
    return machine::load<T>(from, false);
}
template <class T>
T load_acquire(const T *from) {
    return machine::load<T>(from, true);
}
template <class T, class V>
void store_relaxed(T *to, V value) {
    machine::store<T>(to, value, false);
}
template <class T, class V>
void store_release(T *to, V value) {
    machine::store<T>(to, value, true);
}
template <class T>
T load_plain(const void *from) {
    return machine::load<T>(from, false);
}
template <class T>
void store_plain(void *to, T value) {
    machine::store<T>(to, value, false);
}

inline void fence() {
    machine::Thread &thread = machine::running->self();
    if (!machine::running->world.has(machine::FENCE)) return;
    machine::running->commit_before();
    thread.clock.horizon = std::max(thread.clock.horizon, thread.relaxed);
}

inline void begin_together() {
    __syncwarp();
    machine::running->self().together = true;
}
inline bool all_together(bool mine) {
    machine::running->self().together = false;
    machine::Meeting &warp = machine::own_warp();
    machine::meet(warp, machine::WARP_BARRIER, machine::width_of_warp(), mine);
    return warp.was_every;
}

inline u8 load_byte(const void *from) { return machine::load<u8>(from, false); }

inline Packet load_packet(const void *from) {
    machine::Block &block = *machine::running;
    machine::Thread &thread = block.self();
    if (!thread.together) return machine::load<Packet>(from, false);
    thread.address = reinterpret_cast<u64>(from);
    block.meet(machine::own_warp(), machine::WARP_BARRIER, machine::WARP, false, [&] { block.load_lines(); });
    return thread.packet;
}
inline void store_packet(void *to, Packet packet) {
    machine::Block &block = *machine::running;
    machine::Thread &thread = block.self();
    if (!thread.together) return machine::store(to, packet, false);
    thread.together = false;
    // The link takes a line apart.
    if (!block.world.has(machine::LINE)) return machine::store(to, packet, false);
    thread.address = reinterpret_cast<u64>(to);
    thread.packet = packet;
    block.meet(machine::own_warp(), machine::WARP_BARRIER, machine::WARP, false, [&] { block.store_lines(); });
}

inline bool team_barrier_or(u32 barrier, u32 threads, bool mine) {
    return machine::meet(machine::running->barriers[barrier], machine::TEAM_BARRIER, threads, mine);
}
inline void team_barrier(u32 barrier, u32 threads) { team_barrier_or(barrier, threads, false); }

inline void await_stream() {
    machine::Block &block = *machine::running;
    if (!block.world.has(machine::STREAM)) return;
    while (block.waits) block.yield();
    // What came before is there to be seen.
    block.self().clock.horizon = block.world.clock;
}
inline void release_stream() { machine::running->released = true; }
inline void pause() { machine::running->yield(); }
inline void nap() { pause(); }
inline u64 max(u64 a, u64 b) { return a < b ? b : a; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }

constexpr u32 POLLS = 64;

// It goes on by asking.
inline u64 now() { return machine::running->world.time += 5000; }

}  // namespace unisono

// Nobody else sees it but by the same operation.
inline unsigned long long atomicExch(unsigned long long *at, unsigned long long value) {
    const unsigned long long before = *at;
    *at = value;
    return before;
}
inline unsigned long long atomicAdd(unsigned long long *at, unsigned long long value) {
    const unsigned long long before = *at;
    *at = before + value;
    return before;
}
inline unsigned long long atomicCAS(unsigned long long *at, unsigned long long expected, unsigned long long value) {
    const unsigned long long before = *at;
    if (before == expected) *at = value;
    return before;
}
