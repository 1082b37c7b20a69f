/* A libcuda.so.1 of two GPUs whose kernels do nothing: memory is the host's, and every launch, copy and wait is over at once.
 * What is left of a call is what the library does on the host. Of the kernels only couriers do what they are for (courier.c),
 * since the host waits for them. scripts/host-time/run builds it.
 *
 * Only what unisono calls is here, with the arguments that it passes. */

#include "courier.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { GPUS = 2, MOST_ALLOCATIONS = 4096, MOST_PUSHED = 16 };
enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201 };

/* ---- contexts: the number of a GPU, from 1 */

static _Thread_local intptr_t pushed[MOST_PUSHED];
static _Thread_local int depth;

int cuInit(unsigned flags) {
    (void)flags;
    return SUCCESS;
}

int cuGetErrorName(int error, const char **name) {
    (void)error;
    *name = "an error of the driver that does nothing";
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

int cuDeviceGetCount(int *count) {
    *count = GPUS;
    return SUCCESS;
}

int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    memset(uuid, 0x10 + device, 16);
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    switch (attribute) {
    case 16: *value = 132; break; /* multiprocessors */
    case 75: *value = 9; break;   /* compute capability */
    case 76: *value = 0; break;
    default: *value = 1;
    }
    return SUCCESS;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return SUCCESS;
}

int cuDeviceGetP2PAttribute(int *value, int attribute, int device, int peer) {
    (void)attribute;
    *value = device != peer;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(intptr_t *context, int device) {
    *context = device + 1;
    return device < GPUS ? SUCCESS : NO_DEVICE;
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)device;
    return SUCCESS;
}

int cuCtxPushCurrent_v2(intptr_t context) {
    if (depth == MOST_PUSHED) return INVALID_VALUE;
    pushed[depth++] = context;
    return SUCCESS;
}

int cuCtxPopCurrent_v2(intptr_t *context) {
    if (depth == 0) return INVALID_CONTEXT;
    *context = pushed[--depth];
    return SUCCESS;
}

int cuCtxGetCurrent(intptr_t *context) {
    *context = depth == 0 ? 0 : pushed[depth - 1];
    return SUCCESS;
}

int cuCtxGetDevice(int *device) {
    if (depth == 0) return INVALID_CONTEXT;
    *device = (int)pushed[depth - 1] - 1;
    return SUCCESS;
}

int cuCtxEnablePeerAccess(intptr_t peer, unsigned flags) {
    (void)peer, (void)flags;
    return SUCCESS;
}

int cuCtxGetStreamPriorityRange(int *lowest, int *highest) {
    *lowest = 0;
    *highest = -5;
    return SUCCESS;
}

int cuThreadExchangeStreamCaptureMode(unsigned *mode) {
    *mode = 0;
    return SUCCESS;
}

/* ---- memory */

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct allocation {
    uintptr_t base;
    size_t bytes;
    int device;
    int kind; /* 1 the host's, 2 a GPU's */
} allocations[MOST_ALLOCATIONS];
static int allocation_count;

static int allocate(uintptr_t *address, size_t bytes, int kind) {
    void *memory = aligned_alloc(1 << 21, (bytes + (1 << 21) - 1) & ~(size_t)((1 << 21) - 1));
    int device = 0;
    if (memory == NULL || (kind == 2 && cuCtxGetDevice(&device) != SUCCESS)) return OUT_OF_MEMORY;
    memset(memory, 0, bytes);
    pthread_rwlock_wrlock(&lock);
    int at = allocation_count < MOST_ALLOCATIONS ? allocation_count++ : -1;
    if (at >= 0) allocations[at] = (struct allocation){(uintptr_t)memory, bytes, device, kind};
    pthread_rwlock_unlock(&lock);
    *address = (uintptr_t)memory;
    return at >= 0 ? SUCCESS : OUT_OF_MEMORY;
}

int cuMemAlloc_v2(uintptr_t *address, size_t bytes) { return allocate(address, bytes, 2); }

int cuMemHostAlloc(uintptr_t *address, size_t bytes, unsigned flags) {
    (void)flags;
    return allocate(address, bytes, 1);
}

