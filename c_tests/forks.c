/* Forks: what a child may do with its parent's objects, and what it may not wait for. Children exit as any program does, which Rust's own
 * tests do not. */

#include "sums.h"

#include <pthread.h>

static const char *const forked = "before a fork";

enum { PARTS = 1 << 18 };
static uint32_t parts[PARTS];

/* What a child of a fork may do with its parent's objects, and that it ends by exit as any program does. */
static void in_child(unisono_context_t *ctx, unisono_store_t *server, unisono_work_t *work, unisono_buffer_t *buffer) {
    alarm(60);
    float y[4] = {0};
    unisono_context_t *own = NULL;
    unisono_work_t *another = NULL;
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked,
                unisono_allreduce(ctx, y, y, 4, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked,
                unisono_allreduce(ctx, y, y, 4, UNISONO_FLOAT32, UNISONO_SUM, NULL, &another));
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_send(ctx, y, 4, UNISONO_FLOAT32, 1, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_context_duplicate(ctx, &own));
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_work_wait_for(work, 10000));
    CHECK(unisono_work_status(work) == UNISONO_INVALID_USAGE);
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_work_cancel(work));
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_context_abort(ctx));
    CHECK_TEXT(unisono_context_error(ctx), forked);
    CHECK(unisono_context_rank(ctx) == 0 && unisono_context_size(ctx) == 2);
    /* Its connection is the parent's: an answer here would be missing there. */
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_store_set(server, "k", "w", 1));
    CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_store_try_get(server, "k", &value, &bytes));
    unisono_buffer_destroy(buffer);
    unisono_work_destroy(work);
    unisono_store_destroy(server);
    unisono_context_destroy(ctx);
    own = alone();
    CHECK_OK(unisono_allreduce(own, y, y, 4, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
    unisono_context_destroy(own);
    unisono_unique_id_t id;
    CHECK_OK(unisono_unique_id_create(&id));
    exit(0);
}

static void a_fork(unisono_context_t *ctx, void *arg) {
    (void)arg;
    sums(ctx, 3, 1000);
    if (unisono_context_rank(ctx) == 0) {
        for (uint32_t i = 0; i < PARTS; i++) {
            parts[i] = i * 3;
        }
        unisono_store_t *server = served();
        unisono_call_t call = UNISONO_CALL_INIT;
        call.tag = 5;
        unisono_work_t *work = NULL;
        float y[4];
        CHECK_OK(unisono_receive(ctx, y, 4, UNISONO_FLOAT32, 1, &call, &work));
        /* Under way when it forks: the child's end of the buffer does not withdraw it. */
        unisono_buffer_t *buffer = NULL;
        CHECK_OK(unisono_buffer_create(ctx, parts, sizeof parts, &buffer));
        CHECK_OK(unisono_buffer_send(buffer, 0, PARTS, UNISONO_UINT32, 1, &call));
        pid_t child = fork();
        if (child == 0) {
            in_child(ctx, server, work, buffer);
        }
        for (int i = 0; i < 100; i++) {
            CHECK_OK(unisono_store_add(server, "n", 1, NULL));
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        int64_t sum = 0;
        CHECK_OK(unisono_store_add(server, "n", 1, &sum));
        CHECK(sum == 101);
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
        CHECK_OK(unisono_work_wait(work));
        CHECK_OK(unisono_buffer_wait_send(buffer, 20000, NULL));
        unisono_buffer_destroy(buffer);
        unisono_work_destroy(work);
        unisono_store_destroy(server);
    } else {
        /* The child has ended by now, and has not said goodbye in its parent's name. */
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
        unisono_call_t call = UNISONO_CALL_INIT;
        call.tag = 5;
        CHECK_OK(unisono_send(ctx, x, 4, UNISONO_FLOAT32, 0, &call, NULL));
        memset(parts, 0, sizeof parts);
        CHECK_OK(unisono_receive(ctx, parts, PARTS, UNISONO_UINT32, 0, &call, NULL));
        for (uint32_t i = 0; i < PARTS; i++) {
            CHECK(parts[i] == i * 3);
        }
    }
    sums(ctx, 3, 100000);
}

/* Threads of the parent hold locks when it forks, and do not exist in the child: no call there waits for them. */

struct hammer {
    unisono_context_t *ctx;
    unisono_store_t *store;
    uint64_t tag;
    int done;
};

static void *hammer(void *arg) {
    struct hammer *hammer = arg;
    unisono_call_t call = UNISONO_CALL_INIT;
    call.tag = hammer->tag;
    /* Rank 0 says when it is over, by the sum. */
    for (float y[2] = {0, 0}; y[1] == 0;) {
        y[1] = __atomic_load_n(&hammer->done, __ATOMIC_ACQUIRE) ? 1 : 0;
        CHECK_OK(unisono_allreduce(hammer->ctx, y, y, 2, UNISONO_FLOAT32, UNISONO_SUM, &call, NULL));
        if (hammer->store != NULL) {
            CHECK_OK(unisono_store_add(hammer->store, "n", 1, NULL));
        }
    }
    return NULL;
}

static void forks_beside_threads(unisono_context_t *ctx, void *arg) {
    (void)arg;
    unisono_store_t *store = unisono_context_rank(ctx) == 0 ? served() : NULL;
    struct hammer hammers[2] = {{ctx, store, 100, 0}, {ctx, store, 101, 0}};
    pthread_t threads[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&threads[i], NULL, hammer, &hammers[i]) == 0);
    }
    for (int i = 0; store != NULL && i < 40; i++) {
        pid_t child = fork();
        if (child == 0) {
            alarm(30);
            CHECK_STATUS(UNISONO_INVALID_USAGE, unisono_barrier(ctx, NULL, NULL));
            CHECK_STATUS(UNISONO_INVALID_USAGE, unisono_context_abort(ctx));
            CHECK_STATUS(UNISONO_INVALID_USAGE, unisono_store_set(store, "k", "v", 1));
            unisono_context_destroy(ctx);
            unisono_store_destroy(store);
            unisono_context_destroy(alone());
            exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    for (int i = 0; i < 2; i++) {
        if (store != NULL) {
            __atomic_store_n(&hammers[i].done, 1, __ATOMIC_RELEASE);
        }
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    unisono_store_destroy(store);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

/* A thread writes to a store in memory when its process forks, and has its lock for most of the time. */

enum { LARGE_VALUE = 16 << 20 };

struct writer {
    unisono_store_t *store;
    int done;
};

static void *write_on(void *arg) {
    struct writer *writer = arg;
    char *value = calloc(1, LARGE_VALUE);
    CHECK(value != NULL);
    while (!__atomic_load_n(&writer->done, __ATOMIC_ACQUIRE)) {
        CHECK_OK(unisono_store_set(writer->store, "k", value, LARGE_VALUE));
    }
    free(value);
    return NULL;
}

static void forks_beside_a_store_in_memory(void) {
    struct writer writer = {NULL, 0};
    CHECK_OK(unisono_store_create_hash(&writer.store));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, write_on, &writer) == 0);
    for (int i = 0; i < 20; i++) {
        sleep_ms(i % 5);
        fflush(NULL);
        pid_t child = fork();
        if (child == 0) {
            /* Who waits for a thread that is not here is ended. */
            alarm(30);
            void *value = NULL;
            uint64_t bytes = 0;
            CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_store_try_get(writer.store, "k", &value, &bytes));
            CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_store_get(writer.store, "k", 1, &value, &bytes));
            CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_store_set(writer.store, "k", "v", 1));
            CHECK_FAILS(UNISONO_INVALID_USAGE, forked, unisono_store_add(writer.store, "n", 1, NULL));
            unisono_store_destroy(writer.store);
            unisono_store_t *own = NULL;
            CHECK_OK(unisono_store_create_hash(&own));
            CHECK_OK(unisono_store_set(own, "k", "v", 1));
            unisono_store_destroy(own);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    __atomic_store_n(&writer.done, 1, __ATOMIC_RELEASE);
    CHECK(pthread_join(thread, NULL) == 0);
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_OK(unisono_store_get(writer.store, "k", 1000, &value, &bytes));
    CHECK(bytes == LARGE_VALUE);
    unisono_free(value);
    unisono_store_destroy(writer.store);
}

/* A process that serves a store is killed, and a child that it forked lives on: its clients know at once. */
static void a_server_is_killed_and_has_a_child(void) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        /* Neither outlives a test that fails for long. */
        alarm(60);
        unisono_store_t *server = served();
        int64_t numbers[2] = {unisono_store_port(server), 0};
        if (fork() == 0) {
            alarm(60);
            /* It is the child that tells: what it does about descriptors it has done then. */
            numbers[1] = getpid();
            CHECK(write(pipes[1], numbers, sizeof numbers) == (ssize_t)sizeof numbers);
        }
        for (;;) {
            pause();
        }
    }
    int64_t numbers[2] = {0, 0};
    CHECK(read(pipes[0], numbers, sizeof numbers) == (ssize_t)sizeof numbers);
    unisono_tcp_store_options_t options = UNISONO_TCP_STORE_OPTIONS_INIT;
    options.host = "127.0.0.1";
    options.port = (uint32_t)numbers[0];
    options.timeout_ms = 20000;
    unisono_store_t *client = NULL;
    CHECK_OK(unisono_store_create_tcp(&options, &client));
    kill(pid, SIGKILL);
    CHECK(waitpid(pid, NULL, 0) == pid);
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_STATUS(UNISONO_PEER_FAILED, unisono_store_get(client, "k", 20000, &value, &bytes));
    unisono_store_destroy(client);
    /* Nor is the port taken. */
    options.serve = 1;
    CHECK_OK(unisono_store_create_tcp(&options, &client));
    unisono_store_destroy(client);
    kill((pid_t)numbers[1], SIGKILL);
    close(pipes[0]);
    close(pipes[1]);
}

