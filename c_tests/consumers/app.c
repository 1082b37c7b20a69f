/* What a user's first program may look like. */

#include <stdio.h>

#include <unisono.h>

int main(void) {
    unisono_store_t *store = NULL;
    unisono_context_t *ctx = NULL;
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    float x[3] = {1, 2, 3};
    if (unisono_store_create_hash(&store) != UNISONO_OK) {
        goto failed;
    }
    options.rank_count = 1;
    options.store = store;
    if (unisono_context_create(&options, &ctx) != UNISONO_OK) {
        goto failed;
    }
    if (unisono_allreduce(ctx, x, x, 3, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL) != UNISONO_OK) {
        goto failed;
    }
    unisono_context_destroy(ctx);
    unisono_store_destroy(store);
    printf("unisono %s\n", unisono_version_string());
    return x[2] == 3 ? 0 : 1;
failed:
    fprintf(stderr, "%s\n", unisono_last_error());
    return 1;
}
