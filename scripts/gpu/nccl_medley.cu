// Random programs over any library with NCCL's ABI: what they bring is checked, element by element, and that they end.
//
//   nccl_medley [--seed N] [--seconds S] [--threads] [--hosts H] [--windows] [--no-graphs] [--trouble] [--ranks N]
//
// A process for each GPU, or a thread with --threads. Program N follows from N alone and is the same on all ranks:
// calls of every kind, type and operator, with 0 to 4 Mi elements, in place or not, aligned or not, on three streams
// and two communicators (one numbered backwards), one by one, in groups, or in graphs that are replayed again later;
// some ranks are late, on the host or on the device. Communicators are made anew after 32 programs, blocking or not,
// some with few blocks. With --hosts ranks take themselves for those of so many hosts (UNISONO_HOST); with --windows
// all memory is registered; with --trouble one rank aborts its communicators in the middle of each program, leaves a
// call out or calls something else: all must hear of it within UNISONO_NCCL_TIMEOUT (3 seconds), end, and go on with
// new ones. Programs are run for S seconds (10). Exit status 1 says what was wrong with which call of which program, 3
// that a program did not end. `--describe --ranks N --seed S` tells what program S is.
#include <cuda_runtime.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_medley_kernels.cuh"
#include "nccl_medley_program.cuh"

