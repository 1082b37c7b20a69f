/* What a caller can get wrong: each mistake is a status and a text that names it, nothing is written, and the process
 * goes on. No second rank is needed. */

#include "harness.h"

static int32_t x[4] = {1, 2, 3, 4}, y[4];
static const uint64_t huge = UINT64_C(5000000000000000000);

static void versions(void) {
    CHECK(unisono_version() == UNISONO_VERSION);
    CHECK(strcmp(unisono_version_string(), "0.1.0") == 0);
    CHECK(strcmp(unisono_status_name(UNISONO_TIMEOUT), "UNISONO_TIMEOUT") == 0);
    CHECK(strcmp(unisono_status_name(99), "unknown status") == 0);
    CHECK(unisono_dtype_size(UNISONO_BFLOAT16) == 2);
    CHECK(unisono_dtype_size(77) == 0);
    CHECK_TEXT(unisono_last_error(), "dtype 77 is unknown");
}

/* Programs were compiled with these numbers. */
static void numbers(void) {
    CHECK(UNISONO_OK == 0 && UNISONO_INVALID_ARGUMENT == 1 && UNISONO_INVALID_USAGE == 2 && UNISONO_MISMATCH == 3);
    CHECK(UNISONO_TIMEOUT == 4 && UNISONO_PEER_FAILED == 5 && UNISONO_ABORTED == 6 && UNISONO_NOT_MEMBER == 7);
    CHECK(UNISONO_UNSUPPORTED == 8 && UNISONO_SYSTEM == 9 && UNISONO_OUT_OF_MEMORY == 10 && UNISONO_CUDA == 11);
    CHECK(UNISONO_INTERNAL == 12 && UNISONO_IN_PROGRESS == 13);
    CHECK(UNISONO_INT8 == 0 && UNISONO_FLOAT32 == 7 && UNISONO_FLOAT8_E5M2 == 11);
    CHECK(UNISONO_SUM == 0 && UNISONO_MAX == 2 && UNISONO_MIN == 3 && UNISONO_CUSTOM == 9);
    CHECK(sizeof(unisono_call_t) == 72 && sizeof(unisono_context_options_t) == 72);
    CHECK(sizeof(unisono_tcp_store_options_t) == 40 && sizeof(unisono_store_callbacks_t) == 64);
    CHECK(sizeof(unisono_algorithm_options_t) == 80 && sizeof(unisono_unique_id_t) == 128);
}

static void nulls(void) {
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is NULL",
                unisono_allreduce(NULL, x, y, 4, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is NULL", unisono_barrier(NULL, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is NULL", unisono_context_abort(NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is NULL", unisono_context_abort_because(NULL, "why"));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is NULL", unisono_context_set_timeout(NULL, 1));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "work is NULL", unisono_work_wait(NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "options is NULL", unisono_context_create(NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "path is NULL", unisono_store_create_file(NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "store is NULL", unisono_store_create_hash(NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "id is NULL", unisono_unique_id_create(NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "store is NULL", unisono_store_set(NULL, "k", "v", 1));
    CHECK(unisono_context_rank(NULL) == UNISONO_NO_RANK);
    CHECK(unisono_context_size(NULL) == 0);
    CHECK(unisono_context_name(NULL)[0] == '\0');
    CHECK(unisono_context_status(NULL) == UNISONO_INVALID_ARGUMENT);
    CHECK_TEXT(unisono_context_error(NULL), "ctx is NULL");
    CHECK(unisono_work_status(NULL) == UNISONO_INVALID_ARGUMENT);
    CHECK_TEXT(unisono_work_error(NULL), "work is NULL");
    CHECK(unisono_store_port(NULL) == 0);
    CHECK(unisono_sparse_nnz(NULL) == 0 && unisono_sparse_indices(NULL) == NULL);
    CHECK(unisono_algorithm_name(NULL)[0] == '\0');
    unisono_context_destroy(NULL);
    unisono_store_destroy(NULL);
    unisono_work_destroy(NULL);
    unisono_algorithm_destroy(NULL);
    unisono_buffer_destroy(NULL);
    unisono_sparse_destroy(NULL);
    unisono_free(NULL);
}

static void context_options(void) {
    unisono_context_t *ctx = NULL;
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is NULL", unisono_context_create(&options, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "rank_count is 0", unisono_context_create(&options, &ctx));
    options.rank_count = 2;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "one of them is needed", unisono_context_create(&options, &ctx));
    options.rank = 2;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ranks are 0 to 1", unisono_context_create(&options, &ctx));
    options.size = 3;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "size is 3", unisono_context_create(&options, &ctx));
    CHECK_TEXT(unisono_last_error(), "UNISONO_CONTEXT_OPTIONS_INIT");
    options.size = 0;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "size is 0", unisono_context_create(&options, &ctx));
    options.size = UINT64_C(0xcccccccccccccccc);
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT, unisono_context_create(&options, &ctx));

    unisono_store_t *store = NULL;
    CHECK_OK(unisono_store_create_hash(&store));
    unisono_unique_id_t id;
    memset(&id, 7, sizeof id);
    unisono_context_options_t both = UNISONO_CONTEXT_OPTIONS_INIT;
    both.rank_count = 1;
    both.store = store;
    both.id = &id;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "both set", unisono_context_create(&both, &ctx));
    both.id = NULL;
    both.name = "\xff";
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "name is not UTF-8", unisono_context_create(&both, &ctx));
    unisono_context_options_t environment = UNISONO_CONTEXT_OPTIONS_INIT;
    environment.rank_count = 2;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "come from the environment",
                unisono_context_create_from_env(&environment, &ctx));
    CHECK(ctx == NULL);
    unisono_store_destroy(store);
}

