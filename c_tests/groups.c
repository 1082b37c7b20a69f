/* Work handles, callbacks, tags in flight together, groups, buffers, sparse tensors and algorithm objects, on four ranks. */

#include "harness.h"

#include <pthread.h>

static int rank_of(unisono_context_t *ctx) {
    return (int)unisono_context_rank(ctx);
}

static void works(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx), size = (int)unisono_context_size(ctx);
    int32_t x = rank, y = -1;
    unisono_work_t *work = NULL;
    /* Rank 0 comes late, so the others see the work in progress. */
    if (rank == 0) {
        sleep_ms(300);
    }
    CHECK_OK(unisono_allreduce(ctx, &x, &y, 1, UNISONO_INT32, UNISONO_SUM, NULL, &work));
    int32_t done = -1;
    CHECK_OK(unisono_work_test(work, &done));
    if (rank != 0) {
        CHECK(done == 0);
        CHECK(unisono_work_status(work) == UNISONO_IN_PROGRESS && unisono_work_error(work)[0] == '\0');
        CHECK_STATUS(UNISONO_TIMEOUT, unisono_work_wait_for(work, 20));
        CHECK_STATUS(UNISONO_TIMEOUT, unisono_work_wait_for(work, 0));
        uint32_t source = 77;
        CHECK_STATUS(UNISONO_INVALID_USAGE, unisono_work_source(work, &source));
        CHECK(source == 77);
    }
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT, unisono_work_test(work, NULL));
    CHECK_OK(unisono_work_wait(work));
    CHECK_OK(unisono_work_wait(work));
    CHECK_OK(unisono_work_test(work, &done));
    CHECK(done == 1 && y == size * (size - 1) / 2);
    unisono_work_destroy(work);
}

struct note {
    pthread_mutex_t lock;
    pthread_cond_t told;
    int count;
    unisono_status_t status;
};

static void tell(void *user, unisono_status_t status, const char *error) {
    struct note *note = (struct note *)user;
    pthread_mutex_lock(&note->lock);
    note->count++;
    note->status = status;
    if ((error[0] != '\0') != (status != UNISONO_OK)) {
        note->count = -100;
    }
    pthread_cond_signal(&note->told);
    pthread_mutex_unlock(&note->lock);
}

static void callbacks(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx);
    struct note note = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, -1};
    float x[100];
    unisono_work_t *work = NULL;
    for (int i = 0; i < 100; i++) {
        x[i] = (float)rank;
    }
    if (rank == 0) {
        sleep_ms(100);
    }
    CHECK_OK(unisono_allreduce(ctx, x, x, 100, UNISONO_FLOAT32, UNISONO_MAX, NULL, &work));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "callback is NULL", unisono_work_on_complete(work, NULL, NULL));
    CHECK_OK(unisono_work_on_complete(work, tell, &note));
    /* The handle goes; the operation runs on, and the library moves it, since nobody waits. */
    unisono_work_destroy(work);
    pthread_mutex_lock(&note.lock);
    while (note.count == 0) {
        pthread_cond_wait(&note.told, &note.lock);
    }
    CHECK(note.count == 1 && note.status == UNISONO_OK);
    pthread_mutex_unlock(&note.lock);
    CHECK(x[0] == (float)(unisono_context_size(ctx) - 1) && x[99] == x[0]);
    /* On a complete work it is called at once. */
    CHECK_OK(unisono_barrier(ctx, NULL, &work));
    CHECK_OK(unisono_work_wait(work));
    CHECK_OK(unisono_work_on_complete(work, tell, &note));
    CHECK(note.count == 2);
    unisono_work_destroy(work);
}

