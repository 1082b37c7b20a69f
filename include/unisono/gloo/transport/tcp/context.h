/* Whichever of a transport's headers is included, all of it is there. */
#pragma once

#include <memory>

#include "gloo/detail/tcp/buffer.h"
#include "gloo/detail/tcp/context.h"
#include "gloo/detail/tcp/pair.h"
#include "gloo/detail/tcp/unbound_buffer.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

inline std::unique_ptr<::gloo::transport::Pair> &Context::createPair(int peer) {
    auto &pair = pairs_.at(static_cast<std::size_t>(peer));
    pair = std::make_unique<Pair>(this, peer);
    return pair;
}

inline std::unique_ptr<::gloo::transport::UnboundBuffer> Context::createUnboundBuffer(void *ptr, std::size_t bytes) {
    return std::make_unique<UnboundBuffer>(shared_from_this(), ptr, bytes);
}

inline std::shared_ptr<::gloo::transport::Context> Device::createContext(int rank, int size) {
    return std::make_shared<Context>(shared_from_this(), rank, size);
}

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
