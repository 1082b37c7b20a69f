#pragma once

#include <cstddef>
#include <memory>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {

using std::make_unique;

} // namespace over_unisono
} // namespace gloo
