/*
 * A program that puts itself between its callers and the library, as profilers do: its ncclAllReduce counts, and goes on to
 * pncclAllReduce, which must not come back. And a program of both libraries, each of which has a log of its own.
 */

#include "nccl_harness.h"

/* Its header lies apart from NCCL's. */
#include "../include/unisono.h"

static int calls;

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    calls++;
    CHECK(calls < 3);
    return pncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream);
}

/* ---- the logs of both libraries */

/* Has NCCL's face warn. */
static void warn(void) {
    CHECK_FAILS(ncclInvalidArgument, "version is NULL", ncclGetVersion(NULL));
}

static void count_message(void *user, unisono_log_level_t level, const char *message) {
    (void)level;
    (void)message;
    ++*(int *)user;
}

static void the_native_face_is_called_first(void) {
    CHECK(unisono_dtype_size(UNISONO_INT8) == 1);
    warn();
}

static void the_native_face_has_a_function(void) {
    int count = 0;
    CHECK(unisono_log_set(UNISONO_LOG_WARN, count_message, &count) == UNISONO_OK);
    warn();
    CHECK(count == 0);
}

/* In a process of its own, with NCCL_DEBUG: the version comes once, and the warning. */
static void logs(void (*body)(void)) {
    char path[] = "/tmp/nccl-debug-XXXXXX", told[4096] = {0};
    int file = mkstemp(path);
    CHECK(file >= 0);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(30);
        setenv("NCCL_DEBUG", "WARN", 1);
        setenv("NCCL_DEBUG_FILE", path, 1);
        body();
        exit(0);
    }
    int status = 1;
    CHECK(waitpid(pid, &status, 0) == pid && status == 0);
    CHECK(read(file, told, sizeof told - 1) > 0);
    close(file);
    unlink(path);
    const char *version = strstr(told, "NCCL version ");
    CHECK(version != NULL && strstr(version + 1, "NCCL version ") == NULL);
    const char *warning = strstr(told, " NCCL WARN ");
    CHECK(warning != NULL && strstr(warning + 1, " NCCL WARN ") == NULL);
}

int main(void) {
    setenv("UNISONO_NCCL_HOST", "1", 1);
    /* First: the log is there from a process's first call on. */
    logs(the_native_face_is_called_first);
    logs(the_native_face_has_a_function);
    ncclUniqueId id;
    ncclComm_t comm = NULL;
    float x = 3, y = 0;
    CHECK_OK(pncclGetUniqueId(&id));
    CHECK_OK(pncclCommInitRank(&comm, 1, id, 0));
    CHECK_OK(ncclAllReduce(&x, &y, 1, ncclFloat, ncclSum, comm, NULL));
    CHECK(y == 3 && calls == 1);
    CHECK_OK(pncclCommDestroy(comm));
    return 0;
}
