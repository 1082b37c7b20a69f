/*
 * libnccl.so.2: children of communicators, between processes and in one, on host memory.
 *   nccl_children [children|together|background]
 */

#include "nccl_harness.h"

/* ---- one by one */

static void children(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), half = NULL, reversed = NULL, rest = NULL;
    int number = -1;
    float x = (float)rank, y = -1;
    /* By parity; the last rank takes no part. */
    int color = rank == size - 1 ? NCCL_SPLIT_NOCOLOR : rank % 2;
    CHECK_OK(ncclCommSplit(comm, color, 0, &half, NULL));
    CHECK((half == NULL) == (rank == size - 1));
    if (half != NULL) {
        int members = 0, sum = 0;
        for (int other = rank % 2; other < size - 1; other += 2) members++, sum += other;
        CHECK_OK(ncclCommCount(half, &number));
        CHECK(number == members);
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, half, NULL));
        CHECK(y == (float)sum);
        CHECK_OK(ncclCommDestroy(half));
    }
    /* Two children at once, in a group; keys turn the order round. */
    CHECK_OK(ncclGroupStart());
    CHECK_OK(ncclCommSplit(comm, 3, -rank, &reversed, NULL));
    CHECK_OK(ncclGroupEnd());
    CHECK_OK(ncclCommUserRank(reversed, &number));
    CHECK(number == size - 1 - rank);
    x = (float)rank;
    CHECK_OK(ncclBcast(&x, 1, ncclFloat, 0, reversed, NULL));
    CHECK(x == (float)(size - 1));
    CHECK_OK(ncclCommDestroy(reversed));
    /* Without rank 0. */
    int excluded[] = {0};
    if (rank != 0) {
        CHECK_FAILS(ncclInvalidArgument, "which is this one",
                    ncclCommShrink(comm, &rank, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
        rest = comm;
        CHECK_FAILS(ncclInvalidArgument, "shrinkFlags is 5", ncclCommShrink(comm, excluded, 1, &rest, NULL, 5));
        CHECK(rest == NULL);
        CHECK_OK(ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
        CHECK_OK(ncclCommUserRank(rest, &number));
        CHECK(number == rank - 1);
        x = 1;
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, rest, NULL));
        CHECK(y == (float)(size - 1));
        CHECK_OK(ncclCommDestroy(rest));
    }
    /* The parent goes on. */
    x = 1;
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK(y == (float)size);
    CHECK_OK(ncclCommDestroy(comm));
}

/* Ranks name their communicators as they like; errors have the name of the rank that they are told on. */
static void names(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = NULL, child = NULL, named = NULL, rest = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    char name[32], part[64];
    float x = 1, y = 0;
    int excluded[] = {0};
    snprintf(name, sizeof name, "stage %d", rank);
    config.commName = name;
    CHECK_OK(ncclCommInitRankConfig(&comm, size, id, rank, &config));
    CHECK_OK(ncclCommSplit(comm, 3, rank, &child, NULL));
    name[0] = 'S';
    CHECK_OK(ncclCommSplit(comm, 3, rank, &named, &config));
    ncclComm_t all[] = {comm, child, named};
    for (int i = 0; i < 3; i++) CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, all[i], NULL));
    CHECK(y == (float)size);
    if (rank != 0) {
        CHECK_OK(ncclCommShrink(comm, excluded, 1, &rest, NULL, NCCL_SHRINK_DEFAULT));
        CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, rest, NULL));
        CHECK(y == (float)(size - 1));
        CHECK_OK(ncclCommFinalize(rest));
        snprintf(part, sizeof part, "'stage %d/shrunk' was finalized", rank);
        CHECK_FAILS(ncclInvalidArgument, part, ncclCommFinalize(rest));
        CHECK_OK(ncclCommDestroy(rest));
    }
    const char *forms[] = {"'stage %d' was finalized", "'stage %d/3' was finalized", "'Stage %d' was finalized"};
    for (int i = 0; i < 3; i++) {
        CHECK_OK(ncclCommFinalize(all[i]));
        snprintf(part, sizeof part, forms[i], rank);
        CHECK_FAILS(ncclInvalidArgument, part, ncclCommFinalize(all[i]));
    }
    for (int i = 2; i >= 0; i--) CHECK_OK(ncclCommDestroy(all[i]));
}

