#pragma once

#include <string>
#include <vector>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {

/* What a pair tells the other side, so that the two can be connected. */
class Address {
  public:
    /* The most that bytes() gives. */
    static constexpr auto kMaxByteSize = 192;

    virtual ~Address() = default;
    virtual std::string str() const = 0;
    virtual std::vector<char> bytes() const = 0;
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
