/* What several programs do in between, to see that all is well. */

#ifndef SUMS_H
#define SUMS_H

#include "harness.h"

/* More than goes unasked. */
static float x[1 << 19];

/* A store that this process serves. */
static inline unisono_store_t *served(void) {
    unisono_store_t *server = NULL;
    unisono_tcp_store_options_t options = UNISONO_TCP_STORE_OPTIONS_INIT;
    options.serve = 1;
    options.host = "127.0.0.1";
    options.timeout_ms = 20000;
    CHECK_OK(unisono_store_create_tcp(&options, &server));
    return server;
}

/* So many allreduces of so many numbers, whose results are looked at. */
static inline void sums(unisono_context_t *ctx, int times, uint64_t count) {
    float size = (float)unisono_context_size(ctx);
    for (int i = 0; i < times; i++) {
        for (uint64_t k = 0; k < count; k++) {
            x[k] = (float)(k % 100);
        }
        CHECK_OK(unisono_allreduce(ctx, x, x, count, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
        CHECK(x[1] == size && x[count - 1] == (float)((count - 1) % 100) * size);
    }
}

#endif
