/*
 * libnccl.so.2 between processes, on host memory.
 *   nccl_ranks [collectives|groups|places|nonblocking|faults]
 */

#include <dirent.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>

#include "nccl_harness.h"

enum { COUNT = 1003, LARGE = 400000 };

/* ---- collectives */

static float value(int rank, size_t i) {
    return (float)(rank + 1) * (float)(i % 17);
}

static void each_collective(ncclComm_t comm, int rank, int size, size_t count) {
    size_t all = count * (size_t)size;
    float *in = (float *)malloc(all * sizeof(float) + 1), *out = (float *)malloc(all * sizeof(float) + 1);
    float ranks = (float)(size * (size + 1) / 2);
    int root = size - 1;
    CHECK(in != NULL && out != NULL);
#define FILL()                                 \
    do {                                       \
        for (size_t i = 0; i < all; i++) {     \
            in[i] = value(rank, i);            \
            out[i] = -1;                       \
        }                                      \
    } while (0)
    FILL();
    CHECK_OK(ncclAllReduce(in, out, count, ncclFloat, ncclSum, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(out[i] == ranks * (float)(i % 17));
    CHECK_OK(ncclAllReduce(in, in, count, ncclFloat, ncclMax, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(in[i] == value(size - 1, i));
    FILL();
    CHECK_OK(ncclReduce(in, rank == root ? out : NULL, count, ncclFloat, ncclAvg, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(rank != root || out[i] == ranks * (float)(i % 17) / (float)size);
    FILL();
    CHECK_OK(ncclReduce(in, in, count, ncclFloat, ncclMin, 0, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(rank != 0 || in[i] == value(0, i));
    FILL();
    CHECK_OK(ncclBroadcast(rank == root ? in : NULL, out, count, ncclFloat, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(out[i] == value(root, i));
    CHECK_OK(ncclBcast(in, count, ncclFloat, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(in[i] == value(root, i));
    FILL();
    CHECK_OK(ncclAllGather(in, out, count, ncclFloat, comm, NULL));
    for (size_t i = 0; i < all; i++) CHECK(out[i] == value((int)(i / count), i % count));
    for (size_t i = 0; i < all; i++) out[i] = value(rank, i % count);
    CHECK_OK(ncclAllGather(out + (size_t)rank * count, out, count, ncclFloat, comm, NULL));
    for (size_t i = 0; i < all; i++) CHECK(out[i] == value((int)(i / count), i % count));
    FILL();
    CHECK_OK(ncclReduceScatter(in, out, count, ncclFloat, ncclSum, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(out[i] == ranks * (float)(((size_t)rank * count + i) % 17));
    CHECK_OK(ncclReduceScatter(in, in + (size_t)rank * count, count, ncclFloat, ncclSum, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(in[(size_t)rank * count + i] == out[i]);
    FILL();
    CHECK_OK(ncclAlltoAll(in, out, count, ncclFloat, comm, NULL));
    for (size_t i = 0; i < all; i++) {
        CHECK(out[i] == value((int)(i / count), (size_t)rank * count + i % count));
    }
    FILL();
    CHECK_OK(ncclGather(in, rank == root ? out : NULL, count, ncclFloat, root, comm, NULL));
    for (size_t i = 0; i < all; i++) CHECK(rank != root || out[i] == value((int)(i / count), i % count));
    CHECK_OK(ncclScatter(rank == root ? in : NULL, out, count, ncclFloat, root, comm, NULL));
    for (size_t i = 0; i < count; i++) CHECK(out[i] == value(root, (size_t)rank * count + i));
    /* Any alignment of the type's bytes: of one. */
    unsigned char *odd_in = (unsigned char *)in + 1, *odd_out = (unsigned char *)out + 1;
    for (size_t i = 0; i < count; i++) odd_in[i] = (unsigned char)(i + (size_t)rank);
    CHECK_OK(ncclAllReduce(odd_in, odd_out, count, ncclUint8, ncclProd, comm, NULL));
    for (size_t i = 0; i < count; i++) {
        unsigned char product = 1;
        for (int r = 0; r < size; r++) product = (unsigned char)(product * (unsigned char)(i + (size_t)r));
        CHECK(odd_out[i] == product);
    }
    free(in);
    free(out);
}

static void each_type(ncclComm_t comm, int rank, int size) {
    static const size_t bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    /* One in each type, the short floats as bits. */
    static const uint64_t ones[ncclNumTypes] = {1,      1,          1,                     1,      1,    1,
                                                0x3c00, 0x3f800000, 0x3ff0000000000000ull, 0x3f80, 0x38, 0x3c};
    for (int type = 0; type < ncclNumTypes; type++) {
        unsigned char in[32], out[32];
        for (int op = 0; op < ncclNumOps; op++) {
            for (size_t i = 0; i < 3; i++) memcpy(in + i * bytes[type], &ones[type], bytes[type]);
            memset(out, 0, sizeof out);
            CHECK_OK(ncclAllReduce(in, out, 3, (ncclDataType_t)type, (ncclRedOp_t)op, comm, NULL));
            /* The product, the extremes and the average of ones are one; so is the result of all but the sum. */
            CHECK(op == ncclSum || memcmp(in, out, 3 * bytes[type]) == 0);
        }
    }
    /* Averages of integers truncate towards zero. */
    int32_t x = rank == 0 ? -3 : 0, y = 9;
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclInt, ncclAvg, comm, NULL));
    CHECK(y == -3 / size);
    /* Each rank has a factor of its own. */
    ncclRedOp_t op;
    double factor = rank + 1, in = 2, sum = 0;
    CHECK_OK(ncclRedOpCreatePreMulSum(&op, &factor, ncclDouble, ncclScalarHostImmediate, comm));
    CHECK_OK(ncclAllReduce(&in, &sum, 1, ncclDouble, op, comm, NULL));
    CHECK(sum == size * (size + 1));
    CHECK_OK(ncclRedOpDestroy(op, comm));
}

static void collectives(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id);
    int number = -1;
    CHECK_OK(ncclCommCount(comm, &number));
    CHECK(number == size);
    CHECK_OK(ncclCommUserRank(comm, &number));
    CHECK(number == rank);
    each_collective(comm, rank, size, 1);
    each_collective(comm, rank, size, COUNT);
    each_collective(comm, rank, size, LARGE);
    each_type(comm, rank, size);
    CHECK_OK(ncclCommFinalize(comm));
    CHECK_OK(ncclCommDestroy(comm));
}

/* ---- groups */

static void groups(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), second = NULL;
    int next = (rank + 1) % size, previous = (rank + size - 1) % size;
    float *out = (float *)malloc(LARGE * sizeof(float)), *in = (float *)malloc(LARGE * sizeof(float));
    /* A ring of messages, long and short, in orders that would deadlock one by one. */
    for (size_t count = 1; count <= LARGE; count = count * 41 + 1) {
        for (size_t i = 0; i < count; i++) out[i] = value(rank, i);
        CHECK_OK(ncclGroupStart());
        if (rank % 2 == 0) {
            CHECK_OK(ncclSend(out, count, ncclFloat, next, comm, NULL));
            CHECK_OK(ncclRecv(in, count, ncclFloat, previous, comm, NULL));
        } else {
            CHECK_OK(ncclSend(out, count, ncclFloat, next, comm, NULL));
            CHECK_OK(ncclRecv(in, count, ncclFloat, previous, comm, NULL));
        }
        CHECK_OK(ncclGroupEnd());
        for (size_t i = 0; i < count; i++) CHECK(in[i] == value(previous, i));
    }
    /* Everybody to everybody, itself too; receives first. */
    CHECK_OK(ncclGroupStart());
    for (int peer = size - 1; peer >= 0; peer--) CHECK_OK(ncclRecv(in + peer, 1, ncclFloat, peer, comm, NULL));
    for (int peer = 0; peer < size; peer++) {
        out[peer] = (float)(100 * rank + peer);
        CHECK_OK(ncclSend(out + peer, 1, ncclFloat, peer, comm, NULL));
    }
    CHECK_OK(ncclGroupEnd());
    for (int peer = 0; peer < size; peer++) CHECK(in[peer] == (float)(100 * peer + rank));
    /* Messages of one pair match in the order of the calls. */
    CHECK_OK(ncclGroupStart());
    for (int i = 0; i < 20; i++) {
        out[i] = (float)i;
        CHECK_OK(ncclSend(out + i, 1, ncclFloat, next, comm, NULL));
        CHECK_OK(ncclRecv(in + i, 1, ncclFloat, previous, comm, NULL));
    }
    CHECK_OK(ncclGroupEnd());
    for (int i = 0; i < 20; i++) CHECK(in[i] == (float)i);
    /* Messages of no elements. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclSend(NULL, 0, ncclFloat, next, comm, NULL));
    CHECK_OK(ncclRecv(NULL, 0, ncclFloat, previous, comm, NULL));
    CHECK_OK(ncclGroupEnd());
    /* Two communicators in one group, whose calls the ranks make in different orders. */
    CHECK_OK(ncclCommSplit(comm, 0, -rank, &second, NULL));
    float x = 1, y = 0, a = 2, b = 0, c[3] = {1, 2, 3}, d[3] = {0};
    CHECK_OK(ncclGroupStart());
    if (rank % 2 == 0) {
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
        CHECK_OK(ncclAllReduce(&a, &b, 1, ncclFloat, ncclSum, second, NULL));
    } else {
        CHECK_OK(ncclAllReduce(&a, &b, 1, ncclFloat, ncclSum, second, NULL));
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    }
    CHECK_OK(ncclAllReduce(c, d, 3, ncclFloat, ncclMax, comm, NULL));
    CHECK_OK(ncclGroupEnd());
    CHECK(y == (float)size && b == 2 * (float)size && d[2] == 3);
    /* An error of one rank's call leaves the others' group with nobody to talk to: here nothing was started on any. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "root 99", ncclBcast(&x, 1, ncclFloat, 99, comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "root 99", ncclGroupEnd());
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK(y == (float)size);
    CHECK_OK(ncclCommDestroy(second));
    CHECK_OK(ncclCommDestroy(comm));
    free(in);
    free(out);
}

/* ---- communicators that do not block */

static void nonblocking(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = NULL, child = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    float x = 1, y = 0;
    if (rank == 0) sleep_ms(100);
    ncclResult_t begun = ncclCommInitRankConfig(&comm, size, id, rank, &config);
    CHECK(begun == ncclInProgress || begun == ncclSuccess);
    CHECK(comm != NULL);
    if (rank == 1) {
        /* Rank 0 is not there yet. */
        ncclResult_t state = ncclSuccess;
        CHECK_OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclInProgress);
        CHECK_FAILS(ncclInvalidArgument, "still being created", ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    }
    CHECK(settled(comm) == ncclSuccess);
    ncclResult_t called = ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL);
    CHECK(called == ncclSuccess || called == ncclInProgress);
    CHECK(settled(comm) == ncclSuccess);
    CHECK(y == (float)size);
    /* The child inherits. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommSplit(comm, 0, rank, &child, NULL));
    ncclResult_t ended = ncclGroupEnd();
    CHECK(ended == ncclInProgress || ended == ncclSuccess);
    CHECK(settled(child) == ncclSuccess);
    called = ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, child, NULL);
    CHECK(called == ncclSuccess || called == ncclInProgress);
    ncclResult_t finalized = ncclCommFinalize(child);
    CHECK(finalized == ncclSuccess || finalized == ncclInProgress);
    CHECK(settled(child) == ncclSuccess);
    CHECK_OK(ncclCommDestroy(child));
    /* What asks the parent alone finds the child ready. */
    if (rank == 0) sleep_ms(50);
    ended = ncclCommSplit(comm, 0, -rank, &child, NULL);
    CHECK(ended == ncclInProgress || ended == ncclSuccess);
    CHECK(settled(comm) == ncclSuccess);
    int number = -1;
    CHECK_OK(ncclCommUserRank(child, &number));
    CHECK(number == size - 1 - rank);
    CHECK_OK(ncclCommDestroy(child));
    /* It is the parent that says whether making a child waits. */
    ncclUniqueId other;
    if (rank == 0) CHECK_OK(ncclGetUniqueId(&other));
    called = ncclBroadcast(&other, &other, sizeof other, ncclChar, 0, comm, NULL);
    CHECK(called == ncclSuccess || called == ncclInProgress);
    CHECK(settled(comm) == ncclSuccess);
    CHECK_OK(ncclCommDestroy(comm));
    comm = meet(rank, size, other);
    CHECK_OK(ncclCommSplit(comm, 0, rank, &child, &config));
    CHECK_OK(ncclCommUserRank(child, &number));
    CHECK(number == rank);
    CHECK_OK(ncclCommDestroy(child));
    CHECK_OK(ncclCommDestroy(comm));
    /* One that is aborted before the others have come ends at once. */
    if (rank == 0) {
        ncclUniqueId lonely;
        CHECK_OK(ncclGetUniqueId(&lonely));
        CHECK_RESULT(ncclInProgress, ncclCommInitRankConfig(&comm, 2, lonely, 0, &config));
        double start = seconds_now();
        CHECK_OK(ncclCommAbort(comm));
        CHECK(seconds_now() - start < 5);
    }
}

/* ---- a place that all know */

/* A port that is free, and none that the system gives out by itself. */
static int free_port(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), port = 10000 + getpid() % 20000;
    CHECK(listener >= 0);
    do {
        address.sin_port = htons((uint16_t)++port);
    } while (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 && port < 32000);
    close(listener);
    return port;
}

/* Every rank makes the id itself; rank 0 comes last, and the second communicator is made while the first is there on some. A smaller one
 * between them. In the second round the ranks are others, and who was rank 0 still serves the place. */
static void places(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id);
    int port = rank == 0 ? free_port() : 0;
    CHECK_OK(ncclBroadcast(&port, &port, 1, ncclInt, 0, comm, NULL));
    CHECK_OK(ncclCommDestroy(comm));
    char place[64];
    snprintf(place, sizeof place, "127.0.0.1:%d", port);
    setenv("NCCL_COMM_ID", place, 1);
    for (int round = 0; round < 3; round++) {
        ncclUniqueId own;
        float x = 1, y = 0;
        int now = round == 1 ? size - 1 - rank : rank;
        if (now == 0) sleep_ms(50);
        CHECK_OK(ncclGetUniqueId(&own));
        comm = meet(now, size, own);
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
        CHECK(y == (float)size);
        CHECK_OK(ncclCommDestroy(comm));
        if (now < size - 1) {
            CHECK_OK(ncclGetUniqueId(&own));
            comm = meet(now, size - 1, own);
            CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
            CHECK(y == (float)(size - 1));
            CHECK_OK(ncclCommDestroy(comm));
        }
    }
}

/* ---- trouble: a rank that ends something waits until the others have come out of what was before */

static void let_others_finish(void) {
    sleep_ms(300);
}

static void *abort_soon(void *comm) {
    let_others_finish();
    CHECK_OK(ncclCommAbort((ncclComm_t)comm));
    return NULL;
}

static void until_aborted(ncclComm_t comm) {
    ncclResult_t state = ncclSuccess;
    double end = seconds_now() + 20;
    while (state == ncclSuccess && seconds_now() < end) {
        CHECK_OK(ncclCommGetAsyncError(comm, &state));
        sleep_ms(1);
    }
    CHECK(state == ncclRemoteError);
    CHECK_TEXT("rank 0 aborted");
}

/* Rank 0 waits for a sum that rank 1 never calls, and is aborted from another thread; the others are told. */
static void aborts(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id);
    float x = 1, y = 0;
    if (rank == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, abort_soon, comm) == 0);
        double start = seconds_now();
        CHECK_FAILS(ncclRemoteError, "aborted", ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
        CHECK(seconds_now() - start < 5);
        CHECK(pthread_join(thread, NULL) == 0);
        CHECK_FAILS(ncclInvalidArgument, "is no communicator", ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    } else {
        until_aborted(comm);
        CHECK_FAILS(ncclRemoteError, "failed before", ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
        CHECK_OK(ncclCommAbort(comm));
    }
}

static int has_another, rank_0_has_aborted[2], has_swapped[3][2], others_are_done[2];

/* Of ranks 1 and 2. Both have come out of it when this returns. */
static void swap_without_rank_0(int rank, ncclComm_t comm) {
    float x = (float)rank, y = 0;
    char byte;
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclSend(&x, 1, ncclFloat, 3 - rank, comm, NULL));
    CHECK_OK(ncclRecv(&y, 1, ncclFloat, 3 - rank, comm, NULL));
    CHECK_OK(ncclGroupEnd());
    CHECK(y == (float)(3 - rank));
    CHECK(write(has_swapped[3 - rank][1], "", 1) == 1 && read(has_swapped[rank][0], &byte, 1) == 1);
}

/* Rank 0 aborts behind its last call, as trainers do that just end: what the others have called, or call without it,
 * ends well, and what needs it fails soon. It may have another communicator of the same ranks. */
static void abort_behind_the_last_call(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), child = NULL;
    size_t count = 4 << 20;
    float *x = calloc(count, sizeof *x);
    ncclResult_t state = ncclInternalError;
    char byte = 0;
    CHECK(x != NULL);
    for (int i = 0; i < 3; i++) {
        x[count - 1] = rank == 0 ? (float)i : -1;
        CHECK_OK(ncclBroadcast(x, x, count, ncclFloat, 0, comm, NULL));
        CHECK(x[count - 1] == (float)i);
    }
    if (has_another) CHECK_OK(ncclCommSplit(comm, 0, rank, &child, NULL));
    if (rank == 0) {
        CHECK_OK(ncclCommAbort(comm));
        for (int other = 1; other < size; other++) CHECK(write(rank_0_has_aborted[1], "", 1) == 1);
        for (int other = 1; other < size; other++) CHECK(read(others_are_done[0], &byte, 1) == 1);
    } else {
        CHECK(read(rank_0_has_aborted[0], &byte, 1) == 1);
        /* Or it would not have heard. */
        let_others_finish();
        CHECK_OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclSuccess);
        swap_without_rank_0(rank, comm);
        double start = seconds_now();
        CHECK_FAILS(ncclRemoteError, "rank 0", ncclAllReduce(x, x, 1, ncclFloat, ncclSum, comm, NULL));
        CHECK(seconds_now() - start < 20);
        CHECK_OK(ncclCommAbort(comm));
        CHECK(write(others_are_done[1], "", 1) == 1);
    }
    if (has_another) {
        float one = 1, sum = 0;
        CHECK_OK(ncclAllReduce(&one, &sum, 1, ncclFloat, ncclSum, child, NULL));
        CHECK(sum == (float)size);
        CHECK_OK(ncclCommAbort(child));
    }
    free(x);
}

static ncclComm_t lonely;

static void *abort_lonely(void *unused) {
    (void)unused;
    sleep_ms(100);
    CHECK_OK(ncclCommAbort(lonely));
    return NULL;
}

/* A communicator that nobody else joins is aborted while its creation blocks. */
static void abort_of_a_creation(int rank, int size, ncclUniqueId id) {
    pthread_t thread;
    if (rank != 0) return;
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommInitRank(&lonely, size, id, rank));
    CHECK(pthread_create(&thread, NULL, abort_lonely, NULL) == 0);
    double start = seconds_now();
    CHECK_FAILS(ncclRemoteError, "was aborted", ncclGroupEnd());
    CHECK(seconds_now() - start < 20);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(lonely == NULL);
}

/* Written to by each rank that needs rank 0 no more, and by rank 0 when the others may come. */
static int rank_is_done[2], others_may_come[2];

static void await_bytes(const int pipe_ends[2], int count) {
    char byte;
    for (int i = 0; i < count; i++) CHECK(read(pipe_ends[0], &byte, 1) == 1);
}

/* One rank's interface does not exist. All hear of that, though rank 0, which serves the meeting, does so before the last one, and goes on
 * then. */
static void a_rank_without_an_interface(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = NULL;
    if (rank == 1) {
        setenv("UNISONO_TRANSPORT", "tcp", 1); /* shared memory needs none */
        setenv("UNISONO_INTERFACE", "nosuch0", 1);
    }
    double start = seconds_now();
    CHECK(ncclCommInitRank(&comm, size, id, rank) != ncclSuccess);
    CHECK_TEXT("nosuch0");
    CHECK(seconds_now() - start < 20);
    CHECK(comm == NULL);
    if (rank == 0) {
        await_bytes(rank_is_done, size - 1);
    } else {
        CHECK(write(rank_is_done[1], "", 1) == 1);
    }
}

/* Whether this process has a thread of this name. */
static int has_thread(const char *name) {
    DIR *tasks = opendir("/proc/self/task");
    int found = 0;
    CHECK(tasks != NULL);
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[512], line[64] = "";
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *comm = fopen(path, "r");
        if (comm == NULL) continue;
        if (fgets(line, sizeof line, comm) != NULL) line[strcspn(line, "\n")] = '\0';
        found |= strcmp(line, name) == 0;
        fclose(comm);
    }
    closedir(tasks);
    return found;
}

/* Rank 0, which serves the meeting, gives it up and goes on; rank 1 comes when that is over, and is told. */
static void late_for_a_meeting(int rank, int size, ncclUniqueId id) {
    if (rank == 0) {
        double end = seconds_now() + 40;
        abort_of_a_creation(rank, size, id);
        while (has_thread("unisono-meet")) {
            CHECK(seconds_now() < end);
            sleep_ms(5);
        }
        CHECK(write(others_may_come[1], "", 1) == 1);
        await_bytes(rank_is_done, size - 1);
        return;
    }
    ncclComm_t comm = NULL;
    await_bytes(others_may_come, 1);
    double start = seconds_now();
    CHECK_FAILS(ncclRemoteError, "rank 0 has called the meeting off", ncclCommInitRank(&comm, size, id, rank));
    CHECK(seconds_now() - start < 10);
    CHECK(write(rank_is_done[1], "", 1) == 1);
}

static int may_block, rank_0_is_done[2];

/* Rank 0 shrinks what rank 1, which stays, does not shrink. Whoever watches over it has the parent alone, and aborts that. */
static void abort_of_a_parent(int rank, int size, ncclUniqueId id) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL, rest = NULL;
    int excluded[] = {size - 1};
    pthread_t thread;
    config.blocking = may_block;
    ncclResult_t begun = ncclCommInitRankConfig(&comm, size, id, rank, &config);
    CHECK(begun == ncclSuccess || (begun == ncclInProgress && !may_block));
    CHECK(settled(comm) == ncclSuccess);
    if (rank != 0) {
        char byte;
        until_aborted(comm);
        CHECK(rank != 1 || read(rank_0_is_done[0], &byte, 1) == 1);
        CHECK_OK(ncclCommAbort(comm));
        return;
    }
    CHECK(pthread_create(&thread, NULL, abort_soon, comm) == 0);
    double start = seconds_now();
    begun = ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_DEFAULT);
    CHECK(begun == (may_block ? ncclRemoteError : ncclInProgress));
    CHECK(may_block || settled(rest) == ncclRemoteError);
    CHECK_TEXT("was aborted");
    CHECK(seconds_now() - start < 20);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK((rest == NULL) == may_block);
    CHECK_OK(ncclCommAbort(rest));
    CHECK(write(rank_0_is_done[1], "", 1) == 1);
}

/* All ranks learn what the odd one called, and the process goes on with another communicator. */
static void mismatches(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), rest = NULL;
    float x[2] = {1, 1}, y[2] = {0};
    size_t count = rank == 1 ? 2 : 1;
    let_others_finish();
    CHECK_FAILS(ncclInvalidUsage, "rank 1", ncclAllReduce(x, y, count, ncclFloat, ncclSum, comm, NULL));
    CHECK_TEXT("allreduce(2");
    /* Not without saying that what runs may end. */
    int excluded[] = {1};
    if (rank != 1) {
        CHECK_FAILS(ncclInvalidUsage, "NCCL_SHRINK_ABORT", ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
        CHECK_OK(ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_ABORT));
        CHECK_OK(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, rest, NULL));
        CHECK(y[0] == (float)(size - 1));
        CHECK_OK(ncclCommDestroy(rest));
    }
    CHECK_OK(ncclCommAbort(comm));
}

/* The last rank dies; the others are told, and go on without it. */
static void deaths(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), rest = NULL;
    float x = 1, y = 0;
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    if (rank == size - 1) {
        let_others_finish();
        kill(getpid(), SIGKILL);
    }
    char name[32];
    snprintf(name, sizeof name, "rank %d", size - 1);
    double start = seconds_now();
    CHECK_FAILS(ncclRemoteError, name, ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK(seconds_now() - start < 10);
    int excluded[] = {size - 1};
    CHECK_OK(ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_ABORT));
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, rest, NULL));
    CHECK(y == (float)(size - 1));
    CHECK_OK(ncclCommDestroy(rest));
    CHECK_OK(ncclCommDestroy(comm));
}

