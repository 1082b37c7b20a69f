/* What calls of a library with NCCL's ABI cost a processor: calls LIBRARY [OPERATION [CALLS [GROUPS]]].
 *
 * Two ranks are two threads of this process, on the two GPUs of driver.c. There is one call of an operation without a group, and
 * groups of 4, 16 and 64 (or CALLS, to profile), in place, of 32 bytes to 512 KiB; a send and a receive are a group in any case. The
 * figures are processor time of a thread in microseconds for the call or the group, the least of 7 rounds of 2000 calls and more, or
 * of GROUPS groups. */

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { RANKS = 2, ROUNDS = 7, CALLS = 2000, MOST = 64, MOST_BYTES = 512 << 10, FLOAT = 7, SUM = 0 };

typedef void *comm_t;
typedef void *stream_t;

static int (*init_all)(comm_t *, int, const int *);
static int (*group_start)(void), (*group_end)(void);
static int (*all_reduce)(const void *, void *, size_t, int, int, comm_t, stream_t);
static int (*reduce_scatter)(const void *, void *, size_t, int, int, comm_t, stream_t);
static int (*all_gather)(const void *, void *, size_t, int, comm_t, stream_t);
static int (*broadcast)(const void *, void *, size_t, int, int, comm_t, stream_t);
static int (*reduce)(const void *, void *, size_t, int, int, int, comm_t, stream_t);
static int (*send_to)(const void *, size_t, int, int, comm_t, stream_t);
static int (*receive)(void *, size_t, int, int, comm_t, stream_t);
static const char *(*last_error)(comm_t);

int cuDevicePrimaryCtxRetain(intptr_t *, int);
int cuCtxPushCurrent_v2(intptr_t);
int cuMemAlloc_v2(uintptr_t *, size_t);
int cuStreamCreateWithPriority(stream_t *, unsigned, int);

static pthread_barrier_t barrier;
static comm_t comms[RANKS];
static const char *only;
static int only_calls, only_groups;

static void check(int status) {
    if (status == 0) return;
    fprintf(stderr, "%d: %s\n", status, last_error(NULL));
    exit(1);
}

/* ---- operations on `count` elements of each rank, as rank `rank` */

static int do_all_reduce(float *memory, size_t count, int rank, stream_t stream) {
    return all_reduce(memory, memory, count, FLOAT, SUM, comms[rank], stream);
}

static int do_reduce_scatter(float *memory, size_t count, int rank, stream_t stream) {
    size_t part = count / RANKS;
    return reduce_scatter(memory, memory + (size_t)rank * part, part, FLOAT, SUM, comms[rank], stream);
}

static int do_all_gather(float *memory, size_t count, int rank, stream_t stream) {
    size_t part = count / RANKS;
    return all_gather(memory + (size_t)rank * part, memory, part, FLOAT, comms[rank], stream);
}

static int do_broadcast(float *memory, size_t count, int rank, stream_t stream) {
    return broadcast(memory, memory, count, FLOAT, 0, comms[rank], stream);
}

static int do_reduce(float *memory, size_t count, int rank, stream_t stream) {
    return reduce(memory, memory, count, FLOAT, SUM, 0, comms[rank], stream);
}

/* In a group always. */
static int do_send_receive(float *memory, size_t count, int rank, stream_t stream) {
    check(send_to(memory, count / 2, FLOAT, 1 - rank, comms[rank], stream));
    return receive(memory + count / 2, count / 2, FLOAT, 1 - rank, comms[rank], stream);
}

static const struct operation {
    const char *name;
    int (*call)(float *, size_t, int, stream_t);
} operations[] = {
    {"allreduce", do_all_reduce}, {"reduce_scatter", do_reduce_scatter}, {"allgather", do_all_gather},
    {"broadcast", do_broadcast},  {"reduce", do_reduce},                 {"send_receive", do_send_receive},
};

static double processor_time(void) {
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void group(const struct operation *operation, int calls, float *memory, size_t count, int rank, stream_t stream) {
    int alone = calls == 1 && operation->call != do_send_receive;
    if (!alone) check(group_start());
    for (int i = 0; i < calls; i++) check(operation->call(memory + (size_t)i * count, count, rank, stream));
    if (!alone) check(group_end());
}

static double measure(const struct operation *operation, int calls, float *memory, size_t count, int rank, stream_t stream) {
    int groups = only_groups > 0 ? only_groups : CALLS / calls * (only_calls > 0 ? 100 : 1);
    double least = 1e30;
    for (int round = 0; round < ROUNDS; round++) {
        pthread_barrier_wait(&barrier);
        double begin = processor_time();
        for (int i = 0; i < groups; i++) group(operation, calls, memory, count, rank, stream);
        double took = (processor_time() - begin) / groups;
        if (took < least) least = took;
    }
    return least;
}

static void *run(void *number) {
    int rank = (int)(intptr_t)number;
    intptr_t context;
    stream_t stream;
    uintptr_t memory;
    check(cuDevicePrimaryCtxRetain(&context, rank));
    check(cuCtxPushCurrent_v2(context));
    check(cuStreamCreateWithPriority(&stream, 0, 0));
    check(cuMemAlloc_v2(&memory, (size_t)MOST * MOST_BYTES));
    for (size_t i = 0; i < sizeof operations / sizeof *operations; i++) {
        if (only != NULL && strcmp(only, operations[i].name) != 0) continue;
        for (size_t bytes = 32; bytes <= MOST_BYTES; bytes *= 128) {
            if (only_calls > 0 && bytes > 32) break;
            if (rank == 0) printf("%-14s %7zu bytes", operations[i].name, bytes);
            for (int calls = 1; calls <= MOST; calls *= 4) {
                if (only_calls > 0) calls = only_calls;
                double took = measure(&operations[i], calls, (float *)memory, bytes / sizeof(float), rank, stream);
                if (rank == 0) printf("  %2d: %6.2f", calls, took);
                if (only_calls > 0) break;
            }
            if (rank == 0) puts("");
        }
    }
    return NULL;
}

static void *find(void *library, const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    return found;
}

int main(int count, char **arguments) {
    if (count < 2) {
        fprintf(stderr, "usage: %s LIBRARY [OPERATION [CALLS [GROUPS]]]\n", arguments[0]);
        return 2;
    }
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    only = count > 2 ? arguments[2] : NULL;
    only_calls = count > 3 ? atoi(arguments[3]) : 0;
    only_groups = count > 4 ? atoi(arguments[4]) : 0;
    init_all = find(library, "ncclCommInitAll");
    group_start = find(library, "ncclGroupStart");
    group_end = find(library, "ncclGroupEnd");
    all_reduce = find(library, "ncclAllReduce");
    reduce_scatter = find(library, "ncclReduceScatter");
    all_gather = find(library, "ncclAllGather");
    broadcast = find(library, "ncclBroadcast");
    reduce = find(library, "ncclReduce");
    send_to = find(library, "ncclSend");
    receive = find(library, "ncclRecv");
    last_error = find(library, "ncclGetLastError");
    pthread_barrier_init(&barrier, NULL, RANKS);
    check(init_all(comms, RANKS, (int[]){0, 1}));
    pthread_t threads[RANKS];
    for (intptr_t rank = 0; rank < RANKS; rank++) pthread_create(&threads[rank], NULL, run, (void *)rank);
    for (int rank = 0; rank < RANKS; rank++) pthread_join(threads[rank], NULL);
    /* Their kernels have not run, so nothing of them is asked to end in order. */
    fflush(stdout);
    _Exit(0);
}
