/*
 * libnccl.so.2: communicators that grow, between processes and in one, on host memory.
 *   nccl_growth [grown|background|refusals|faults]
 */

#include "nccl_harness.h"

enum { RANKS = 4 };

/* ---- ids from hand to hand */

/* A pipe to each rank. */
static int hands[RANKS][2];

/* To ranks `first` to `last`, but not back to `own`. */
static void hand_out(const ncclUniqueId *id, int first, int last, int own) {
    for (int rank = first; rank <= last; rank++) {
        CHECK(rank == own || write(hands[rank][1], id, sizeof *id) == (ssize_t)sizeof *id);
    }
}

static ncclUniqueId handed(int rank) {
    ncclUniqueId id;
    CHECK(read(hands[rank][0], &id, sizeof id) == (ssize_t)sizeof id);
    return id;
}

/* ---- growing, and what comes of it */

/* Which ranks of the parent pass the id: programs are written in each of these manners. */
typedef enum { NOBODY, MAKER, EVERYBODY } manner;

typedef struct {
    int old, size, maker;
    manner passed_by;
} growth;

/* What the call begins. */
static ncclResult_t begin(ncclComm_t comm, int rank, growth how, ncclComm_t *grown, ncclConfig_t *config) {
    ncclUniqueId id, second;
    if (rank >= how.old) {
        id = handed(rank);
        return ncclCommGrow(NULL, how.size, &id, rank, grown, config);
    }
    if (rank == how.maker) {
        CHECK_OK(ncclCommGetUniqueId(comm, &id));
        CHECK_FAILS(ncclInvalidUsage, "not used yet", ncclCommGetUniqueId(comm, &second));
        hand_out(&id, how.passed_by == EVERYBODY ? 0 : how.old, how.size - 1, rank);
    } else if (how.passed_by == EVERYBODY) {
        id = handed(rank);
    }
    int passes = how.passed_by == EVERYBODY || (how.passed_by == MAKER && rank == how.maker);
    return ncclCommGrow(comm, how.size, passes ? &id : NULL, -1, grown, config);
}

static ncclComm_t grow(ncclComm_t comm, int rank, growth how) {
    ncclComm_t grown = NULL;
    CHECK_OK(begin(comm, rank, how, &grown, NULL));
    return grown;
}

static void is_of(ncclComm_t comm, int rank, int size) {
    int answer = -1;
    float x = (float)(rank + 1), y = 0;
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK(y == (float)(size * (size + 1) / 2));
    CHECK_OK(ncclCommCount(comm, &answer));
    CHECK(answer == size);
    CHECK_OK(ncclCommUserRank(comm, &answer));
    CHECK(answer == rank);
}

static void grown(int rank, int size, ncclUniqueId id) {
    int old = size / 2;
    ncclComm_t comm = rank < old ? meet(rank, old, id) : NULL;
    for (int maker = 0; maker < old; maker++) {
        for (manner by = NOBODY; by <= EVERYBODY; by++) {
            ncclComm_t larger = grow(comm, rank, (growth){old, size, maker, by});
            is_of(larger, rank, size);
            if (rank < old) is_of(comm, rank, old);
            CHECK_OK(ncclCommDestroy(larger));
        }
    }
    if (rank < old) CHECK_OK(ncclCommDestroy(comm));
}

/* From one rank to two, and from those to all; what has grown is gone by then. */
static void grown_twice(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = rank == 0 ? meet(0, 1, id) : NULL, two = NULL;
    if (rank < 2) {
        two = grow(comm, rank, (growth){1, 2, 0, NOBODY});
        if (rank == 0) CHECK_OK(ncclCommDestroy(comm));
        is_of(two, rank, 2);
    }
    ncclComm_t all = grow(two, rank, (growth){2, size, 1, MAKER});
    if (rank < 2) CHECK_OK(ncclCommDestroy(two));
    is_of(all, rank, size);
    CHECK_OK(ncclCommDestroy(all));
}

