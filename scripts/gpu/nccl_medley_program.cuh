// What nccl_medley.cu runs: random programs, each from its number and the options alone, and what their calls are to
// bring.
#pragma once

#include <nccl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <vector>

namespace medley {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

constexpr int STREAMS = 3, COMMS = 2;
constexpr u64 ARENA = u64(384) << 20, MOST = u64(4) << 20, GUARD = 256;

struct Options {
    u64 seed = 1;
    double seconds = 10;
    int ranks = 0, hosts = 1;
    bool describe = false, threads = false, windows = false, graphs = true, trouble = false;
};
inline Options options;

struct Random {
    u64 state;
    u64 next() {
        state += 0x9e3779b97f4a7c15;
        u64 x = state;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return x ^ x >> 31;
    }
    u64 below(u64 end) { return next() % end; }
    bool one_in(u64 n) { return below(n) == 0; }
};

enum Kind { ALLREDUCE, REDUCE, REDUCE_SCATTER, BROADCAST, ALLGATHER, ALLTOALL, GATHER, SCATTER, MESSAGES, KINDS };
const char *const KIND_NAMES[] = {"allreduce", "reduce", "reduce_scatter", "broadcast", "allgather", "alltoall", "gather", "scatter", "messages"};
enum Combination { SUM, PRODUCT, MAXIMUM, MINIMUM, AVERAGE, PREMULTIPLIED, COMBINATIONS };
const ncclRedOp_t OPERATORS[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};

// What is combined, and of whose.
struct Values {
    u32 call, size;
    Combination combination;

    // What rank `of` gives at `i`: so small that every type holds the result.
    __host__ __device__ int given(u32 of, u64 i) const {
        const u64 mixed = (i * 0x9e3779b97f4a7c15 + of * 0x85ebca6b + call * u64(0xc2b2ae3d)) * 0xff51afd7ed558ccd;
        const int value = static_cast<int>(mixed >> 57);
        switch (combination) {
            case PRODUCT: return 1 + (value % 4 == 2 && of % 2 == 0);
            case AVERAGE: return static_cast<int>(size) * (value & 1);
            case SUM: case PREMULTIPLIED: return value & 1;
            // What every type holds.
            default: return value % 9;
        }
    }
    __host__ __device__ int combined(u64 i) const {
        int result = given(0, i);
        for (u32 of = 1; of < size; of++) {
            const int value = given(of, i);
            switch (combination) {
                case PRODUCT: result *= value; break;
                case MAXIMUM: result = result > value ? result : value; break;
                case MINIMUM: result = result < value ? result : value; break;
                default: result += value;
            }
        }
        return combination == AVERAGE ? result / static_cast<int>(size) : combination == PREMULTIPLIED ? 2 * result : result;
    }
};

// What number a rank has in a communicator: the second is numbered backwards.
constexpr u32 numbered(int comm, u32 rank, u32 size) { return comm == 0 ? rank : size - 1 - rank; }

struct Message {
    u32 source, target;
    u64 count, from, to;
};

struct Call {
    u32 number;
    int comm, stream, root;
    Kind kind;
    Combination combination;
    ncclDataType_t type;
    u64 count, input, output;
    bool in_place;
    std::vector<Message> messages;

