// Groups of collectives over any library with NCCL's ABI: checks what they bring, and says how long a group takes.
//
// A thread for each GPU. Each group has 1 to 64 calls of one operation (a call to send and one to receive count as
// one), of 32 bytes to 4 MiB of float32 each, 64 MiB at most, in place; who sends and receives moves half of that each
// way. The figures are medians of 9 times 20 groups that follow each other on a stream, in microseconds a group, as
// rank 0 sees it: as they are called, and replayed from a graph. Then how long the group takes on rank 0 beyond what
// the last rank is late by, which has 0.3 and 1 ms to do before it: the longer of two medians of 9.
//
// `nccl_groups long`: groups of 4 and 16 calls of 256 KiB to 32 MiB each, 5 that follow each other, of which the last
// call is checked; no late rank.
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#define CHECK(call, good)                                                                                              \
    do {                                                                                                               \
        const auto status = call;                                                                                      \
        if (status != good) {                                                                                          \
            std::fprintf(stderr, "%s: %d\n", #call, static_cast<int>(status));                                         \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (0)
#define CUDA(call) CHECK(call, cudaSuccess)
#define NCCL(call) CHECK(call, ncclSuccess)

namespace {

int ranks;
ncclUniqueId id;
bool is_long;
// Which call of a group is made, or looked at.
thread_local int turn;

// All threads come here before any goes on.
void meet() {
    static std::mutex mutex;
    static std::condition_variable changed;
    static int arrived = 0, round = 0;
    std::unique_lock<std::mutex> lock(mutex);
    const int mine = round;
    if (++arrived == ranks) {
        arrived = 0;
        round++;
        changed.notify_all();
    }
    changed.wait(lock, [&] { return round != mine; });
}

struct Operation {
    const char *name;
    // A call on `count` elements of `memory`, as rank `rank`.
    std::function<ncclResult_t(float *memory, size_t count, int rank, ncclComm_t, cudaStream_t)> call;
    // What element `i` holds afterwards, if each rank had `rank + i % 7` there; or -1 where it holds anything.
    std::function<float(size_t i, size_t count, int rank)> wanted;
};

float given(size_t i, int rank) { return static_cast<float>(rank + i % 7); }
float sum(size_t i) { return static_cast<float>(ranks * (ranks - 1) / 2 + ranks * (i % 7)); }

const std::vector<Operation> operations = {
    {"allreduce",
     [](float *m, size_t n, int, ncclComm_t c, cudaStream_t s) { return ncclAllReduce(m, m, n, ncclFloat, ncclSum, c, s); },
     [](size_t i, size_t, int) { return sum(i); }},
    {"reduce_scatter",
     [](float *m, size_t n, int r, ncclComm_t c, cudaStream_t s) {
         const size_t part = n / ranks;
         return ncclReduceScatter(m, m + r * part, part, ncclFloat, ncclSum, c, s);
     },
     [](size_t i, size_t n, int r) { return i / (n / ranks) == static_cast<size_t>(r) ? sum(i) : -1; }},
    {"allgather",
     [](float *m, size_t n, int r, ncclComm_t c, cudaStream_t s) {
         const size_t part = n / ranks;
         return ncclAllGather(m + r * part, m, part, ncclFloat, c, s);
     },
     [](size_t i, size_t n, int) { return given(i, static_cast<int>(i / (n / ranks))); }},
    {"broadcast",
     [](float *m, size_t n, int, ncclComm_t c, cudaStream_t s) {
         return ncclBroadcast(m, m, n, ncclFloat, ranks - 1, c, s);
     },
     [](size_t i, size_t, int) { return given(i, ranks - 1); }},
    // To one rank after the other.
    {"reduce",
     [](float *m, size_t n, int, ncclComm_t c, cudaStream_t s) {
         return ncclReduce(m, m, n, ncclFloat, ncclSum, turn % ranks, c, s);
     },
     [](size_t i, size_t, int r) { return r == turn % ranks ? sum(i) : given(i, r); }},
    // Half of the memory to the next rank, the other half from the one before.
    {"sendrecv",
     [](float *m, size_t n, int r, ncclComm_t c, cudaStream_t s) {
         const size_t part = n / 2;
         const ncclResult_t sent = ncclSend(m, part, ncclFloat, (r + 1) % ranks, c, s);
         return sent != ncclSuccess ? sent : ncclRecv(m + part, part, ncclFloat, (r + ranks - 1) % ranks, c, s);
     },
     [](size_t i, size_t n, int r) { return i < n / 2 || i >= n / 2 * 2 ? -1 : given(i - n / 2, (r + ranks - 1) % ranks); }},
};

// That follow each other.
int groups() { return is_long ? 5 : 20; }

// Microseconds of one of the groups that `give` gives to the stream.
double median(const std::function<void()> &give, cudaStream_t stream) {
    std::vector<double> times;
    for (int round = 0; round < 10; round++) {
        meet();
        const auto begin = std::chrono::steady_clock::now();
        give();
        CUDA(cudaStreamSynchronize(stream));
        const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
        // The first is not counted.
        if (round > 0) times.push_back(took.count() / groups());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

__global__ void occupy(uint64_t nanoseconds) {
    uint64_t begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}

// Microseconds that what `give` gives takes on rank 0 beyond what the last rank is late by.
double beyond(const std::function<void()> &give, int rank, cudaStream_t stream) {
    cudaEvent_t begin, end;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    double longest = 0;
    for (const int late : {300, 1000}) {
        std::vector<double> times;
        for (int round = 0; round < 10; round++) {
            CUDA(cudaStreamSynchronize(stream));
            meet();
            occupy<<<1, 1, 0, stream>>>(rank == ranks - 1 ? late * 1000 : 1000);
            CUDA(cudaEventRecord(begin, stream));
            give();
            CUDA(cudaEventRecord(end, stream));
            CUDA(cudaStreamSynchronize(stream));
            float took;
            CUDA(cudaEventElapsedTime(&took, begin, end));
            // The first is not counted.
            if (round > 0) times.push_back(1000 * took - late);
        }
        std::sort(times.begin(), times.end());
        longest = std::max(longest, times[times.size() / 2]);
    }
    CUDA(cudaEventDestroy(begin));
    CUDA(cudaEventDestroy(end));
    return longest;
}

void run(int rank) {
    CUDA(cudaSetDevice(rank));
    ncclComm_t comm;
    NCCL(ncclCommInitRank(&comm, ranks, id, rank));
    cudaStream_t stream;
    CUDA(cudaStreamCreate(&stream));
    float *memory;
    const size_t most = (size_t(is_long ? 512 : 64) << 20) / sizeof(float);
    CUDA(cudaMalloc(&memory, most * sizeof(float)));
    const std::vector<size_t> kibibytes =
        is_long ? std::vector<size_t>{256, 1 << 10, 4 << 10, 16 << 10, 32 << 10} : std::vector<size_t>{0, 4, 64, 512, 4 << 10};
    const std::vector<int> numbers = is_long ? std::vector<int>{4, 16} : std::vector<int>{1, 2, 4, 16, 64};
    for (const Operation &operation : operations) {
        for (const size_t kib : kibibytes) {
            // What all ranks share evenly.
            const size_t count = std::max(kib << 10, size_t(32)) / sizeof(float) / ranks * ranks;
            for (const int calls : numbers) {
                if (calls * count > most) continue;
                const auto group = [&] {
                    NCCL(ncclGroupStart());
                    for (int i = 0; i < calls; i++) {
                        turn = i;
                        NCCL(operation.call(memory + i * count, count, rank, comm, stream));
                    }
                    NCCL(ncclGroupEnd());
                };
                std::vector<float> one(count);
                for (size_t i = 0; i < count; i++) one[i] = given(i, rank);
                for (int i = 0; i < calls; i++) {
                    CUDA(cudaMemcpyAsync(memory + i * count, one.data(), count * sizeof(float), cudaMemcpyHostToDevice, stream));
                }
                group();
                const size_t first = is_long ? calls - 1 : 0;
                std::vector<float> all((calls - first) * count);
                CUDA(cudaMemcpyAsync(all.data(), memory + first * count, all.size() * sizeof(float), cudaMemcpyDeviceToHost, stream));
                CUDA(cudaStreamSynchronize(stream));
                for (size_t i = 0; i < all.size(); i++) {
                    turn = static_cast<int>(first + i / count);
                    const float wanted = operation.wanted(i % count, count, rank);
                    if (wanted < 0 || all[i] == wanted) continue;
                    std::fprintf(stderr, "%s, %d of %zu: element %zu of call %d is %g on rank %d, not %g\n", operation.name,
                                 calls, count, i % count, turn, all[i], rank, wanted);
                    std::exit(1);
                }
                const double eager = median([&] {
                    for (int i = 0; i < groups(); i++) group();
                }, stream);
                cudaGraph_t graph;
                cudaGraphExec_t replayed;
                CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
                for (int i = 0; i < groups(); i++) group();
                CUDA(cudaStreamEndCapture(stream, &graph));
                CUDA(cudaGraphInstantiate(&replayed, graph, 0));
                const double captured = median([&] { CUDA(cudaGraphLaunch(replayed, stream)); }, stream);
                CUDA(cudaGraphExecDestroy(replayed));
                CUDA(cudaGraphDestroy(graph));
                const double waited = is_long ? 0 : beyond(group, rank, stream);
                if (rank > 0) continue;
                std::printf("groups: %-14s %2d x %8zu bytes %8.1f us, in graphs %8.1f us", operation.name, calls, count * sizeof(float), eager,
                            captured);
                if (!is_long) std::printf(", for a late rank %8.1f us", waited);
                std::printf("\n");
            }
        }
    }
    NCCL(ncclCommDestroy(comm));
}

}  // namespace

int main(int argc, char **argv) {
    is_long = argc > 1 && std::strcmp(argv[1], "long") == 0;
    CUDA(cudaGetDeviceCount(&ranks));
    NCCL(ncclGetUniqueId(&id));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; rank++) threads.emplace_back(run, rank);
    for (std::thread &thread : threads) thread.join();
}
