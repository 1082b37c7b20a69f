#pragma once

#include <string>

#include <pthread.h>
#include <unistd.h>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {

inline std::string getHostname() {
    char name[256] = {};
    return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

/* Names the calling thread, by the first 15 characters. */
inline void setThreadName(const std::string &name) { pthread_setname_np(pthread_self(), name.substr(0, 15).c_str()); }

} // namespace over_unisono
} // namespace gloo
