/*
 * What the tests share: checks that say where they failed, and groups of ranks as processes.
 *
 * run_ranks(n, seconds, body, arg) forks n processes. Each creates a context through a file store in a directory of its own
 * and calls the body; the parent waits for all of them, for a bounded time, and fails if one did. The transport is
 * what UNISONO_TRANSPORT says.
 */
#ifndef UNISONO_TEST_HARNESS_H
#define UNISONO_TEST_HARNESS_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <unisono.h>

#define CHECK(condition)                                                                              \
    do {                                                                                              \
        if (!(condition)) {                                                                           \
            fprintf(stderr, "%s:%d: pid %d: not true: %s\n  last error: %s\n", __FILE__, __LINE__,    \
                    (int)getpid(), #condition, unisono_last_error());                                 \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define CHECK_STATUS(expected, call)                                                                  \
    do {                                                                                              \
        unisono_status_t got_ = (call);                                                               \
        if (got_ != (expected)) {                                                                     \
            fprintf(stderr, "%s:%d: pid %d: %s is %s, not %s\n  last error: %s\n", __FILE__, __LINE__,\
                    (int)getpid(), #call, unisono_status_name(got_), unisono_status_name(expected),   \
                    unisono_last_error());                                                            \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

#define CHECK_OK(call) CHECK_STATUS(UNISONO_OK, call)

#define CHECK_TEXT(text, part)                                                                        \
    do {                                                                                              \
        const char *text_ = (text);                                                                   \
        if (strstr(text_, (part)) == NULL) {                                                          \
            fprintf(stderr, "%s:%d: pid %d: \"%s\" does not contain \"%s\"\n", __FILE__, __LINE__,    \
                    (int)getpid(), text_, (part));                                                    \
            exit(1);                                                                                  \
        }                                                                                             \
    } while (0)

/* The call fails with this status, and its text contains this part. */
#define CHECK_FAILS(status, part, call)                                                               \
    do {                                                                                              \
        CHECK_STATUS(status, call);                                                                   \
        CHECK_TEXT(unisono_last_error(), part);                                                       \
    } while (0)

typedef void (*rank_body)(unisono_context_t *ctx, void *arg);

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

static inline void make_directory(char *path, size_t size) {
    const char *base = getenv("TMPDIR");
    snprintf(path, size, "%s/unisono-test-XXXXXX", base != NULL ? base : "/tmp");
    if (mkdtemp(path) == NULL) {
        perror(path);
        exit(1);
    }
}

static inline void remove_directory(const char *path) {
    pid_t pid = fork();
    if (pid == 0) {
        execlp("rm", "rm", "-rf", path, (char *)NULL);
        _exit(127);
    }
    waitpid(pid, NULL, 0);
}

static inline unisono_context_t *join(const char *directory, uint32_t rank, uint32_t size) {
    unisono_store_t *store = NULL;
    CHECK_OK(unisono_store_create_file(directory, &store));
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    options.rank = rank;
    options.rank_count = size;
    options.store = store;
    options.timeout_ms = 60000;
    unisono_context_t *ctx = NULL;
    CHECK_OK(unisono_context_create(&options, &ctx));
    /* All have created theirs before the first goes on: one that fails at once would fail the others' creation. */
    int64_t joined = 0;
    CHECK_OK(unisono_store_add(store, "test-joined", 1, &joined));
    if (joined == (int64_t)size) {
        CHECK_OK(unisono_store_set(store, "test-all-joined", "", 0));
    }
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_OK(unisono_store_get(store, "test-all-joined", 60000, &value, &bytes));
    unisono_free(value);
    unisono_store_destroy(store);
    return ctx;
}

/* How each rank ended, as waitpid tells it. */
static inline void run_ranks_with(int n, double seconds, rank_body body, void *arg, int *ended) {
    char directory[4096];
    make_directory(directory, sizeof directory);
    fflush(NULL);
    pid_t *pids = (pid_t *)calloc((size_t)n, sizeof(pid_t));
    for (int rank = 0; rank < n; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            unisono_context_t *ctx = join(directory, (uint32_t)rank, (uint32_t)n);
            body(ctx, arg);
            unisono_context_destroy(ctx);
            free(pids);
            exit(0);
        }
        if (pids[rank] < 0) {
            perror("fork");
            exit(1);
        }
    }
    double end = seconds_now() + seconds;
    int left = n, late = 0;
    while (left > 0) {
        for (int rank = 0; rank < n; rank++) {
            if (pids[rank] != 0 && waitpid(pids[rank], &ended[rank], WNOHANG) == pids[rank]) {
                pids[rank] = 0;
                left--;
            }
        }
        if (left > 0 && !late && seconds_now() > end) {
            late = 1;
            for (int rank = 0; rank < n; rank++) {
                if (pids[rank] != 0) {
                    fprintf(stderr, "rank %d is not done after %.0f s\n", rank, seconds);
                    kill(pids[rank], SIGKILL);
                }
            }
        }
        sleep_ms(2);
    }
    free(pids);
    remove_directory(directory);
    if (late) {
        exit(1);
    }
}

/* All ranks end well. */
static inline void run_ranks(int n, double seconds, rank_body body, void *arg) {
    int *ended = (int *)calloc((size_t)n, sizeof(int));
    run_ranks_with(n, seconds, body, arg, ended);
    for (int rank = 0; rank < n; rank++) {
        if (!WIFEXITED(ended[rank]) || WEXITSTATUS(ended[rank]) != 0) {
            fprintf(stderr, "rank %d of %d ended with status 0x%x\n", rank, n, (unsigned)ended[rank]);
            exit(1);
        }
    }
    free(ended);
}

/* A context of one, in this process. */
static inline unisono_context_t *alone(void) {
    unisono_store_t *store = NULL;
    CHECK_OK(unisono_store_create_hash(&store));
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    options.rank_count = 1;
    options.store = store;
    options.name = "solo";
    unisono_context_t *ctx = NULL;
    CHECK_OK(unisono_context_create(&options, &ctx));
    unisono_store_destroy(store);
    return ctx;
}

#endif
