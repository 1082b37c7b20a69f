#pragma once

#include <cstddef>
#include <string>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {

/* Names another rank's buffer for put and get, which no transport here has. */
class RemoteKey {
  public:
    RemoteKey(int rank_, std::size_t size_) : rank(rank_), size(size_) {}
    virtual ~RemoteKey() = default;
    virtual std::string serialize() const = 0;

    const int rank;
    const std::size_t size;
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
