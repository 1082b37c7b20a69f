// The kernels as functions of the host, for tests/kernels.rs: every thread of a grid, one after the other.

#include "fold.cuh"

#define FUNCTION(op, type)                                                                                             \
    extern "C" void unisono_fold_##op##_##type(const unisono::Arguments *call, unsigned blocks, unsigned threads) {    \
        for (unsigned block = 0; block < blocks; block++) {                                                            \
            for (unsigned thread = 0; thread < threads; thread++) {                                                    \
                unisono::Worker worker{block, blocks, thread, threads};                                                \
                unisono::Fold<unisono::type, unisono::op>{*call, worker}.run();                                        \
            }                                                                                                          \
        }                                                                                                              \
    }

FOR_EACH_KERNEL(FUNCTION)