/* ---- several of one parent at once */

enum { KINDS = 6, CHILDREN = 2 * KINDS, ROUNDS = 12, RANKS = 4 };

/* Which child `number` a rank wants: all ranks, halves, alternate ones, all but one, in their order or turned round. */
static int color_of(int number, int rank) {
    switch (number % KINDS) {
        case 0: return 7;
        case 1: return rank / 2;
        case 2: return rank % 2;
        case 3: return rank == number % RANKS ? NCCL_SPLIT_NOCOLOR : 7;
        case 4: return 7;
        default: return rank == 0 ? NCCL_SPLIT_NOCOLOR : rank % 2;
    }
}

static int key_of(int number, int rank) {
    return number % 2 == 0 ? rank : -rank;
}

static int is_before(int number, int one, int other) {
    return key_of(number, one) < key_of(number, other);
}

/* The child has the ranks that gave its colour, in the order of their keys, and is no other than that of its number. */
static void is_child(ncclComm_t child, int number, int rank) {
    int color = color_of(number, rank), place = 0, members = 0, answer = -1;
    float in[CHILDREN], out[CHILDREN], sum = 0;
    CHECK((child == NULL) == (color == NCCL_SPLIT_NOCOLOR));
    if (child == NULL) {
        return;
    }
    for (int other = 0; other < RANKS; other++) {
        if (color_of(number, other) == color) {
            members++;
            place += is_before(number, other, rank);
            sum += (float)(other + 1);
        }
    }
    CHECK_OK(ncclCommCount(child, &answer));
    CHECK(answer == members);
    CHECK_OK(ncclCommUserRank(child, &answer));
    CHECK(answer == place);
    for (int i = 0; i <= number; i++) in[i] = (float)(rank + 1);
    /* Ranks that hold another child of the same members under this number give another count. */
    CHECK_OK(ncclAllReduce(in, out, (size_t)number + 1, ncclFloat, ncclSum, child, NULL));
    for (int i = 0; i <= number; i++) CHECK(out[i] == sum);
}

static void destroy(ncclComm_t *children, int count) {
    for (int i = 0; i < count; i++) CHECK_OK(ncclCommDestroy(children[i]));
}

static void together(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet(rank, size, id), children[CHILDREN];
    for (int round = 0; round < ROUNDS; round++) {
        CHECK_OK(ncclGroupStart());
        for (int i = 0; i < CHILDREN; i++) {
            CHECK_OK(ncclCommSplit(comm, color_of(i, rank), key_of(i, rank), &children[i], NULL));
        }
        CHECK_OK(ncclGroupEnd());
        for (int i = 0; i < CHILDREN; i++) is_child(children[i], i, rank);
        destroy(children, CHILDREN);
        /* Without rank 0, which has no part in it: children of the same members. */
        int excluded[] = {0};
        if (rank != 0) {
            float x[KINDS] = {1, 1, 1, 1, 1, 1}, y[KINDS];
            CHECK_OK(ncclGroupStart());
            for (int i = 0; i < KINDS; i++) {
                CHECK_OK(ncclCommShrink(comm, excluded, 1, &children[i], NULL, NCCL_SHRINK_DEFAULT));
            }
            CHECK_OK(ncclGroupEnd());
            for (int i = 0; i < KINDS; i++) {
                CHECK_OK(ncclAllReduce(x, y, (size_t)i + 1, ncclFloat, ncclSum, children[i], NULL));
                CHECK(y[i] == (float)(size - 1));
            }
            destroy(children, KINDS);
        }
    }
    CHECK_OK(ncclCommDestroy(comm));
}

