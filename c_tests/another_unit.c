/* The header a second time in one program, in another language, included twice. */

#include <unisono.h>
#include <unisono.h>

unisono_status_t sum_in_another_unit(const unisono_context_t *ctx, float *x, uint64_t count);

unisono_status_t sum_in_another_unit(const unisono_context_t *ctx, float *x, uint64_t count) {
    unisono_call_t call = UNISONO_CALL_INIT;
    return unisono_allreduce(ctx, x, x, count, UNISONO_FLOAT32, UNISONO_SUM, &call, NULL);
}
