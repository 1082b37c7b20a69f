/* A count beyond 2^31: two ranks, a broadcast of 2^31 + 5 bytes. Pages come from the system as they are touched, and each
 * rank touches its own 2 GiB. Where there is no memory for it, the test is skipped. */

#include "harness.h"

#include <sys/mman.h>

static const uint64_t count = (UINT64_C(1) << 31) + 5;

static void body(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint8_t *x = mmap(NULL, count, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(x != MAP_FAILED);
    const uint64_t step = 4099;
    if (unisono_context_rank(ctx) == 0) {
        for (uint64_t i = 0; i < count; i += step) {
            x[i] = (uint8_t)(i / step * 7 + 1);
        }
        x[count - 1] = 201;
    }
    CHECK_OK(unisono_broadcast(ctx, x, count, UNISONO_UINT8, 0, NULL, NULL));
    for (uint64_t i = 0; i < count - 1; i += step) {
        CHECK(x[i] == (uint8_t)(i / step * 7 + 1));
    }
    CHECK(x[count - 1] == 201);
    munmap(x, count);
}

int main(void) {
    FILE *info = fopen("/proc/meminfo", "r");
    char line[256];
    unsigned long long available = 0;
    while (info != NULL && fgets(line, sizeof line, info) != NULL) {
        sscanf(line, "MemAvailable: %llu kB", &available);
    }
    if (info != NULL) {
        fclose(info);
    }
    if (available < 6ULL << 20) {
        fprintf(stderr, "skipped: %llu MB of memory are available, 6 GiB are needed\n", available >> 10);
        return 77;
    }
    run_ranks(2, 200, body, NULL);
    return 0;
}
