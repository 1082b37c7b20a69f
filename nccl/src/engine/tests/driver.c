/* The driver of scripts/host-time, where all that a stream is given is over at once, with what the tests look at or change. */

#define cuEventQuery cuEventQueryAtOnce
#define cuStreamQuery cuStreamQueryAtOnce
#define cuLaunchKernel cuLaunchKernelAtOnce
#define cuLaunchKernelEx cuLaunchKernelExAtOnce
#define cuModuleLoadData cuModuleLoadDataOfAny
#define cuEventRecord cuEventRecordAtOnce
#define cuStreamWaitEvent cuStreamWaitEventAtOnce
#define cuStreamWaitValue32_v2 cuStreamWaitValue32AtOnce
#define cuMemcpyDtoDAsync_v2 cuMemcpyDtoDAtOnce
#include "../../../../scripts/host-time/driver.c"
#undef cuEventQuery
#undef cuStreamQuery
#undef cuLaunchKernel
#undef cuLaunchKernelEx
#undef cuModuleLoadData
#undef cuEventRecord
#undef cuStreamWaitEvent
#undef cuStreamWaitValue32_v2
#undef cuMemcpyDtoDAsync_v2

#include <stdio.h>

enum { UNSUPPORTED_PTX_VERSION = 222, NOT_READY = 600, LAUNCH_FAILED = 719 };

/* As long as this is set, no stream has come to anything that is asked for. */
int held;

int cuEventQuery(intptr_t event) {
    (void)event;
    return __atomic_load_n(&held, __ATOMIC_SEQ_CST) ? NOT_READY : SUCCESS;
}

int cuStreamQuery(intptr_t stream) { return cuEventQuery(stream); }

/* How many more events are recorded, and waited for by streams, before one is refused; below zero: none is. */
int records = -1, waits = -1;

static int one_of(int *left) { return __atomic_load_n(left, __ATOMIC_SEQ_CST) >= 0 && __atomic_fetch_sub(left, 1, __ATOMIC_SEQ_CST) == 0; }

/* The last version of PTX that it compiles, ten times as high. */
int last_text = 87;

int cuModuleLoadData(intptr_t *module, const void *image) {
    int major, minor;
    if (sscanf(image, ".version %d.%d", &major, &minor) == 2 && 10 * major + minor > last_text) return UNSUPPORTED_PTX_VERSION;
    return cuModuleLoadDataOfAny(module, image);
}

/* What streams were given: a kernel, a copy, or a wait for an event that was recorded on the stream `of`, or for a value. */
enum { KERNEL = 1, RECORD, WAIT, WAIT_FOR_VALUE, COPY, MOST_STEPS = 1 << 14, MOST_EVENTS = 1 << 12 };
struct step {
    intptr_t what, stream, of;
} steps[MOST_STEPS];
int step_count;
static intptr_t recorded_on[MOST_EVENTS];

static int step(intptr_t what, intptr_t stream, intptr_t of) {
    int at = __atomic_fetch_add(&step_count, 1, __ATOMIC_SEQ_CST);
    if (at < MOST_STEPS) steps[at] = (struct step){what, stream, of};
    return SUCCESS;
}

int cuEventRecord(intptr_t event, intptr_t stream) {
    if (one_of(&records)) return LAUNCH_FAILED;
    __atomic_store_n(&recorded_on[event % MOST_EVENTS], stream, __ATOMIC_SEQ_CST);
    return step(RECORD, stream, 0);
}

int cuStreamWaitEvent(intptr_t stream, intptr_t event, unsigned flags) {
    (void)flags;
    if (one_of(&waits)) return LAUNCH_FAILED;
    return step(WAIT, stream, __atomic_load_n(&recorded_on[event % MOST_EVENTS], __ATOMIC_SEQ_CST));
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, intptr_t stream) {
    step(COPY, stream, 0);
    return cuMemcpyDtoDAtOnce(to, from, bytes, stream);
}

/* Couriers are all that is not over at once. */
int cuStreamWaitValue32_v2(intptr_t stream, uintptr_t address, unsigned value, unsigned flags) {
    (void)flags;
    hold_couriers(stream, (const uint32_t *)address, value);
    return step(WAIT_FOR_VALUE, stream, 0);
}

/* Kernels that each GPU was given, by how many one was ahead of another at most, and whether the last is a courier. */
int given[GPUS], most_ahead, courier_is_last[GPUS];

static int gpu_of(intptr_t stream) {
    intptr_t context;
    cuStreamGetCtx(stream, &context);
    return (int)context - 1;
}

static void note_last(intptr_t function, intptr_t stream) {
    int gpu = gpu_of(stream);
    courier_is_last[gpu] = 0;
    for (int i = 0; i < GPUS; i++) courier_is_last[gpu] |= function == couriers[i];
}

int cuLaunchKernelEx(const struct config *config, intptr_t function, void **parameters, void **extra) {
    note_last(function, config->stream);
    return cuLaunchKernelExAtOnce(config, function, parameters, extra);
}

int cuLaunchKernel(intptr_t function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
                   unsigned shared, intptr_t stream, void **parameters, void **extra) {
    int gpu = gpu_of(stream);
    note_last(function, stream);
    given[gpu]++;
    step(KERNEL, stream, 0);
    for (int i = 0; i < GPUS; i++) {
        if (given[gpu] - given[i] > most_ahead) most_ahead = given[gpu] - given[i];
    }
    return cuLaunchKernelAtOnce(function, x, y, z, threads_x, threads_y, threads_z, shared, stream, parameters, extra);
}
