/* The process around the library: signals, descriptors, limits, handles that are mixed up, system calls that are forbidden.
 * A C program has what Rust's own tests do not: SIGPIPE that kills, handlers without SA_RESTART. */

#include "sums.h"

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
    run_ranks(2, 30, main_thread_ends, NULL);
    /* Last, since they leave this process with the library's threads, and groups are forked. */
    mixed_up_handles();
    a_client_that_leaves();
    return 0;
}
