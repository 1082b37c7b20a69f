#pragma once

#include <memory>
#include <string>

#include "gloo/transport/context.h"
#include "gloo/transport/pair.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {

/* The network interface that contexts are made on. */
class Device {
  public:
    virtual ~Device() = default;

    virtual std::string str() const = 0;
    virtual const std::string &getPCIBusID() const = 0;
    /* Mbit/s; 0: unknown. */
    virtual int getInterfaceSpeed() const { return 0; }
    virtual bool hasGPUDirect() const { return false; }
    virtual std::shared_ptr<Context> createContext(int rank, int size) = 0;
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
