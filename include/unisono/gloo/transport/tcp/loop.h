#pragma once

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

/* gloo's event loop. unisono needs none: whoever waits moves the data, and one thread of its own moves the rest. */
class Loop final {};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
