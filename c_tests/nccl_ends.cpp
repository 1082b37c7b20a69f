// libnccl.so.2 where threads end and where the process does: what C++ destructors and atexit handlers find. In C++17.

#include <dirent.h>
#include <pthread.h>

#include <thread>

#include "nccl_harness.h"

namespace {

// In a destructor exit() must not be called again.
void demand(bool holds, const char *what) {
    if (!holds) {
        fprintf(stderr, "pid %d: %s (last error: \"%s\")\n", static_cast<int>(getpid()), what, ncclGetLastError(nullptr));
        _exit(1);
    }
}

bool last_error_has(const char *part) { return strstr(ncclGetLastError(nullptr), part) != nullptr; }

// A call that fails, and what it leaves.
void fail_here(const char *where) {
    int count = 0;
    demand(ncclCommCount(nullptr, &count) == ncclInvalidArgument && last_error_has("comm is NULL"), where);
}

// A group of calls and a group that is ended without a start.
void group_here(const char *where) {
    demand(ncclGroupStart() == ncclSuccess && ncclGroupEnd() == ncclSuccess, where);
    demand(ncclGroupEnd() == ncclInvalidUsage && last_error_has("without ncclGroupStart"), where);
}

void all_here(const char *expected, const char *where) {
    demand(last_error_has(expected), where);
    group_here(where);
    fail_here(where);
}

// What failed before exit() is what atexit handlers and destructors of static objects read.
const char *left_for_the_end = nullptr;

struct AtTheEnd {
    ~AtTheEnd() {
        if (left_for_the_end != nullptr) {
            all_here(left_for_the_end, "in the destructor of a static object");
        }
    }
} at_the_end;

void at_exit() {
    all_here(left_for_the_end, "in an atexit handler");
    left_for_the_end = "comm is NULL";
}

struct OfTheThread {
    ~OfTheThread() { all_here("without ncclGroupStart", "in the destructor of a thread_local object"); }
};

thread_local OfTheThread of_the_thread;

void by_the_key(void *) { all_here("comm is NULL", "in the destructor of a pthread key"); }

// Destructors of its thread-locals, then those of keys.
void texts_when_a_thread_ends() {
    pthread_key_t key;
    CHECK(pthread_key_create(&key, by_the_key) == 0);
    std::thread([&] {
        CHECK(pthread_setspecific(key, &key) == 0);
        static_cast<void>(&of_the_thread);
        CHECK(ncclGetLastError(nullptr)[0] == '\0');
        fail_here("in a thread");
        group_here("in a thread");
    }).join();
    CHECK(pthread_key_delete(key) == 0);
}

ncclConfig_t without_waiting() {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

// Communicators that were to be made in a group whose thread has ended say so, whether they block or not.
void communicators_of_a_group_that_was_left() {
    ncclUniqueId id, other;
    ncclComm_t comms[2] = {nullptr, nullptr}, child = nullptr, parent;
    ncclConfig_t config = without_waiting();
    CHECK_OK(ncclGetUniqueId(&id));
    CHECK_OK(ncclGetUniqueId(&other));
    parent = meet(0, 1, other);
    std::thread([&] {
        ncclComm_t on_the_stack = nullptr;
        CHECK_OK(ncclGetUniqueId(&other));
        CHECK_OK(ncclGroupStart());
        CHECK_OK(ncclCommInitRank(&comms[0], 2, id, 0));
        CHECK_OK(ncclGroupStart());
        CHECK_OK(ncclCommInitRankConfig(&comms[1], 2, id, 1, &config));
        CHECK_OK(ncclCommInitRank(&on_the_stack, 1, other, 0));
        CHECK_OK(ncclCommSplit(parent, 0, 0, &child, nullptr));
        CHECK_OK(ncclGroupEnd());
    }).join();
    const ncclComm_t left[] = {comms[0], comms[1], child};
    for (ncclComm_t comm : left) {
        CHECK(comm != nullptr);
        CHECK(settled(comm) == ncclInvalidUsage);
        CHECK(strstr(ncclGetLastError(comm), "has ended in its group") != nullptr);
        int count = 0;
        CHECK_FAILS(ncclInvalidUsage, "has ended in its group", ncclCommCount(comm, &count));
        CHECK_OK(ncclCommDestroy(comm));
    }
    // This thread's groups are its own, and the parent has nothing left to wait for.
    CHECK_OK(ncclCommSplit(parent, 0, 0, &child, nullptr));
    CHECK_OK(ncclCommDestroy(child));
    CHECK_OK(ncclCommFinalize(parent));
    CHECK_OK(ncclCommDestroy(parent));
}

int open_descriptors() {
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder != nullptr);
    int count = 0;
    while (readdir(folder) != nullptr) {
        count++;
    }
    closedir(folder);
    return count;
}

// Calls of a group that was left hold nothing: communicators that are destroyed give back what they had.
void calls_of_a_group_that_was_left() {
    float x = 1, y = 0;
    int before = 0;
    for (int round = 0; round < 6; round++) {
        ncclComm_t comms[2];
        const int devices[2] = {0, 1};
        CHECK_OK(ncclCommInitAll(comms, 2, devices));
        std::thread([&] {
            CHECK_OK(ncclGroupStart());
            for (ncclComm_t comm : comms) {
                CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, nullptr));
                CHECK_OK(ncclSend(&x, 1, ncclFloat, 0, comm, nullptr));
            }
        }).join();
        CHECK(y == 0);
        for (ncclComm_t comm : comms) {
            CHECK_OK(ncclCommDestroy(comm));
        }
        // What the process has once is there after the first.
        if (round == 0) {
            before = open_descriptors();
        }
    }
    double end = seconds_now() + 20;
    while (open_descriptors() > before) {
        CHECK(seconds_now() < end);
        sleep_ms(5);
    }
}