static void *idle(void *arg) {
    for (;;) {
        pause();
    }
    return arg;
}

static void *end(void *arg) {
    return arg;
}

/* A child destroys its parent's server, whose thread is not there. Nor is the memory of that, once the child has had threads of its
 * own and the C library has given back the stacks of its parent's. */
static void a_child_ends_its_parents_server(void) {
    fflush(NULL);
    pid_t parent = fork();
    if (parent == 0) {
        alarm(60);
        unisono_store_t *server = served();
        pthread_attr_t attributes;
        pthread_t thread;
        CHECK(pthread_attr_init(&attributes) == 0);
        CHECK(pthread_attr_setstacksize(&attributes, 8 << 20) == 0);
        for (int i = 0; i < 16; i++) {
            CHECK(pthread_create(&thread, &attributes, idle, NULL) == 0);
        }
        pid_t child = fork();
        if (child == 0) {
            alarm(60);
            for (int i = 0; i < 3; i++) {
                CHECK(pthread_create(&thread, NULL, end, NULL) == 0);
                CHECK(pthread_join(thread, NULL) == 0);
            }
            unisono_store_destroy(server);
            _exit(0);
        }
        int status = 0;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        _exit(0);
    }
    int status = 0;
    CHECK(waitpid(parent, &status, 0) == parent);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void) {
    run_ranks(2, 60, a_fork, NULL);
    run_ranks(2, 60, forks_beside_threads, NULL);
    forks_beside_a_store_in_memory();
    a_server_is_killed_and_has_a_child();
    a_child_ends_its_parents_server();
    return 0;
}
