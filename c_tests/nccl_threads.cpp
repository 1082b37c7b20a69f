// libnccl.so.2 in one process: many ranks of one thread, and a thread for each, on host memory. In C++17.

#include <atomic>
#include <thread>
#include <vector>

#include "nccl_harness.h"

namespace {

constexpr int RANKS = 4;

// One thread drives all ranks, as programs of one process do: everything in groups.
void one_thread() {
    std::vector<ncclComm_t> comms(RANKS);
    const int devices[RANKS] = {3, 1, 0, 2};
    CHECK_OK(ncclCommInitAll(comms.data(), RANKS, devices));
    std::vector<std::vector<double>> in(RANKS), out(RANKS);
    for (int rank = 0; rank < RANKS; rank++) {
        int number = -1;
        CHECK_OK(ncclCommUserRank(comms[rank], &number));
        CHECK(number == rank);
        CHECK_OK(ncclCommCuDevice(comms[rank], &number));
        CHECK(number == devices[rank]);
        in[rank].assign(5000, rank + 1);
        out[rank].assign(5000, 0);
    }
    CHECK_OK(ncclGroupStart());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_OK(ncclAllReduce(in[rank].data(), out[rank].data(), 5000, ncclDouble, ncclSum, comms[rank], nullptr));
    }
    CHECK_OK(ncclGroupEnd());
    for (const auto &result : out) {
        for (double x : result) {
            CHECK(x == RANKS * (RANKS + 1) / 2);
        }
    }
    CHECK_OK(ncclGroupStart());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_OK(ncclRecv(out[rank].data(), 5000, ncclDouble, (rank + 1) % RANKS, comms[rank], nullptr));
    }
    for (int rank = RANKS - 1; rank >= 0; rank--) {
        CHECK_OK(ncclSend(in[rank].data(), 5000, ncclDouble, (rank + RANKS - 1) % RANKS, comms[rank], nullptr));
    }
    CHECK_OK(ncclGroupEnd());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK(out[rank][4999] == in[(rank + 1) % RANKS][0]);
    }
    // Children of all, made in one group, by the one thread.
    std::vector<ncclComm_t> halves(RANKS);
    CHECK_OK(ncclGroupStart());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_OK(ncclCommSplit(comms[rank], rank / 2, rank, &halves[rank], nullptr));
    }
    CHECK_OK(ncclGroupEnd());
    CHECK_OK(ncclGroupStart());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_OK(ncclBcast(in[rank].data(), 1, ncclDouble, 1, halves[rank], nullptr));
    }
    CHECK_OK(ncclGroupEnd());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK(in[rank][0] == rank / 2 * 2 + 2);
        CHECK_OK(ncclCommDestroy(halves[rank]));
        CHECK_OK(ncclCommDestroy(comms[rank]));
    }
}

// Ranks of one unique id, created in one group.
void one_group() {
    ncclUniqueId id;
    ncclComm_t comms[2] = {nullptr, nullptr};
    CHECK_OK(ncclGetUniqueId(&id));
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommInitRank(&comms[0], 2, id, 0));
    CHECK_OK(ncclCommInitRank(&comms[1], 2, id, 1));
    CHECK_OK(ncclGroupEnd());
    CHECK_OK(ncclCommDestroy(comms[0]));
    CHECK_OK(ncclCommDestroy(comms[1]));
    // An error in a group leaves nothing behind.
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommInitRank(&comms[0], 2, id, 0));
    CHECK_RESULT(ncclInvalidArgument, ncclCommInitRank(&comms[1], 2, id, 2));
    CHECK_RESULT(ncclInvalidArgument, ncclGroupEnd());
    CHECK(comms[0] == nullptr);
}

// A thread for each rank, with two communicators each, over which calls cross.
void many_threads() {
    ncclUniqueId first, second;
    CHECK_OK(ncclGetUniqueId(&first));
    CHECK_OK(ncclGetUniqueId(&second));
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < RANKS; rank++) {
        threads.emplace_back([&, rank] {
            ncclComm_t a = meet(rank, RANKS, first), b = meet(rank, RANKS, second);
            std::vector<float> x(3000, 1), y(3000, 0);
            for (int round = 0; round < 50; round++) {
                CHECK_OK(ncclAllReduce(x.data(), y.data(), x.size(), ncclFloat, ncclSum, a, nullptr));
                wrong += y[2999] != RANKS;
                CHECK_OK(ncclAllReduce(y.data(), y.data(), x.size(), ncclFloat, ncclMax, b, nullptr));
                wrong += y[0] != RANKS;
            }
            CHECK_OK(ncclCommDestroy(a));
            CHECK_OK(ncclCommDestroy(b));
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
    CHECK(wrong == 0);
}

}  // namespace

int main() {
    setenv("UNISONO_NCCL_HOST", "1", 1);
    one_thread();
    one_group();
    many_threads();
    return 0;
}
