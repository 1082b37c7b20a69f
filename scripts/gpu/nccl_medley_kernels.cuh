// The kernels by which nccl_medley.cu's ranks write what calls are given, look for what they are to bring, and are
// late.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <nccl.h>

#include <algorithm>
#include <cstdint>

#include "nccl_medley_program.cuh"

namespace medley {

constexpr u8 UNTOUCHED = 0xa5;

// What is wrong with a program's results, as seen by a rank's kernels.
struct Wrong {
    u32 count, call;
    u64 index;
    double got, wanted;
};

// What the ranks give from `first` of `of` on; `of` below 0 is what has been combined.
template <class T>
__global__ void fill(T *memory, u64 count, Values values, int of, u64 first) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        memory[i] = static_cast<T>(static_cast<float>(values.given(of, first + i)));
    }
}
template <class T>
__global__ void compare(const T *memory, u64 count, Values values, int of, u64 first, Wrong *wrong) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        const float wanted = of < 0 ? values.combined(first + i) : values.given(of, first + i);
        const float got = static_cast<float>(memory[i]);
        if (got != wanted && atomicAdd(&wrong->count, 1) == 0) {
            wrong->call = values.call, wrong->index = i, wrong->got = got, wrong->wanted = wanted;
        }
    }
}
__global__ void compare_untouched(const u8 *memory, u64 count, u32 call, Wrong *wrong) {
    for (u64 i = blockIdx.x * u64(blockDim.x) + threadIdx.x; i < count; i += u64(gridDim.x) * blockDim.x) {
        if (memory[i] != UNTOUCHED && atomicAdd(&wrong->count, 1) == 0) {
            wrong->call = call, wrong->index = ~u64(0) - i, wrong->got = memory[i], wrong->wanted = UNTOUCHED;
        }
    }
}
__global__ void occupy(u64 nanoseconds) {
    u64 begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - begin < nanoseconds);
}

// Calls `body` with a null pointer of the type.
template <class Body>
void with_type(ncclDataType_t type, Body body) {
    switch (type) {
        case ncclInt8: return body(static_cast<int8_t *>(nullptr));
        case ncclUint8: return body(static_cast<uint8_t *>(nullptr));
        case ncclInt32: return body(static_cast<int32_t *>(nullptr));
        case ncclUint32: return body(static_cast<uint32_t *>(nullptr));
        case ncclInt64: return body(static_cast<int64_t *>(nullptr));
        case ncclUint64: return body(static_cast<uint64_t *>(nullptr));
        case ncclFloat16: return body(static_cast<__half *>(nullptr));
        case ncclFloat32: return body(static_cast<float *>(nullptr));
        case ncclFloat64: return body(static_cast<double *>(nullptr));
        case ncclBfloat16: return body(static_cast<__nv_bfloat16 *>(nullptr));
        case ncclFloat8e4m3: return body(static_cast<__nv_fp8_e4m3 *>(nullptr));
        default: return body(static_cast<__nv_fp8_e5m2 *>(nullptr));
    }
}

inline int blocks_for(u64 count) { return static_cast<int>(std::min<u64>(1 + count / 4096, 16)); }

}  // namespace medley