    // Elements that a rank of `size` gives, and obtains.
    u64 inputs(u32 me, u32 size) const {
        switch (kind) {
            case SCATTER: return me == static_cast<u32>(root) ? count * size : 0;
            case REDUCE_SCATTER: case ALLTOALL: return count * size;
            case MESSAGES: return 0;
            default: return count;
        }
    }
    u64 outputs(u32 me, u32 size) const {
        switch (kind) {
            case REDUCE: return me == static_cast<u32>(root) ? count : 0;
            case GATHER: return me == static_cast<u32>(root) ? count * size : 0;
            case ALLGATHER: case ALLTOALL: return count * size;
            case MESSAGES: return 0;
            default: return count;
        }
    }
    // Whether another rank of `size` waits for what rank `of` the communicator gives.
    bool waits_for(u32 of, u32 size) const {
        const bool is_root = of == static_cast<u32>(root);
        switch (kind) {
            case MESSAGES:
                return std::any_of(messages.begin(), messages.end(), [of](const Message &one) {
                    return one.source == of && one.target != of && one.count > 0;
                });
            case BROADCAST: case SCATTER: return is_root && count > 0 && size > 1;
            case REDUCE: case GATHER: return !is_root && count > 0;
            default: return count > 0 && size > 1;
        }
    }
    bool combines() const { return kind <= REDUCE_SCATTER; }
    bool is_rooted() const { return kind == REDUCE || kind == BROADCAST || kind == GATHER || kind == SCATTER; }
    // Whether one side of it has a block for each rank.
    bool moves_blocks() const { return kind != ALLREDUCE && kind != REDUCE && kind != BROADCAST && kind != MESSAGES; }
};

inline u64 bytes_of(ncclDataType_t type) {
    switch (type) {
        case ncclInt8: case ncclUint8: case ncclFloat8e4m3: case ncclFloat8e5m2: return 1;
        case ncclFloat16: case ncclBfloat16: return 2;
        case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
        default: return 8;
    }
}

enum Mode { ALONE, GROUP, GRAPH, REPLAY };
struct Step {
    Mode mode;
    std::vector<Call> calls;
    // Of a graph: the stream, how often it is launched, and of those that are launched again, which.
    int stream, launches, graph;
    // Who is late, by how many microseconds, and whether on the host.
    int late;
    u32 late_us;
    bool on_host, synchronized;
};

enum Trouble { NONE, ABORTS, LEAVES_OUT, OTHER_COUNT, OTHER_KIND, OTHER_ROOT, TROUBLES };
const char *const TROUBLE_NAMES[] = {"nothing", "aborts", "leaves a call out", "has another count", "calls something else", "has another root"};

struct Program {
    u64 seed, used = 0;
    std::vector<Step> steps;
    int graphs = 0;
    // With --trouble: who does what, at which step.
    Trouble trouble = NONE;
    int victim = -1;
    size_t trouble_at = 0;

    explicit Program(u64 seed) : seed(seed) {
        Random random{seed * 1000003};
        random.next();
        u32 number = 0;
        const u32 largest = 4 + random.below(19);
        const u64 length = 4 + random.below(40);
        for (u64 i = 0; i < length && used < ARENA / 2; i++) {
            Step step{};
            const u64 mode = random.below(10);
            step.mode = mode < 5 ? ALONE : mode < 8 || !options.graphs ? GROUP : graphs && mode == 9 ? REPLAY : GRAPH;
            step.stream = random.below(STREAMS);
            step.launches = 1 + random.below(3);
            if (step.mode == REPLAY) step.graph = random.below(graphs);
            if (step.mode == GRAPH) step.graph = graphs++;
            const u64 calls = step.mode == REPLAY ? 0 : step.mode == ALONE ? 1 : 1 + random.below(random.one_in(4) ? 20 : 6);
            // Of some groups all are alike, and have one kernel.
            const bool alike = random.one_in(3);
            for (u64 c = 0; c < calls && used < ARENA / 2; c++) {
                step.calls.push_back(call(random, number++, largest, alike && c > 0 ? &step.calls[0] : nullptr));
            }
            if (step.mode == GRAPH) for (Call &made : step.calls) made.stream = step.stream;
            step.late = random.one_in(4) ? static_cast<int>(random.below(options.ranks)) : -1;
            step.late_us = random.below(random.one_in(5) ? 3000 : 200);
            step.on_host = random.one_in(2);
            step.synchronized = random.one_in(6);
            steps.push_back(step);
        }
        // What comes behind new communicators is looked at, too.
        if (!options.trouble || random.one_in(3)) return;
        victim = random.below(options.ranks);
        trouble_at = random.below(steps.size());
        trouble = static_cast<Trouble>(1 + random.below(TROUBLES - 1));
        const Step &step = steps[trouble_at];
        // Calls in graphs are not compared; what has no bytes, or is between other ranks, concerns nobody; and a rank
        // that has given others what they need hears nothing of who does not come for it.
        const Call *first = step.mode <= GROUP ? &step.calls[0] : nullptr;
        if (!first || first->kind == MESSAGES || first->count < 2 || options.ranks == 1) trouble = ABORTS;
        else if (trouble == (first->is_rooted() ? LEAVES_OUT : OTHER_ROOT)) trouble = ABORTS;
        // Who aborts when all that it gave is done leaves as if it destroyed: only who still waits for it is told.
        if (trouble == ABORTS && !is_waited_for()) trouble = NONE;
    }

    // What rank `mine` calls in a step.
    std::vector<Call> calls(size_t index, int mine) const {
        std::vector<Call> calls = steps[index].calls;
        if (mine != victim || index != trouble_at) return calls;
        switch (trouble) {
            case LEAVES_OUT: calls.erase(calls.begin()); break;
            case OTHER_COUNT: calls[0].count--; break;
            // Of two kinds that take as much memory.
            case OTHER_KIND: calls[0].kind = calls[0].kind == ALLREDUCE ? BROADCAST : calls[0].kind == ALLTOALL ? ALLGATHER : calls[0].moves_blocks() ? ALLTOALL : ALLREDUCE; break;
            case OTHER_ROOT: calls[0].root = (calls[0].root + 1) % options.ranks; break;
            default: break;
        }
        return calls;
    }

