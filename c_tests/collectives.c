/* Every collective against a reference in plain C: types, operators, counts that divide and that do not, zero, in place
 * and out of place, waiting in the call and through a work. The transport is what UNISONO_TRANSPORT says.
 *
 *   collectives [ranks]     without an argument: 1 to 4 ranks
 */

/* feenableexcept */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <fenv.h>
#include <math.h>
#ifdef __SSE__
#include <xmmintrin.h>
/* Subnormal numbers, on the way in and out. */
#define FLUSHES 0x8040u
#endif

#include "harness.h"

static const int dtypes[] = {UNISONO_UINT8, UNISONO_INT32, UNISONO_INT64, UNISONO_FLOAT32, UNISONO_FLOAT64};
static const uint64_t sizes[] = {0, 1, 3, 10, 4099, 70000};
#define COUNT_OF(list) (sizeof(list) / sizeof(list)[0])

struct group {
    unisono_context_t *ctx;
    int rank, size;
    int asynchronous;
};

/* What rank `rank` has at `index`: small, so that every type holds it and sums are exact. */
static double value(int rank, uint64_t index) {
    return (double)(1 + (rank + (int)(index % 3)) % 3);
}

static void put(int dtype, void *buffer, uint64_t index, double number) {
    switch (dtype) {
    case UNISONO_UINT8: ((uint8_t *)buffer)[index] = (uint8_t)number; break;
    case UNISONO_INT32: ((int32_t *)buffer)[index] = (int32_t)number; break;
    case UNISONO_INT64: ((int64_t *)buffer)[index] = (int64_t)number; break;
    case UNISONO_FLOAT32: ((float *)buffer)[index] = (float)number; break;
    default: ((double *)buffer)[index] = number;
    }
}

static double take(int dtype, const void *buffer, uint64_t index) {
    switch (dtype) {
    case UNISONO_UINT8: return ((const uint8_t *)buffer)[index];
    case UNISONO_INT32: return ((const int32_t *)buffer)[index];
    case UNISONO_INT64: return (double)((const int64_t *)buffer)[index];
    case UNISONO_FLOAT32: return ((const float *)buffer)[index];
    default: return ((const double *)buffer)[index];
    }
}

static double reduced(int op, int size, uint64_t index) {
    double all = value(0, index);
    for (int rank = 1; rank < size; rank++) {
        double next = value(rank, index);
        switch (op) {
        case UNISONO_PRODUCT: all *= next; break;
        case UNISONO_MAX: all = next > all ? next : all; break;
        case UNISONO_MIN: all = next < all ? next : all; break;
        default: all += next;
        }
    }
    return all;
}

/* Memory for `count` elements, with a guard behind it. */
static void *room(int dtype, uint64_t count) {
    uint64_t bytes = count * unisono_dtype_size(dtype);
    unsigned char *memory = malloc(bytes + 8);
    CHECK(memory != NULL);
    memset(memory, 0xA5, bytes + 8);
    return memory;
}

static void done_with(int dtype, uint64_t count, void *memory) {
    unsigned char *guard = (unsigned char *)memory + count * unisono_dtype_size(dtype);
    for (int i = 0; i < 8; i++) {
        CHECK(guard[i] == 0xA5);
    }
    free(memory);
}

static void *at(int dtype, void *buffer, uint64_t index) {
    return (char *)buffer + index * unisono_dtype_size(dtype);
}

static void fill(int dtype, void *buffer, uint64_t count, int rank, uint64_t first) {
    for (uint64_t i = 0; i < count; i++) {
        put(dtype, buffer, i, value(rank, first + i));
    }
}

static void expect(int dtype, const void *buffer, uint64_t count, int rank, uint64_t first) {
    for (uint64_t i = 0; i < count; i++) {
        CHECK(take(dtype, buffer, i) == value(rank, first + i));
    }
}

static void expect_reduced(int dtype, const void *buffer, uint64_t count, int op, int size, uint64_t first) {
    for (uint64_t i = 0; i < count; i++) {
        CHECK(take(dtype, buffer, i) == reduced(op, size, first + i));
    }
}