namespace {

using namespace medley;
using Clock = std::chrono::steady_clock;

constexpr int MAX_RANKS = 8;

// What all ranks share, whether threads or processes.
struct Shared {
    std::atomic<int> arrived, round, failed;
    ncclUniqueId id;
    std::atomic<int> over;
};
Shared *shared;

thread_local int rank;
thread_local std::string doing = "starting";

[[noreturn]] void fail(int status, const char *format, ...) {
    va_list list;
    va_start(list, format);
    char text[1024];
    std::vsnprintf(text, sizeof text, format, list);
    std::fprintf(stderr, "medley: rank %d, %s: %s\n", rank, doing.c_str(), text);
    shared->failed = 1;
    _exit(status);
}

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        const cudaError_t status_ = call;                                                                              \
        if (status_ != cudaSuccess) fail(1, "%s: %s", #call, cudaGetErrorString(status_));                             \
    } while (0)
#define NCCL(call)                                                                                                     \
    do {                                                                                                               \
        const ncclResult_t status_ = call;                                                                             \
        if (status_ != ncclSuccess) fail(1, "%s: %d: %s", #call, status_, ncclGetLastError(nullptr));                  \
    } while (0)

// All ranks come here before any goes on.
void meet() {
    const int mine = shared->round;
    if (++shared->arrived == options.ranks) {
        shared->arrived = 0;
        shared->round++;
    }
    for (const auto begin = Clock::now(); shared->round == mine;) {
        if (shared->failed) _exit(1);
        if (Clock::now() - begin > std::chrono::seconds(60)) fail(3, "the others have not come");
        usleep(20);
    }
}

class Rank {
  public:
    Rank() {
        int devices;
        CUDA(cudaGetDeviceCount(&devices));
        CUDA(cudaSetDevice(rank % devices));
        for (cudaStream_t &stream : streams) CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        if (options.windows) {
            NCCL(ncclMemAlloc(reinterpret_cast<void **>(&arena), ARENA));
        } else {
            CUDA(cudaMalloc(&arena, ARENA));
        }
        CUDA(cudaHostAlloc(&wrong, sizeof *wrong, cudaHostAllocMapped));
        begin(options.seed);
        watch = std::thread([this, mine = rank] {
            rank = mine;
            for (u64 seen = ~u64(0), since = 0; !over; usleep(100000)) {
                since = seen == progress ? since + 1 : 0;
                seen = progress;
                if (since < 300) continue;
                doing = "program " + std::to_string(current) + ", step " + std::to_string(step_now) + ", phase " + std::to_string(phase);
                fail(3, "it does not go on");
            }
        });
    }
    ~Rank() {
        over = true;
        watch.join();
    }

    // New communicators.
    void begin(u64 seed) {
        Random random{seed};
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = random.below(2);
        if (random.one_in(3)) config.maxCTAs = static_cast<int>(1 + random.below(16));
        if (rank == 0) NCCL(ncclGetUniqueId(&shared->id));
        meet();
        for (ncclComm_t &comm : comms) comm = nullptr;
        NCCL(settled(ncclCommInitRankConfig(&comms[0], options.ranks, shared->id, rank, &config)));
        NCCL(settled(ncclCommSplit(comms[0], 0, -rank, &comms[1], &config)));
        for (int c = 0; options.windows && c < COMMS; c++) {
            NCCL(settled(ncclCommWindowRegister(comms[c], arena, ARENA, &windows[c], NCCL_WIN_COLL_SYMMETRIC)));
        }
    }
    void end() {
        for (int c = COMMS - 1; c >= 0; c--) {
            if (options.windows) NCCL(settled(ncclCommWindowDeregister(comms[c], windows[c])));
            NCCL(settled(ncclCommFinalize(comms[c])));
            NCCL(ncclCommDestroy(comms[c]));
            comms[c] = nullptr;
        }
    }

    void run(const Program &program) {
        current = program.seed;
        playing = &program;
        *wrong = Wrong{};
        meet();
        CUDA(cudaMemsetAsync(arena, UNTOUCHED, program.used + GUARD, streams[0]));
        CUDA(cudaStreamSynchronize(streams[0]));
        std::vector<cudaGraphExec_t> graphs;
        for (step_now = 0; step_now < program.steps.size(); step_now++) {
            const Step &step = program.steps[step_now];
            progress++;
            doing = "program " + std::to_string(program.seed) + ", step " + std::to_string(step_now);
            phase = 1;
            // The others' calls of this program fail from here on, or end.
            if (program.trouble == ABORTS && rank == program.victim && step_now == program.trouble_at) break;
            const std::vector<Call> calls = program.calls(step_now, rank);
            if (step.late == rank && step.on_host) usleep(step.late_us);
            if (step.late == rank && !step.on_host) {
                occupy<<<1, 1, 0, streams[step.calls.empty() ? step.stream : step.calls[0].stream]>>>(u64(step.late_us) * 1000);
            }
            if (step.mode == REPLAY || step.mode == GRAPH) {
                if (step.mode == GRAPH) graphs.push_back(capture(step, calls));
                if (gone) break;
                for (int i = 0; i < step.launches; i++) CUDA(cudaGraphLaunch(graphs[step.graph], streams[step.stream]));
            } else {
                make(calls, step.mode == GROUP);
            }
            if (gone) break;
            phase = 2;
            if (step.synchronized && program.trouble == NONE) CUDA(cudaStreamSynchronize(streams[step.stream]));
        }
        phase = 3;
        if (program.trouble != NONE) recover(program);
        for (cudaStream_t stream : streams) CUDA(cudaStreamSynchronize(stream));
        phase = 4;
        for (cudaGraphExec_t graph : graphs) {
            if (graph) CUDA(cudaGraphExecDestroy(graph));
        }
        if (program.trouble == NONE) judge(program);
        progress++;
    }

  private:
    void judge(const Program &program) {
        for (const Step &step : program.steps) {
            for (const Call &call : step.calls) guards(call);
        }
        CUDA(cudaStreamSynchronize(streams[0]));
        if (wrong->count == 0) return;
        for (const Step &step : program.steps) {
            for (const Call &call : step.calls) {
                if (call.number != wrong->call) continue;
                fail(1, "%u wrong: %s of %llu elements of type %d, operator %d, root %d, communicator %d, mode %d, %s: element %lld is %g, not %g",
                     wrong->count, KIND_NAMES[call.kind], (unsigned long long)call.count, call.type, call.combination, call.root,
                     call.comm, step.mode, call.in_place ? "in place" : "not in place", (long long)wrong->index, wrong->got, wrong->wanted);
            }
        }
        fail(1, "%u wrong, of call %u, which is none", wrong->count, wrong->call);
    }

    u32 me(int comm) const { return numbered(comm, rank, options.ranks); }

    Values values(const Call &call) const {
        // What is only moved has any values.
        return Values{call.number, static_cast<u32>(options.ranks), call.combines() ? call.combination : MINIMUM};
    }

    void give(const Call &call, u64 at, u64 count, u64 first, cudaStream_t stream, int of) {
        if (count == 0) return;
        with_type(call.type, [&](auto *type) {
            fill<<<blocks_for(count), 256, 0, stream>>>(reinterpret_cast<decltype(type)>(arena + at), count, values(call), of, first);
        });
        CUDA(cudaGetLastError());
    }
    void check(const Call &call, u64 at, u64 count, u64 first, cudaStream_t stream, int of) {
        if (count == 0) return;
        with_type(call.type, [&](auto *type) {
            compare<<<blocks_for(count), 256, 0, stream>>>(reinterpret_cast<decltype(type)>(arena + at), count, values(call), of, first, wrong);
        });
        CUDA(cudaGetLastError());
    }

    // Where this rank's input of a call lies: in place where NCCL has it so.
    u64 input(const Call &call) const {
        const u64 part = me(call.comm) * call.count * bytes_of(call.type);
        const bool root = me(call.comm) == static_cast<u32>(call.root);
        if (!call.in_place) return call.input;
        return call.kind == ALLGATHER || (call.kind == GATHER && root) ? call.output + part : call.output;
    }
    u64 output(const Call &call) const {
        const u64 part = me(call.comm) * call.count * bytes_of(call.type);
        const bool root = me(call.comm) == static_cast<u32>(call.root);
        return call.in_place && (call.kind == REDUCE_SCATTER || (call.kind == SCATTER && root)) ? call.output + part : call.output;
    }

    // Gives the input, and clears what is to be obtained: a graph finds there what it brought before.
    void prepare(const Call &call, cudaStream_t stream) {
        const u32 self = me(call.comm);
        const u64 element = bytes_of(call.type);
        const auto clear = [&](u64 at, u64 count) { CUDA(cudaMemsetAsync(arena + at, UNTOUCHED, count * element, stream)); };
        // Only the root of a broadcast has something.
        const bool gives = call.kind != BROADCAST || self == static_cast<u32>(call.root);
        const bool obtains = call.kind != MESSAGES && (!call.in_place || !gives || call.kind == ALLGATHER || call.kind == GATHER || call.kind == SCATTER);
        if (obtains) clear(call.in_place ? call.output : output(call), call.outputs(self, options.ranks));
        if (gives) give(call, input(call), call.inputs(self, options.ranks), 0, stream, self);
        for (const Message &message : call.messages) {
            if (message.target == self) clear(message.to, message.count);
        }
        for (const Message &message : call.messages) {
            if (message.source == self) give(call, message.from, message.count, message.to, stream, self);
        }
    }

    ncclResult_t begin_call(const Call &call, cudaStream_t stream) {
        // Who gives or obtains nothing may have no memory.
        const bool root = me(call.comm) == static_cast<u32>(call.root), none = call.number % 2 == 0 && !call.in_place && !root;
        const void *in = none && (call.kind == SCATTER || call.kind == BROADCAST) ? nullptr : arena + input(call);
        void *out = none && (call.kind == REDUCE || call.kind == GATHER) ? nullptr : arena + output(call);
        const ncclComm_t comm = comms[call.comm];
        ncclRedOp_t op = call.combination == PREMULTIPLIED ? ncclSum : OPERATORS[call.combination];
        const bool premultiplied = call.combines() && call.combination == PREMULTIPLIED;
        u8 two[8] = {};
        if (premultiplied) {
            with_type(call.type, [&](auto *type) {
                const std::remove_reference_t<decltype(*type)> scalar(2.0f);
                std::memcpy(two, &scalar, sizeof scalar);
            });
            const ncclResult_t made = ncclRedOpCreatePreMulSum(&op, two, call.type, ncclScalarHostImmediate, comm);
            if (made != ncclSuccess) return made;
        }
        ncclResult_t result = ncclSuccess;
        switch (call.kind) {
            case ALLREDUCE: result = ncclAllReduce(in, out, call.count, call.type, op, comm, stream); break;
            case REDUCE: result = ncclReduce(in, out, call.count, call.type, op, call.root, comm, stream); break;
            case REDUCE_SCATTER: result = ncclReduceScatter(in, out, call.count, call.type, op, comm, stream); break;
            case BROADCAST: result = ncclBroadcast(in, out, call.count, call.type, call.root, comm, stream); break;
            case ALLGATHER: result = ncclAllGather(in, out, call.count, call.type, comm, stream); break;
            case ALLTOALL: result = ncclAlltoAll(in, out, call.count, call.type, comm, stream); break;
            case GATHER: result = ncclGather(in, out, call.count, call.type, call.root, comm, stream); break;
            case SCATTER: result = ncclScatter(in, out, call.count, call.type, call.root, comm, stream); break;
            default:
                result = ncclGroupStart();
                for (const Message &message : call.messages) {
                    if (result == ncclSuccess && message.source == me(call.comm)) {
                        result = ncclSend(arena + message.from, message.count, call.type, message.target, comm, stream);
                    }
                    if (result == ncclSuccess && message.target == me(call.comm)) {
                        result = ncclRecv(arena + message.to, message.count, call.type, message.source, comm, stream);
                    }
                }
                const ncclResult_t ended = ncclGroupEnd();
                if (result == ncclSuccess) result = ended;
        }
        if (premultiplied) ncclRedOpDestroy(op, comm);
        return result;
    }

    void examine(const Call &call, cudaStream_t stream) {
        const u32 self = me(call.comm), size = options.ranks;
        const u64 count = call.count, element = bytes_of(call.type), at = output(call);
        const bool root = self == static_cast<u32>(call.root);
        // What was given is as it was.
        const bool is_left = !call.in_place || ((call.kind == REDUCE || call.kind == GATHER) && !root);
        if (is_left && (call.kind != BROADCAST || root)) check(call, input(call), call.inputs(self, size), 0, stream, self);
        switch (call.kind) {
            case ALLREDUCE: check(call, at, count, 0, stream, -1); break;
            case REDUCE: if (root) check(call, at, count, 0, stream, -1); break;
            case REDUCE_SCATTER: check(call, at, count, self * count, stream, -1); break;
            case BROADCAST: check(call, at, count, 0, stream, call.root); break;
            case SCATTER: check(call, at, count, self * count, stream, call.root); break;
            case ALLGATHER: case ALLTOALL: case GATHER:
                if (call.kind == GATHER && !root) break;
                for (u32 of = 0; of < size; of++) {
                    check(call, at + of * count * element, count, call.kind == ALLTOALL ? self * count : 0, stream, of);
                }
                break;
            default:
                for (const Message &message : call.messages) {
                    if (message.target == self) check(call, message.to, message.count, message.to, stream, message.source);
                }
        }
    }

    // What lies around a call's output, and what is nobody's, must be as it was.
    void guards(const Call &call) {
        const u32 self = me(call.comm);
        const auto around = [&](u64 at, u64 bytes) {
            compare_untouched<<<1, GUARD, 0, streams[0]>>>(arena + at - GUARD / 2, GUARD / 2, call.number, wrong);
            compare_untouched<<<1, GUARD, 0, streams[0]>>>(arena + at + bytes, GUARD / 2, call.number, wrong);
        };
        const auto untouched = [&](u64 at, u64 bytes) {
            if (bytes > 0) compare_untouched<<<blocks_for(bytes), 256, 0, streams[0]>>>(arena + at, bytes, call.number, wrong);
        };
        const u64 element = bytes_of(call.type);
        for (const Message &message : call.messages) {
            around(message.to, message.count * element);
            if (message.target != self) untouched(message.to, message.count * element);
        }
        if (call.kind == MESSAGES) return;
        const bool blocks = call.moves_blocks();
        around(call.output, call.count * element * (blocks ? options.ranks : 1));
        if (call.in_place) return;
        const u64 written = call.outputs(self, options.ranks) * element;
        untouched(call.output + written, call.count * element * (blocks ? options.ranks : 1) - written);
    }

    void make(const std::vector<Call> &calls, bool group) {
        for (const Call &call : calls) prepare(call, streams[call.stream]);
        if (group) NCCL(ncclGroupStart());
        for (const Call &call : calls) answer(begin_call(call, streams[call.stream]), !group);
        if (group) answer(ncclGroupEnd(), true);
        if (gone) return;
        for (const Call &call : calls) examine(call, streams[call.stream]);
    }

    // What a call has come to, where communicators do not block.
    ncclResult_t settled(ncclResult_t result) {
        for (; result == ncclInProgress; usleep(10)) {
            result = ncclSuccess;
            for (ncclComm_t comm : comms) {
                ncclResult_t state = ncclSuccess;
                if (comm) NCCL(ncclCommGetAsyncError(comm, &state));
                if (state != ncclSuccess) result = state;
            }
        }
        return result;
    }

    // A call must succeed, unless there is trouble.
    void answer(ncclResult_t result, bool settles) {
        if (settles) result = settled(result);
        if (result == ncclSuccess || result == ncclInProgress) return;
        const bool may = playing->trouble != NONE && (rank != playing->victim || step_now >= playing->trouble_at);
        if (!may) fail(1, "a call is answered %d: %s", result, ncclGetLastError(nullptr));
        gone = true;
    }

    cudaGraphExec_t capture(const Step &step, const std::vector<Call> &calls) {
        const cudaStream_t stream = streams[step.stream];
        CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
        // Half of the graphs have groups.
        make(calls, step.launches % 2 == 0);
        cudaGraph_t graph = nullptr;
        const cudaError_t ended = cudaStreamEndCapture(stream, &graph);
        if (gone) {
            if (graph) CUDA(cudaGraphDestroy(graph));
            (void)cudaGetLastError();
            return nullptr;
        }
        CUDA(ended);
        cudaGraphExec_t exec;
        CUDA(cudaGraphInstantiate(&exec, graph, 0));
        CUDA(cudaGraphDestroy(graph));
        return exec;
    }

    // Who aborts does so now; the others hear of it, or of what was wrong, and all make new communicators.
    void recover(const Program &program) {
        doing = "program " + std::to_string(program.seed) + ", rank " + std::to_string(program.victim) + " " + TROUBLE_NAMES[program.trouble] + " at step " + std::to_string(program.trouble_at);
        if (program.trouble != ABORTS || rank != program.victim) {
            const auto begin = Clock::now();
            for (bool told = gone; !told;) {
                for (ncclComm_t comm : comms) {
                    ncclResult_t state;
                    NCCL(ncclCommGetAsyncError(comm, &state));
                    told |= state != ncclSuccess && state != ncclInProgress;
                }
                if (Clock::now() - begin > std::chrono::seconds(10)) fail(3, "nothing is told");
                usleep(100);
            }
        }
        phase = 31;
        const auto begin = Clock::now();
        for (int c = COMMS - 1; c >= 0; c--) NCCL(ncclCommAbort(comms[c]));
        const std::chrono::duration<double> took = Clock::now() - begin;
        if (took.count() > 2) fail(1, "aborting took %.1f s", took.count());
        phase = 32;
        for (cudaStream_t stream : streams) CUDA(cudaStreamSynchronize(stream));
        gone = false;
        meet();
        phase = 33;
        this->begin(program.seed);
    }

    cudaStream_t streams[STREAMS];
    ncclComm_t comms[COMMS];
    ncclWindow_t windows[COMMS];
    u8 *arena;
    Wrong *wrong;
    const Program *playing = nullptr;
    bool gone = false;
    std::thread watch;
    std::atomic<bool> over{false};
    std::atomic<u64> progress{0}, current{0}, step_now{0};
    std::atomic<int> phase{0};
};

void play(int mine) {
    rank = mine;
    Rank self;
    u64 programs = 0, calls = 0;
    const auto begin = Clock::now();
    for (u64 seed = options.seed;; seed++) {
        // One decides for all.
        if (rank == 0) shared->over = std::chrono::duration<double>(Clock::now() - begin).count() > options.seconds;
        meet();
        if (shared->over) break;
        const Program program(seed);
        self.run(program);
        if (program.trouble == NONE && seed % 32 == 0) {
            self.end();
            self.begin(seed);
        }
        programs++;
        for (const Step &step : program.steps) calls += step.calls.size();
        // Nobody decides anew before all have gone on.
        meet();
    }
    doing = "ending";
    self.end();
    if (rank == 0) std::printf("medley: %llu programs, %llu calls, all right\n", (unsigned long long)programs, (unsigned long long)calls);
}

}  // namespace

int main(int count, char **arguments) {
    for (int i = 1; i < count; i++) {
        const std::string name = arguments[i];
        const auto value = [&] { return i + 1 < count ? arguments[++i] : "0"; };
        if (name == "--seed") options.seed = std::strtoull(value(), nullptr, 10);
        else if (name == "--seconds") options.seconds = std::atof(value());
        else if (name == "--ranks") options.ranks = std::atoi(value());
        else if (name == "--hosts") options.hosts = std::atoi(value());
        else if (name == "--describe") options.describe = true;
        else if (name == "--threads") options.threads = true;
        else if (name == "--windows") options.windows = true;
        else if (name == "--no-graphs") options.graphs = false;
        else if (name == "--trouble") options.trouble = true;
        else {
            std::fprintf(stderr, "there is no option %s\n", name.c_str());
            return 2;
        }
    }
    if (options.trouble) setenv("UNISONO_NCCL_TIMEOUT", "3", 0);
    void *memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    shared = new (memory) Shared{};
    // A process that has asked the driver has no children that can: so a child counts.
    if (options.ranks == 0) {
        int channel[2];
        if (pipe(channel) != 0) return 2;
        const pid_t child = fork();
        if (child == 0) {
            int devices = 0;
            if (cudaGetDeviceCount(&devices) != cudaSuccess) devices = 0;
            _exit(write(channel[1], &devices, sizeof devices) != sizeof devices);
        }
        int status;
        close(channel[1]);
        if (read(channel[0], &options.ranks, sizeof options.ranks) != sizeof options.ranks) return 2;
        waitpid(child, &status, 0);
    }
    if (options.ranks < 1 || options.ranks > MAX_RANKS) {
        std::fprintf(stderr, "no GPU is here\n");
        return 2;
    }
    if (options.describe) {
        Program(options.seed).describe();
        return 0;
    }
    int worst = 0;
    if (options.threads) {
        std::vector<std::thread> ranks;
        for (int mine = 0; mine < options.ranks; mine++) ranks.emplace_back(play, mine);
        for (std::thread &one : ranks) one.join();
        return 0;
    }
    std::vector<pid_t> children;
    for (int mine = 0; mine < options.ranks; mine++) {
        const pid_t child = fork();
        if (child == 0) {
            if (options.hosts > 1) setenv("UNISONO_HOST", ("medley-" + std::to_string(mine * options.hosts / options.ranks)).c_str(), 1);
            play(mine);
            std::fflush(stdout);
            _exit(0);
        }
        children.push_back(child);
    }
    for (const pid_t child : children) {
        int status;
        waitpid(child, &status, 0);
        worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 1);
        if (worst) shared->failed = 1;
    }
    return worst;
}
