/* Operations that start together: halves of an exchange that one thread waits for, works, several ranks of one thread, and
 * what is refused. */

#include "harness.h"

#include <pthread.h>

enum { LONG = 1 << 20 };

static uint32_t rank_of(unisono_context_t *ctx) {
    return unisono_context_rank(ctx);
}

/* Each rank sends to the next, first, and receives from the one before. By themselves such long sends wait for their receives. */
static void rings(unisono_context_t *ctx, void *arg) {
    (void)arg;
    static int64_t out[LONG], in[LONG];
    uint32_t rank = rank_of(ctx), size = unisono_context_size(ctx);
    uint32_t next = (rank + 1) % size, last = (rank + size - 1) % size;
    const uint64_t counts[] = {0, 1, 1000, LONG};
    for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++) {
        for (uint64_t i = 0; i < LONG; i++) {
            out[i] = (int64_t)(rank * 1000 + i);
            in[i] = -1;
        }
        CHECK_OK(unisono_batch_begin());
        CHECK_OK(unisono_send(ctx, out, counts[c], UNISONO_INT64, next, NULL, NULL));
        CHECK_OK(unisono_receive(ctx, in, counts[c], UNISONO_INT64, last, NULL, NULL));
        CHECK(in[0] == -1);
        CHECK_OK(unisono_batch_end());
        for (uint64_t i = 0; i < counts[c]; i++) {
            CHECK(in[i] == (int64_t)(last * 1000 + i));
        }
        CHECK(in[counts[c] % LONG] == -1 || counts[c] == LONG);
    }
}

/* Works come at the end, of whatever is in the batch, and those that have none are waited for there. */
static void works(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint32_t rank = rank_of(ctx), size = unisono_context_size(ctx);
    uint32_t next = (rank + 1) % size, last = (rank + size - 1) % size;
    int32_t sum = (int32_t)rank, largest = (int32_t)rank, from = -1, source = -1, untold = -1;
    unisono_work_t *const none = (unisono_work_t *)&sum;
    unisono_work_t *first = none, *second = none, *any = none;
    unisono_call_t tagged = UNISONO_CALL_INIT;
    tagged.tag = 7;
    CHECK_OK(unisono_batch_begin());
    CHECK_OK(unisono_allreduce(ctx, &sum, &sum, 1, UNISONO_INT32, UNISONO_SUM, NULL, &first));
    CHECK_OK(unisono_batch_begin());
    CHECK_OK(unisono_receive_any(ctx, &source, 1, UNISONO_INT32, NULL, &tagged, &any));
    CHECK_OK(unisono_send(ctx, &rank, 1, UNISONO_INT32, next, &tagged, NULL));
    tagged.tag = 8;
    CHECK_OK(unisono_receive_any(ctx, &untold, 1, UNISONO_INT32, NULL, &tagged, NULL));
    CHECK_OK(unisono_send(ctx, &rank, 1, UNISONO_INT32, next, &tagged, NULL));
    CHECK_OK(unisono_batch_end());
    CHECK_OK(unisono_receive(ctx, &from, 1, UNISONO_INT32, last, NULL, &second));
    CHECK_OK(unisono_send(ctx, &rank, 1, UNISONO_INT32, next, NULL, NULL));
    CHECK_OK(unisono_allreduce(ctx, &largest, &largest, 1, UNISONO_INT32, UNISONO_MAX, NULL, NULL));
    CHECK(first == none && second == none && any == none && largest == (int32_t)rank);
    CHECK_OK(unisono_batch_end());
    CHECK(largest == (int32_t)size - 1 && untold == (int32_t)last);
    CHECK_OK(unisono_work_wait(first));
    CHECK_OK(unisono_work_wait(second));
    CHECK_OK(unisono_work_wait(any));
    uint32_t who = 0;
    CHECK_OK(unisono_work_source(any, &who));
    CHECK(who == last && source == (int32_t)last && from == (int32_t)last && sum == (int32_t)(size * (size - 1) / 2));
    unisono_work_destroy(first);
    unisono_work_destroy(second);
    unisono_work_destroy(any);
}

