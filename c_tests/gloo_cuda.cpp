// The Cuda… algorithms of the gloo face. Whose memory it is they learn from the pointers, so without a GPU they are run over
// host memory, without streams; tests/gpu has unisono's own over the memory of GPUs.

#include <cstdint>

#include <gloo/cuda_allreduce_bcube.h>
#include <gloo/cuda_allreduce_halving_doubling_pipelined.h>
#include <gloo/cuda_allreduce_local.h>
#include <gloo/cuda_allreduce_ring.h>
#include <gloo/cuda_allreduce_ring_chunked.h>
#include <gloo/cuda_broadcast_one_to_all.h>

#include "gloo_harness.h"

namespace {

/* Buffers of this rank: buffer b has rank + b + i at i. */
template <class T> struct Buffers {
    Buffers(int rank, std::size_t buffers, std::size_t count) : values(buffers, std::vector<T>(count)) {
        for (std::size_t b = 0; b < buffers; b++) {
            for (std::size_t i = 0; i < count; i++) {
                values[b][i] = static_cast<T>(static_cast<int>(static_cast<std::size_t>(rank) + b + i % 7));
            }
            pointers.push_back(values[b].data());
        }
    }
    std::vector<std::vector<T>> values;
    std::vector<T *> pointers;
};

/* The sum over so many ranks' buffers at i. */
int sum(int ranks, int first, int buffers, std::size_t i) {
    int total = 0;
    for (int rank = first; rank < first + ranks; rank++) {
        for (int buffer = 0; buffer < buffers; buffer++) {
            total += rank + buffer + static_cast<int>(i % 7);
        }
    }
    return total;
}

template <class Algorithm, class T> void sums(const GlooContext &context, bool alone = false) {
    for (const int buffers : {1, 3}) {
        for (const int count : {1, 1000, 100003}) {
            Buffers<T> mine(context->rank, static_cast<std::size_t>(buffers), static_cast<std::size_t>(count));
            Algorithm algorithm(context, mine.pointers, count);
            algorithm.run();
            const int ranks = alone ? 1 : context->size, first = alone ? context->rank : 0;
            for (const auto &values : mine.values) {
                for (std::size_t i = 0; i < values.size(); i += 97) {
                    CHECK_EQ(static_cast<float>(values[i]), static_cast<float>(sum(ranks, first, buffers, i)));
                }
            }
        }
    }
}

void allreduces() {
    for (const int size : {1, 2, 3}) {
        as_threads(size, [](const GlooContext &context) {
            sums<gloo::CudaAllreduceRing<float>, float>(context);
            sums<gloo::CudaAllreduceRingChunked<float, gloo::CudaDeviceWorkspace<float>>, float>(context);
            sums<gloo::CudaAllreduceHalvingDoubling<double>, double>(context);
            sums<gloo::CudaAllreduceHalvingDoublingPipelined<int32_t>, int32_t>(context);
            sums<gloo::CudaAllreduceBcube<int64_t>, int64_t>(context);
            sums<gloo::CudaAllreduceLocal<float>, float>(context, true);
        });
    }
}

void broadcasts() {
    as_threads(3, [](const GlooContext &context) {
        Buffers<float> mine(context->rank * 100, 2, 5000);
        gloo::CudaBroadcastOneToAll<float> algorithm(context, mine.pointers, 5000, 2, 1);
        algorithm.run();
        for (const auto &values : mine.values) {
            for (std::size_t i = 0; i < values.size(); i++) {
                CHECK_EQ(values[i], static_cast<float>(200 + 1 + i % 7));
            }
        }
    });
}

void what_is_wrong() {
    as_threads(1, [](const GlooContext &context) {
        float x = 1;
        const std::vector<float *> one = {&x};
        using Ring = gloo::CudaAllreduceRing<float>;
        CHECK_THROWS(gloo::EnforceNotMet, "no buffer", Ring(context, std::vector<float *>(), 1));
        CHECK_THROWS(gloo::EnforceNotMet, "2 streams for 1 buffers", Ring(context, one, 1, {nullptr, nullptr}));
        CHECK_THROWS(gloo::InvalidOperationException, "", gloo::CudaAllreduceRing<bool>(context, {nullptr}, 1));
        CHECK_THROWS(gloo::EnforceNotMet, "root 1 of 1", gloo::CudaBroadcastOneToAll<float>(context, one, 1, 1));
        CHECK_THROWS(gloo::EnforceNotMet, "buffer 1 of 1", gloo::CudaBroadcastOneToAll<float>(context, one, 1, 0, 1));
    });
}

} // namespace

int main() {
    return run_tests({{"allreduces", allreduces}, {"broadcasts", broadcasts}, {"what_is_wrong", what_is_wrong}});
}
