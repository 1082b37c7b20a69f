/* The process around the library: signals, forks, descriptors, handles that are mixed up, system calls that are forbidden.
 * A C program has what Rust's own tests do not: SIGPIPE that kills, handlers without SA_RESTART, exit in forked children. */

#include "harness.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>

static float x[1 << 19];

static unisono_store_t *served(void) {
    unisono_store_t *server = NULL;
    unisono_tcp_store_options_t options = UNISONO_TCP_STORE_OPTIONS_INIT;
    options.serve = 1;
    options.host = "127.0.0.1";
    options.timeout_ms = 20000;
    CHECK_OK(unisono_store_create_tcp(&options, &server));
    return server;
}

static void sums(unisono_context_t *ctx, int times, uint64_t count) {
    float size = (float)unisono_context_size(ctx);
    for (int i = 0; i < times; i++) {
        for (uint64_t k = 0; k < count; k++) {
            x[k] = (float)(k % 100);
        }
        CHECK_OK(unisono_allreduce(ctx, x, x, count, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL));
        CHECK(x[1] == size && x[count - 1] == (float)((count - 1) % 100) * size);
    }
}

/* ---- handles */

static void mixed_up_handles(void) {
    unisono_context_t *ctx = alone();
    unisono_store_t *store = NULL;
    CHECK_OK(unisono_store_create_hash(&store));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "ctx is no unisono_context_t",
                unisono_barrier((unisono_context_t *)(void *)store, NULL, NULL));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "store is no unisono_store_t",
                unisono_store_set((unisono_store_t *)(void *)ctx, "k", "v", 1));
    CHECK_FAILS(UNISONO_INVALID_ARGUMENT, "work is no unisono_work_t",
                unisono_work_wait((unisono_work_t *)(void *)((char *)ctx + 1)));
    CHECK(unisono_context_rank((unisono_context_t *)(void *)store) == UNISONO_NO_RANK);
    /* Destroyed as what it is not, it goes on as what it is. */
    unisono_context_destroy((unisono_context_t *)(void *)store);
    CHECK_TEXT(unisono_last_error(), "ctx is no unisono_context_t");
    CHECK_OK(unisono_store_set(store, "k", "v", 1));
    unisono_store_destroy(store);
    unisono_context_destroy(ctx);
}

/* ---- signals */

/* A client that asks three times and is gone before the first answer: what the server writes then must not end this program. */
static void a_client_that_leaves(void) {
    CHECK(signal(SIGPIPE, SIG_DFL) != SIG_ERR);
    unisono_store_t *server = served();
    struct sockaddr_in address = {0};
    address.sin_family = AF_INET;
    address.sin_port = htons((uint16_t)unisono_store_port(server));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    for (int visit = 0; visit < 10; visit++) {
        int s = socket(AF_INET, SOCK_STREAM, 0);
        CHECK(connect(s, (struct sockaddr *)&address, sizeof address) == 0);
        char hello[57];
        CHECK(recv(s, hello, sizeof hello, MSG_WAITALL) == (ssize_t)sizeof hello);
        unsigned char words[73 + 3 * 10] = {0};
        memcpy(words, hello, 8);
        for (int request = 0; request < 3; request++) {
            unsigned char *head = words + 73 + 10 * request;
            head[0] = 3; /* try_get, of a key of one byte */
            head[1] = 1;
            head[9] = 'k';
        }
        /* Held back until the socket closes, so that the server gets all of it together with the end. */
        int cork = 1;
        CHECK(setsockopt(s, IPPROTO_TCP, TCP_CORK, &cork, sizeof cork) == 0);
        CHECK(send(s, words, sizeof words, 0) == (ssize_t)sizeof words);
        close(s);
    }
    /* The server takes one after the other, so it has served those when it has answered this. */
    CHECK_OK(unisono_store_set(server, "k", "v", 1));
    unisono_store_destroy(server);
}

/* The signals that a thread of this process blocks, by its name's beginning; -1 if there is none. */
static int64_t blocked_by(const char *name) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks != NULL);
    int64_t found = -1;
    for (struct dirent *task; (task = readdir(tasks)) != NULL;) {
        char path[512], line[256];
        snprintf(path, sizeof path, "/proc/self/task/%s/status", task->d_name);
        FILE *status = fopen(path, "r");
        int ours = 0;
        while (status != NULL && fgets(line, sizeof line, status) != NULL) {
            if (strncmp(line, "Name:\t", 6) == 0) {
                line[strcspn(line, "\n")] = '\0';
                ours = strcmp(line + 6, name) == 0;
            } else if (ours && strncmp(line, "SigBlk:\t", 8) == 0) {
                found = (int64_t)strtoull(line + 8, NULL, 16);
            }
        }
        if (status != NULL) {
            fclose(status);
        }
    }
    closedir(tasks);
    return found;
}

