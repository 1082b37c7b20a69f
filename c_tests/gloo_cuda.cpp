// The Cuda… algorithms of the gloo face, over host memory, and where there is a GPU over its memory, too, with a stream
// for each buffer and without.

#include <cstdint>

#include <gloo/cuda_allreduce_bcube.h>
#include <gloo/cuda_allreduce_halving_doubling_pipelined.h>
#include <gloo/cuda_allreduce_local.h>
#include <gloo/cuda_allreduce_ring.h>
#include <gloo/cuda_allreduce_ring_chunked.h>
#include <gloo/cuda_broadcast_one_to_all.h>

#include "gloo_gpu.h"
#include "gloo_harness.h"

namespace {

enum class Place { host, device, streams };

/* One buffer. On a stream it is filled and read in the stream's order, with no wait between: what runs in it must wait for the
   one and be waited for by the other. */
template <class T> class Buffer {
  public:
    Buffer(Place place, int device, std::vector<T> values) : values_(std::move(values)) {
        if (place != Place::host) {
            gpu_ = std::make_unique<GpuBuffer>(device, bytes(), place == Place::streams);
            gpu_->load(values_.data(), bytes());
        }
    }
    T *data() { return gpu_ ? static_cast<T *>(gpu_->data()) : values_.data(); }
    cudaStream_t stream() const { return gpu_->stream(); }
    /* As of the work that its stream has been given. */
    const std::vector<T> &values() {
        if (gpu_) {
            gpu_->store(values_.data(), bytes());
        }
        return values_;
    }

  private:
    std::size_t bytes() const { return values_.size() * sizeof(T); }
    std::vector<T> values_;
    std::unique_ptr<GpuBuffer> gpu_;
};

/* Buffers of this rank: buffer b has rank + b + i % 7 at i. */
template <class T> struct Buffers {
    Buffers(Place place, int device, int rank, std::size_t buffers, std::size_t count) {
        for (std::size_t b = 0; b < buffers; b++) {
            std::vector<T> values(count);
            for (std::size_t i = 0; i < count; i++) {
                values[i] = static_cast<T>(static_cast<int>(static_cast<std::size_t>(rank) + b + i % 7));
            }
            all.push_back(std::make_unique<Buffer<T>>(place, device, std::move(values)));
            pointers.push_back(all.back()->data());
            if (place == Place::streams) {
                streams.push_back(all.back()->stream());
            }
        }
    }
    std::vector<std::unique_ptr<Buffer<T>>> all;
    std::vector<T *> pointers;
    std::vector<cudaStream_t> streams;
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

template <class Algorithm, class T> void sums(const GlooContext &context, Place place, bool alone = false) {
    for (const int buffers : {1, 3}) {
        for (const int count : {1, 1000, 100003}) {
            Buffers<T> mine(place, context->rank, context->rank, static_cast<std::size_t>(buffers),
                            static_cast<std::size_t>(count));
            Algorithm algorithm(context, mine.pointers, count, mine.streams);
            algorithm.run();
            const int ranks = alone ? 1 : context->size, first = alone ? context->rank : 0;
            for (const auto &buffer : mine.all) {
                const std::vector<T> &values = buffer->values();
                for (std::size_t i = 0; i < values.size(); i += 97) {
                    CHECK_EQ(static_cast<float>(values[i]), static_cast<float>(sum(ranks, first, buffers, i)));
                }
            }
        }
    }
}

void all_sums(const GlooContext &context, Place place) {
    sums<gloo::CudaAllreduceRing<float>, float>(context, place);
    sums<gloo::CudaAllreduceRingChunked<float, gloo::CudaDeviceWorkspace<float>>, float>(context, place);
    sums<gloo::CudaAllreduceHalvingDoubling<double>, double>(context, place);
    sums<gloo::CudaAllreduceHalvingDoublingPipelined<int32_t>, int32_t>(context, place);
    sums<gloo::CudaAllreduceBcube<int64_t>, int64_t>(context, place);
    sums<gloo::CudaAllreduceLocal<float>, float>(context, place, true);
}

/* From the second buffer of the last rank. */
void one_to_all(const GlooContext &context, Place place) {
    const int root = context->size - 1;
    Buffers<float> mine(place, context->rank, context->rank * 100, 2, 5000);
    gloo::CudaBroadcastOneToAll<float> algorithm(context, mine.pointers, 5000, root, 1, mine.streams);
    algorithm.run();
    for (const auto &buffer : mine.all) {
        const std::vector<float> &values = buffer->values();
        for (std::size_t i = 0; i < values.size(); i++) {
            CHECK_EQ(values[i], static_cast<float>(root * 100 + 1 + static_cast<int>(i % 7)));
        }
    }
}

void allreduces() {
    all_sums(std::make_shared<gloo::rendezvous::Context>(0, 1), Place::host);
    for (const int size : {1, 2, 3}) {
        as_threads(size, [](const GlooContext &context) { all_sums(context, Place::host); });
    }
}

void broadcasts() {
    one_to_all(std::make_shared<gloo::rendezvous::Context>(0, 1), Place::host);
    as_threads(3, [](const GlooContext &context) { one_to_all(context, Place::host); });
}

/* What all make afterwards meets nevertheless. */
void one_rank_makes_a_local_one() {
    as_threads(2, [](const GlooContext &context) {
        Buffers<float> mine(Place::host, 0, context->rank, 2, 100);
        if (context->rank == 0) {
            gloo::CudaAllreduceLocal<float>(context, mine.pointers, 100).run();
        }
        sums<gloo::CudaAllreduceRing<float>, float>(context, Place::host);
    });
}

/* Each rank a process, on the GPU that falls to it. */
void on_gpus() {
    for (const int size : {1, 2, 3}) {
        Processes ranks(size, [](const GlooContext &context) {
            for (const Place place : {Place::device, Place::streams}) {
                all_sums(context, place);
                one_to_all(context, place);
            }
        });
        for (int rank = 0; rank < size; rank++) {
            CHECK_EQ(ranks.wait(rank, 100), 0);
        }
    }
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
    std::vector<std::pair<const char *, std::function<void()>>> tests = {
        {"allreduces", allreduces}, {"broadcasts", broadcasts},
        {"one_rank_makes_a_local_one", one_rank_makes_a_local_one}, {"what_is_wrong", what_is_wrong}};
    if (gpu_is_here()) {
        tests.emplace_back("on_gpus", on_gpus);
    } else {
        std::printf("skipped: on_gpus: no GPU is here\n");
    }
    return run_tests(tests);
}
