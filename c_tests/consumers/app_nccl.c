/* A program for NCCL, compiled and linked with unisono's. */

#include <stdio.h>

#include <nccl.h>

int main(void) {
    int version = 0;
    if (ncclGetVersion(&version) != ncclSuccess) {
        fprintf(stderr, "%s\n", ncclGetLastError(NULL));
        return 1;
    }
    printf("NCCL %d\n", version);
    return version == NCCL_VERSION_CODE ? 0 : 1;
}
