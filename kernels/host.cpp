// The kernels as functions of the host, for tests/kernels.rs: every thread of a grid, one after the other.

#include "fold.cuh"

template <class Fold>
void run(const unisono::Arguments &call, unsigned blocks, unsigned threads) {
    for (unsigned block = 0; block < blocks; block++) {
        for (unsigned thread = 0; thread < threads; thread++) {
            Fold{call, unisono::Worker{block, blocks, thread, threads}}.run();
        }
    }
}

#define FUNCTION(op, type)                                                                                             \
    extern "C" void unisono_fold_##op##_##type(const unisono::Arguments *call, unsigned blocks, unsigned threads) {    \
        run<unisono::Fold<unisono::type, unisono::op>>(*call, blocks, threads);                                        \
    }
// What a courier combines with.
#define THIN_FUNCTION(op, type)                                                                                        \
    extern "C" void unisono_combine_##op##_##type(const unisono::Arguments *call, unsigned blocks, unsigned threads) { \
        run<unisono::Fold<unisono::type, unisono::op, true>>(*call, blocks, threads);                                  \
    }

FOR_EACH_KERNEL(FUNCTION)
FOR_EACH_KERNEL(THIN_FUNCTION)
