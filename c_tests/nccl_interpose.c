/*
 * A program that puts itself between its callers and the library, as profilers do: its ncclAllReduce counts, and goes on to
 * pncclAllReduce, which must not come back.
 */

#include "nccl_harness.h"

static int calls;

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    calls++;
    CHECK(calls < 3);
    return pncclAllReduce(sendbuff, recvbuff, count, datatype, op, comm, stream);
}

int main(void) {
    setenv("UNISONO_NCCL_HOST", "1", 1);
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
