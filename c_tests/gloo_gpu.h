/*
 * Memory and streams of a GPU, by the driver, which is opened at run time: the tests build and run without CUDA.
 */
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gloo/cuda.h>

namespace gpu {

template <class... Arguments> int status_of(const char *function, Arguments... arguments) {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    void *const found = driver == nullptr ? nullptr : dlsym(driver, function);
    return found == nullptr ? -1 : reinterpret_cast<int (*)(Arguments...)>(found)(arguments...);
}

template <class... Arguments> void call(const char *function, Arguments... arguments) {
    const int status = status_of(function, arguments...);
    if (status != 0) {
        throw std::runtime_error(std::string(function) + " failed with error " + std::to_string(status));
    }
}

inline int count() {
    int devices = 0;
    return status_of("cuInit", 0U) == 0 && status_of("cuDeviceGetCount", &devices) == 0 ? devices : 0;
}

} // namespace gpu

/* Asked in a process of its own, since what has touched the driver can no longer fork ranks that use it. */
inline bool gpu_is_here() {
    const pid_t pid = fork();
    if (pid == 0) {
        std::_Exit(gpu::count() > 0 ? 1 : 0);
    }
    int status = 0;
    return pid > 0 && ::waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

/* Memory on the GPU that falls to this rank, ranks being dealt out one after the other, with a stream or without. */
class GpuBuffer {
  public:
    GpuBuffer(int rank, std::size_t bytes, bool with_stream) {
        const int devices = gpu::count();
        if (devices == 0) {
            throw std::runtime_error("no GPU is here");
        }
        int device = 0;
        gpu::call("cuDeviceGet", &device, rank % devices);
        void *context = nullptr;
        gpu::call("cuDevicePrimaryCtxRetain", &context, device);
        gpu::call("cuCtxSetCurrent", context);
        gpu::call("cuMemAlloc_v2", &address_, bytes);
        if (with_stream) {
            constexpr unsigned int kNonBlocking = 1;
            gpu::call("cuStreamCreate", &stream_, kNonBlocking);
        }
    }
    ~GpuBuffer() {
        if (stream_ != nullptr) {
            gpu::status_of("cuStreamDestroy_v2", stream_);
        }
        gpu::status_of("cuMemFree_v2", address_);
    }
    GpuBuffer(const GpuBuffer &) = delete;
    GpuBuffer &operator=(const GpuBuffer &) = delete;

    void *data() const { return reinterpret_cast<void *>(address_); }
    cudaStream_t stream() const { return stream_; }

    /* In the stream's order, or at once where there is none. */
    void load(const void *from, std::size_t bytes) {
        gpu::call("cuMemcpyHtoDAsync_v2", address_, from, bytes, stream_);
        if (stream_ == nullptr) {
            gpu::call("cuStreamSynchronize", stream_);
        }
    }

    /* In the stream's order; they are there on return. */
    void store(void *to, std::size_t bytes) {
        gpu::call("cuMemcpyDtoHAsync_v2", to, address_, bytes, stream_);
        gpu::call("cuStreamSynchronize", stream_);
    }

  private:
    std::uintptr_t address_ = 0;
    cudaStream_t stream_ = nullptr;
};
