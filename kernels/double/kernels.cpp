// The kernels of the exchange and the courier as functions of the host, and what plays launches of them:
// src/cuda/exchange/tests and src/cuda/courier/tests run it.

#include "../machine.cuh"

// What is compiled of the many.
#define UNISONO_FEW
#include "../exchange.cu"
#undef KERNEL
#undef SEVERAL
#undef SUM_DEALT
#include "../stages.cu"
#include "../windowed.cu"
#include "../courier.cu"

namespace unisono {

// What the host does about an order: `Deed` of src/cuda/courier/tests/kernel.rs.
struct Deed {
    // Waits until all blocks of these desks have carried out the orders of these numbers; 0: for nothing.
    struct {
        u32 desk, number;
    } behind[2];
    // Copies what an earlier order has brought; NULL: nothing.
    u8 *to;
    const u8 *from;
    u64 bytes;
    // Writes an order on its slip.
    u32 desk, number;
    u32 field[FIELDS];
    // What stands on the back.
    u32 back[BACK_WORDS];
};

// The host beside couriers, as a kernel of its own.
struct Host {
    Stand *stand;
    const Deed *deeds;
    u64 count;
    u32 blocks[DESKS];
};

}  // namespace unisono

ENTRY(unisono_double_host, unisono::Host, 1, 1) {
    using namespace unisono;
    for (u64 i = 0; i < call.count; i++) {
        const Deed &deed = call.deeds[i];
        for (const auto &behind : deed.behind) {
            for (u32 block = 0; behind.number != 0 && block < call.blocks[behind.desk]; block++) {
                const u32 *done = &call.stand->desk[behind.desk].done[block];
                while (static_cast<int>(load_acquire(done) - behind.number) < 0) pause();
            }
        }
        for (u64 at = 0; at < deed.bytes; at++) store_plain(deed.to + at, load_byte(deed.from + at));
        const u64 numbered = static_cast<u64>(deed.number) << 32;
        const u32 slip = deed.number % SLIPS;
        for (u32 word = 0; word < deed.field[ON_BACK]; word++) {
            store_relaxed(&call.stand->back[deed.desk - 1][slip][word], numbered | deed.back[word]);
        }
        for (u32 field = 0; field < FIELDS; field++) {
            store_release(&call.stand->desk[deed.desk].slip[slip].field[field], numbered | deed.field[field]);
        }
    }
}

#include <condition_variable>
#include <mutex>
#include <thread>

namespace machine {

// A block and the thread of the host that it is: it runs when it is told to.
struct Actor {
    Block block;
    std::mutex mutex;
    std::condition_variable changed;
    u64 turns = 0;
    bool over = false;
    std::thread thread;

    template <class... Arguments>
    explicit Actor(Arguments &&...arguments) : block(arguments...), thread([this] { play(); }) {}
    // One that cannot end is left as it is.
    void abandon() { thread.detach(); }

    void play() {
        running = &block;
        std::unique_lock<std::mutex> lock(mutex);
        while (!over) {
            changed.wait(lock, [&] { return turns > 0; });
            over = !block.run(turns);
            turns = 0;
            changed.notify_all();
        }
    }
    // Has it run so many turns.
    void run(u64 count) {
        std::unique_lock<std::mutex> lock(mutex);
        turns = count;
        changed.notify_all();
        changed.wait(lock, [&] { return turns == 0; });
    }
};

// What is copied when a kernel has ended: what its rank sees there then.
struct Result {
    const u8 *from;
    u64 bytes;
    u8 *to;
};

// A launch of a kernel: `Launch` of src/cuda/exchange/tests.
struct Launch {
    void (*entry)(const void *);
    const void *call;
    u32 blocks, threads;
    const Result *results;
    u64 count;
    // Whether it may begin as soon as all blocks of the one before it allow that.
    u64 overlaps;
};

// A rank: what its stream was given, and the abort word of its page.
struct Rank {
    const Launch *launches;
    u64 count;
    u64 *abort;
};

struct Stream {
    using Blocks = std::vector<std::unique_ptr<Actor>>;

    const Rank &rank;
    u64 next = 0;
    // Those of the kernel whose turn it is, and of the next one if that has begun.
    Blocks actors, early;