/* Calls, and waits if the call only started. */
#define RUN(g, ...)                                           \
    do {                                                      \
        unisono_work_t *work_ = NULL;                         \
        unisono_work_t **work = (g)->asynchronous ? &work_ : NULL; \
        CHECK_OK(__VA_ARGS__);                                \
        if (work != NULL) {                                   \
            CHECK_OK(unisono_work_wait(work_));               \
            unisono_work_destroy(work_);                      \
        }                                                     \
    } while (0)

static void reductions(struct group *g, int dtype, uint64_t count) {
    static const int ops[] = {UNISONO_SUM, UNISONO_PRODUCT, UNISONO_MAX, UNISONO_MIN};
    uint64_t all = count * (uint64_t)g->size;
    void *from = room(dtype, all), *to = room(dtype, all);
    for (size_t k = 0; k < COUNT_OF(ops); k++) {
        int op = ops[k];
        fill(dtype, from, count, g->rank, 0);
        RUN(g, unisono_allreduce(g->ctx, from, to, count, dtype, op, NULL, work));
        expect_reduced(dtype, to, count, op, g->size, 0);
        expect(dtype, from, count, g->rank, 0);
        RUN(g, unisono_allreduce(g->ctx, from, from, count, dtype, op, NULL, work));
        expect_reduced(dtype, from, count, op, g->size, 0);
    }
    for (int root = 0; root < g->size; root++) {
        fill(dtype, from, count, g->rank, 0);
        RUN(g, unisono_reduce(g->ctx, from, g->rank == root ? to : NULL, count, dtype, UNISONO_SUM, (uint32_t)root,
                              NULL, work));
        if (g->rank == root) {
            expect_reduced(dtype, to, count, UNISONO_SUM, g->size, 0);
        }
        RUN(g, unisono_reduce(g->ctx, from, g->rank == root ? from : NULL, count, dtype, UNISONO_SUM,
                              (uint32_t)root, NULL, work));
        if (g->rank == root) {
            expect_reduced(dtype, from, count, UNISONO_SUM, g->size, 0);
        } else {
            expect(dtype, from, count, g->rank, 0);
        }
    }
    uint64_t first = count * (uint64_t)g->rank;
    fill(dtype, from, all, g->rank, 0);
    RUN(g, unisono_reduce_scatter(g->ctx, from, to, count, dtype, UNISONO_SUM, NULL, work));
    expect_reduced(dtype, to, count, UNISONO_SUM, g->size, first);
    RUN(g, unisono_reduce_scatter(g->ctx, from, at(dtype, from, first), count, dtype, UNISONO_SUM, NULL, work));
    expect_reduced(dtype, at(dtype, from, first), count, UNISONO_SUM, g->size, first);
    expect(dtype, from, first, g->rank, 0);
    done_with(dtype, all, from);
    done_with(dtype, all, to);
}