/* A program that waits for SIGTERM with sigwait must get it: no thread of the library takes it. */
static void threads_take_no_signals(unisono_context_t *ctx, void *arg) {
    (void)arg;
    unisono_store_t *server = served();
    const char *names[] = {"unisono", "unisono-store"};
    for (int i = 0; i < 2; i++) {
        int64_t mask = blocked_by(names[i]);
        CHECK(mask != -1);
        CHECK((mask >> (SIGTERM - 1) & 1) == 1 && (mask >> (SIGCHLD - 1) & 1) == 1);
        CHECK((mask >> (SIGSEGV - 1) & 1) == 0);
    }
    unisono_store_destroy(server);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

static volatile sig_atomic_t alarms;

static void count_alarm(int signal) {
    (void)signal;
    alarms++;
}

/* A signal every 200 microseconds, whose handler makes system calls answer EINTR. */
static void storm(int on) {
    struct sigaction action = {0};
    action.sa_handler = on ? count_alarm : SIG_IGN;
    CHECK(sigaction(SIGALRM, &action, NULL) == 0);
    struct itimerval timer = {{0, on ? 200 : 0}, {0, on ? 200 : 0}};
    CHECK(setitimer(ITIMER_REAL, &timer, NULL) == 0);
}

static void interrupted(unisono_context_t *ctx, void *arg) {
    (void)arg;
    storm(1);
    unisono_context_t *child = NULL;
    CHECK_OK(unisono_context_duplicate(ctx, &child));
    sums(child, 20, 1000);
    sums(child, 5, sizeof x / sizeof x[0]);
    for (int late = 0; late < 2; late++) {
        if ((int)unisono_context_rank(ctx) == late) {
            sleep_ms(100);
        }
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    }
    unisono_store_t *server = served();
    for (int i = 0; i < 50; i++) {
        CHECK_OK(unisono_store_add(server, "n", 1, NULL));
    }
    void *value = NULL;
    uint64_t bytes = 0;
    CHECK_STATUS(UNISONO_TIMEOUT, unisono_store_get(server, "absent", 50, &value, &bytes));
    unisono_store_destroy(server);
    unisono_context_destroy(child);
    CHECK(alarms > 0);
    storm(0);
}

/* ---- descriptors */

static int descriptors(int *last_not_closed_on_exec) {
    int open = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int flags = fcntl(fd, F_GETFD);
        if (flags >= 0) {
            open++;
            if (!(flags & FD_CLOEXEC)) {
                *last_not_closed_on_exec = fd;
            }
        }
    }
    return open;
}

