#pragma once

#include <string>

#include <sys/socket.h>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

/* Which network interface a device is on: by its name, or by a host name or address that it has. Neither: unisono
   chooses, or UNISONO_INTERFACE does. */
struct attr {
    attr() = default;
    /* implicit */ attr(const char *hostname_) : hostname(hostname_) {}

    std::string hostname;
    std::string iface;

    int ai_family = AF_UNSPEC;
    int ai_socktype = 0;
    int ai_protocol = 0;
    struct sockaddr_storage ai_addr = {};
    int ai_addrlen = 0;
    int ai_fd = -1;
};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
