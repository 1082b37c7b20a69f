#pragma once

#include <cstddef>
#include <memory>

namespace gloo {
inline namespace over_unisono {

using std::make_unique;

} // namespace over_unisono
} // namespace gloo