/* None stays open after its object, and none would be there in a program that this one executes. */
static void no_descriptor_leaks(unisono_context_t *ctx, void *arg) {
    (void)arg;
    int inherited = -1, before = 0;
    descriptors(&inherited);
    for (int round = 0; round < 6; round++) {
        unisono_context_t *child = NULL;
        CHECK_OK(unisono_context_split(ctx, 0, 0, &child));
        sums(child, 1, 100000);
        unisono_store_t *server = served();
        CHECK_OK(unisono_store_set(server, "k", "v", 1));
        int now = -1;
        descriptors(&now);
        CHECK(now == inherited);
        unisono_store_destroy(server);
        unisono_context_destroy(child);
        /* The library's threads may close some a little later. */
        int after = descriptors(&now);
        for (int look = 0; round >= 2 && after > before && look < 1000; look++) {
            sleep_ms(10);
            after = descriptors(&now);
        }
        CHECK(round < 2 || after <= before);
        before = after;
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

/* ---- forks */

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

/* ---- limits */

/* A limit on file sizes holds for shared memory too, and who goes beyond it gets SIGXFSZ: an error instead. */
static void small_files_only(void) {
    char directory[4096];
    make_directory(directory, sizeof directory);
    fflush(NULL);
    pid_t pids[2];
    for (int rank = 0; rank < 2; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            struct rlimit limit = {1 << 20, 1 << 20};
            CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
            setenv("UNISONO_TRANSPORT", "shm", 1);
            unisono_store_t *store = NULL;
            CHECK_OK(unisono_store_create_file(directory, &store));
            unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
            options.rank = (uint32_t)rank;
            options.rank_count = 2;
            options.store = store;
            options.timeout_ms = 20000;
            unisono_context_t *ctx = NULL;
            CHECK_FAILS(UNISONO_SYSTEM, "ulimit -f", unisono_context_create(&options, &ctx));
            exit(0);
        }
    }
    for (int rank = 0; rank < 2; rank++) {
        int status = 0;
        CHECK(waitpid(pids[rank], &status, 0) == pids[rank]);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    remove_directory(directory);
}

/* A process that may have little more memory than it has: the call that needs more says so, here and on the others. */
static void no_more_memory(unisono_context_t *ctx, void *arg) {
    unisono_op_t op = *(unisono_op_t *)arg;
    uint64_t count = 64 << 20;
    float *mine = (float *)malloc(count * sizeof(float)), *all = (float *)malloc(count * sizeof(float));
    CHECK(mine && all);
    unisono_status_t status = unisono_barrier(ctx, NULL, NULL);
    if (unisono_context_rank(ctx) != 0 && status == UNISONO_OUT_OF_MEMORY) {
        /* Rank 0 was out of the barrier before this one, and has failed the group. */
        free(mine);
        free(all);
        return;
    }
    CHECK_OK(status);
    unisono_call_t call = UNISONO_CALL_INIT;
    call.algorithm = UNISONO_ALGORITHM_RECURSIVE_DOUBLING;
    if (unisono_context_rank(ctx) == 0) {
        unsigned long pages = 0;
        FILE *sizes = fopen("/proc/self/statm", "r");
        CHECK(sizes && fscanf(sizes, "%lu", &pages) == 1);
        fclose(sizes);
        rlim_t room = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + (64 << 20);
        struct rlimit limit = {room, room};
        CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    }
    CHECK_FAILS(UNISONO_OUT_OF_MEMORY, unisono_context_rank(ctx) == 0 ? "no memory for" : "rank 0",
                unisono_allreduce(ctx, mine, all, count, UNISONO_FLOAT32, op, &call, NULL));
    free(mine);
    free(all);
}

/* ---- what the environment says */

/* Who misspells UNISONO_LOG is told so, in the one place that is read then. */
static void a_misspelt_log_level(void) {
    int pipes[2];
    CHECK(pipe(pipes) == 0);
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("UNISONO_LOG", "loud", 1);
        dup2(pipes[1], STDERR_FILENO);
        _exit(unisono_dtype_size(UNISONO_INT8) == 1 ? 0 : 1);
    }
    close(pipes[1]);
    char text[512] = {0};
    CHECK(read(pipes[0], text, sizeof text - 1) > 0);
    CHECK_TEXT(text, "UNISONO_LOG=loud: use off, error, warn, info, debug or trace");
    close(pipes[0]);
    CHECK(waitpid(pid, NULL, 0) == pid);
}

/* ---- threads */

/* Calls for which ranks of one host read each other's memory, if they may. */
static void long_calls(unisono_context_t *ctx, void *arg) {
    (void)arg;
    sums(ctx, 3, 1000);
    sums(ctx, 3, sizeof x / sizeof x[0]);
    unisono_status_t status = unisono_context_rank(ctx) == 0
        ? unisono_send(ctx, x, sizeof x / sizeof x[0], UNISONO_FLOAT32, 1, NULL, NULL)
        : unisono_receive(ctx, x, sizeof x / sizeof x[0], UNISONO_FLOAT32, 0, NULL, NULL);
    CHECK_OK(status);
}

static void *goes_on(void *ctx) {
    sleep_ms(50);
    long_calls((unisono_context_t *)ctx, NULL);
    unisono_context_destroy((unisono_context_t *)ctx);
    exit(0);
}

/* The main thread of one process ends, and the rest of it goes on: the others still read what they need of its memory. */
static void main_thread_ends(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (unisono_context_rank(ctx) == 0) {
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, goes_on, ctx) == 0);
        pthread_exit(NULL);
    }
    long_calls(ctx, NULL);
}

/* ---- memory of one process alone */

/* Calls for which ranks read each other's memory, whatever the number of ranks up to three. */
enum { HIDDEN = 3 << 16 };

/* Memory for so many numbers, and none of the others may read it: as what a driver maps. NULL where there is no such memory. */
static int32_t *numbers(int secret) {
    int fd = -1;
#ifdef SYS_memfd_secret
    if (secret) {
        fd = (int)syscall(SYS_memfd_secret, O_CLOEXEC);
    }
#endif
    if (secret && (fd < 0 || ftruncate(fd, HIDDEN * sizeof(int32_t)) != 0)) {
        return NULL;
    }
    int flags = secret ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void *memory = mmap(NULL, HIDDEN * sizeof(int32_t), PROT_READ | PROT_WRITE, flags, fd, 0);
    if (fd >= 0) {
        close(fd);
    }
    return memory == MAP_FAILED ? NULL : (int32_t *)memory;
}