/* The same where nothing blocks: what a child could not be made for is behind its parent when that is stopped to be shrunk. */
static void deaths_in_background(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = NULL, child = NULL, rest = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t begun = ncclCommInitRankConfig(&comm, size, id, rank, &config);
    CHECK(begun == ncclInProgress || begun == ncclSuccess);
    CHECK(settled(comm) == ncclSuccess);
    if (rank == size - 1) {
        let_others_finish();
        kill(getpid(), SIGKILL);
    }
    begun = ncclCommSplit(comm, 0, rank, &child, NULL);
    CHECK(begun == ncclInProgress || begun == ncclSuccess);
    CHECK(settled(comm) == ncclRemoteError);
    CHECK(settled(child) == ncclRemoteError);
    CHECK_OK(ncclCommAbort(child));
    int excluded[] = {size - 1};
    begun = ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_ABORT);
    CHECK(begun == ncclInProgress || begun == ncclSuccess);
    CHECK(settled(comm) == ncclSuccess);
    CHECK(settled(rest) == ncclSuccess);
    float x = 1, y = 0;
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, rest, NULL));
    CHECK(y == (float)(size - 1));
    CHECK_OK(ncclCommDestroy(rest));
    CHECK_OK(ncclCommDestroy(comm));
}

/* Stopped on purpose, by every rank, then shrunk. */
static void revocations(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), other = NULL, rest = NULL;
    float x = 1, y = 0;
    CHECK_OK(ncclCommSplit(comm, 0, rank, &other, NULL));
    let_others_finish();
    CHECK_OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    /* All have, before one goes on. */
    let_others_finish();
    CHECK_OK(ncclCommSplit(comm, 0, -rank, &rest, NULL));
    x = (float)rank;
    CHECK_OK(ncclBroadcast(&x, &y, 1, ncclFloat, 0, rest, NULL));
    CHECK(y == (float)(size - 1));
    CHECK_OK(ncclCommDestroy(rest));
    x = 1;
    int excluded[] = {0};
    if (rank != 0) {
        CHECK_OK(ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, rest, NULL));
        CHECK(y == (float)(size - 1));
        CHECK_OK(ncclCommDestroy(rest));
        /* What is stopped to be shrunk has not failed, and ends as any other. */
        ncclResult_t state = ncclInternalError;
        CHECK_OK(ncclCommShrink(other, excluded, 1, &rest, NULL, NCCL_SHRINK_ABORT));
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, rest, NULL));
        CHECK_OK(ncclCommDestroy(rest));
        CHECK_OK(ncclCommGetAsyncError(other, &state));
        CHECK(state == ncclSuccess);
        CHECK_OK(ncclCommFinalize(other));
    }
    CHECK_OK(ncclCommDestroy(other));
    CHECK_OK(ncclCommDestroy(comm));
}