/* All ranks in one thread, in a group. */
static void in_one_thread(void) {
    ncclComm_t comms[2], all[RANKS];
    ncclUniqueId id;
    float x[RANKS], y[RANKS];
    CHECK_OK(ncclCommInitAll(comms, 2, NULL));
    for (int round = 0; round < 3; round++) {
        CHECK_OK(ncclCommGetUniqueId(comms[1], &id));
        CHECK_OK(ncclGroupStart());
        for (int rank = RANKS - 1; rank >= 0; rank--) {
            ncclComm_t comm = rank < 2 ? comms[rank] : NULL;
            CHECK_OK(ncclCommGrow(comm, RANKS, rank < 2 ? NULL : &id, rank < 2 ? -1 : rank, &all[rank], NULL));
        }
        CHECK_OK(ncclGroupEnd());
        CHECK_OK(ncclGroupStart());
        for (int rank = 0; rank < RANKS; rank++) {
            x[rank] = (float)(rank + 1);
            CHECK_OK(ncclAllReduce(&x[rank], &y[rank], 1, ncclFloat, ncclSum, all[rank], NULL));
        }
        CHECK_OK(ncclGroupEnd());
        for (int rank = 0; rank < RANKS; rank++) {
            CHECK(y[rank] == RANKS * (RANKS + 1) / 2);
            CHECK_OK(ncclCommDestroy(all[rank]));
        }
    }
    for (int rank = 0; rank < 2; rank++) CHECK_OK(ncclCommDestroy(comms[rank]));
}

/* ---- in the background */

/* The parent blocks or not; what comes of it does not. */
static void background(int rank, int size, ncclUniqueId id) {
    int old = size / 2;
    for (int parent_blocks = 0; parent_blocks < 2; parent_blocks++) {
        ncclComm_t comm = NULL, larger = NULL;
        ncclConfig_t of_parent = NCCL_CONFIG_INITIALIZER, config = NCCL_CONFIG_INITIALIZER;
        of_parent.blocking = parent_blocks;
        config.blocking = 0;
        if (rank < old) {
            ncclResult_t begun = ncclCommInitRankConfig(&comm, old, id, rank, &of_parent);
            CHECK(begun == ncclSuccess || begun == ncclInProgress);
            CHECK(settled(comm) == ncclSuccess);
        }
        /* As its parent, where nothing is said of it. */
        ncclConfig_t *given = rank < old && !parent_blocks ? NULL : &config;
        CHECK_RESULT(ncclInProgress, begin(comm, rank, (growth){old, size, 0, MAKER}, &larger, given));
        CHECK(larger != NULL);
        CHECK(settled(larger) == ncclSuccess);
        is_of(larger, rank, size);
        if (rank < old) {
            CHECK(settled(comm) == ncclSuccess);
            is_of(comm, rank, old);
            /* For the next parent, which the ranks meet for by another id. */
            if (rank == 0) CHECK_OK(ncclGetUniqueId(&id));
            CHECK_OK(ncclBroadcast(&id, &id, sizeof id, ncclChar, 0, comm, NULL));
            CHECK_OK(ncclCommDestroy(comm));
        }
        CHECK_OK(ncclCommDestroy(larger));
    }
}

/* Nobody comes to what its client ends. */
static void given_up(int rank, int size, ncclUniqueId id) {
    (void)rank, (void)size;
    ncclComm_t comm = meet(0, 1, id), larger = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclUniqueId other;
    config.blocking = 0;
    CHECK_OK(ncclCommGetUniqueId(comm, &other));
    CHECK_RESULT(ncclInProgress, ncclCommGrow(comm, 2, NULL, -1, &larger, &config));
    CHECK_OK(ncclCommAbort(larger));
    is_of(comm, 0, 1);
    CHECK_OK(ncclCommDestroy(comm));
}

/* ---- what is refused */