static int32_t given(int rank, int k) {
    return rank * 1000000 + k;
}

static int32_t *give(int32_t *memory, int rank) {
    for (int k = 0; k < HIDDEN; k++) {
        memory[k] = given(rank, k);
    }
    return memory;
}

#define CHECK_EACH(count, value)          \
    for (int k = 0; k < (count); k++) {   \
        CHECK(out[k] == (value));         \
    }

/* `arg` has a bit for each rank whose memory is its own alone. */
static void hidden_memory(unisono_context_t *ctx, void *arg) {
    int rank = (int)unisono_context_rank(ctx), size = (int)unisono_context_size(ctx);
    int secret = *(int *)arg >> rank & 1, each = HIDDEN / size, sums = size * (size - 1) / 2;
    int32_t *in = numbers(secret), *out = numbers(secret);
    uint64_t count = HIDDEN, part = (uint64_t)each, counts[3] = {part, part, part};
    CHECK(in && out);
    for (int round = 0; round < 2; round++) {
        give(in, rank);
        CHECK_OK(unisono_allreduce(ctx, in, out, count, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK_EACH(HIDDEN, given(sums, k * size));
        give(out, rank);
        CHECK_OK(unisono_allreduce(ctx, out, out, count, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK_EACH(HIDDEN, given(sums, k * size));
        give(out, rank);
        CHECK_OK(unisono_reduce(ctx, out, out, count, UNISONO_INT32, UNISONO_SUM, 1, NULL, NULL));
        CHECK_EACH(rank == 1 ? HIDDEN : 0, given(sums, k * size));
        CHECK_OK(unisono_reduce_scatter(ctx, in, out, part, UNISONO_INT32, UNISONO_SUM, NULL, NULL));
        CHECK_EACH(each, given(sums, (rank * each + k) * size));
        give(out, rank);
        CHECK_OK(unisono_broadcast(ctx, out, count, UNISONO_INT32, 0, NULL, NULL));
        CHECK_EACH(HIDDEN, given(0, k));
        CHECK_OK(unisono_allgather(ctx, in, out, part, UNISONO_INT32, NULL, NULL));
        CHECK_EACH(HIDDEN, given(k / each, k % each));
        CHECK_OK(unisono_gatherv(ctx, in, out, counts, UNISONO_INT32, 1, NULL, NULL));
        CHECK_EACH(rank == 1 ? HIDDEN : 0, given(k / each, k % each));
        CHECK_OK(unisono_scatter(ctx, in, out, part, UNISONO_INT32, 0, NULL, NULL));
        CHECK_EACH(each, given(0, rank * each + k));
        CHECK_OK(unisono_alltoallv(ctx, in, out, counts, counts, UNISONO_INT32, NULL, NULL));
        CHECK_EACH(HIDDEN, given(k / each, rank * each + k % each));
        give(out, rank);
        CHECK_OK(unisono_alltoall(ctx, out, out, part, UNISONO_INT32, NULL, NULL));
        CHECK_EACH(HIDDEN, given(k / each, rank * each + k % each));
        unisono_call_t call = UNISONO_CALL_INIT;
        call.tag = 5;
        unisono_work_t *sent = NULL;
        CHECK_OK(unisono_send(ctx, in, count, UNISONO_INT32, (uint32_t)((rank + 1) % size), &call, &sent));
        int from = (rank + size - 1) % size;
        CHECK_OK(unisono_receive(ctx, out, count, UNISONO_INT32, (uint32_t)from, &call, NULL));
        CHECK_EACH(HIDDEN, given(from, k));
        CHECK_OK(unisono_work_wait(sent));
        unisono_work_destroy(sent);
        /* A collective that goes by messages. */
        CHECK_OK(unisono_allreduce(ctx, in, out, count, UNISONO_INT32, UNISONO_SUM, &call, NULL));
        CHECK_EACH(HIDDEN, given(sums, k * size));
    }
}

static void memory_of_one_process(void) {
    int32_t *memory[2] = {numbers(1), numbers(1)};
    if (!memory[0] || !memory[1]) {
        fprintf(stderr, "skipped: there is no memory that others may not read (memfd_secret: %s)\n", strerror(errno));
        return;
    }
    munmap(memory[0], HIDDEN * sizeof(int32_t));
    munmap(memory[1], HIDDEN * sizeof(int32_t));
    int all = 7, one = 1, another = 2;
    run_ranks(2, 60, hidden_memory, &all);
    run_ranks(3, 60, hidden_memory, &all);
    run_ranks(3, 60, hidden_memory, &one);
    run_ranks(3, 60, hidden_memory, &another);
}

/* After calls that have read it, nobody may look into this process any more: messages go on, and a collective says why it
 * does not. */
static void shut(unisono_context_t *ctx, void *arg) {
    (void)arg;
    uint64_t count = sizeof x / sizeof x[0];
    sums(ctx, 2, count);
    CHECK(prctl(PR_SET_DUMPABLE, 0) == 0);
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    memset(x, 0, sizeof x);
    if (unisono_context_rank(ctx) == 0) {
        x[count - 1] = 5;
        CHECK_OK(unisono_send(ctx, x, count, UNISONO_FLOAT32, 1, NULL, NULL));
    } else {
        CHECK_OK(unisono_receive(ctx, x, count, UNISONO_FLOAT32, 0, NULL, NULL));
        CHECK(x[count - 1] == 5);
    }
    /* Where nobody could look into it before, this goes on too. */
    if (unisono_allreduce(ctx, x, x, count, UNISONO_FLOAT32, UNISONO_SUM, NULL, NULL) != UNISONO_OK) {
        CHECK_TEXT(unisono_last_error(), "PR_SET_DUMPABLE");
        CHECK_TEXT(unisono_last_error(), "UNISONO_CMA=0");
    }
}

static void permissions_that_change(void) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        const char *base = getenv("TMPDIR");
        /* Root may look into every process. */
        if (setgid(65534) != 0 || setuid(65534) != 0 || prctl(PR_SET_DUMPABLE, 1) != 0
            || access(base != NULL ? base : "/tmp", W_OK | X_OK) != 0) {
            fprintf(stderr, "skipped: this process cannot be another user's (%s)\n", strerror(errno));
            exit(0);
        }
        run_ranks(2, 60, shut, NULL);
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- forbidden system calls, as in containers: `surroundings forbidden` */

/* What ctest takes for a test that was not run. */
enum { NOT_RUN = 77 };

static void forbid(const int *calls, int count, int error) {
    struct sock_filter filter[32];
    int n = 0;
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count; i++) {
        filter[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[i], 0, 1);
        filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)error);
    }
    filter[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {(unsigned short)n, filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
        fprintf(stderr, "skipped: no filter of system calls can be set here (%s)\n", strerror(errno));
        exit(NOT_RUN);
    }
}

/* One process must not look into another, or learn of another's end by its number; results are the same. */
static const int readings[] = {SYS_process_vm_readv, SYS_process_vm_writev, SYS_pidfd_open, SYS_kcmp, SYS_ptrace};

/* In a process of its own, whose children are forbidden the same. */
static void apart(int error, rank_body body) {
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        forbid(readings, sizeof readings / sizeof readings[0], error);
        run_ranks(2, 60, body, NULL);
        exit(0);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == NOT_RUN));
    if (WEXITSTATUS(status) == NOT_RUN) {
        exit(NOT_RUN);
    }
}

