// libnccl.so.2 in children that are forked while other threads of the process are in it. In C++17.

#include <atomic>
#include <thread>
#include <vector>

#include "nccl_harness.h"

namespace {

constexpr int RANKS = 2;
constexpr int FORKS = 20;

void make(ncclComm_t (&comms)[RANKS]) {
    const int devices[RANKS] = {0, 1};
    CHECK_OK(ncclCommInitAll(comms, RANKS, devices));
}

void destroy(ncclComm_t (&comms)[RANKS]) {
    for (ncclComm_t comm : comms) {
        CHECK_OK(ncclCommDestroy(comm));
    }
}

// One that works: a group of all its ranks.
void use(ncclComm_t (&comms)[RANKS]) {
    float x = 1, y[RANKS] = {0, 0};
    CHECK_OK(ncclGroupStart());
    for (int rank = 0; rank < RANKS; rank++) {
        CHECK_OK(ncclAllReduce(&x, &y[rank], 1, ncclFloat, ncclSum, comms[rank], nullptr));
    }
    CHECK_OK(ncclGroupEnd());
    CHECK(y[0] == RANKS && y[1] == RANKS);
}

// What is the parent's is refused, and can be destroyed; its own works. It ends by exit as any program does.
void in_child(ncclComm_t (&parents)[RANKS]) {
    alarm(60);
    ncclUniqueId id;
    ncclComm_t own[RANKS];
    ncclResult_t state = ncclSuccess;
    float x = 1;
    for (ncclComm_t comm : parents) {
        CHECK_FAILS(ncclInvalidUsage, "before a fork", ncclAllReduce(&x, &x, 1, ncclFloat, ncclSum, comm, nullptr));
        CHECK_FAILS(ncclInvalidUsage, "before a fork", ncclCommGetAsyncError(comm, &state));
        CHECK_FAILS(ncclInvalidUsage, "before a fork", ncclCommFinalize(comm));
    }
    CHECK_OK(ncclCommDestroy(parents[0]));
    CHECK_OK(ncclCommAbort(parents[1]));
    CHECK_FAILS(ncclInvalidArgument, "is no communicator", ncclCommDestroy(parents[0]));
    CHECK_OK(ncclGetUniqueId(&id));
    make(own);
    use(own);
    destroy(own);
    exit(0);
}

}  // namespace

int main() {
    // A log is written under a lock, too.
    setenv("UNISONO_NCCL_HOST", "1", 1);
    setenv("NCCL_DEBUG", "TRACE", 1);
    setenv("NCCL_DEBUG_FILE", "/dev/null", 1);
    ncclComm_t comms[RANKS];
    make(comms);
    std::atomic<bool> over{false};
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; thread++) {
        threads.emplace_back([&] {
            while (!over) {
                ncclUniqueId id;
                ncclComm_t own[RANKS];
                CHECK_OK(ncclGetUniqueId(&id));
                make(own);
                destroy(own);
            }
        });
        threads.emplace_back([&] {
            for (int count = 0; !over;) {
                CHECK_RESULT(ncclInvalidArgument, ncclCommCount(nullptr, &count));
            }
        });
    }
    for (int child = 0; child < FORKS; child++) {
        pid_t pid = fork();
        CHECK(pid >= 0);
        if (pid == 0) {
            in_child(comms);
        }
        int status = 1;
        CHECK(waitpid(pid, &status, 0) == pid);
        if (status != 0) {
            fprintf(stderr, "child %d of %d ended with status 0x%x\n", child, FORKS, static_cast<unsigned>(status));
            _exit(1);
        }
    }
    over = true;
    for (auto &thread : threads) {
        thread.join();
    }
    // The parent's are as they were.
    use(comms);
    destroy(comms);
    return 0;
}
