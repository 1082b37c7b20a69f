/* Trouble: ranks that call different things, die, abort, never come. Each survivor gets a status and a text that names the
 * cause, in bounded time. */

#include "harness.h"

#include <sys/mman.h>

static int32_t x[1024];

static void different_counts(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint64_t count = unisono_context_rank(ctx) == 1 ? 10 : 1024;
    CHECK_STATUS(UNISONO_MISMATCH, unisono_allreduce(ctx, x, x, count, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK_TEXT(unisono_last_error(), "1024");
    CHECK_TEXT(unisono_last_error(), "10 ");
    CHECK_TEXT(unisono_last_error(), "rank 1");
    CHECK_TEXT(unisono_last_error(), "allreduce");
    /* The context has failed, and says so. */
    CHECK(unisono_context_status(ctx) == UNISONO_MISMATCH);
    CHECK_TEXT(unisono_context_error(ctx), "1024");
    CHECK_STATUS(UNISONO_MISMATCH, unisono_barrier(ctx, NULL, NULL));
}

static void different_operations(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (unisono_context_rank(ctx) == 0) {
        CHECK_STATUS(UNISONO_MISMATCH, unisono_allreduce(ctx, x, x, 64, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    } else {
        CHECK_STATUS(UNISONO_MISMATCH, unisono_broadcast(ctx, x, 64, UNISONO_INT32, 0, NULL, NULL));
    }
    CHECK_TEXT(unisono_last_error(), "allreduce");
    CHECK_TEXT(unisono_last_error(), "broadcast");
}

static void different_types(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int dtype = unisono_context_rank(ctx) == 2 ? UNISONO_FLOAT32 : UNISONO_INT32;
    CHECK_STATUS(UNISONO_MISMATCH, unisono_allreduce(ctx, x, x, 64, dtype, UNISONO_SUM, NULL, NULL));
    CHECK_TEXT(unisono_last_error(), "float32");
    CHECK_TEXT(unisono_last_error(), "int32");
}

static void different_roots(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint32_t root = unisono_context_rank(ctx) == 2 ? 1 : 0;
    unisono_status_t status = unisono_broadcast(ctx, x, 64, UNISONO_INT32, root, NULL, NULL);
    if (status == UNISONO_OK) {
        /* Who met only ranks that agree has done its part, and hears of the others in its next call. */
        status = unisono_barrier(ctx, NULL, NULL);
    }
    CHECK_STATUS(UNISONO_MISMATCH, status);
    CHECK_TEXT(unisono_last_error(), "root 0");
    CHECK_TEXT(unisono_last_error(), "root 1");
}

/* Rank 2 dies while the others are in an allreduce: they know within a second. */
static void a_death(unisono_context_t *ctx, void *arg) {
    (void)arg;
    static float large[1 << 20];
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    if (unisono_context_rank(ctx) == 2) {
        sleep_ms(300);
        kill(getpid(), SIGKILL);
    }
    unisono_status_t status = unisono_allreduce(ctx, large, large, 1 << 20, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL);
    double after = seconds_now();
    CHECK_STATUS(UNISONO_PEER_FAILED, status);
    CHECK_TEXT(unisono_last_error(), "rank 2");
    CHECK_TEXT(unisono_last_error(), "allreduce");
    /* Further calls fail at once, for the same reason. */
    CHECK_STATUS(UNISONO_PEER_FAILED, unisono_barrier(ctx, NULL, NULL));
    CHECK(seconds_now() - after < 1.0);
    CHECK(unisono_context_status(ctx) == UNISONO_PEER_FAILED);
}

static void an_abort(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (unisono_context_rank(ctx) == 0) {
        sleep_ms(200);
        CHECK_OK(unisono_context_abort(ctx));
        CHECK_STATUS(UNISONO_ABORTED, unisono_barrier(ctx, NULL, NULL));
    } else {
        CHECK_STATUS(UNISONO_ABORTED, unisono_barrier(ctx, NULL, NULL));
    }
    CHECK_TEXT(unisono_last_error(), "rank 0");
}

/* An abort with a cause: every rank is told it, as one line. */
static void an_abort_with_a_cause(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (unisono_context_rank(ctx) == 1) {
        CHECK_OK(unisono_context_abort_because(ctx, "the disk is full\nagain\xff"));
    }
    CHECK_STATUS(UNISONO_ABORTED, unisono_barrier(ctx, NULL, NULL));
    CHECK_TEXT(unisono_last_error(), "rank 1 aborted 'default': the disk is full again");
}

/* What works were given is their caller's again behind an abort, though nobody has waited for them. */
static void an_abort_gives_memory_back(unisono_context_t *ctx, void *arg) {
    (void)arg;
    size_t bytes = 32 << 20;
    for (int round = 0; round < 12; round++) {
        unisono_context_t *child = NULL;
        unisono_work_t *work = NULL;
        char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(memory != MAP_FAILED);
        memset(memory, 1, bytes);
        CHECK_OK(unisono_context_duplicate(ctx, &child));
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
        if (unisono_context_rank(ctx) == 0) {
            unisono_status_t status = unisono_send(child, memory, bytes, UNISONO_UINT8, 1, NULL, &work);
            if (status == UNISONO_OK) {
                status = unisono_work_wait(work);
            }
            CHECK(status == UNISONO_OK || status == UNISONO_ABORTED);
        } else {
            CHECK_OK(unisono_receive(child, memory, bytes, UNISONO_UINT8, 0, NULL, &work));
            sleep_ms(round % 4);
        }
        unisono_work_destroy(work);
        CHECK_OK(unisono_context_abort(child));
        unisono_context_destroy(child);
        munmap(memory, bytes);
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    }
}

/* Rank 1 does not come: the deadline of the call ends it, and the text says whom it waited for. */
static void a_deadline(unisono_context_t *ctx, void *arg) {
    (void)arg;
    unisono_call_t call = UNISONO_CALL_INIT;
    call.timeout_ms = 300;
    if (unisono_context_rank(ctx) == 1) {
        sleep_ms(1500);
        return;
    }
    double start = seconds_now();
    CHECK_STATUS(UNISONO_TIMEOUT, unisono_allreduce(ctx, x, x, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    CHECK(seconds_now() - start >= 0.25);
    CHECK_TEXT(unisono_last_error(), "rank 1");
    CHECK_TEXT(unisono_last_error(), "allreduce");
}

/* What is waited for at exit, when the library has said goodbye to the other ranks, which send nothing any more. */
static unisono_work_t *left_for_the_end = NULL;

static void at_the_end(void) {
    if (left_for_the_end != NULL && (unisono_work_wait(left_for_the_end) != UNISONO_INVALID_USAGE ||
                                     strstr(unisono_last_error(), "this process is ending") == NULL)) {
        fprintf(stderr, "a wait at exit: %s\n", unisono_last_error());
        _exit(1);
    }
}

static void a_wait_at_exit(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (unisono_context_rank(ctx) == 1) {
        /* Until the other has left. */
        CHECK_STATUS(UNISONO_PEER_FAILED, unisono_receive(ctx, x, 1, UNISONO_INT32, 0, NULL, NULL));
        return;
    }
    CHECK_OK(unisono_receive(ctx, x, 1, UNISONO_INT32, 1, NULL, &left_for_the_end));
    exit(0);
}

/* A rank that never starts. */
static void a_missing_rank(void) {
    char directory[4096];
    make_directory(directory, sizeof directory);
    unisono_store_t *store = NULL;
    CHECK_OK(unisono_store_create_file(directory, &store));
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    options.rank = 0;
    options.rank_count = 2;
    options.store = store;
    options.timeout_ms = 500;
    unisono_context_t *ctx = NULL;
    CHECK_STATUS(UNISONO_TIMEOUT, unisono_context_create(&options, &ctx));
    CHECK_TEXT(unisono_last_error(), "rank 0 of 2 waits for rank 1 to join 'default'");
    CHECK(ctx == NULL);
    unisono_store_destroy(store);
    remove_directory(directory);
}

/* Ranks that leave without a goodbye right behind their last operation, as children of Python's multiprocessing do: what the
 * others need of them is there. */
static void leave_at_once(unisono_context_t *ctx, void *arg) {
    (void)arg;
    enum { N = 100000 };
    static float ones[N];
    uint32_t size = unisono_context_size(ctx);
    for (int i = 0; i < N; i++) {
        ones[i] = 1;
    }
    CHECK_OK(unisono_allreduce(ctx, ones, ones, N, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
    CHECK(ones[0] == (float)size && ones[N - 1] == (float)size);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    _exit(0);
}

int main(void) {
    /* Before the first context, so that it runs after the goodbye. */
    CHECK(atexit(at_the_end) == 0);
    run_ranks(3, 60, different_counts, NULL);
    run_ranks(3, 60, different_operations, NULL);
    run_ranks(3, 60, different_types, NULL);
    run_ranks(3, 60, different_roots, NULL);
    run_ranks(3, 60, an_abort, NULL);
    run_ranks(3, 60, an_abort_with_a_cause, NULL);
    run_ranks(2, 60, an_abort_gives_memory_back, NULL);
    run_ranks(2, 60, a_deadline, NULL);
    run_ranks(2, 30, a_wait_at_exit, NULL);
    for (int round = 0; round < 10; round++) {
        run_ranks(2 + round % 3, 30, leave_at_once, NULL);
    }

    int ended[3];
    run_ranks_with(3, 60, a_death, NULL, ended);
    for (int rank = 0; rank < 2; rank++) {
        if (!WIFEXITED(ended[rank]) || WEXITSTATUS(ended[rank]) != 0) {
            fprintf(stderr, "survivor %d ended with status 0x%x\n", rank, (unsigned)ended[rank]);
            return 1;
        }
    }
    if (!WIFSIGNALED(ended[2])) {
        fprintf(stderr, "rank 2 was to be killed\n");
        return 1;
    }
    /* Last, since it leaves this process with the library's threads, and groups are forked. */
    a_missing_rank();
    return 0;
}