/* All ranks in one thread: their children meet side by side, those of each parent in order. */
static void in_one_thread(void) {
    ncclComm_t comms[RANKS], children[CHILDREN][RANKS];
    CHECK_OK(ncclCommInitAll(comms, RANKS, NULL));
    for (int round = 0; round < ROUNDS; round++) {
        CHECK_OK(ncclGroupStart());
        for (int i = 0; i < CHILDREN; i++) {
            for (int rank = 0; rank < RANKS; rank++) {
                CHECK_OK(ncclCommSplit(comms[rank], color_of(i, rank), key_of(i, rank), &children[i][rank], NULL));
            }
        }
        CHECK_OK(ncclGroupEnd());
        for (int i = 0; i < CHILDREN; i++) {
            float x[RANKS], y[RANKS];
            CHECK_OK(ncclGroupStart());
            for (int rank = 0; rank < RANKS; rank++) {
                x[rank] = 1;
                if (children[i][rank] == NULL) continue;
                CHECK_OK(ncclAllReduce(&x[rank], &y[rank], 1, ncclFloat, ncclSum, children[i][rank], NULL));
            }
            CHECK_OK(ncclGroupEnd());
            for (int rank = 0; rank < RANKS; rank++) {
                int members = 0, place = -1;
                CHECK((children[i][rank] == NULL) == (color_of(i, rank) == NCCL_SPLIT_NOCOLOR));
                if (children[i][rank] == NULL) continue;
                CHECK_OK(ncclCommCount(children[i][rank], &members));
                CHECK(y[rank] == (float)members);
                CHECK_OK(ncclCommUserRank(children[i][rank], &place));
                for (int other = 0; other < RANKS; other++) {
                    place -= color_of(i, other) == color_of(i, rank) && is_before(i, other, rank);
                }
                CHECK(place == 0);
            }
            destroy(children[i], RANKS);
        }
    }
    destroy(comms, RANKS);
}

/* ---- in the background: calls return, and what they began goes on */

static ncclComm_t meet_in_background(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t begun = ncclCommInitRankConfig(&comm, size, id, rank, &config);
    CHECK(begun == ncclInProgress || begun == ncclSuccess);
    CHECK(settled(comm) == ncclSuccess);
    return comm;
}

static void background(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet_in_background(rank, size, id), children[CHILDREN];
    for (int round = 0; round < ROUNDS; round++) {
        /* No group: the second is called while the first goes on. */
        for (int i = 0; i < CHILDREN; i++) {
            ncclResult_t begun = ncclCommSplit(comm, color_of(i, rank), key_of(i, rank), &children[i], NULL);
            CHECK(begun == ncclInProgress || begun == ncclSuccess);
        }
        /* The parent is in progress as long as they need it. */
        CHECK(settled(comm) == ncclSuccess);
        for (int i = 0; i < CHILDREN; i++) {
            CHECK(children[i] == NULL || settled(children[i]) == ncclSuccess);
            is_child(children[i], i, rank);
        }
        destroy(children, CHILDREN);
    }
    CHECK_OK(ncclCommDestroy(comm));
}

/* A rank that joins no child may end once its parent is destroyed: the others need it until then. */
static void leaving(int rank, int size, ncclUniqueId id) {
    ncclComm_t comm = meet_in_background(rank, size, id), child = NULL;
    ncclResult_t state = ncclSuccess;
    if (rank == 0) {
        CHECK_RESULT(ncclInProgress, ncclCommSplit(comm, NCCL_SPLIT_NOCOLOR, 0, &child, NULL));
        CHECK(child == NULL);
        CHECK_OK(ncclCommGetAsyncError(comm, &state));
        CHECK(state == ncclInProgress);
        CHECK_OK(ncclCommDestroy(comm));
        return;
    }
    /* Rank 0 has left by then, if it does not wait. */
    sleep_ms(100 * rank);
    ncclResult_t begun = ncclCommSplit(comm, 0, rank, &child, NULL);
    CHECK(begun == ncclInProgress || begun == ncclSuccess);
    CHECK(settled(child) == ncclSuccess);
    float x = 1, y = 0;
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, child, NULL));
    CHECK(y == (float)(size - 1));
    CHECK_OK(ncclCommDestroy(child));
    CHECK_OK(ncclCommDestroy(comm));
}

int main(int argc, char **argv) {
    const char *only = argc > 1 ? argv[1] : "";
#define WANTED(name) (*only == '\0' || strcmp(only, name) == 0)
    /* First: forks, while there are no threads. */
    if (WANTED("children")) {
        nccl_ranks(RANKS, 60, children);
        nccl_ranks(RANKS, 60, names);
    }
    if (WANTED("together")) nccl_ranks(RANKS, 100, together);
    if (WANTED("background")) {
        nccl_ranks(RANKS, 100, background);
        nccl_ranks(RANKS, 60, leaving);
    }
    if (WANTED("together")) in_one_thread();
    return 0;
}
