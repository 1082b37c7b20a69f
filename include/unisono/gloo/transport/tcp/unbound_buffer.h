#pragma once

#include "gloo/transport/tcp/context.h"
