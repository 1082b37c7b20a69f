// A few floats in the memory of a GPU, by the driver alone: the example needs no CUDA toolkit to be built, and no GPU to run.

#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

class Gpu {
public:
    // Memory for `count` floats on the GPU that `rank` is to use, or nothing if this machine has none.
    static std::unique_ptr<Gpu> open(std::uint32_t rank, std::size_t count) {
        std::unique_ptr<Gpu> gpu(new Gpu());
        int devices = 0;
        if (gpu->driver_ == nullptr || gpu->call<unsigned>("cuInit", 0U) != 0 ||
            gpu->call<int *>("cuDeviceGetCount", &devices) != 0 || devices == 0) {
            return nullptr;
        }
        int device = 0;
        void *context = nullptr;
        gpu->check("cuDeviceGet", gpu->call<int *, int>("cuDeviceGet", &device, static_cast<int>(rank) % devices));
        gpu->check("cuDevicePrimaryCtxRetain", gpu->call<void **, int>("cuDevicePrimaryCtxRetain", &context, device));
        gpu->check("cuCtxSetCurrent", gpu->call<void *>("cuCtxSetCurrent", context));
        const std::size_t bytes = count * sizeof(float);
        gpu->check("cuMemAlloc", gpu->call<Address *, std::size_t>("cuMemAlloc_v2", &gpu->memory_, bytes));
        return gpu;
    }

    // Freed with the process: a context of unisono may outlive this.
    float *memory() const { return reinterpret_cast<float *>(static_cast<std::uintptr_t>(memory_)); }

    void load(const std::vector<float> &values) {
        const std::size_t bytes = values.size() * sizeof(float);
        check("cuMemcpyHtoD", call<Address, const void *, std::size_t>("cuMemcpyHtoD_v2", memory_, values.data(), bytes));
    }

    void store(std::vector<float> &values) {
        const std::size_t bytes = values.size() * sizeof(float);
        check("cuMemcpyDtoH", call<void *, Address, std::size_t>("cuMemcpyDtoH_v2", values.data(), memory_, bytes));
    }

private:
    using Address = unsigned long long;

    Gpu() : driver_(dlopen("libcuda.so.1", RTLD_NOW)) {}

    // Calls a function of the driver by its name.
    template <class... Parameters>
    int call(const char *name, Parameters... arguments) {
        using Function = int (*)(Parameters...);
        const auto function = reinterpret_cast<Function>(dlsym(driver_, name));
        return function == nullptr ? -1 : function(arguments...);
    }

    static void check(const char *name, int result) {
        if (result != 0) throw std::runtime_error(std::string(name) + " failed with " + std::to_string(result));
    }

    void *driver_;
    Address memory_ = 0;
};