int main(int argc, char **argv) {
    if (argc > 1) {
        CHECK(strcmp(argv[1], "forbidden") == 0);
        apart(EPERM, long_calls);
        apart(ENOSYS, long_calls);
        return 0;
    }
    a_misspelt_log_level();
    small_files_only();
    /* Of these, the second combines what it reads before it meets the others. */
    unisono_op_t ops[] = {UNISONO_SUM, UNISONO_PREMULSUM};
    run_ranks(2, 60, no_more_memory, &ops[0]);
    run_ranks(2, 60, no_more_memory, &ops[1]);
    run_ranks(2, 60, threads_take_no_signals, NULL);
    run_ranks(2, 60, interrupted, NULL);
    run_ranks(2, 60, no_descriptor_leaks, NULL);
    run_ranks(2, 60, a_fork, NULL);
    run_ranks(2, 60, forks_beside_threads, NULL);
    forks_beside_a_store_in_memory();
    a_server_is_killed_and_has_a_child();
    a_child_ends_its_parents_server();
    run_ranks(2, 30, main_thread_ends, NULL);
    memory_of_one_process();
    permissions_that_change();
    /* Last, since they leave this process with the library's threads, and groups are forked. */
    mixed_up_handles();
    a_client_that_leaves();
    return 0;
}