static void arguments(int rank, int size, ncclUniqueId id) {
    (void)rank, (void)size;
    ncclComm_t comm = meet(0, 1, id), larger = comm;
    ncclUniqueId own, damaged, of_place;
    CHECK_FAILS(ncclInvalidArgument, "comm is NULL", ncclCommGetUniqueId(NULL, &own));
    CHECK_FAILS(ncclInvalidArgument, "uniqueId is NULL", ncclCommGetUniqueId(comm, NULL));
    CHECK_FAILS(ncclInvalidArgument, "newcomm is NULL", ncclCommGrow(comm, 2, NULL, -1, NULL, NULL));
    CHECK_FAILS(ncclInvalidArgument, "nRanks is 1", ncclCommGrow(comm, 1, NULL, -1, &larger, NULL));
    CHECK(larger == NULL);
    CHECK_FAILS(ncclInvalidArgument, "nRanks is 70000", ncclCommGrow(comm, 70000, NULL, -1, &larger, NULL));
    CHECK_FAILS(ncclInvalidArgument, "rank is 0", ncclCommGrow(comm, 2, NULL, 0, &larger, NULL));
    CHECK_FAILS(ncclInvalidArgument, "no communicator", ncclCommGrow((ncclComm_t)&own, 2, NULL, -1, &larger, NULL));
    CHECK_FAILS(ncclInvalidArgument, "uniqueId are NULL", ncclCommGrow(NULL, 2, NULL, 1, &larger, NULL));
    CHECK_OK(ncclCommGetUniqueId(comm, &own));
    damaged = own;
    damaged.internal[60] ^= 1;
    CHECK_FAILS(ncclInvalidArgument, "damaged", ncclCommGrow(comm, 2, &damaged, -1, &larger, NULL));
    int wrong[] = {-1, 0, 2};
    for (int i = 0; i < 3; i++) {
        CHECK_FAILS(ncclInvalidArgument, "a rank that joins", ncclCommGrow(NULL, 2, &own, wrong[i], &larger, NULL));
    }
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 5;
    CHECK_FAILS(ncclInvalidArgument, "blocking", ncclCommGrow(comm, 2, NULL, -1, &larger, &config));
    CHECK(larger == NULL);
    CHECK_OK(ncclCommFinalize(comm));
    CHECK_FAILS(ncclInvalidUsage, "was finalized", ncclCommGrow(comm, 2, NULL, -1, &larger, NULL));
    CHECK_FAILS(ncclInvalidUsage, "was finalized", ncclCommGetUniqueId(comm, &own));
    CHECK_OK(ncclCommDestroy(comm));
    CHECK_OK(ncclCommInitAll(&comm, 1, NULL));
    CHECK_OK(ncclCommRevoke(comm, NCCL_REVOKE_DEFAULT));
    CHECK_FAILS(ncclInvalidUsage, "was revoked", ncclCommGrow(comm, 2, NULL, -1, &larger, NULL));
    CHECK_FAILS(ncclInvalidUsage, "was revoked", ncclCommGetUniqueId(comm, &own));
    CHECK_OK(ncclCommDestroy(comm));
    /* A place is for those who make a communicator of nothing. */
    setenv("NCCL_COMM_ID", "127.0.0.1:9", 1);
    CHECK_OK(ncclCommInitAll(&comm, 1, NULL));
    CHECK_OK(ncclGetUniqueId(&of_place));
    CHECK_OK(ncclCommGetUniqueId(comm, &own));
    CHECK(memcmp(&own, &of_place, sizeof own) != 0);
    CHECK_FAILS(ncclInvalidArgument, "NCCL_COMM_ID", ncclCommGrow(NULL, 2, &of_place, 1, &larger, NULL));
    CHECK_OK(ncclCommDestroy(comm));
}

/* What the ranks of a parent do not agree on is an error on all of them, and the parent goes on. */
static void disagreement(int rank, int size, ncclUniqueId id) {
    int old = size / 2;
    ncclComm_t comm = rank < old ? meet(rank, old, id) : NULL, larger = NULL;
    ncclUniqueId own;
    if (rank < old) {
        CHECK_FAILS(ncclInvalidUsage, "no rank of 'world' has called ncclCommGetUniqueId",
                    ncclCommGrow(comm, size, NULL, -1, &larger, NULL));
        CHECK(larger == NULL);
        CHECK_OK(ncclCommGetUniqueId(comm, &own));
        CHECK_FAILS(ncclInvalidUsage, "have each called", ncclCommGrow(comm, size, NULL, -1, &larger, NULL));
        /* Both are used up. */
        CHECK_FAILS(ncclInvalidUsage, "since it grew last", ncclCommGrow(comm, size, &own, -1, &larger, NULL));
        if (rank == 0) {
            CHECK_OK(ncclCommGetUniqueId(comm, &own));
            hand_out(&own, old, size - 1, rank);
        }
        CHECK_FAILS(ncclInvalidUsage, "4 ranks as rank 0 has it, to 5",
                    ncclCommGrow(comm, size + rank, NULL, -1, &larger, NULL));
        is_of(comm, rank, old);
    } else {
        own = handed(rank);
        CHECK_FAILS(ncclRemoteError, "4 ranks as rank 0 has it, to 5",
                    ncclCommGrow(NULL, size, &own, rank, &larger, NULL));
    }
    CHECK(larger == NULL);
    /* It grows when they do. */
    larger = grow(comm, rank, (growth){old, size, 0, EVERYBODY});
    is_of(larger, rank, size);
    CHECK_OK(ncclCommDestroy(larger));
    if (rank < old) CHECK_OK(ncclCommDestroy(comm));
}

