/* A program that knows the library by its file alone: it loads it, runs an allreduce, and unloads it.
 *   dlopen path/to/libunisono.so.0 */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <unisono.h>

static void *library;

static void *symbol(const char *name) {
    void *found = dlsym(library, name);
    if (found == NULL) {
        fprintf(stderr, "%s\n", dlerror());
    }
    return found;
}

/* ISO C has no conversion from dlsym's answer to a function; POSIX says that the bits are the same. */
#define LOAD(name)                                   \
    __typeof__(&unisono_##name) name;                \
    do {                                             \
        void *found_ = symbol("unisono_" #name);     \
        if (found_ == NULL) {                        \
            return 1;                                \
        }                                            \
        memcpy(&name, &found_, sizeof name);         \
    } while (0)

int main(int argc, char **argv) {
    if (argc != 2 || (library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL)) == NULL) {
        fprintf(stderr, "%s\n", argc == 2 ? dlerror() : "which library?");
        return 1;
    }
    LOAD(version);
    LOAD(last_error);
    LOAD(store_create_hash);
    LOAD(store_destroy);
    LOAD(context_create);
    LOAD(context_destroy);
    LOAD(allreduce);
    if (version() != UNISONO_VERSION) {
        fprintf(stderr, "version %u\n", version());
        return 1;
    }
    unisono_store_t *store = NULL;
    unisono_context_t *ctx = NULL;
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    double x[2] = {1.5, 2.5};
    if (store_create_hash(&store) != UNISONO_OK) {
        fprintf(stderr, "%s\n", last_error());
        return 1;
    }
    options.rank_count = 1;
    options.store = store;
    if (context_create(&options, &ctx) != UNISONO_OK ||
        allreduce(ctx, x, x, 2, UNISONO_FLOAT64, UNISONO_SUM, NULL, NULL) != UNISONO_OK || x[1] != 2.5) {
        fprintf(stderr, "%s\n", last_error());
        return 1;
    }
    context_destroy(ctx);
    store_destroy(store);
    return dlclose(library);
}
