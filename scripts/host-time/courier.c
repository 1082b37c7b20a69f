/* Couriers over a driver without GPUs: a thread carries bytes as the host orders, as kernels/courier.cuh does, one courier of a stream
 * after the other. How long that takes is not a GPU's time: what is measured is the host's. */

#include "courier.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SLIPS = 64, FIELDS = 8, BACK_WORDS = 32, BLOCKS = 16, DESKS = 3, MOST_STREAMS = 64, NAP_NANOSECONDS = 2000 };
enum { CARRY_BEHIND = 1, LEAVE = 3, PLACE = 4, TELL = 5 };

/* As they lie in pinned memory. */
struct desk {
    uint64_t slip[SLIPS][FIELDS];
    uint32_t done[BLOCKS], here, apart[15];
};

struct stand {
    struct desk desk[DESKS];
    uint64_t back[DESKS - 1][SLIPS][BACK_WORDS];
};

/* The parameter of the kernel. */
struct call {
    struct stand *stand;
    uint32_t near, next[DESKS], blocks[DESKS];
};

/* A courier, or what holds up those behind it. */
struct courier {
    struct call call;
    const uint32_t *word;
    uint32_t value;
    intptr_t stream;
    int come, gone[DESKS];
    struct courier *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct courier *first, **end = &first;

static void place(uint8_t *to, uint64_t front, const uint64_t *back, uint64_t bytes) {
    for (uint64_t at = 0; at < bytes; at++) {
        to[at] = (uint8_t)(bytes > 8 ? back[at / 4] >> at % 4 * 8 : front >> at * 8);
    }
}

static void tell(uint64_t *to, const uint8_t *from, uint64_t bytes, uint64_t number) {
    for (uint64_t at = 0; at < bytes; at += 4) {
        uint64_t word = number << 32;
        memcpy(&word, from + at, bytes - at < 4 ? bytes - at : 4);
        __atomic_store_n(to + at / 4, word, __ATOMIC_RELEASE);
    }
}

/* Carries out what is ordered at a desk. */
static void serve(struct courier *courier, int side) {
    struct desk *desk = &courier->call.stand->desk[side];
    while (!courier->gone[side]) {
        uint32_t number = courier->call.next[side], word[FIELDS];
        uint64_t *slip = desk->slip[number % SLIPS];
        for (int i = 0; i < FIELDS; i++) {
            uint64_t found = __atomic_load_n(&slip[i], __ATOMIC_ACQUIRE);
            if (found >> 32 != number) return;
            word[i] = (uint32_t)found;
        }
        uint64_t to = word[0] | (uint64_t)word[1] << 32, from = word[2] | (uint64_t)word[3] << 32;
        uint64_t bytes = word[4] | (uint64_t)word[5] << 32;
        if (word[6] <= CARRY_BEHIND) memcpy((void *)to, (const void *)from, bytes);
        if (word[6] == PLACE) place((void *)to, from, courier->call.stand->back[side - 1][number % SLIPS], bytes);
        if (word[6] == TELL) tell((void *)to, (const void *)from, bytes, number);
        courier->gone[side] = word[6] == LEAVE;
        for (uint32_t block = 0; block < courier->call.blocks[side]; block++) {
            __atomic_store_n(&desk->done[block], number, __ATOMIC_RELEASE);
        }
        courier->call.next[side]++;
    }
}

/* Whether it has left. */
static int advance(struct courier *courier) {
    int gone = 1;
    if (courier->word != NULL) return (int32_t)(__atomic_load_n(courier->word, __ATOMIC_ACQUIRE) - courier->value) >= 0;
    for (int side = 0; side < DESKS; side++) {
        if (courier->call.blocks[side] == 0) continue;
        if (!courier->come) __atomic_store_n(&courier->call.stand->desk[side].here, courier->call.next[side], __ATOMIC_RELEASE);
        serve(courier, side);
        gone &= courier->gone[side];
    }
    courier->come = 1;
    return gone;
}

static void *run(void *nothing) {
    for (;;) {
        intptr_t busy[MOST_STREAMS];
        int streams = 0;
        pthread_mutex_lock(&lock);
        for (struct courier **at = &first; *at != NULL;) {
            struct courier *courier = *at;
            int waits = streams == MOST_STREAMS;
            for (int i = 0; i < streams; i++) waits |= busy[i] == courier->stream;
            if (!waits && advance(courier)) {
                *at = courier->next;
                if (*at == NULL) end = at;
                free(courier);
                continue;
            }
            if (!waits) busy[streams++] = courier->stream;
            at = &courier->next;
        }
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){0, NAP_NANOSECONDS}, NULL);
    }
    return nothing;
}

static void start(void) {
    pthread_t thread;
    pthread_create(&thread, NULL, run, NULL);
}

static void add(intptr_t stream, struct courier *courier) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    courier->stream = stream;
    pthread_mutex_lock(&lock);
    *end = courier;
    end = &courier->next;
    pthread_mutex_unlock(&lock);
    pthread_once(&once, start);
}

void launch_courier(intptr_t stream, const void *parameter) {
    struct courier *courier = calloc(1, sizeof *courier);
    courier->call = *(const struct call *)parameter;
    add(stream, courier);
}

void hold_couriers(intptr_t stream, const uint32_t *word, uint32_t value) {
    struct courier *held = calloc(1, sizeof *held);
    held->word = word;
    held->value = value;
    add(stream, held);
}