/* A program of a later version has more options: fine while they are unset. */
static void later_versions(unisono_context_t *ctx) {
    struct {
        unisono_call_t call;
        uint64_t later;
    } longer = {UNISONO_CALL_INIT, 0};
    longer.call.size = sizeof longer;
    CHECK_OK(unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &longer.call, NULL));
    longer.later = 1;
    CHECK_FAILS(UNISONO_UNSUPPORTED, "does not know",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &longer.call, NULL));
}

static void calls(unisono_context_t *ctx) {
    int32_t before[4] = {-1, -1, -1, -1};
    memcpy(y, before, sizeof y);
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "recvbuf is NULL, but count is 3",
                unisono_allreduce(ctx, x, NULL, 3, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "sendbuf is NULL, but count is 3",
                unisono_allreduce(ctx, NULL, y, 3, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "dtype 12 is unknown",
                unisono_allreduce(ctx, x, y, 4, 12, UNISONO_SUM, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "dtype -1 is unknown",
                unisono_broadcast(ctx, y, 4, -1, 0, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "op 10 is unknown",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, 10, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "call->function is NULL",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_CUSTOM, NULL, NULL));
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT,
                 unisono_allreduce(ctx, x, y, 4, UNISONO_FLOAT32, UNISONO_BIT_AND, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "root is 1, but 'solo' has one rank",
                unisono_broadcast(ctx, y, 4, UNISONO_INT32, 1, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "to is 9",
                unisono_send(ctx, x, 4, UNISONO_INT32, 9, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "40000000000000000000 bytes",
                unisono_allreduce(ctx, x, y, huge, UNISONO_FLOAT64, UNISONO_SUM, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "count is 5000000000000000000",
                unisono_allgather(ctx, x, y, huge, UNISONO_FLOAT64, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "counts[0] is 5000000000000000000",
                unisono_allgatherv(ctx, x, y, &huge, UNISONO_FLOAT64, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "counts is NULL",
                unisono_allgatherv(ctx, x, y, NULL, UNISONO_FLOAT64, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "past the end of the address space",
                unisono_send(ctx, (void *)(UINTPTR_MAX - 7), 4, UNISONO_INT32, 0, NULL, NULL));
    unisono_call_t call = UNISONO_CALL_INIT;
    /* Where there is a driver, it would take this for a stream. */
    if (access("/dev/nvidiactl", F_OK) != 0) {
        call.stream = (struct CUstream_st *)x;
        CHECK_FAILS(UNISONO_CUDA, "no CUDA driver could be loaded",
                    unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    }
    call = (unisono_call_t)UNISONO_CALL_INIT;
    call.reserved = 1;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "call->reserved",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    call = (unisono_call_t)UNISONO_CALL_INIT;
    call.pdl = UNISONO_PDL_EARLY + 1;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "call->pdl",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    /* As larger groups. */
    call = (unisono_call_t)UNISONO_CALL_INIT;
    call.algorithm = 999;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "algorithm 999 is unknown",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "leave it unset", unisono_receive_any(ctx, y, 4, UNISONO_INT32, NULL, &call, NULL));
    call.algorithm = UNISONO_ALGORITHM_BRUCK;
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT, unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    call = (unisono_call_t)UNISONO_CALL_INIT;
    call.size = 8;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "call->size is 8",
                unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, &call, NULL));
    unisono_window_t *window = NULL;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "is no device memory", unisono_window_create(ctx, x, 16, &window));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "a window has memory", unisono_window_create(ctx, NULL, 16, &window));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "window is NULL", unisono_window_create(ctx, x, 16, NULL));
    unisono_window_destroy(NULL);
    uint32_t source = 5;
    unisono_work_t *work = NULL;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "unisono_work_source",
                unisono_receive_any(ctx, y, 4, UNISONO_INT32, &source, NULL, &work));
    CHECK(source == 5 && work == NULL);
    CHECK(memcmp(y, before, sizeof y) == 0);
}

static void a_group_of_one(unisono_context_t *ctx) {
    CHECK(unisono_context_rank(ctx) == 0 && unisono_context_size(ctx) == 1);
    CHECK(strcmp(unisono_context_name(ctx), "solo") == 0);
    CHECK_OK(unisono_allreduce(ctx, x, y, 4, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK(memcmp(x, y, sizeof x) == 0);
    CHECK_OK(unisono_allreduce(ctx, NULL, NULL, 0, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    unisono_work_t *work = NULL;
    CHECK_OK(unisono_allgather(ctx, x, y, 4, UNISONO_INT32, NULL, &work));
    CHECK_OK(unisono_work_wait(work));
    CHECK(unisono_work_status(work) == UNISONO_OK && unisono_work_error(work)[0] == '\0');
    unisono_work_destroy(work);
    unisono_context_t *child = NULL;
    CHECK_OK(unisono_context_split(ctx, 0, 0, &child));
    CHECK(unisono_context_size(child) == 1);
    unisono_context_destroy(child);
    CHECK_OK(unisono_context_split(ctx, UNISONO_NO_COLOR, 0, &child));
    CHECK(child == NULL);
    uint32_t wrong[1] = {3};
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT, unisono_context_group(ctx, "g", wrong, 1, &child));
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT, unisono_context_group(ctx, NULL, wrong, 1, &child));
    CHECK(child == NULL);
    CHECK(unisono_context_status(ctx) == UNISONO_OK && unisono_context_error(ctx)[0] == '\0');
}

static void last_of_two(void *accumulator, const void *operand, uint64_t count, int32_t dtype, void *user) {
    CHECK(dtype == UNISONO_FLOAT32 && user == NULL);
    memcpy(accumulator, operand, count * sizeof(float));
}

static void local_reductions(void) {
    float a[3] = {1, 2, 3}, b[3] = {10, 20, 30}, c[3] = {100, 200, 300}, out[3];
    const void *all[3] = {a, b, c};
    CHECK_OK(unisono_reduce_local(all, 3, out, 3, UNISONO_FLOAT32, UNISONO_SUM, NULL));
    CHECK(out[0] == 111 && out[2] == 333 && a[0] == 1 && b[0] == 10 && c[0] == 100);
    CHECK_OK(unisono_reduce_local(all, 3, out, 3, UNISONO_FLOAT32, UNISONO_AVG, NULL));
    CHECK(out[0] == 37 && out[2] == 111);
    CHECK_OK(unisono_reduce_local(all, 1, out, 3, UNISONO_FLOAT32, UNISONO_MAX, NULL));
    CHECK(memcmp(out, a, sizeof a) == 0);
    unisono_call_t call = UNISONO_CALL_INIT;
    call.scale = 0.5;
    CHECK_OK(unisono_reduce_local(all, 2, out, 3, UNISONO_FLOAT32, UNISONO_PREMULSUM, &call));
    CHECK(out[0] == 5.5f && out[2] == 16.5f);
    call.function = last_of_two;
    CHECK_OK(unisono_reduce_local(all, 3, out, 3, UNISONO_FLOAT32, UNISONO_CUSTOM, &call));
    CHECK(memcmp(out, c, sizeof c) == 0);
    CHECK_OK(unisono_reduce_local(all, 3, b, 3, UNISONO_FLOAT32, UNISONO_SUM, NULL));
    CHECK(b[0] == 111 && b[2] == 333 && a[0] == 1 && c[0] == 100);
    const void *nothing[1] = {NULL};
    CHECK_OK(unisono_reduce_local(nothing, 1, NULL, 0, UNISONO_FLOAT32, UNISONO_SUM, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "sendbufs[0] is NULL",
                unisono_reduce_local(nothing, 1, out, 3, UNISONO_FLOAT32, UNISONO_SUM, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "0 inputs",
                unisono_reduce_local(all, 0, out, 3, UNISONO_FLOAT32, UNISONO_SUM, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "sendbufs[2] and recvbuf overlap",
                unisono_reduce_local(all, 3, c + 1, 2, UNISONO_FLOAT32, UNISONO_SUM, NULL));
    CHECK_STATUS(UNISONO_INVALID_ARGUMENT,
                 unisono_reduce_local(all, 3, out, 3, UNISONO_FLOAT32, UNISONO_BIT_OR, NULL));
}

static void algorithms(unisono_context_t *ctx) {
    unisono_algorithm_t *algorithm = NULL;
    void *pointers[1] = {x};
    unisono_algorithm_options_t options = UNISONO_ALGORITHM_OPTIONS_INIT;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "options is NULL", unisono_algorithm_create(ctx, NULL, &algorithm));
    options.pointer_count = 1;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "options->pointers is NULL",
                unisono_algorithm_create(ctx, &options, &algorithm));
    options.pointers = pointers;
    options.count = 4;
    options.dtype = UNISONO_INT32;
    options.collective = 50;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "collective 50 is unknown",
                unisono_algorithm_create(ctx, &options, &algorithm));
    options.collective = UNISONO_ALLREDUCE;
    options.algorithm = 4711;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "4711", unisono_algorithm_create(ctx, &options, &algorithm));
    options.algorithm = UNISONO_ALGORITHM_AUTOMATIC;
    options.root_rank = 1;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "options->root_rank is 1",
                unisono_algorithm_create(ctx, &options, &algorithm));
    options.root_rank = 0;
    CHECK(algorithm == NULL);
    CHECK_OK(unisono_algorithm_create(ctx, &options, &algorithm));
    CHECK(unisono_algorithm_name(algorithm)[0] != '\0');
    CHECK_OK(unisono_algorithm_run(algorithm));
    unisono_algorithm_destroy(algorithm);
    CHECK(x[0] == 1 && x[3] == 4);
}

static void buffers(unisono_context_t *ctx) {
    char memory[1024];
    unisono_buffer_t *buffer = NULL;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "pointer is NULL", unisono_buffer_create(ctx, NULL, 8, &buffer));
    CHECK_OK(unisono_buffer_create(ctx, memory, sizeof memory, &buffer));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT,
                "count 5000000000 of float64 is 40000000000 bytes, but the buffer given to unisono_buffer_create has 1024",
                unisono_buffer_send(buffer, 0, UINT64_C(5000000000), UNISONO_FLOAT64, 0, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "from offset 1020",
                unisono_buffer_receive(buffer, 1020, 2, UNISONO_INT32, NULL, 0, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "to is 3", unisono_buffer_send(buffer, 0, 1, UNISONO_INT32, 3, NULL));
    CHECK_FAILS(UNISONO_INVALID_USAGE, "no send", unisono_buffer_wait_send(buffer, 0, NULL));
    CHECK_FAILS(UNISONO_INVALID_USAGE, "no receive", unisono_buffer_wait_receive(buffer, 10, NULL));
    unisono_buffer_destroy(buffer);
}

static void stores(void) {
    unisono_store_t *store = NULL, *part = NULL;
    CHECK_OK(unisono_store_create_hash(&store));
    CHECK_OK(unisono_store_create_prefix(store, "job", &part));
    CHECK_OK(unisono_store_set(part, "k", "value", 5));
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_OK(unisono_store_get(store, "job/k", 1000, &value, &bytes));
    CHECK(bytes == 5 && memcmp(value, "value", 5) == 0);
    unisono_free(value);
    CHECK_OK(unisono_store_set(part, "empty", NULL, 0));
    CHECK_OK(unisono_store_try_get(part, "empty", &value, &bytes));
    CHECK(value != NULL && bytes == 0);
    unisono_free(value);
    CHECK_OK(unisono_store_try_get(part, "absent", &value, &bytes));
    CHECK(value == NULL && bytes == 0);
    value = &bytes;
    CHECK_FAILS(UNISONO_TIMEOUT, "absent", unisono_store_get(part, "absent", 20, &value, &bytes));
    CHECK(value == &bytes);
    int64_t sum = 0;
    CHECK_OK(unisono_store_add(part, "n", 5, &sum));
    CHECK_OK(unisono_store_add(part, "n", -2, &sum));
    CHECK(sum == 3);
    unisono_store_destroy(store);
    CHECK_OK(unisono_store_set(part, "still", "there", 5));
    unisono_store_destroy(part);
    char directory[4096], *file = NULL;
    CHECK_OK(unisono_store_create_hash(&store));
    CHECK_FAILS(UNISONO_UNSUPPORTED, "in a file of its own", unisono_store_key_file(store, "k", &file));
    unisono_store_destroy(store);
    make_directory(directory, sizeof directory);
    CHECK_OK(unisono_store_create_file(directory, &store));
    CHECK_OK(unisono_store_create_prefix(store, "job", &part));
    CHECK_OK(unisono_store_key_file(part, "k", &file));
    CHECK(file[0] == '/' && access(file, F_OK) != 0);
    CHECK_OK(unisono_store_set(part, "k", "value", 5));
    CHECK(access(file, F_OK) == 0 && unlink(file) == 0);
    unisono_free(file);
    CHECK_OK(unisono_store_try_get(part, "k", &value, &bytes));
    CHECK(value == NULL);
    unisono_store_destroy(part);
    unisono_store_destroy(store);
    remove_directory(directory);
    CHECK_STATUS(UNISONO_SYSTEM, unisono_store_create_file("/proc/nowhere/at/all", &store));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "path of a file store is empty", unisono_store_create_file("", &store));
}

static void tcp_stores(void) {
    unisono_store_t *server = NULL, *client = NULL;
    unisono_tcp_store_options_t options = UNISONO_TCP_STORE_OPTIONS_INIT;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "port is 0", unisono_store_create_tcp(&options, &client));
    options.port = 70000;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "port is 70000", unisono_store_create_tcp(&options, &client));
    options.port = 0;
    options.serve = 7;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "serve is 7", unisono_store_create_tcp(&options, &client));
    options.serve = 1;
    options.host = "127.0.0.1";
    options.secret = "open sesame";
    options.timeout_ms = 10000;
    CHECK_OK(unisono_store_create_tcp(&options, &server));
    CHECK(unisono_store_port(server) > 0);
    options.serve = 0;
    options.port = unisono_store_port(server);
    options.secret = "guess";
    CHECK_FAILS(UNISONO_INVALID_USAGE, "127.0.0.1", unisono_store_create_tcp(&options, &client));
    options.secret = "open sesame";
    CHECK_OK(unisono_store_create_tcp(&options, &client));
    CHECK_OK(unisono_store_set(client, "k", "v", 1));
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_OK(unisono_store_get(server, "k", 5000, &value, &bytes));
    CHECK(bytes == 1 && *(char *)value == 'v');
    unisono_free(value);
    unisono_store_destroy(client);
    unisono_store_destroy(server);
}