    void describe() const {
        const char *const modes[] = {"alone", "group", "graph", "replay"};
        for (size_t i = 0; i < steps.size(); i++) {
            const Step &step = steps[i];
            std::printf("step %zu: %s", i, modes[step.mode]);
            if (step.mode >= GRAPH) std::printf(" %d, %d times on stream %d", step.graph, step.launches, step.stream);
            if (step.late >= 0) std::printf(", rank %d late by %u us on the %s", step.late, step.late_us, step.on_host ? "host" : "device");
            std::printf("%s\n", step.synchronized ? ", then waits" : "");
            if (trouble != NONE && i == trouble_at) std::printf("  here rank %d %s\n", victim, TROUBLE_NAMES[trouble]);
            for (const Call &call : step.calls) {
                std::printf("  %s of %llu of type %d, operator %d, root %d, communicator %d, stream %d%s\n", KIND_NAMES[call.kind],
                            (unsigned long long)call.count, call.type, call.combination, call.root, call.comm, call.stream,
                            call.in_place ? ", in place" : "");
                for (const Message &message : call.messages) {
                    std::printf("    %llu from %u to %u\n", (unsigned long long)message.count, message.source, message.target);
                }
            }
        }
    }

  private:
    // Whether somebody waits for the victim from that step on. (What is launched again is not looked at.)
    bool is_waited_for() const {
        const u32 size = static_cast<u32>(options.ranks), one = static_cast<u32>(victim);
        return std::any_of(steps.begin() + static_cast<std::ptrdiff_t>(trouble_at), steps.end(), [=](const Step &step) {
            return std::any_of(step.calls.begin(), step.calls.end(), [=](const Call &call) {
                return call.waits_for(numbered(call.comm, one, size), size);
            });
        });
    }

    // A place for so many elements, some of them at no address that suits packets.
    u64 place(Random &random, u64 bytes, u64 element) {
        const u64 at = (used + GUARD + 15) / 16 * 16 + (random.one_in(3) ? random.below(16) * element % 64 : 0);
        used = at + bytes + GUARD;
        return at;
    }
    Call call(Random &random, u32 number, u32 largest, const Call *like) {
        Call call{};
        call.number = number;
        call.comm = random.one_in(4);
        call.stream = random.below(STREAMS);
        call.root = random.below(options.ranks);
        call.kind = static_cast<Kind>(random.below(KINDS));
        call.combination = static_cast<Combination>(random.below(COMBINATIONS));
        const ncclDataType_t types[] = {ncclInt8, ncclUint8, ncclInt32, ncclUint32, ncclInt64, ncclUint64, ncclFloat16,
                                        ncclFloat32, ncclFloat64, ncclBfloat16, ncclFloat8e4m3, ncclFloat8e5m2, ncclFloat32, ncclBfloat16};
        call.type = types[random.below(std::size(types))];
        if (like) call.comm = like->comm, call.kind = like->kind, call.combination = like->combination, call.type = like->type;
        const u64 element = bytes_of(call.type), size = options.ranks;
        const auto count = [&] {
            if (random.one_in(25)) return u64(0);
            const u64 top = u64(1) << random.below(largest + 1);
            // Even, or any.
            return std::min(random.one_in(2) ? top : 1 + random.below(top), MOST / (element > 4 ? 2 : 1));
        };
        call.count = like ? std::max<u64>(like->count, 1) - (random.one_in(2) ? 0 : random.below(std::max<u64>(like->count / 2, 1))) : count();
        if (call.kind == MESSAGES) {
            for (u64 left = 1 + random.below(2 * size); left > 0; left--) {
                Message message{static_cast<u32>(random.below(size)), static_cast<u32>(random.below(size)), std::min(count(), MOST / 8), 0, 0};
                message.from = place(random, message.count * element, element);
                message.to = place(random, message.count * element, element);
                call.messages.push_back(message);
            }
            return call;
        }
        const bool blocks = call.moves_blocks();
        if (blocks) call.count = std::min(call.count, MOST / size);
        const u64 whole = call.count * element * (blocks ? size : 1);
        // An all-to-all in place is none of NCCL's.
        call.in_place = call.kind != ALLTOALL && random.one_in(3);
        call.output = place(random, whole, element);
        call.input = call.in_place ? call.output : place(random, whole, element);
        return call;
    }
};

}  // namespace medley
