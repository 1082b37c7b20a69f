#pragma once

#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <arpa/inet.h>
#include <climits>
#include <cstdlib>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "gloo/common/logging.h"
#include "gloo/detail/native.h"
#include "gloo/transport/device.h"
#include "gloo/transport/tcp/attr.h"
#include "gloo/transport/tcp/loop.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

struct EndServing {
    void operator()(unisono_unique_id_t *id) const {
        unisono_unique_id_release(id);
        delete id;
    }
};
/* A unique id that this process serves: until this ends, or as long as the context that met by it does. */
using ServedId = std::unique_ptr<unisono_unique_id_t, EndServing>;

/* An address, without a port. */
inline std::string textOf(const sockaddr &address) {
    char name[INET6_ADDRSTRLEN] = {};
    if (address.sa_family == AF_INET6) {
        inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6 &>(address).sin6_addr, name, sizeof(name));
        return name;
    }
    const in_addr its = reinterpret_cast<const sockaddr_in &>(address).sin_addr;
    // All of 127.0.0.0/8 is this host's, but no interface names more of it than this.
    if (ntohl(its.s_addr) >> 24 == 127) {
        return "127.0.0.1";
    }
    inet_ntop(AF_INET, &its, name, sizeof(name));
    return name;
}

/* An address of one of this host's interfaces. */
struct InterfaceAddress {
    std::string name, address;
    bool up;
};

/* All of them; none where the system does not tell. */
inline std::vector<InterfaceAddress> interfaceAddresses() {
    std::vector<InterfaceAddress> found;
    ifaddrs *all = nullptr;
    if (getifaddrs(&all) == 0) {
        for (const ifaddrs *entry = all; entry != nullptr; entry = entry->ifa_next) {
            const sockaddr *its = entry->ifa_addr;
            if (its != nullptr && (its->sa_family == AF_INET || its->sa_family == AF_INET6)) {
                found.push_back({entry->ifa_name, textOf(*its), (entry->ifa_flags & IFF_UP) != 0});
            }
        }
        freeifaddrs(all);
    }
    return found;
}

/* A network interface. Ranks of one host use shared memory, whatever the device; UNISONO_TRANSPORT=tcp has them use
   TCP. Nothing is opened, and no thread begins, before a context is connected, so a program may fork with a device.
   */
class Device : public ::gloo::transport::Device, public std::enable_shared_from_this<Device> {
  public:
    explicit Device(const struct attr &attr, bool lazyInit = false) : attr_(attr), lazyInit_(lazyInit) {
        if (!attr_.iface.empty()) {
            interface_ = attr_.iface;
            name_ = attr_.iface;
        } else if (attr_.ai_addrlen > 0) {
            interface_ = textOf(reinterpret_cast<const sockaddr &>(attr_.ai_addr));
            name_ = nameOf(interface_);
        }
        speed_ = readSpeed(name_);
        busId_ = readBusId(name_);
    }

    std::string str() const override {
        return MakeString("unisono, iface=", name_.empty() ? "chosen" : name_, ", addr=[", interface_,
                          "], pci=", busId_.empty() ? "?" : busId_, ", speed=", speed_);
    }
    const std::string &getPCIBusID() const override { return busId_; }
    int getInterfaceSpeed() const override { return speed_; }
    std::shared_ptr<::gloo::transport::Context> createContext(int rank, int size) override;

    /* Links open when they are first needed, whether asked for or not. */
    bool isLazyInit() { return lazyInit_; }

    /* As unisono names it: an interface or an address; NULL: unisono chooses. */
    const char *interface() const { return interface_.empty() ? nullptr : interface_.c_str(); }

    /* A new unique id, served by this process on this interface. */
    ServedId makeId() const {
        auto id = std::make_unique<unisono_unique_id_t>();
        detail::check(unisono_unique_id_create_on(interface(), id.get()));
        return ServedId(id.release());
    }

  private:
    static std::string nameOf(const std::string &address) {
        for (const InterfaceAddress &entry : interfaceAddresses()) {
            if (entry.address == address) {
                return entry.name;
            }
        }
        return {};
    }

    static int readSpeed(const std::string &name) {
        int speed = 0;
        std::ifstream("/sys/class/net/" + name + "/speed") >> speed;
        return speed > 0 ? speed : 0;
    }

    static std::string readBusId(const std::string &name) {
        char path[PATH_MAX];
        if (name.empty() || realpath(("/sys/class/net/" + name + "/device").c_str(), path) == nullptr) {
            return {};
        }
        return std::string(path).substr(std::string(path).rfind('/') + 1);
    }

    const struct attr attr_;
    const bool lazyInit_;
    std::string interface_, name_, busId_;
    int speed_ = 0;
};

/* Throws for the name of an interface that this host does not have. What unisono takes besides, addresses and networks,
   is looked at when a context is connected. */
inline void checkInterface(const std::string &wanted) {
    in6_addr address;
    if (wanted.empty() || wanted.find('/') != std::string::npos || inet_pton(AF_INET, wanted.c_str(), &address) == 1 ||
        inet_pton(AF_INET6, wanted.c_str(), &address) == 1) {
        return;
    }
    const auto all = interfaceAddresses();
    std::string shown;
    for (const InterfaceAddress &entry : all) {
        if (entry.name == wanted) {
            return;
        }
        shown += MakeString(shown.empty() ? "" : ", ", entry.name, " ", entry.address, entry.up ? "" : " (down)");
    }
    GLOO_ENFORCE(all.empty(), "interface '", wanted, "' does not exist; there are ", shown);
}

/* Whether the address is this host's. */
inline bool isHere(const addrinfo &address) {
    const int probe = socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const bool here = probe >= 0 && bind(probe, address.ai_addr, address.ai_addrlen) == 0;
    if (probe >= 0) {
        ::close(probe);
    }
    return here;
}

/* The attributes with the address that a host name means on this host. */
inline struct attr CreateDeviceAttr(const struct attr &src) {
    checkInterface(src.iface);
    struct attr found = src;
    if (!src.iface.empty() || src.hostname.empty()) {
        return found;
    }
    addrinfo hints = {};
    hints.ai_family = src.ai_family;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo *all = nullptr;
    const int failure = getaddrinfo(src.hostname.c_str(), nullptr, &hints, &all);
    GLOO_ENFORCE(failure == 0, "the host name '", src.hostname, "' has no address: ", gai_strerror(failure));
    const std::unique_ptr<addrinfo, void (*)(addrinfo *)> owned(all, freeaddrinfo);
    const addrinfo *ours = all;
    while (ours != nullptr && !isHere(*ours)) {
        ours = ours->ai_next;
    }
    GLOO_ENFORCE(ours != nullptr, "no address of '", src.hostname, "' is this host's");
    found.ai_family = ours->ai_family;
    found.ai_socktype = ours->ai_socktype;
    found.ai_protocol = ours->ai_protocol;
    std::memcpy(&found.ai_addr, ours->ai_addr, ours->ai_addrlen);
    found.ai_addrlen = static_cast<int>(ours->ai_addrlen);
    return found;
}

inline std::shared_ptr<::gloo::transport::Device> CreateDevice(const struct attr &src) {
    return std::make_shared<Device>(CreateDeviceAttr(src), false);
}

inline std::shared_ptr<::gloo::transport::Device> CreateLazyDevice(const struct attr &src) {
    return std::make_shared<Device>(CreateDeviceAttr(src), true);
}

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