/* Memory is never given back: the process is short. */
int cuMemFree_v2(uintptr_t address) {
    (void)address;
    return SUCCESS;
}

int cuMemFreeHost(void *address) { return cuMemFree_v2((uintptr_t)address); }

int cuMemGetInfo_v2(size_t *free, size_t *total) {
    *free = *total = (size_t)80 << 30;
    return SUCCESS;
}

int cuPointerGetAttributes(unsigned count, const unsigned *attributes, void **data, uintptr_t address) {
    struct allocation found = {0, 0, 0, 0};
    pthread_rwlock_rdlock(&lock);
    int at = 0;
    while (at < allocation_count && address - allocations[at].base >= allocations[at].bytes) at++;
    if (at < allocation_count) found = allocations[at];
    pthread_rwlock_unlock(&lock);
    for (unsigned i = 0; i < count; i++) {
        switch (attributes[i]) {
        case 2: *(unsigned *)data[i] = (unsigned)found.kind; break;
        case 7: *(uint64_t *)data[i] = (uint64_t)at + 1; break; /* the number of the allocation */
        case 8: *(unsigned *)data[i] = 0; break;                /* managed */
        case 9: *(int *)data[i] = found.device; break;
        case 10: *(unsigned char *)data[i] = 1; break; /* can be shared by a handle */
        case 11: *(uint64_t *)data[i] = found.base; break;
        case 12: *(size_t *)data[i] = found.bytes; break;
        default: *(void **)data[i] = NULL;
        }
    }
    return SUCCESS;
}

int cuPointerGetAttribute(void *data, unsigned attribute, uintptr_t address) {
    return cuPointerGetAttributes(1, &attribute, &data, address);
}

struct handle {
    uintptr_t address;
    char rest[56];
};

int cuIpcGetMemHandle(struct handle *handle, uintptr_t address) {
    *handle = (struct handle){address, {0}};
    return SUCCESS;
}

int cuIpcOpenMemHandle_v2(uintptr_t *address, struct handle handle, unsigned flags) {
    (void)flags;
    *address = handle.address;
    return SUCCESS;
}

int cuIpcCloseMemHandle(uintptr_t address) {
    (void)address;
    return SUCCESS;
}

int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    (void)address, (void)bytes, (void)flags;
    return SUCCESS;
}

int cuMemHostUnregister(void *address) {
    (void)address;
    return SUCCESS;
}

/* ---- streams and events: numbers */

static intptr_t next = 16;