/* ---- a store of the caller's own: one key */

struct own_store {
    unisono_store_t *store;
    char key[64], value[64];
    uint64_t bytes;
    int64_t number;
    int released;
};

static unisono_status_t own_set(void *user, const char *key, const uint8_t *value, uint64_t bytes,
                                unisono_store_reply_t *reply) {
    struct own_store *own = user;
    if (bytes > sizeof own->value) {
        unisono_store_reply_error(reply, "the shelf\nis full");
        return UNISONO_OUT_OF_MEMORY;
    }
    snprintf(own->key, sizeof own->key, "%s", key);
    memcpy(own->value, value, bytes);
    own->bytes = bytes;
    return UNISONO_OK;
}

static unisono_status_t own_try_get(void *user, const char *key, unisono_store_reply_t *reply) {
    struct own_store *own = user;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "is no unisono_store_reply_t",
                unisono_store_reply_value((unisono_store_reply_t *)own->store, (const uint8_t *)own->value, own->bytes));
    if (strcmp(own->key, key) == 0) {
        unisono_store_reply_value(reply, (const uint8_t *)own->value, own->bytes);
    }
    return UNISONO_OK;
}

static unisono_status_t own_get(void *user, const char *key, uint64_t timeout_ms, unisono_store_reply_t *reply) {
    struct own_store *own = user;
    if (strcmp(own->key, key) != 0) {
        CHECK(timeout_ms > 0 && timeout_ms <= 30);
        unisono_store_reply_error(reply, "nobody brought it");
        return UNISONO_TIMEOUT;
    }
    return own_try_get(user, key, reply);
}

