/*
 * What the tests of libnccl.so.2 share: checks that say where they failed, and ranks as processes, on host memory.
 *
 * nccl_ranks(n, seconds, body) forks n processes, which get a unique id that the first of them makes, through a pipe of each,
 * and waits for all of them, for a bounded time.
 */
#ifndef UNISONO_TEST_NCCL_HARNESS_H
#define UNISONO_TEST_NCCL_HARNESS_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <nccl.h>

#define CHECK(condition)                                                                              \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: pid %d: %s\n", __FILE__, __LINE__, (int)getpid(), #condition);    \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define CHECK_RESULT(expected, call)                                                                  \
    do {                                                                                              \
        ncclResult_t got_ = (call);                                                                   \
        if (got_ != (expected)) {                                                                     \
            fprintf(stderr, "%s:%d: pid %d: %s is %d, not %d\n  last error: %s\n", __FILE__, __LINE__,\
                    (int)getpid(), #call, (int)got_, (int)(expected), ncclGetLastError(NULL));        \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define CHECK_OK(call) CHECK_RESULT(ncclSuccess, call)

#define CHECK_TEXT(part)                                                                              \
    do {                                                                                              \
        const char *text_ = ncclGetLastError(NULL);                                                   \
        if (strstr(text_, (part)) == NULL) {                                                          \
            fprintf(stderr, "%s:%d: pid %d: \"%s\" does not contain \"%s\"\n", __FILE__, __LINE__,    \
                    (int)getpid(), text_, (part));                                                    \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

/* The call fails with this result, and its text contains this part. */
#define CHECK_FAILS(result, part, call)                                                               \
    do {                                                                                              \
        CHECK_RESULT(result, call);                                                                   \
        CHECK_TEXT(part);                                                                             \
    } while (0)

typedef void (*nccl_body)(int rank, int size, ncclUniqueId id);

static inline double seconds_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static inline void sleep_ms(long milliseconds) {
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    while (nanosleep(&pause, &pause) != 0 && errno == EINTR) {
    }
}

/* What a communicator has come to, once it is no longer in progress. */
static inline ncclResult_t settled(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    double end = seconds_now() + 60;
    while (state == ncclInProgress) {
        CHECK_OK(ncclCommGetAsyncError(comm, &state));
        CHECK(seconds_now() < end);
        sleep_ms(1);
    }
    return state;
}

static inline ncclComm_t meet(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = NULL;
    CHECK_OK(ncclCommInitRank(&comm, size, id, rank));
    CHECK(comm != NULL);
    return comm;
}

/* Rank `killed` (or -1) may end by SIGKILL; all others end well. */
static inline void nccl_ranks_but(int size, double seconds, nccl_body body, int killed) {
    setenv("UNISONO_NCCL_HOST", "1", 1);
    fflush(NULL);
    int (*pipes)[2] = (int (*)[2])calloc((size_t)size, sizeof *pipes);
    pid_t *pids = (pid_t *)calloc((size_t)size, sizeof(pid_t));
    for (int rank = 0; rank < size; rank++) {
        CHECK(pipe(pipes[rank]) == 0);
    }
    for (int rank = 0; rank < size; rank++) {
        pids[rank] = fork();
        CHECK(pids[rank] >= 0);
        if (pids[rank] == 0) {
            ncclUniqueId id;
            if (rank == 0) {
                CHECK_OK(ncclGetUniqueId(&id));
                for (int other = 1; other < size; other++) {
                    CHECK(write(pipes[other][1], &id, sizeof id) == (ssize_t)sizeof id);
                }
            } else {
                CHECK(read(pipes[rank][0], &id, sizeof id) == (ssize_t)sizeof id);
            }
            for (int other = 0; other < size; other++) {
                close(pipes[other][0]);
                close(pipes[other][1]);
            }
            free(pipes);
            free(pids);
            body(rank, size, id);
            exit(0);
        }
    }
    int wrong = 0, left = size, late = 0;
    double end = seconds_now() + seconds;
    while (left > 0) {
        for (int rank = 0; rank < size; rank++) {
            int status = 0;
            if (pids[rank] != 0 && waitpid(pids[rank], &status, WNOHANG) == pids[rank]) {
                pids[rank] = 0;
                left--;
                int well = WIFEXITED(status) && WEXITSTATUS(status) == 0;
                if (!well && !(rank == killed && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) {
                    fprintf(stderr, "rank %d of %d ended with status 0x%x\n", rank, size, (unsigned)status);
                    wrong = 1;
                }
            }
        }
        if (left > 0 && !late && seconds_now() > end) {
            late = 1;
            for (int rank = 0; rank < size; rank++) {
                if (pids[rank] != 0) {
                    fprintf(stderr, "rank %d is not done after %.0f s\n", rank, seconds);
                    kill(pids[rank], SIGKILL);
                }
            }
        }
        sleep_ms(2);
    }
    for (int rank = 0; rank < size; rank++) {
        close(pipes[rank][0]);
        close(pipes[rank][1]);
    }
    free(pipes);
    free(pids);
    if (wrong || late) {
        exit(1);
    }
}

static inline void nccl_ranks(int size, double seconds, nccl_body body) {
    nccl_ranks_but(size, seconds, body, -1);
}

#endif