/* Ranks start operations with different tags in different orders; they match by tag. */
static void tags(unisono_context_t *ctx, void *arg) {
    (void)arg;
    enum { TAGS = 8, N = 5000 };
    int rank = rank_of(ctx), size = (int)unisono_context_size(ctx);
    static int32_t x[TAGS][N];
    unisono_work_t *works[TAGS];
    for (int k = 0; k < TAGS; k++) {
        int which = (k * (rank % 2 == 0 ? 1 : TAGS - 1) + rank) % TAGS;
        unisono_call_t call = UNISONO_CALL_INIT;
        call.tag = 100 + (uint64_t)which;
        for (int i = 0; i < N; i++) {
            x[which][i] = which * 1000 + rank;
        }
        CHECK_OK(unisono_allreduce(ctx, x[which], x[which], N, UNISONO_INT32, UNISONO_SUM, &call, &works[which]));
    }
    for (int k = TAGS - 1; k >= 0; k--) {
        CHECK_OK(unisono_work_wait(works[k]));
        unisono_work_destroy(works[k]);
        for (int i = 0; i < N; i++) {
            CHECK(x[k][i] == size * k * 1000 + size * (size - 1) / 2);
        }
    }
    /* Messages too. */
    if (rank < 2) {
        int32_t a = 10 + rank, b = 20 + rank, from_a = 0, from_b = 0;
        unisono_call_t first = UNISONO_CALL_INIT, second = UNISONO_CALL_INIT;
        first.tag = 1;
        second.tag = 2;
        uint32_t peer = 1 - (uint32_t)rank;
        unisono_work_t *w[4];
        CHECK_OK(unisono_receive(ctx, &from_b, 1, UNISONO_INT32, peer, &second, &w[0]));
        CHECK_OK(unisono_receive(ctx, &from_a, 1, UNISONO_INT32, peer, &first, &w[1]));
        CHECK_OK(unisono_send(ctx, &a, 1, UNISONO_INT32, peer, &first, &w[2]));
        CHECK_OK(unisono_send(ctx, &b, 1, UNISONO_INT32, peer, &second, &w[3]));
        for (int k = 0; k < 4; k++) {
            CHECK_OK(unisono_work_wait(w[k]));
            unisono_work_destroy(w[k]);
        }
        CHECK(from_a == 10 + (int)peer && from_b == 20 + (int)peer);
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

static void children(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx), size = (int)unisono_context_size(ctx);
    unisono_context_t *child = NULL;
    /* Even and odd ranks, in reverse order. */
    CHECK_OK(unisono_context_split(ctx, (uint32_t)rank % 2, -rank, &child));
    CHECK(unisono_context_size(child) == 2 && unisono_context_rank(child) == (rank < 2 ? 1u : 0u));
    int32_t sum = rank;
    CHECK_OK(unisono_allreduce(child, &sum, &sum, 1, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK(sum == (rank % 2 == 0 ? 2 : 4));
    unisono_context_destroy(child);

    CHECK_OK(unisono_context_split(ctx, rank == 3 ? UNISONO_NO_COLOR : 7, 0, &child));
    CHECK((child == NULL) == (rank == 3));
    if (child != NULL) {
        CHECK(unisono_context_size(child) == 3);
        CHECK_OK(unisono_barrier(child, NULL, NULL));
        unisono_context_destroy(child);
    }

    uint32_t ranks[3] = {3, 0, 2};
    child = NULL;
    if (rank == 1) {
        CHECK_FAILS(UNISONO_NOT_MEMBER, "rank 1", unisono_context_group(ctx, "outer", ranks, 3, &child));
        CHECK_TEXT(unisono_last_error(), "outer");
        CHECK(child == NULL);
    } else {
        CHECK_OK(unisono_context_group(ctx, "outer", ranks, 3, &child));
        CHECK(strcmp(unisono_context_name(child), "outer") == 0);
        CHECK(ranks[unisono_context_rank(child)] == (uint32_t)rank);
        int32_t root = rank;
        CHECK_OK(unisono_broadcast(child, &root, 1, UNISONO_INT32, 0, NULL, NULL));
        CHECK(root == 3);
        unisono_context_destroy(child);
    }

    CHECK_OK(unisono_context_duplicate(ctx, &child));
    CHECK(unisono_context_size(child) == (uint32_t)size && unisono_context_rank(child) == (uint32_t)rank);
    /* Independent: a work of the one does not hold back the other, whichever is waited for first. */
    int32_t a = 1, b = 2;
    unisono_work_t *first = NULL, *second = NULL;
    CHECK_OK(unisono_allreduce(ctx, &a, &a, 1, UNISONO_INT32, UNISONO_SUM, NULL, &first));
    CHECK_OK(unisono_allreduce(child, &b, &b, 1, UNISONO_INT32, UNISONO_SUM, NULL, &second));
    CHECK_OK(unisono_work_wait(rank % 2 == 0 ? first : second));
    CHECK_OK(unisono_work_wait(rank % 2 == 0 ? second : first));
    CHECK(a == size && b == 2 * size);
    unisono_work_destroy(first);
    unisono_work_destroy(second);
    /* For calls that name no deadline. */
    CHECK_OK(unisono_barrier(child, NULL, NULL));
    CHECK_OK(unisono_context_set_timeout(child, rank == 0 ? 100 : 0));
    if (rank == 0) {
        CHECK_STATUS(UNISONO_TIMEOUT, unisono_receive(child, &a, 1, UNISONO_INT32, 1, NULL, NULL));
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    unisono_context_destroy(child);
}

static void buffers(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx), size = (int)unisono_context_size(ctx);
    double memory[64] = {0};
    unisono_buffer_t *buffer = NULL;
    CHECK_OK(unisono_buffer_create(ctx, memory, sizeof memory, &buffer));
    if (rank == 0) {
        /* Each rank's message to a place of its own. */
        for (uint32_t from = 1; from < (uint32_t)size; from++) {
            CHECK_OK(unisono_buffer_receive(buffer, from * 64, 8, UNISONO_FLOAT64, &from, 1, NULL));
        }
        CHECK_STATUS(UNISONO_TIMEOUT, unisono_buffer_wait_receive(buffer, 20, NULL));
        CHECK_TEXT(unisono_last_error(), "from rank 1");
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    if (rank == 0) {
        int seen[8] = {0};
        for (int k = 1; k < size; k++) {
            uint32_t from = UNISONO_NO_RANK;
            CHECK_OK(unisono_buffer_wait_receive(buffer, 30000, &from));
            CHECK(from > 0 && from < (uint32_t)size && !seen[from]++);
            CHECK(memory[from * 8] == from && memory[from * 8 + 7] == from);
        }
        CHECK_STATUS(UNISONO_INVALID_USAGE, unisono_buffer_wait_receive(buffer, 0, NULL));
        /* From whoever sends first. */
        CHECK_OK(unisono_buffer_receive(buffer, 0, 8, UNISONO_FLOAT64, NULL, 0, NULL));
        uint32_t from = UNISONO_NO_RANK;
        CHECK_OK(unisono_buffer_wait_receive(buffer, 30000, &from));
        CHECK(from == 2 && memory[7] == 102);
        /* From some: rank 2 sends first, and is left for later. */
        static const uint32_t odd[] = {3, 1};
        CHECK_OK(unisono_buffer_receive(buffer, 0, 1, UNISONO_FLOAT64, odd, 2, NULL));
        CHECK_STATUS(UNISONO_TIMEOUT, unisono_buffer_wait_receive(buffer, 50, NULL));
        CHECK_TEXT(unisono_last_error(), "[3, 1]");
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
        CHECK_OK(unisono_buffer_wait_receive(buffer, 30000, &from));
        CHECK(from == 3 && memory[0] == 203);
        uint32_t even = 2;
        CHECK_OK(unisono_receive_any_of(ctx, memory, 1, UNISONO_FLOAT64, &even, 1, &from, NULL, NULL));
        CHECK(from == 2 && memory[0] == 202);
        CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "from_count is 0",
                    unisono_receive_any_of(ctx, memory, 1, UNISONO_FLOAT64, NULL, 0, &from, NULL, NULL));
        uint32_t outside = 17;
        CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "from is 17",
                    unisono_buffer_receive(buffer, 0, 1, UNISONO_FLOAT64, &outside, 1, NULL));
    } else {
        for (int i = 0; i < 8; i++) {
            memory[i] = rank;
        }
        CHECK_OK(unisono_buffer_send(buffer, 0, 8, UNISONO_FLOAT64, 0, NULL));
        uint32_t to = UNISONO_NO_RANK;
        CHECK_OK(unisono_buffer_wait_send(buffer, 30000, &to));
        CHECK(to == 0);
        if (rank == 2) {
            for (int i = 0; i < 8; i++) {
                memory[i] = 102;
            }
            CHECK_OK(unisono_buffer_send(buffer, 0, 8, UNISONO_FLOAT64, 0, NULL));
            CHECK_OK(unisono_buffer_wait_send(buffer, 30000, &to));
        }
        double last = 200 + rank;
        if (rank == 2) {
            CHECK_OK(unisono_send(ctx, &last, 1, UNISONO_FLOAT64, 0, NULL, NULL));
        }
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
        if (rank == 3) {
            CHECK_OK(unisono_send(ctx, &last, 1, UNISONO_FLOAT64, 0, NULL, NULL));
        }
    }
    unisono_buffer_destroy(buffer);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

static void *abort_soon(void *buffer) {
    sleep_ms(100);
    CHECK_OK(unisono_buffer_abort_wait((unisono_buffer_t *)buffer));
    return NULL;
}

static void aborted_waits(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (rank_of(ctx) == 0) {
        char memory[8];
        unisono_buffer_t *buffer = NULL;
        CHECK_OK(unisono_buffer_create(ctx, memory, sizeof memory, &buffer));
        CHECK_OK(unisono_buffer_receive(buffer, 0, 8, UNISONO_UINT8, NULL, 0, NULL));
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, abort_soon, buffer) == 0);
        CHECK_STATUS(UNISONO_ABORTED, unisono_buffer_wait_receive(buffer, UNISONO_FOREVER, NULL));
        CHECK(pthread_join(thread, NULL) == 0);
        /* The receive is still there, and is cancelled with the buffer. */
        CHECK_STATUS(UNISONO_TIMEOUT, unisono_buffer_wait_receive(buffer, 10, NULL));
        unisono_buffer_destroy(buffer);
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

static void sparse(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx);
    unisono_sparse_t *result = NULL;
    /* Rank r has (r, 0) and twice (9, 9); rank 3 has nothing. Blocks of two. */
    int64_t indices[] = {9, rank, 9, 9, 0, 9};
    float values[] = {1, 2, (float)rank, 10, 3, 4};
    CHECK_OK(unisono_sparse_allreduce(ctx, indices, values, rank == 3 ? 0 : 3, 2, 2, UNISONO_FLOAT32, UNISONO_SUM,
                                      NULL, &result, NULL));
    /* With nnz 0 the lists may be anything; with 3, index k is (indices[k], indices[3 + k]). */
    CHECK(unisono_sparse_dims(result) == 2 && unisono_sparse_nnz(result) == 4);
    const int64_t *at = unisono_sparse_indices(result);
    const float *sums = (const float *)unisono_sparse_values(result);
    for (int k = 0; k < 3; k++) {
        CHECK(at[k] == k && at[4 + k] == 0);
        CHECK(sums[2 * k] == (float)k && sums[2 * k + 1] == 10);
    }
    CHECK(at[3] == 9 && at[7] == 9);
    CHECK(sums[6] == 3 * (1 + 3) && sums[7] == 3 * (2 + 4));
    int64_t copied[8] = {0};
    CHECK_OK(unisono_sparse_copy(result, copied, NULL, NULL));
    CHECK(memcmp(copied, at, sizeof copied) == 0);
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "sparse is NULL", unisono_sparse_copy(NULL, copied, NULL, NULL));
    unisono_sparse_destroy(result);
    result = NULL;

    CHECK_OK(unisono_sparse_allreduce(ctx, NULL, NULL, 0, 1, 1, UNISONO_FLOAT64, UNISONO_SUM, NULL, &result, NULL));
    CHECK(unisono_sparse_nnz(result) == 0);
    unisono_sparse_destroy(result);
    result = NULL;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "by xor",
                unisono_sparse_allreduce(ctx, NULL, NULL, 0, 1, 1, UNISONO_INT32, UNISONO_BIT_XOR, NULL, &result,
                                         NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "indices is NULL",
                unisono_sparse_allreduce(ctx, NULL, values, 1, 1, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, &result, NULL));
    CHECK(result == NULL);
}

/* Started, several at once, with tags in different orders; one is given up, which runs on. */
static void sparse_works(unisono_context_t *ctx, void *arg) {
    (void)arg;
    enum { CALLS = 6, N = 3000 };
    int rank = rank_of(ctx), size = (int)unisono_context_size(ctx);
    static int64_t indices[N];
    static int32_t values[N];
    unisono_sparse_t *results[CALLS];
    unisono_work_t *works[CALLS];
    for (int k = 0; k < CALLS; k++) {
        int which = (k + rank) % CALLS;
        unisono_call_t call = UNISONO_CALL_INIT;
        call.tag = 50 + (uint64_t)which;
        /* Multiples of 1 to 4: every rank has those of 12. */
        uint64_t nnz = 0;
        for (int64_t i = 0; i < N; i += rank + 1) {
            indices[nnz] = i + which;
            values[nnz++] = which + 1;
        }
        CHECK_OK(unisono_sparse_allreduce(ctx, indices, values, nnz, 1, 1, UNISONO_INT32, UNISONO_SUM, &call,
                                          &results[which], &works[which]));
    }
    /* Of the second nobody wants the result; it goes on all the same, and must end before its context does. */
    struct note notes[2] = {{PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, -1},
                            {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, -1}};
    for (int which = 0; which < 2; which++) {
        CHECK_OK(unisono_work_on_complete(works[which], tell, &notes[which]));
        unisono_work_destroy(works[which]);
    }
    unisono_sparse_destroy(results[1]);
    for (int which = 0; which < 2; which++) {
        struct note *note = &notes[which];
        pthread_mutex_lock(&note->lock);
        while (note->count == 0) {
            pthread_cond_wait(&note->told, &note->lock);
        }
        CHECK(note->count == 1 && note->status == UNISONO_OK);
        pthread_mutex_unlock(&note->lock);
    }
    for (int which = 0; which < CALLS; which++) {
        if (which == 1) {
            continue;
        }
        if (which != 0) {
            CHECK_OK(unisono_work_wait(works[which]));
            unisono_work_destroy(works[which]);
        }
        CHECK(unisono_sparse_dims(results[which]) == 1 && unisono_sparse_nnz(results[which]) == N);
        const int64_t *at = unisono_sparse_indices(results[which]);
        const int32_t *sums = (const int32_t *)unisono_sparse_values(results[which]);
        for (int i = 0; i < N; i++) {
            int32_t ranks = 0;
            for (int other = 0; other < size; other++) {
                ranks += i % (other + 1) == 0;
            }
            CHECK(at[i] == i + which && sums[i] == ranks * (which + 1));
        }
        unisono_sparse_destroy(results[which]);
    }
}

static void sparse_differs(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx);
    /* What fails leaves an empty result, which is still the caller's. */
    unisono_work_t *work = NULL;
    unisono_sparse_t *result = NULL;
    unisono_status_t status = unisono_sparse_allreduce(ctx, NULL, NULL, 0, 1, rank == 2 ? 7 : 3, UNISONO_INT32,
                                                       UNISONO_SUM, NULL, &result, &work);
    if (status != UNISONO_OK) {
        /* The others were faster: the context has failed. */
        CHECK(work == NULL && result == NULL && status == UNISONO_MISMATCH);
        CHECK_TEXT(unisono_last_error(), "blocks of 7");
        return;
    }
    CHECK_STATUS(UNISONO_MISMATCH, unisono_work_wait(work));
    CHECK_TEXT(unisono_work_error(work), "blocks of 7");
    CHECK_TEXT(unisono_work_error(work), "rank 2");
    CHECK(unisono_sparse_dims(result) == 1 && unisono_sparse_nnz(result) == 0);
    unisono_work_destroy(work);
    unisono_sparse_destroy(result);
}