static void moves(struct group *g, int dtype, uint64_t count) {
    uint64_t all = count * (uint64_t)g->size, first = count * (uint64_t)g->rank;
    void *from = room(dtype, all), *to = room(dtype, all);
    for (int root = 0; root < g->size; root++) {
        int is_root = g->rank == root;
        fill(dtype, from, count, g->rank, 0);
        RUN(g, unisono_broadcast(g->ctx, from, count, dtype, (uint32_t)root, NULL, work));
        expect(dtype, from, count, root, 0);

        fill(dtype, from, count, g->rank, 0);
        RUN(g, unisono_gather(g->ctx, from, is_root ? to : NULL, count, dtype, (uint32_t)root, NULL, work));
        for (int rank = 0; is_root && rank < g->size; rank++) {
            expect(dtype, at(dtype, to, count * (uint64_t)rank), count, rank, 0);
        }

        fill(dtype, from, all, g->rank, 0);
        RUN(g, unisono_scatter(g->ctx, is_root ? from : NULL, to, count, dtype, (uint32_t)root, NULL, work));
        expect(dtype, to, count, root, first);
    }
    fill(dtype, from, count, g->rank, 0);
    RUN(g, unisono_allgather(g->ctx, from, to, count, dtype, NULL, work));
    for (int rank = 0; rank < g->size; rank++) {
        expect(dtype, at(dtype, to, count * (uint64_t)rank), count, rank, 0);
    }
    memset(to, 0, all * unisono_dtype_size(dtype));
    fill(dtype, at(dtype, to, first), count, g->rank, 0);
    RUN(g, unisono_allgather(g->ctx, at(dtype, to, first), to, count, dtype, NULL, work));
    for (int rank = 0; rank < g->size; rank++) {
        expect(dtype, at(dtype, to, count * (uint64_t)rank), count, rank, 0);
    }
    fill(dtype, from, all, g->rank, 0);
    RUN(g, unisono_alltoall(g->ctx, from, to, count, dtype, NULL, work));
    for (int rank = 0; rank < g->size; rank++) {
        expect(dtype, at(dtype, to, count * (uint64_t)rank), count, rank, first);
    }
    RUN(g, unisono_alltoall(g->ctx, from, from, count, dtype, NULL, work));
    for (int rank = 0; rank < g->size; rank++) {
        expect(dtype, at(dtype, from, count * (uint64_t)rank), count, rank, first);
    }
    done_with(dtype, all, from);
    done_with(dtype, all, to);
}

/* Rank r's block has r × `step` elements, so rank 0's is empty. */
static void uneven(struct group *g, int dtype, uint64_t step) {
    uint64_t counts[8], places[8], all = 0;
    for (int rank = 0; rank < g->size; rank++) {
        counts[rank] = step * (uint64_t)rank;
        places[rank] = all;
        all += counts[rank];
    }
    uint64_t own = counts[g->rank], first = places[g->rank];
    void *from = room(dtype, all), *to = room(dtype, all);
    fill(dtype, from, own, g->rank, 0);
    RUN(g, unisono_allgatherv(g->ctx, from, to, counts, dtype, NULL, work));
    for (int rank = 0; rank < g->size; rank++) {
        expect(dtype, at(dtype, to, places[rank]), counts[rank], rank, 0);
    }
    for (int root = 0; root < g->size; root++) {
        int is_root = g->rank == root;
        fill(dtype, from, own, g->rank, 0);
        RUN(g, unisono_gatherv(g->ctx, from, is_root ? to : NULL, counts, dtype, (uint32_t)root, NULL, work));
        for (int rank = 0; is_root && rank < g->size; rank++) {
            expect(dtype, at(dtype, to, places[rank]), counts[rank], rank, 0);
        }
        fill(dtype, from, all, g->rank, 0);
        RUN(g, unisono_scatterv(g->ctx, is_root ? from : NULL, to, counts, dtype, (uint32_t)root, NULL, work));
        expect(dtype, to, own, root, first);
    }
    fill(dtype, from, all, g->rank, 0);
    RUN(g, unisono_reduce_scatterv(g->ctx, from, to, counts, dtype, UNISONO_SUM, NULL, work));
    expect_reduced(dtype, to, own, UNISONO_SUM, g->size, first);
    done_with(dtype, all, from);
    done_with(dtype, all, to);

    /* Rank s sends (s + d) × step elements to rank d. */
    uint64_t sent[8], received[8], out = 0, in = 0;
    for (int rank = 0; rank < g->size; rank++) {
        sent[rank] = received[rank] = step * (uint64_t)(g->rank + rank);
        out += sent[rank];
        in += received[rank];
    }
    from = room(dtype, out);
    to = room(dtype, in);
    fill(dtype, from, out, g->rank, 0);
    RUN(g, unisono_alltoallv(g->ctx, from, to, sent, received, dtype, NULL, work));
    uint64_t place = 0;
    for (int rank = 0; rank < g->size; rank++) {
        uint64_t begin = 0;
        for (int before = 0; before < g->rank; before++) {
            begin += step * (uint64_t)(rank + before);
        }
        expect(dtype, at(dtype, to, place), received[rank], rank, begin);
        place += received[rank];
    }
    done_with(dtype, out, from);
    done_with(dtype, in, to);
}