static void refusals(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint32_t rank = rank_of(ctx), size = unisono_context_size(ctx);
    uint32_t next = (rank + 1) % size, last = (rank + size - 1) % size;
    int32_t out = (int32_t)rank, in = -1;
    unisono_work_t *kept = NULL, *refused = (unisono_work_t *)&out, *behind = (unisono_work_t *)&out;
    CHECK_FAILS(UNISONO_INVALID_USAGE, "no batch", unisono_batch_end());
    /* What is wrong by itself is told at once, and is not in the batch. */
    CHECK_OK(unisono_batch_begin());
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "to is 9", unisono_send(ctx, &out, 1, UNISONO_INT32, 9, NULL, NULL));
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT, unisono_send(NULL, &out, 1, UNISONO_INT32, next, NULL, NULL));
    uint32_t source = 0;
    CHECK_FAILS(UNISONO_INVALID_USAGE, "ask for a work",
                unisono_receive_any(ctx, &in, 1, UNISONO_INT32, &source, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "is this rank itself",
                unisono_send(ctx, &out, 1, UNISONO_INT32, rank, NULL, NULL));
    float values[12] = {0};
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "overlap",
                unisono_allreduce(ctx, values, values + 4, 8, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT,
                 unisono_allreduce(ctx, values, values, 8, UNISONO_FLOAT32, UNISONO_BIT_AND, NULL, NULL));
    unisono_call_t named = UNISONO_CALL_INIT;
    named.algorithm = 999;
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT,
                 unisono_allreduce(ctx, values, values, 8, UNISONO_FLOAT32, UNISONO_SUM, &named, NULL));
    CHECK_OK(unisono_batch_end());
    /* What cannot be started: those before it run, those after it do not. */
    unisono_context_t *gone;
    CHECK_OK(unisono_context_duplicate(ctx, &gone));
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    CHECK_OK(unisono_context_abort(gone));
    CHECK_OK(unisono_batch_begin());
    CHECK_OK(unisono_receive(ctx, &in, 1, UNISONO_INT32, last, NULL, &kept));
    CHECK_OK(unisono_send(gone, &out, 1, UNISONO_INT32, next, NULL, &refused));
    CHECK_OK(unisono_send(ctx, &out, 1, UNISONO_INT32, next, NULL, &behind));
    CHECK_STATUS(UNISONO_ABORTED, unisono_batch_end());
    CHECK(kept != NULL && refused == NULL && behind == NULL);
    unisono_context_destroy(gone);
    CHECK_OK(unisono_send(ctx, &out, 1, UNISONO_INT32, next, NULL, NULL));
    CHECK_OK(unisono_work_wait(kept));
    CHECK(in == (int32_t)last);
    unisono_work_destroy(kept);
    /* The failure of what the end has waited for is the end's. */
    unisono_call_t soon = UNISONO_CALL_INIT;
    soon.tag = 3;
    soon.timeout_ms = 50;
    CHECK_OK(unisono_batch_begin());
    CHECK_OK(unisono_receive(ctx, &in, 1, UNISONO_INT32, last, &soon, NULL));
    CHECK_STATUS(UNISONO_TIMEOUT, unisono_batch_end());
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

struct in_batch {
    unisono_context_t *ctx;
    int32_t sum;
    int ran;
};

/* Starts another operation, and follows it. */
static void start_another(void *user, unisono_status_t status, const char *error) {
    struct in_batch *next = (struct in_batch *)user;
    (void)error;
    CHECK(status == UNISONO_OK);
    if (next->ran++ == 0) {
        unisono_call_t tagged = UNISONO_CALL_INIT;
        tagged.tag = 9;
        unisono_work_t *work = NULL;
        CHECK_OK(unisono_allreduce(next->ctx, &next->sum, &next->sum, 1, UNISONO_INT32, UNISONO_SUM, &tagged, &work));
        CHECK(work != NULL);
        CHECK_OK(unisono_work_on_complete(work, start_another, next));
        unisono_work_destroy(work);
    }
}

