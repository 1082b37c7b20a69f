/* Adds up the numbers of all ranks:  unisono-run -n 4 -- hello */

#include <stdio.h>

#include <unisono.h>

static int fail(void) {
    fprintf(stderr, "%s\n", unisono_last_error());
    return 1;
}

int main(void) {
    unisono_context_t *ctx;
    if (unisono_context_create_from_env(NULL, &ctx) != UNISONO_OK) return fail();
    unsigned rank = unisono_context_rank(ctx), size = unisono_context_size(ctx);

    /* Blocking, in place: the default. */
    float x[4];
    for (unsigned i = 0; i < 4; i++) x[i] = (float)(rank + i);
    if (unisono_allreduce(ctx, x, x, 4, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL) != UNISONO_OK) return fail();
    printf("rank %u of %u: sums are %g %g %g %g\n", rank, size, x[0], x[1], x[2], x[3]);

    /* Asynchronous, with a deadline of its own. */
    unisono_call_t call = UNISONO_CALL_INIT;
    call.timeout_ms = 5000;
    unisono_work_t *work;
    int32_t word = rank == 0 ? 42 : 0;
    if (unisono_broadcast(ctx, &word, 1, UNISONO_INT32, 0, &call, &work) != UNISONO_OK) return fail();
    /* ... other work ... */
    if (unisono_work_wait(work) != UNISONO_OK) {
        fprintf(stderr, "%s\n", unisono_work_error(work));
        return 1;
    }
    unisono_work_destroy(work);
    printf("rank %u of %u: rank 0's word is %d\n", rank, size, (int)word);

    unisono_context_destroy(ctx);
    return 0;
}