/* Of a group's communicators some do not meet: the client has the others, and none of those. */
static void half_a_group(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), failed = NULL, first = NULL, good = NULL, last = NULL;
    float x[2] = {1, 1}, y[2] = {0};
    CHECK_OK(ncclCommSplit(comm, 0, rank, &failed, NULL));
    size_t count = rank == 1 ? 2 : 1;
    CHECK_FAILS(ncclInvalidUsage, "differs", ncclAllReduce(x, y, count, ncclFloat, ncclSum, failed, NULL));
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommSplit(failed, 0, rank, &first, NULL));
    CHECK_OK(ncclCommSplit(comm, 0, rank, &good, NULL));
    CHECK_OK(ncclCommSplit(failed, 0, rank, &last, NULL));
    CHECK(first != NULL && last != NULL);
    CHECK_FAILS(ncclInvalidUsage, "failed before", ncclGroupEnd());
    CHECK(first == NULL && last == NULL && good != NULL);
    CHECK_OK(ncclAllReduce(x, y, 1, ncclFloat, ncclSum, good, NULL));
    CHECK(y[0] == (float)size);
    CHECK_OK(ncclCommDestroy(good));
    CHECK_OK(ncclCommDestroy(failed));
    CHECK_OK(ncclCommDestroy(comm));
}

