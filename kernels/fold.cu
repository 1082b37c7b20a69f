// The kernels of local reductions: unisono_fold_<operator>_<type>, each with one parameter, `Arguments`.
//
// Any grid and any block of up to 256 threads do the same work; src/cuda/kernels.rs says which suit a count.

#include "fold.cuh"

#define KERNEL(op, type)                                                                                               \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        unisono_fold_##op##_##type(const __grid_constant__ unisono::Arguments call) {                                  \
        unisono::Worker worker{blockIdx.x, gridDim.x, threadIdx.x, blockDim.x};                                        \
        unisono::Fold<unisono::type, unisono::op>{call, worker}.run();                                             \
    }

FOR_EACH_KERNEL(KERNEL)