/* A callback is in no batch, whichever thread calls it: this one moves what it is for while it has one open. */
static void callbacks(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int32_t size = (int32_t)unisono_context_size(ctx), value = 1, sum = 0;
    static struct in_batch next;
    next.ctx = ctx;
    next.sum = 1;
    unisono_call_t tagged = UNISONO_CALL_INIT;
    tagged.tag = 9;
    unisono_work_t *work;
    CHECK_OK(unisono_allreduce(ctx, &next.sum, &next.sum, 1, UNISONO_INT32, UNISONO_SUM, &tagged, &work));
    CHECK_OK(unisono_work_on_complete(work, start_another, &next));
    CHECK_OK(unisono_batch_begin());
    CHECK_OK(unisono_allreduce(ctx, &value, &sum, 1, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK_OK(unisono_work_wait(work));
    CHECK(sum == 0);
    CHECK_OK(unisono_batch_end());
    CHECK(sum == size);
    unisono_work_destroy(work);
    double end = seconds_now() + 20;
    while (__atomic_load_n(&next.ran, __ATOMIC_ACQUIRE) < 2) {
        CHECK(seconds_now() < end);
        sleep_ms(1);
    }
    CHECK(next.sum == size * size);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

/* The child of a fork is in none of its parent's batches. */
static void forks(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int32_t value = 5, sum = 0;
    CHECK_OK(unisono_batch_begin());
    CHECK_OK(unisono_allreduce(ctx, &value, &sum, 1, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        unisono_context_t *own = alone();
        int32_t result = 0;
        CHECK_OK(unisono_allreduce(own, &value, &result, 1, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK(result == 5);
        CHECK_STATUS(UNISONO_INVALID_USAGE, unisono_batch_end());
        unisono_context_destroy(own);
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    CHECK_OK(unisono_batch_end());
    CHECK(sum == 5 * (int32_t)unisono_context_size(ctx));
}

struct seat {
    unisono_unique_id_t id;
    uint32_t rank;
    unisono_context_t *ctx;
};

static void *take_seat(void *arg) {
    struct seat *seat = (struct seat *)arg;
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    options.rank = seat->rank;
    options.rank_count = 2;
    options.id = &seat->id;
    CHECK_OK(unisono_context_create(&options, &seat->ctx));
    return NULL;
}

/* Both ranks of a group in one thread, which waits for neither before it has called for the other. */
static void several_ranks(unisono_context_t *ctx, void *arg) {
    (void)ctx;
    (void)arg;
    struct seat seats[2];
    pthread_t thread;
    CHECK_OK(unisono_unique_id_create(&seats[0].id));
    seats[1].id = seats[0].id;
    seats[0].rank = 0;
    seats[1].rank = 1;
    CHECK(pthread_create(&thread, NULL, take_seat, &seats[1]) == 0);
    take_seat(&seats[0]);
    pthread_join(thread, NULL);
    static double values[2][100000];
    for (int i = 0; i < 100000; i++) {
        values[0][i] = i;
        values[1][i] = 2 * i;
    }
    CHECK_OK(unisono_batch_begin());
    for (int rank = 0; rank < 2; rank++) {
        double *x = values[rank];
        CHECK_OK(unisono_allreduce(seats[rank].ctx, x, x, 100000, UNISONO_FLOAT64, UNISONO_SUM, NULL, NULL));
    }
    CHECK_OK(unisono_batch_end());
    for (int i = 0; i < 100000; i++) {
        CHECK(values[0][i] == 3.0 * i && values[1][i] == 3.0 * i);
    }
    unisono_context_destroy(seats[0].ctx);
    unisono_context_destroy(seats[1].ctx);
}

int main(void) {
    run_ranks(3, 60, rings, NULL);
    run_ranks(3, 60, works, NULL);
    run_ranks(3, 60, refusals, NULL);
    run_ranks(2, 60, callbacks, NULL);
    run_ranks(2, 60, forks, NULL);
    run_ranks(1, 60, several_ranks, NULL);
    return 0;
}
