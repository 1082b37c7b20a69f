// Memory on a GPU, by the driver, which is opened at run time: the program builds without CUDA, and runs without a GPU.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

class GpuMemory {
public:
    // On the GPU that falls to this rank, ranks being dealt out one after the other.
    GpuMemory(std::uint32_t rank, std::size_t bytes) : driver_(dlopen("libcuda.so.1", RTLD_NOW)) {
        if (driver_ == nullptr) throw std::runtime_error("--gpu needs NVIDIA's driver: " + std::string(dlerror()));
        int count = 0, device = 0;
        void *context = nullptr;
        call("cuInit", 0U);
        call("cuDeviceGetCount", &count);
        if (count == 0) throw std::runtime_error("--gpu needs a GPU");
        call("cuDeviceGet", &device, static_cast<int>(rank % static_cast<std::uint32_t>(count)));
        call("cuDevicePrimaryCtxRetain", &context, device);
        call("cuCtxSetCurrent", context);
        call("cuMemAlloc_v2", &address_, bytes);
    }

    // The memory ends with the process.
    GpuMemory(const GpuMemory &) = delete;
    GpuMemory &operator=(const GpuMemory &) = delete;

    float *data() const { return reinterpret_cast<float *>(address_); }
    void load(const float *from, std::size_t bytes) { call("cuMemcpyHtoD_v2", address_, from, bytes); }
    void store(float *to, std::size_t bytes) { call("cuMemcpyDtoH_v2", to, address_, bytes); }

private:
    template <typename... Arguments>
    void call(const char *name, Arguments... arguments) {
        const auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(driver_, name));
        const int status = function == nullptr ? -1 : function(arguments...);
        if (status != 0) throw std::runtime_error(std::string(name) + " failed with error " + std::to_string(status));
    }

    void *driver_;
    std::uintptr_t address_ = 0;
};