/* A rank that joins by the id that it is handed, in vain: it is told long before its deadline. */
static void joins_in_vain(int rank, int size, const char *part) {
    ncclUniqueId id = handed(rank);
    ncclComm_t larger = NULL;
    double began = seconds_now();
    CHECK(ncclCommGrow(NULL, size, &id, rank, &larger, NULL) != ncclSuccess);
    CHECK_TEXT(part);
    CHECK(larger == NULL && seconds_now() - began < 20);
}

/* Ids that are not made for growing, or have served, and one whose maker has another nRanks than all others. */
static void useless_ids(int rank, int size, ncclUniqueId id) {
    int old = size / 2;
    ncclComm_t comm = rank < old ? meet(rank, old, id) : NULL, larger = NULL, none = NULL;
    ncclUniqueId own;
    if (rank == 0) {
        CHECK_OK(ncclGetUniqueId(&own));
        hand_out(&own, old, size - 1, rank);
    }
    if (rank < old) {
        CHECK_FAILS(ncclInvalidUsage, "none of its ranks has made",
                    ncclCommGrow(comm, size, rank == 0 ? &own : NULL, -1, &none, NULL));
    } else {
        joins_in_vain(rank, size, "none of its ranks has made");
    }
    if (rank == 0) {
        CHECK_OK(ncclCommGetUniqueId(comm, &own));
        for (int i = 0; i < 2; i++) hand_out(&own, old, size - 1, rank);
    }
    if (rank < old) {
        CHECK_OK(ncclCommGrow(comm, size, NULL, -1, &larger, NULL));
        is_of(larger, rank, size);
        CHECK_FAILS(ncclInvalidUsage, "since it grew last",
                    ncclCommGrow(comm, size, rank == 0 ? &own : NULL, -1, &none, NULL));
    } else {
        own = handed(rank);
        CHECK_OK(ncclCommGrow(NULL, size, &own, rank, &larger, NULL));
        is_of(larger, rank, size);
        joins_in_vain(rank, size, "serves one meeting");
    }
    if (rank == 0) {
        CHECK_OK(ncclCommGetUniqueId(comm, &own));
        hand_out(&own, old, size - 1, rank);
    }
    if (rank < old) {
        CHECK_FAILS(ncclInvalidUsage, "3 ranks as rank 0 has it, to 4",
                    ncclCommGrow(comm, rank == 0 ? size - 1 : size, NULL, -1, &none, NULL));
    } else {
        joins_in_vain(rank, size, "3");
    }
    /* The ids are served until they have heard. */
    ncclComm_t last = grow(comm, rank, (growth){old, size, 0, EVERYBODY});
    CHECK_OK(ncclCommDestroy(last));
    CHECK_OK(ncclCommDestroy(larger));
    if (rank < old) CHECK_OK(ncclCommDestroy(comm));
}

/* ---- what goes wrong: the others hear of it long before their deadline, which is hours away */

static void fails(ncclComm_t comm, int rank, int size, const char *part) {
    ncclComm_t larger = NULL;
    double began = seconds_now();
    ncclResult_t result = begin(comm, rank, (growth){size / 2, size, 0, EVERYBODY}, &larger, NULL);
    CHECK(result != ncclSuccess && result != ncclInProgress);
    CHECK_TEXT(part);
    CHECK(larger == NULL);
    CHECK(seconds_now() - began < 40);
}

