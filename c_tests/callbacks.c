/* What completion callbacks may do: start operations, however many complete at once; destroy their work; use the buffer whose
 * wait runs them. */

#include "harness.h"

#include <pthread.h>

enum { READY = 2000 };

static unisono_context_t *context;
static uint8_t bytes[2 * READY];
static __thread int depth;
static int deepest, called;

static unisono_call_t tagged(uint64_t tag) {
    unisono_call_t call = UNISONO_CALL_INIT;
    call.tag = tag;
    return call;
}

static void receive(intptr_t which, unisono_work_callback_t callback) {
    unisono_call_t call = tagged((uint64_t)which);
    unisono_work_t *work = NULL;
    CHECK_OK(unisono_receive(context, &bytes[which], 1, UNISONO_UINT8, 1, &call, &work));
    CHECK_OK(unisono_work_on_complete(work, callback, (void *)which));
    unisono_work_destroy(work);
}

static void receive_another(void *user, unisono_status_t status, const char *error) {
    intptr_t which = (intptr_t)user;
    CHECK(status == UNISONO_OK && error[0] == '\0');
    int now = ++depth;
    int most = __atomic_load_n(&deepest, __ATOMIC_RELAXED);
    while (now > most && !__atomic_compare_exchange_n(&deepest, &most, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    if (which < READY) {
        receive(which + READY, receive_another);
    }
    __atomic_add_fetch(&called, 1, __ATOMIC_RELEASE);
    depth--;
}

/* All messages are there before anybody looks: each callback starts the receive of one that has come already. */
static void all_at_once(unisono_context_t *ctx, void *arg) {
    (void)arg;
    context = ctx;
    if (unisono_context_rank(ctx) == 1) {
        for (uint64_t which = 0; which < 2 * READY; which++) {
            unisono_call_t call = tagged(which);
            uint8_t byte = (uint8_t)(which * 7);
            CHECK_OK(unisono_send(ctx, &byte, 1, UNISONO_UINT8, 0, &call, NULL));
        }
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    } else {
        for (intptr_t which = 0; which < READY; which++) {
            receive(which, receive_another);
        }
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
        for (int i = 0; i < 20000 && __atomic_load_n(&called, __ATOMIC_ACQUIRE) < 2 * READY; i++) {
            sleep_ms(1);
        }
        CHECK(__atomic_load_n(&called, __ATOMIC_ACQUIRE) == 2 * READY);
        CHECK(deepest == 1);
        for (int which = 0; which < 2 * READY; which++) {
            CHECK(bytes[which] == (uint8_t)(which * 7));
        }
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

static void destroy(void *user, unisono_status_t status, const char *error) {
    (void)error;
    CHECK(status == UNISONO_ABORTED);
    unisono_work_destroy(*(unisono_work_t **)user);
    *(unisono_work_t **)user = NULL;
}

/* The work is gone when the call that ends it goes on. */
static void destroyed_within(unisono_context_t *ctx, void *arg) {
    (void)arg;
    if (unisono_context_rank(ctx) == 0) {
        unisono_work_t *work = NULL;
        CHECK_OK(unisono_receive(ctx, bytes, 1, UNISONO_UINT8, 1, NULL, &work));
        CHECK_OK(unisono_work_on_complete(work, destroy, &work));
        CHECK_OK(unisono_work_cancel(work));
        CHECK(work == NULL);
    }
    CHECK_OK(unisono_barrier(ctx, NULL, NULL));
}

static unisono_buffer_t *buffer;
static pthread_t waiter;
static int waiting;

static void use_buffer(void *user, unisono_status_t status, const char *error) {
    CHECK(status == UNISONO_OK && error[0] == '\0');
    if (user == NULL) {
        while (!__atomic_load_n(&waiting, __ATOMIC_ACQUIRE)) {
            sleep_ms(1);
        }
        if (!pthread_equal(pthread_self(), waiter)) {
            sleep_ms(30);
        }
        CHECK_OK(unisono_buffer_abort_wait(buffer));
        return;
    }
    unisono_call_t call = tagged(3);
    CHECK_OK(unisono_buffer_receive(buffer, 1, 1, UNISONO_UINT8, (uint32_t[]){1}, 1, &call));
    __atomic_store_n((int *)user, 1, __ATOMIC_RELEASE);
}

/* Rank 0 waits for what comes last, and meanwhile runs the callback of another receive. */
static void buffer_in_its_wait(unisono_context_t *ctx, void *arg) {
    (void)arg;
    const uint8_t byte = 77;
    for (int aborts = 0; aborts < 2; aborts++) {
        unisono_call_t first = tagged(1), other = tagged(2), added = tagged(3);
        if (unisono_context_rank(ctx) == 1) {
            CHECK_OK(unisono_barrier(ctx, NULL, NULL));
            sleep_ms(50);
            CHECK_OK(unisono_send(ctx, &byte, 1, UNISONO_UINT8, 0, &other, NULL));
            sleep_ms(50);
            CHECK_OK(unisono_send(ctx, &byte, 1, UNISONO_UINT8, 0, &first, NULL));
            if (!aborts) {
                CHECK_OK(unisono_send(ctx, &byte, 1, UNISONO_UINT8, 0, &added, NULL));
            }
        } else {
            uint8_t memory[2] = {0}, another = 0;
            int received = 0;
            uint32_t from = 77;
            unisono_work_t *work = NULL;
            CHECK_OK(unisono_buffer_create(ctx, memory, sizeof memory, &buffer));
            CHECK_OK(unisono_buffer_receive(buffer, 0, 1, UNISONO_UINT8, (uint32_t[]){1}, 1, &first));
            CHECK_OK(unisono_receive(ctx, &another, 1, UNISONO_UINT8, 1, &other, &work));
            CHECK_OK(unisono_work_on_complete(work, use_buffer, aborts ? NULL : &received));
            CHECK_OK(unisono_barrier(ctx, NULL, NULL));
            if (aborts) {
                waiter = pthread_self();
                __atomic_store_n(&waiting, 1, __ATOMIC_RELEASE);
                CHECK_STATUS(UNISONO_ABORTED, unisono_buffer_wait_receive(buffer, 20000, &from));
            }
            for (int waits = 0; waits < 2 - aborts; waits++) {
                CHECK_OK(unisono_buffer_wait_receive(buffer, 20000, &from));
                CHECK(from == 1);
            }
            CHECK(memory[0] == byte && memory[1] == (aborts ? 0 : byte));
            unisono_work_destroy(work);
            unisono_buffer_destroy(buffer);
        }
        CHECK_OK(unisono_barrier(ctx, NULL, NULL));
    }
}

int main(void) {
    run_ranks(2, 60, all_at_once, NULL);
    run_ranks(2, 60, destroyed_within, NULL);
    run_ranks(2, 60, buffer_in_its_wait, NULL);
    return 0;
}