static void messages(struct group *g, int dtype, uint64_t count) {
    void *from = room(dtype, count), *to = room(dtype, count);
    uint32_t next = (uint32_t)((g->rank + 1) % g->size), previous = (uint32_t)((g->rank + g->size - 1) % g->size);
    if (g->size > 1) {
        fill(dtype, from, count, g->rank, 0);
        unisono_work_t *sending = NULL;
        CHECK_OK(unisono_send(g->ctx, from, count, dtype, next, NULL, &sending));
        RUN(g, unisono_receive(g->ctx, to, count, dtype, previous, NULL, work));
        expect(dtype, to, count, (int)previous, 0);
        CHECK_OK(unisono_work_wait(sending));
        unisono_work_destroy(sending);
    }
    /* Everybody to rank 0, which takes them as they come. */
    if (g->rank == 0) {
        int seen[8] = {0};
        for (int i = 1; i < g->size; i++) {
            uint32_t source = UNISONO_NO_RANK;
            CHECK_OK(unisono_receive_any(g->ctx, to, count, dtype, &source, NULL, NULL));
            CHECK(source > 0 && source < (uint32_t)g->size && !seen[source]++);
            expect(dtype, to, count, (int)source, 0);
        }
    } else {
        CHECK_OK(unisono_send(g->ctx, from, count, dtype, 0, NULL, NULL));
    }
    RUN(g, unisono_barrier(g->ctx, NULL, work));
    done_with(dtype, count, from);
    done_with(dtype, count, to);
}

/* ---- operators that need more than a name */

static void keep_larger(void *accumulator, const void *operand, uint64_t count, unisono_dtype_t dtype, void *user) {
    CHECK(dtype == UNISONO_INT32);
    int32_t *ours = (int32_t *)accumulator;
    const int32_t *theirs = (const int32_t *)operand;
    for (uint64_t i = 0; i < count; i++) {
        ours[i] = theirs[i] > ours[i] ? theirs[i] : ours[i];
    }
    __atomic_add_fetch((int *)user, 1, __ATOMIC_RELAXED);
}

static void operators(struct group *g) {
    enum { N = 1000 };
    static float f[N], h[N];
    static int32_t i32[N], j32[N];
    unisono_call_t call = UNISONO_CALL_INIT;
    for (int i = 0; i < N; i++) {
        f[i] = (float)value(g->rank, (uint64_t)i);
    }
    RUN(g, unisono_allreduce(g->ctx, f, h, N, UNISONO_FLOAT32, UNISONO_AVG, NULL, work));
    for (int i = 0; i < N; i++) {
        CHECK(h[i] == (float)reduced(UNISONO_SUM, g->size, (uint64_t)i) / (float)g->size);
    }
    call.scale = 0.5 * (g->rank + 1);
    RUN(g, unisono_allreduce(g->ctx, f, h, N, UNISONO_FLOAT32, UNISONO_PREMULSUM, &call, work));
    for (int i = 0; i < N; i++) {
        double sum = 0;
        for (int rank = 0; rank < g->size; rank++) {
            sum += 0.5 * (rank + 1) * value(rank, (uint64_t)i);
        }
        CHECK(h[i] == (float)sum);
    }
    for (int i = 0; i < N; i++) {
        i32[i] = 1 << g->rank | i << 8;
    }
    RUN(g, unisono_allreduce(g->ctx, i32, j32, N, UNISONO_INT32, UNISONO_BIT_OR, NULL, work));
    CHECK(j32[9] == (((1 << g->size) - 1) | 9 << 8));
    RUN(g, unisono_allreduce(g->ctx, i32, j32, N, UNISONO_INT32, UNISONO_BIT_AND, NULL, work));
    CHECK(j32[9] == (g->size == 1 ? (1 | 9 << 8) : 9 << 8));
    RUN(g, unisono_allreduce(g->ctx, i32, j32, N, UNISONO_INT32, UNISONO_BIT_XOR, NULL, work));
    CHECK(j32[9] == (((1 << g->size) - 1) | (g->size % 2 == 0 ? 0 : 9 << 8)));
    int called = 0;
    call = (unisono_call_t)UNISONO_CALL_INIT;
    call.function = keep_larger;
    call.user = &called;
    RUN(g, unisono_allreduce(g->ctx, i32, j32, N, UNISONO_INT32, UNISONO_CUSTOM, &call, work));
    for (int i = 0; i < N; i++) {
        CHECK(j32[i] == (1 << (g->size - 1) | i << 8));
    }
}

