#pragma once

#include <memory>
#include <utility>

#include "gloo/transport/tcp/device.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace uv {

/* gloo's devices over libuv are those over epoll here, under names of their own. */
struct attr : tcp::attr {
    attr() = default;
    /* implicit */ attr(const char *hostname_) : tcp::attr(hostname_) {}
};

class Device : public tcp::Device {
  public:
    explicit Device(const struct tcp::attr &which) : tcp::Device(which) {}
};

class Context : public tcp::Context {
  public:
    Context(std::shared_ptr<Device> device, int rank_, int size_) : tcp::Context(std::move(device), rank_, size_) {}
};

class Address : public tcp::Address {
  public:
    using tcp::Address::Address;
};

using Pair = tcp::Pair;
using UnboundBuffer = tcp::UnboundBuffer;

inline std::shared_ptr<::gloo::transport::Device> CreateDevice(const struct attr &src) {
    return std::make_shared<Device>(tcp::CreateDeviceAttr(src));
}

} // namespace uv
} // namespace transport
} // namespace over_unisono
} // namespace gloo