static void objects(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int rank = rank_of(ctx), size = (int)unisono_context_size(ctx);
    enum { N = 10000 };
    static float a[N], b[N];
    void *pointers[2] = {a, b};
    static const int kinds[] = {UNISONO_ALGORITHM_AUTOMATIC, UNISONO_ALGORITHM_ONE_SHOT, UNISONO_ALGORITHM_TWO_SHOT,
                                UNISONO_ALGORITHM_RECURSIVE_DOUBLING, UNISONO_ALGORITHM_BINOMIAL};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
        options.collective = UNISONO_ALLREDUCE;
        options.algorithm = kinds[k];
        options.pointers = pointers;
        options.pointer_count = 2;
        options.count = N;
        options.dtype = UNISONO_FLOAT32;
        options.op = UNISONO_SUM;
        unisono_algorithm_t *algorithm = NULL;
        CHECK_OK(unisono_algorithm_create(ctx, &options, &algorithm));
        for (int run = 0; run < 3; run++) {
            for (int i = 0; i < N; i++) {
                a[i] = (float)(rank + run);
                b[i] = 1;
            }
            if (run == 1) {
                unisono_work_t *work = NULL;
                CHECK_OK(unisono_algorithm_start(algorithm, &work));
                CHECK_OK(unisono_work_wait(work));
                unisono_work_destroy(work);
            } else {
                CHECK_OK(unisono_algorithm_run(algorithm));
            }
            float sum = (float)(size * (size - 1) / 2 + size * run + size);
            CHECK(a[0] == sum && a[N - 1] == sum && b[0] == sum && b[N - 1] == sum);
        }
        unisono_algorithm_destroy(algorithm);
    }
    unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
    options.collective = UNISONO_BROADCAST;
    options.pointers = pointers;
    options.pointer_count = 2;
    options.count = N;
    options.dtype = UNISONO_FLOAT32;
    options.root_rank = 1;
    options.root_pointer = 1;
    for (int i = 0; i < N; i++) {
        a[i] = -1;
        b[i] = (float)(100 * rank + i % 7);
    }
    unisono_algorithm_t *algorithm = NULL;
    CHECK_OK(unisono_algorithm_create(ctx, &options, &algorithm));
    CHECK_OK(unisono_algorithm_run(algorithm));
    unisono_algorithm_destroy(algorithm);
    for (int i = 0; i < N; i++) {
        CHECK(a[i] == (float)(100 + i % 7) && b[i] == a[i]);
    }
    /* Off the root what is gathered goes nowhere, and what is scattered is not looked at. */
    static float all[4 * N];
    for (int scatters = 0; scatters < 2; scatters++) {
        options.collective = scatters ? UNISONO_SCATTER : UNISONO_GATHER;
        void *apart[2] = {scatters ? (void *)all : (void *)a, scatters ? (void *)a : (void *)all};
        if (rank != 1) {
            apart[!scatters] = NULL;
        }
        options.pointers = apart;
        for (int i = 0; i < 4 * N; i++) {
            all[i] = (float)(i % 1000);
            a[i % N] = (float)rank;
        }
        CHECK_OK(unisono_algorithm_create(ctx, &options, &algorithm));
        CHECK_OK(unisono_algorithm_run(algorithm));
        unisono_algorithm_destroy(algorithm);
        if (scatters) {
            CHECK(a[7] == (float)((rank * N + 7) % 1000));
        } else if (rank == 1) {
            CHECK(all[N - 1] == 0 && all[4 * N - 1] == 3);
        }
    }
}

int main(void) {
    run_ranks(4, 60, works, NULL);
    run_ranks(4, 60, callbacks, NULL);
    run_ranks(4, 60, tags, NULL);
    run_ranks(4, 60, children, NULL);
    run_ranks(4, 60, buffers, NULL);
    run_ranks(2, 60, aborted_waits, NULL);
    run_ranks(4, 60, sparse, NULL);
    run_ranks(4, 60, sparse_works, NULL);
    run_ranks(4, 60, sparse_differs, NULL);
    run_ranks(4, 60, objects, NULL);
    return 0;
}