/* Threads of ranks that round and flush as they like, or want signals of what is invalid, have the sums of the others, and what they
 * have set afterwards. */
static void environments(const struct group *g) {
    enum { SHORT = 4, LONG = 40000 };
    static float x[LONG], y[LONG];
    const uint64_t lengths[] = {SHORT, LONG};
    for (int kind = 0; kind < 3; kind++) {
        for (size_t s = 0; s < COUNT_OF(lengths); s++) {
            const uint64_t n = lengths[s];
            /* A subnormal number; one that is between two floats with the others'; no number. */
            for (uint64_t i = 0; i < n; i++) {
                x[i] = kind == 0 ? 0x64p-149f : kind == 1 ? (g->rank == 0 ? 0x1p24f : 1) : NAN;
            }
            if (g->rank == g->size - 1) {
                switch (kind) {
#ifdef __SSE__
                case 0: _mm_setcsr(_mm_getcsr() | FLUSHES); break;
#endif
                case 1: CHECK(fesetround(FE_UPWARD) == 0); break;
                case 2: feenableexcept(FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW); break;
                }
            }
            int op = kind == 2 ? UNISONO_MAX : UNISONO_SUM;
            RUN(g, unisono_allreduce(g->ctx, x, y, n, UNISONO_FLOAT32, op, NULL, work));
            if (g->rank == g->size - 1) {
#ifdef __SSE__
                CHECK(kind != 0 || (_mm_getcsr() & FLUSHES) == FLUSHES);
                _mm_setcsr(_mm_getcsr() & ~FLUSHES);
#endif
                CHECK(kind != 1 || fegetround() == FE_UPWARD);
                CHECK(fesetround(FE_TONEAREST) == 0);
                CHECK(kind != 2 || fedisableexcept(FE_ALL_EXCEPT) == (FE_INVALID | FE_DIVBYZERO | FE_OVERFLOW));
            }
            for (uint64_t i = 0; i < n; i++) {
                uint32_t bits;
                memcpy(&bits, &y[i], sizeof bits);
                /* One more than 2^24 is rounded to that, to even; of four ranks it is two more. */
                const uint32_t above = g->size == 4 ? 0x4b800001 : 0x4b800000;
                CHECK(bits == (kind == 0 ? 100 * (uint32_t)g->size : kind == 1 ? above : 0x7fc00000));
            }
        }
    }
}

static void everything(unisono_context_t *ctx, void *arg) {
    struct group g = {ctx, (int)unisono_context_rank(ctx), (int)unisono_context_size(ctx), 0};
    int quick = *(int *)arg;
    for (g.asynchronous = 0; g.asynchronous < 2; g.asynchronous++) {
        for (size_t d = 0; d < COUNT_OF(dtypes); d++) {
            for (size_t s = 0; s < COUNT_OF(sizes); s++) {
                if (quick && (s > 3 || d > 1)) {
                    continue;
                }
                reductions(&g, dtypes[d], sizes[s]);
                moves(&g, dtypes[d], sizes[s]);
                messages(&g, dtypes[d], sizes[s]);
            }
            uneven(&g, dtypes[d], 0);
            uneven(&g, dtypes[d], 37);
        }
        operators(&g);
        /* Valgrind knows no such settings. */
        if (!quick && g.size > 1) {
            environments(&g);
        }
    }
}

int main(int argc, char **argv) {
    int quick = argc > 2 && strcmp(argv[2], "quick") == 0;
    int only = argc > 1 ? atoi(argv[1]) : 0;
    for (int n = 1; n <= 4; n++) {
        if (only == 0 || n == only) {
            run_ranks(n, 240, everything, &quick);
        }
    }
    return 0;
}