static unisono_status_t own_add(void *user, const char *key, int64_t amount, int64_t *sum,
                                unisono_store_reply_t *reply) {
    (void)key, (void)reply;
    struct own_store *own = user;
    *sum = own->number += amount;
    return UNISONO_OK;
}

static void own_release(void *user) {
    ((struct own_store *)user)->released++;
}

static void callback_stores(void) {
    struct own_store own = {.key = ""};
    unisono_store_callbacks_t callbacks = UNISONO_STORE_CALLBACKS_INIT;
    unisono_store_t *store = NULL, *part = NULL;
    callbacks.user = &own;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "callbacks->set is NULL",
                unisono_store_create_callback(&callbacks, &store));
    callbacks.set = own_set;
    callbacks.get = own_get;
    callbacks.try_get = own_try_get;
    callbacks.add = own_add;
    callbacks.release = own_release;
    callbacks.description = "shelf";
    CHECK_OK(unisono_store_create_callback(&callbacks, &store));
    CHECK_OK(unisono_store_create_prefix(store, "p", &part));
    own.store = store;
    CHECK_OK(unisono_store_set(part, "k", "v", 1));
    CHECK(strcmp(own.key, "p/k") == 0);
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_OK(unisono_store_get(part, "k", 1000, &value, &bytes));
    CHECK(bytes == 1 && *(char *)value == 'v');
    unisono_free(value);
    int64_t sum = 0;
    CHECK_OK(unisono_store_add(store, "n", 7, &sum));
    CHECK(sum == 7);
    CHECK_FAILS(UNISONO_TIMEOUT, "nobody brought it", unisono_store_get(store, "other", 30, &value, &bytes));
    CHECK_TEXT(unisono_last_error(), "shelf");
    char large[100] = {0};
    CHECK_STATUS(UNISONO_OUT_OF_MEMORY, unisono_store_set(store, "k", large, sizeof large));
    CHECK_TEXT(unisono_last_error(), "the shelf is full");
    unisono_store_destroy(store);
    CHECK(own.released == 0);
    unisono_store_destroy(part);
    CHECK(own.released == 1);
}

