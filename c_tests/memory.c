/* Memory that others may not read, though ranks of one host read each other's where they may. */

#include "sums.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/* Calls for which ranks read each other's memory, whatever the number of ranks up to three. */
enum { HIDDEN = 3 << 16 };

/* Memory for so many numbers, and none of the others may read it: as what a driver maps. NULL where there is no such memory. */
static int32_t *numbers(int secret) {
    int fd = -1;
#ifdef SYS_memfd_secret
    if (secret) {
        fd = (int)syscall(SYS_memfd_secret, O_CLOEXEC);
    }
#endif
    if (secret && (fd < 0 || ftruncate(fd, HIDDEN * sizeof(int32_t)) != 0)) {
        return NULL;
    }
    int flags = secret ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *memory = mmap(NULL, HIDDEN * sizeof(int32_t), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) {
        close(fd);
    }
    return memory == MAP_FAILED ? NULL : (int32_t *)memory;
}

static int32_t given(int rank, int k) {
    return rank * 1000000 + k;
}

static int32_t *give(int32_t *memory, int rank) {
    for (int k = 0; k < HIDDEN; k++) {
        memory[k] = given(rank, k);
    }
    return memory;
}

#define CHECK_EACH(count, value)          \
    for (int k = 0; k < (count); k++) {   \
        CHECK(out[k] == (value));         \
    }

/* `arg` has a bit for each rank whose memory is its own alone. */
static void hidden_memory(unisono_context_t *ctx, void *arg) {
    int rank = (int)unisono_context_rank(ctx), size = (int)unisono_context_size(ctx);
    int secret = *(int *)arg >> rank & 1, each = HIDDEN / size, sums = size * (size - 1) / 2;
    int32_t *in = numbers(secret), *out = numbers(secret);
    uint64_t count = HIDDEN, part = (uint64_t)each, counts[3] = {part, part, part};
    CHECK(in && out);
    for (int round = 0; round < 2; round++) {
        give(in, rank);
        CHECK_OK(unisono_allreduce(ctx, in, out, count, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK_EACH(HIDDEN, given(sums, k * size));
        give(out, rank);
        CHECK_OK(unisono_allreduce(ctx, out, out, count, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK_EACH(HIDDEN, given(sums, k * size));
        give(out, rank);
        CHECK_OK(unisono_reduce(ctx, out, out, count, UNISONO_INT32, UNISONO_SUM, 1, NULL, NULL));
        CHECK_EACH(rank == 1 ? HIDDEN : 0, given(sums, k * size));
        CHECK_OK(unisono_reduce_scatter(ctx, in, out, part, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK_EACH(each, given(sums, (rank * each + k) * size));
        give(out, rank);
        CHECK_OK(unisono_broadcast(ctx, out, count, UNISONO_INT32, 0, NULL, NULL));
        CHECK_EACH(HIDDEN, given(0, k));
        CHECK_OK(unisono_allgather(ctx, in, out, part, UNISONO_INT32, NULL, NULL));
        CHECK_EACH(HIDDEN, given(k / each, k % each));
        CHECK_OK(unisono_gatherv(ctx, in, out, counts, UNISONO_INT32, 1, NULL, NULL));
        CHECK_EACH(rank == 1 ? HIDDEN : 0, given(k / each, k % each));
        CHECK_OK(unisono_scatter(ctx, in, out, part, UNISONO_INT32, 0, NULL, NULL));
        CHECK_EACH(each, given(0, rank * each + k));
        CHECK_OK(unisono_alltoallv(ctx, in, out, counts, counts, UNISONO_INT32, NULL, NULL));
        CHECK_EACH(HIDDEN, given(k / each, rank * each + k % each));
        give(out, rank);
        CHECK_OK(unisono_alltoall(ctx, out, out, part, UNISONO_INT32, NULL, NULL));
        CHECK_EACH(HIDDEN, given(k / each, rank * each + k % each));
        unisono_call_t call = UNISONO_CALL_INIT;
        call.tag = 5;
        unisono_work_t *sent = NULL;
        CHECK_OK(unisono_send(ctx, in, count, UNISONO_INT32, (uint32_t)((rank + 1) % size), &call, &sent));
        int from = (rank + size - 1) % size;
        CHECK_OK(unisono_receive(ctx, out, count, UNISONO_INT32, (uint32_t)from, &call, NULL));
        CHECK_EACH(HIDDEN, given(from, k));
        CHECK_OK(unisono_work_wait(sent));
        unisono_work_destroy(sent);
        /* A collective that goes by messages. */
        CHECK_OK(unisono_allreduce(ctx, in, out, count, UNISONO_INT32, UNISONO_SUM, &call, NULL));
        CHECK_EACH(HIDDEN, given(sums, k * size));
    }
}

static void memory_of_one_process(void) {
    int32_t *memory[2] = {numbers(1), numbers(1)};
    if (!memory[0] || !memory[1]) {
        fprintf(stderr, "skipped: there is no memory that others may not read (memfd_secret: %s)\n", strerror(errno));
        return;
    }
    munmap(memory[0], HIDDEN * sizeof(int32_t));
    munmap(memory[1], HIDDEN * sizeof(int32_t));
    int all = 7, one = 1, another = 2;
    run_ranks(2, 60, hidden_memory, &all);
    run_ranks(3, 60, hidden_memory, &all);
    run_ranks(3, 60, hidden_memory, &one);
    run_ranks(3, 60, hidden_memory, &another);
}

/* After calls that have read it, nobody may look into this process any more: messages go on, and a collective says why it
 * does not. */
static void shut(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint64_t count = sizeof x / sizeof x[0];
    sums(ctx, 2, count);
    CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    memset(x, 0, sizeof x);
    if (unisono_context_rank(ctx) == 0) {
        x[count - 1] = 5;
        CHECK_OK(unisono_send(ctx, x, count, UNISONO_FLOAT32, 1, NULL, NULL));
    } else {
        CHECK_OK(unisono_receive(ctx, x, count, UNISONO_FLOAT32, 0, NULL, NULL));
        CHECK(x[count - 1] == 5);
    }
    /* Where nobody could look into it before, this goes on too. */
    if (unisono_allreduce(ctx, x, x, count, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL) != UNISONO_OK) {
        CHECK_TEXT(unisono_last_error(), "PR_SET_DUMPABLE");
        CHECK_TEXT(unisono_last_error(), "UNISONO_CMA=0");
    }
}

static void permissions_that_change(void) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        const char *base = getenv("TMPDIR");
        /* Root may look into every process. */
        if (setgid(65534) != 0 || setuid(65534) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0
            || access(base != NULL ? base : "/tmp", W_OK | X_OK) != 0) {
            fprintf(stderr, "skipped: this process cannot be another user's (%s)\n", strerror(errno));
            exit(0);
        }
        run_ranks(2, 60, shut, NULL);
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    memory_of_one_process();
    permissions_that_change();
    return 0;
}