// A group that is left open in a thread can be ended by a destructor there.
struct Ends {
    ncclResult_t *result;
    ~Ends() { *result = ncclGroupEnd(); }
};

void a_destructor_ends_a_group() {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclResult_t result = ncclInternalError;
    CHECK_OK(ncclGetUniqueId(&id));
    std::thread([&] {
        thread_local Ends ends{&result};
        CHECK_OK(ncclGroupStart());
        CHECK_OK(ncclCommInitRank(&comm, 1, id, 0));
    }).join();
    CHECK_OK(result);
    CHECK(settled(comm) == ncclSuccess);
    CHECK_OK(ncclCommDestroy(comm));
}

// Ranks that call until the process has ended. Handlers run in reverse: what was given to atexit before the first
// communicator was made runs after the library has said goodbye to the other ranks.
ncclComm_t until_the_end[2];

void sum(ncclComm_t comm, ncclResult_t expected, const char *part, const char *where) {
    float x = 1, y = 0;
    demand(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, nullptr) == expected, where);
    demand(expected == ncclSuccess ? y == 2 : last_error_has(part), where);
}

void before_the_goodbye() { sum(until_the_end[0], ncclSuccess, "", "in a handler before the goodbye"); }

void behind_the_goodbye() {
    const char *where = "in a handler behind the goodbye";
    ncclComm_t child = nullptr, own[2];
    for (ncclComm_t comm : until_the_end) {
        sum(comm, ncclInvalidUsage, "this process is ending", where);
    }
    demand(ncclCommSplit(until_the_end[0], 0, 0, &child, nullptr) == ncclInvalidUsage, where);
    demand(last_error_has("this process is ending"), where);
    ncclResult_t state = ncclInternalError;
    demand(ncclCommGetAsyncError(until_the_end[0], &state) == ncclSuccess && state == ncclSuccess, where);
    demand(ncclCommFinalize(until_the_end[0]) == ncclSuccess, where);
    for (ncclComm_t comm : until_the_end) {
        demand(ncclCommDestroy(comm) == ncclSuccess, where);
    }
    // What is made now, of ranks that are all here, works.
    const int devices[2] = {0, 1};
    float x[2] = {1, 1}, y[2] = {0, 0};
    demand(ncclCommInitAll(own, 2, devices) == ncclSuccess && ncclGroupStart() == ncclSuccess, where);
    for (int rank = 0; rank < 2; rank++) {
        demand(ncclAllReduce(&x[rank], &y[rank], 1, ncclFloat, ncclSum, own[rank], nullptr) == ncclSuccess, where);
    }
    demand(ncclGroupEnd() == ncclSuccess && y[0] == 2 && y[1] == 2, where);
}

void calls_at_exit(int rank, int size, ncclUniqueId id) {
    CHECK(atexit(behind_the_goodbye) == 0);
    until_the_end[0] = meet(rank, size, id);
    CHECK_OK(ncclCommSplit(until_the_end[0], 0, rank, &until_the_end[1], nullptr));
    CHECK(atexit(before_the_goodbye) == 0);
    sum(until_the_end[0], ncclSuccess, "", "before exit");
}

}  // namespace

int main() {
    setenv("UNISONO_NCCL_HOST", "1", 1);
    // First: it forks.
    nccl_ranks(2, 60, calls_at_exit);
    texts_when_a_thread_ends();
    communicators_of_a_group_that_was_left();
    calls_of_a_group_that_was_left();
    a_destructor_ends_a_group();
    CHECK(atexit(at_exit) == 0);
    CHECK_RESULT(ncclInvalidArgument, ncclGetVersion(nullptr));
    left_for_the_end = "version is NULL";
    return 0;
}