    bool is_over() const { return actors.empty() && next == rank.count; }
    // Ends a kernel whose blocks have ended, and begins the next one.
    void advance(World &world) {
        const auto is_over = [](const std::unique_ptr<Actor> &actor) { return actor->over; };
        if (std::all_of(actors.begin(), actors.end(), is_over)) {
            for (const auto &actor : actors) {
                actor->block.commit_all();
                actor->thread.join();
            }
            if (!actors.empty()) {
                const Launch &ended = rank.launches[next - 1 - !early.empty()];
                for (u64 i = 0; i < ended.count; i++) memcpy(ended.results[i].to, ended.results[i].from, ended.results[i].bytes);
            }
            actors = std::move(early);
            early.clear();
            for (const auto &actor : actors) actor->block.waits = false;
            if (actors.empty() && next < rank.count) actors = begin(world, false);
        }
        const auto lets = [](const std::unique_ptr<Actor> &actor) { return actor->over || actor->block.released; };
        const bool may = !actors.empty() && early.empty() && next < rank.count && rank.launches[next].overlaps;
        if (may && std::all_of(actors.begin(), actors.end(), lets)) early = begin(world, true);
    }
    Blocks begin(World &world, bool waits) {
        const Launch &launch = rank.launches[next++];
        Blocks blocks;
        for (u32 block = 0; block < launch.blocks; block++) {
            blocks.emplace_back(new Actor(world, block, launch.blocks, launch.threads, launch.entry, launch.call, waits));
        }
        return blocks;
    }
    template <class What>
    void each(What what) const {
        for (const Blocks *blocks : {&actors, &early}) {
            for (const auto &actor : *blocks) what(*actor);
        }
    }
    // Its threads are left behind.
    void forget() {
        for (Blocks *blocks : {&actors, &early}) {
            for (auto &one : *blocks) one.release();
        }
    }
};

// Turns for which a rank stands still, at most.
constexpr u64 FROZEN = 50000;

// After so many turns the first rank is told to end, the others up to `apart` turns after one another; when `grace`
// have gone by since, the play is given up.
struct Patience {
    u64 turns, apart, grace;
};

// How it ended: by itself, because it was told to, or not at all.
enum Ending : int { WELL, ABORTED, STUCK };

}  // namespace machine

// Plays the streams of all ranks to their end. `asked`: how often abort words were read.
extern "C" int unisono_play(const machine::Rank *ranks, machine::u32 size, machine::u64 seed, const machine::Chances *chances,
                            const machine::Patience *patience, machine::u64 *asked) {
    using namespace machine;
    World world{Dice{seed | 1}, *chances};
    for (u32 i = 0; i < 8; i++) world.dice.next();
    for (u32 rank = 0; rank < size; rank++) world.aborts.push_back(reinterpret_cast<u64>(ranks[rank].abort));
    std::vector<Stream> streams;
    for (u32 rank = 0; rank < size; rank++) streams.push_back(Stream{ranks[rank]});
    u64 turns = 0, thaw = 0, end = patience->turns;
    const Stream *frozen = nullptr;
    // Whose turn it is to be told, of those from the first on.
    u32 told = 0;
    const u32 first = patience->apart == 0 ? 0 : world.dice.below(size);
    for (;;) {
        std::vector<Actor *> actors;
        bool over = true;
        for (Stream &stream : streams) {
            stream.advance(world);
            over = over && stream.is_over();
            if (&stream == frozen && turns < thaw) continue;
            stream.each([&](Actor &actor) { actors.push_back(&actor); });
        }
        *asked = world.asked;
        if (over) return told != 0 ? ABORTED : WELL;
        if (world.dice.says(world.chances.freeze)) {
            frozen = &streams[world.dice.below(streams.size())];
            thaw = turns + world.dice.below(FROZEN);
        }
        if (actors.empty()) {
            // Nobody else has anything to do.
            frozen = nullptr;
            continue;
        }
        Actor &actor = *actors[world.dice.below(actors.size())];
        if (actor.over) {
            actor.block.commit_some();
        } else {
            const u64 count = 1 + world.dice.below(4 * actor.block.threads.size());
            actor.run(count);
            turns += count;
        }
        for (; turns >= end && told < size; told++) {
            const u64 word = 1, address = reinterpret_cast<u64>(ranks[(first + told) % size].abort);
            world.commit(address, reinterpret_cast<const u8 *>(&word), sizeof(word));
            end = turns + (told + 1 == size ? patience->grace : patience->apart == 0 ? 0 : world.dice.below(patience->apart));
            frozen = nullptr;
        }
        if (turns < end) continue;
        for (Actor *one : actors) one->abandon();
        for (Stream &stream : streams) stream.forget();
        return STUCK;
    }
}