static int create(intptr_t *made) {
    *made = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

int cuStreamCreateWithPriority(intptr_t *stream, unsigned flags, int priority) {
    (void)flags, (void)priority;
    /* Of the GPU that is current, as cuStreamGetCtx tells. */
    int device, status = cuCtxGetDevice(&device);
    if (status != SUCCESS) return status;
    create(stream);
    *stream = *stream * 16 + device + 1;
    return SUCCESS;
}

int cuStreamGetCtx(intptr_t stream, intptr_t *context) {
    if (stream <= 2) return cuCtxGetCurrent(context);
    *context = stream % 16;
    return SUCCESS;
}

int cuStreamGetId(intptr_t stream, unsigned long long *id) {
    *id = (unsigned long long)stream;
    return SUCCESS;
}

int cuStreamGetCaptureInfo_v2(intptr_t stream, unsigned *status, unsigned long long *id, void *graph, void *nodes,
                              void *count) {
    (void)stream, (void)graph, (void)nodes, (void)count;
    *status = 0;
    *id = 0;
    return SUCCESS;
}

int cuGraphAddEventRecordNode(void *node, void *graph, const void *after, size_t count, intptr_t event) {
    (void)node, (void)graph, (void)after, (void)count, (void)event;
    return SUCCESS;
}

int cuGraphAddDependencies(void *graph, const void *from, const void *to, size_t count) {
    (void)graph, (void)from, (void)to, (void)count;
    return SUCCESS;
}

int cuGraphRemoveDependencies(void *graph, const void *from, const void *to, size_t count) {
    (void)graph, (void)from, (void)to, (void)count;
    return SUCCESS;
}

int cuEventCreate(intptr_t *event, unsigned flags) {
    (void)flags;
    return create(event);
}

int cuEventElapsedTime(float *milliseconds, intptr_t from, intptr_t to) {
    (void)from, (void)to;
    *milliseconds = 0.001f;
    return SUCCESS;
}

int cuModuleLoadData(intptr_t *module, const void *image) {
    (void)image;
    return create(module);
}

/* The functions that are couriers, one for each GPU. */
static intptr_t couriers[GPUS];

int cuModuleGetFunction(intptr_t *function, intptr_t module, const char *name) {
    (void)module;
    create(function);
    for (int i = 0; i < GPUS && strcmp(name, "unisono_courier") == 0; i++) {
        if (couriers[i] != 0) continue;
        couriers[i] = *function;
        break;
    }
    return SUCCESS;
}

/* ---- what is over at once: ranks look whether they find in each other's memory what was written there */

int cuStreamWriteValue32_v2(intptr_t stream, uintptr_t address, unsigned value, unsigned flags) {
    (void)stream, (void)flags;
    __atomic_store_n((unsigned *)address, value, __ATOMIC_RELEASE);
    return SUCCESS;
}

int cuMemsetD8Async(uintptr_t address, unsigned char value, size_t bytes, intptr_t stream) {
    (void)stream;
    memset((void *)address, value, bytes);
    return SUCCESS;
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, intptr_t stream) {
    (void)stream;
    memcpy((void *)to, (const void *)from, bytes);
    return SUCCESS;
}

int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t bytes, intptr_t stream) {
    return cuMemcpyDtoDAsync_v2(to, from, bytes, stream);
}

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t bytes, intptr_t stream) {
    return cuMemcpyDtoDAsync_v2(to, (uintptr_t)from, bytes, stream);
}

int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t bytes, intptr_t stream) {
    return cuMemcpyDtoDAsync_v2((uintptr_t)to, from, bytes, stream);
}

unsigned long launches;

static int launch(intptr_t function, intptr_t stream, void **parameters) {
    for (int i = 0; i < GPUS; i++) {
        if (function == couriers[i]) launch_courier(stream, parameters[0]);
    }
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    return SUCCESS;
}

// CUlaunchConfig.
struct config {
    unsigned x, y, z, threads_x, threads_y, threads_z, shared;
    intptr_t stream;
    void *attributes;
    unsigned count;
};

int cuLaunchKernelEx(const struct config *config, intptr_t function, void **parameters, void **extra) {
    (void)extra;
    return launch(function, config->stream, parameters);
}

int cuLaunchKernel(intptr_t function, unsigned x, unsigned y, unsigned z, unsigned threads_x, unsigned threads_y, unsigned threads_z,
                   unsigned shared, intptr_t stream, void **parameters, void **extra) {
    (void)x, (void)y, (void)z, (void)threads_x, (void)threads_y, (void)threads_z, (void)shared, (void)extra;
    return launch(function, stream, parameters);
}

int cuLaunchHostFunc(intptr_t stream, void (*function)(void *), void *user) {
    (void)stream;
    function(user);
    return SUCCESS;
}

#define DOES_NOTHING(name) \
    int name(void) { return SUCCESS; }
DOES_NOTHING(cuFuncLoad)
DOES_NOTHING(cuStreamDestroy_v2)
DOES_NOTHING(cuStreamQuery)
DOES_NOTHING(cuStreamBeginCapture_v2)
DOES_NOTHING(cuStreamEndCapture)
DOES_NOTHING(cuStreamWaitEvent)
DOES_NOTHING(cuStreamWaitValue32_v2)
DOES_NOTHING(cuEventDestroy_v2)
DOES_NOTHING(cuEventRecord)
DOES_NOTHING(cuEventQuery)
DOES_NOTHING(cuEventSynchronize)
DOES_NOTHING(cuGraphInstantiateWithFlags)
DOES_NOTHING(cuGraphLaunch)
DOES_NOTHING(cuGraphDestroy)
DOES_NOTHING(cuGraphExecDestroy)