static int heard[2];

/* Rank 1 of the parent has the id when it does something else `instead`; `part` is in what all others are told. */
static void without_rank_1(int rank, int size, ncclUniqueId id, void (*instead)(ncclComm_t), const char *part) {
    int old = size / 2;
    ncclComm_t comm = rank < old ? meet(rank, old, id) : NULL;
    if (rank == 1) {
        handed(rank);
        instead(comm);
        return;
    }
    fails(comm, rank, size, part);
    char byte = 0;
    if (rank >= old) {
        CHECK(write(heard[1], &byte, 1) == 1);
        return;
    }
    /* Its process serves the id, by which those that join are told. */
    for (int i = old; i < size; i++) CHECK(read(heard[0], &byte, 1) == 1);
    CHECK_OK(ncclCommAbort(comm));
}

static void dies(ncclComm_t comm) {
    (void)comm;
    kill(getpid(), SIGKILL);
}

static void aborts(ncclComm_t comm) {
    CHECK_OK(ncclCommAbort(comm));
}

static void leaves(ncclComm_t comm) {
    CHECK_OK(ncclCommDestroy(comm));
}

static void splits(ncclComm_t comm) {
    ncclComm_t half = NULL;
    CHECK_FAILS(ncclInvalidUsage, "grow()", ncclCommSplit(comm, 0, 0, &half, NULL));
    CHECK_OK(ncclCommAbort(comm));
}

static void killed(int rank, int size, ncclUniqueId id) {
    without_rank_1(rank, size, id, dies, "rank 1");
}

static void aborted(int rank, int size, ncclUniqueId id) {
    without_rank_1(rank, size, id, aborts, "rank 1");
}

static void left(int rank, int size, ncclUniqueId id) {
    without_rank_1(rank, size, id, leaves, "rank 1");
}

static void split(int rank, int size, ncclUniqueId id) {
    without_rank_1(rank, size, id, splits, "split()");
}

/* Both that join come as one rank, which a rank of the parent has, or one of them. */
static void twice(int rank, int size, ncclUniqueId id) {
    int old = size / 2;
    for (int taken = 1; taken <= 2; taken++) {
        ncclComm_t comm = rank < old ? meet(rank, old, id) : NULL, larger = NULL;
        if (rank < old) {
            fails(comm, rank, size, "two processes");
            if (rank == 0) CHECK_OK(ncclGetUniqueId(&id));
            CHECK_OK(ncclBroadcast(&id, &id, sizeof id, ncclChar, 0, comm, NULL));
            CHECK_OK(ncclCommDestroy(comm));
        } else {
            ncclUniqueId own = handed(rank);
            double began = seconds_now();
            CHECK(ncclCommGrow(NULL, size, &own, taken, &larger, NULL) != ncclSuccess);
            CHECK(larger == NULL && seconds_now() - began < 40);
        }
    }
}

int main(int argc, char **argv) {
    const char *only = argc > 1 ? argv[1] : "";
    for (int rank = 0; rank < RANKS; rank++) CHECK(pipe(hands[rank]) == 0);
    CHECK(pipe(heard) == 0);
#define WANTED(name) (*only == '\0' || strcmp(only, name) == 0)
    /* First: forks, while there are no threads. */
    if (WANTED("grown")) {
        nccl_ranks(RANKS, 60, grown);
        nccl_ranks(RANKS, 60, grown_twice);
    }
    if (WANTED("background")) {
        nccl_ranks(RANKS, 60, background);
        nccl_ranks(1, 60, given_up);
    }
    if (WANTED("refusals")) {
        nccl_ranks(1, 60, arguments);
        nccl_ranks(RANKS, 60, disagreement);
        nccl_ranks(RANKS, 60, useless_ids);
    }
    if (WANTED("faults")) {
        nccl_ranks_but(RANKS, 60, killed, 1);
        nccl_ranks(RANKS, 60, aborted);
        nccl_ranks(RANKS, 60, left);
        nccl_ranks(RANKS, 60, split);
        nccl_ranks(RANKS, 100, twice);
    }
    if (WANTED("grown")) in_one_thread();
    return 0;
}