int main(int argc, char **argv) {
    const char *only = argc > 1 ? argv[1] : "";
#define WANTED(name) (*only == '\0' || strcmp(only, name) == 0)
    for (int size = 2; size <= 4; size++) {
        if (WANTED("collectives")) nccl_ranks(size, 100, collectives);
        if (WANTED("groups")) nccl_ranks(size, 60, groups);
    }
    if (WANTED("places")) nccl_ranks(3, 60, places);
    if (WANTED("nonblocking")) nccl_ranks(2, 60, nonblocking);
    if (WANTED("faults")) {
        nccl_ranks(3, 60, aborts);
        CHECK(pipe(rank_0_has_aborted) == 0 && pipe(others_are_done) == 0);
        for (int rank = 1; rank < 3; rank++) CHECK(pipe(has_swapped[rank]) == 0);
        for (has_another = 0; has_another < 2; has_another++) nccl_ranks(3, 60, abort_behind_the_last_call);
        nccl_ranks(2, 60, abort_of_a_creation);
        CHECK(pipe(rank_is_done) == 0 && pipe(others_may_come) == 0);
        nccl_ranks(3, 60, a_rank_without_an_interface);
        nccl_ranks(2, 60, late_for_a_meeting);
        CHECK(pipe(rank_0_is_done) == 0);
        for (may_block = 0; may_block < 2; may_block++) nccl_ranks(3, 60, abort_of_a_parent);
        nccl_ranks(3, 60, mismatches);
        nccl_ranks_but(3, 60, deaths, 2);
        nccl_ranks_but(3, 60, deaths_in_background, 2);
        nccl_ranks(3, 60, revocations);
        nccl_ranks(2, 60, half_a_group);
    }
    return 0;
}