static void logged(void *user, unisono_log_level_t level, const char *message) {
    (void)message;
    CHECK(level >= UNISONO_LOG_ERROR && level <= UNISONO_LOG_TRACE);
    ++*(int *)user;
}

static void logs(void) {
    int count = 0;
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "level 6", unisono_log_set(6, NULL, NULL));
    CHECK_OK(unisono_log_set(UNISONO_LOG_TRACE, logged, &count));
    unisono_unique_id_t id;
    CHECK_OK(unisono_unique_id_create(&id));
    CHECK(count > 0);
    CHECK_OK(unisono_unique_id_release(&id));
    CHECK_OK(unisono_unique_id_create_on("127.0.0.1", &id));
    CHECK_OK(unisono_unique_id_release(&id));
    CHECK_OK(unisono_unique_id_release(&id));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "id is NULL", unisono_unique_id_release(NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "interface 'nowhere' does not exist", unisono_unique_id_create_on("nowhere", &id));
    CHECK_OK(unisono_log_set(UNISONO_LOG_OFF, NULL, NULL));
}

/* After the thread's own objects have gone: what failed last is still told, and what fails here is, too. */
static void at_exit(void) {
    if (strstr(unisono_last_error(), "nowhere") == NULL ||
        unisono_log_set(6, NULL, NULL) != UNISONO_INVALID_ARGUMENT || strstr(unisono_last_error(), "level 6") == NULL) {
        fprintf(stderr, "at exit: %s\n", unisono_last_error());
        _exit(1);
    }
}

int main(void) {
    CHECK(unisono_last_error()[0] == '\0');
    versions();
    numbers();
    nulls();
    context_options();
    unisono_context_t *ctx = alone();
    later_versions(ctx);
    calls(ctx);
    a_group_of_one(ctx);
    local_reductions();
    algorithms(ctx);
    buffers(ctx);
    unisono_context_destroy(ctx);
    stores();
    tcp_stores();
    callback_stores();
    logs();
    CHECK(atexit(at_exit) == 0);
    return 0;
}
