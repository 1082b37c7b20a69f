/* A program that unisono-run starts. */

#include <stdio.h>

#include <unisono.h>

int main(void) {
    unisono_context_t *ctx = NULL;
    float x = 1;
    if (unisono_context_create_from_env(NULL, &ctx) != UNISONO_OK ||
        unisono_allreduce(ctx, &x, &x, 1, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL) != UNISONO_OK) {
        fprintf(stderr, "%s\n", unisono_last_error());
        return 1;
    }
    unisono_context_destroy(ctx);
    return x == 2 ? 0 : 1;
}
