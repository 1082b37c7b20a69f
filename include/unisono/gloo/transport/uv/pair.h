#pragma once

#include "gloo/transport/uv/device.h"
