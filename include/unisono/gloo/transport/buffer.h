#pragma once

#include <cstddef>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {

/* Memory that is bound to a pair and a slot. What one side sends from its send buffer arrives in the other's receive
   buffer of the same slot, at the offset that the sender says. */
class Buffer {
  public:
    explicit Buffer(int slot, void *ptr, std::size_t size) : slot_(slot), ptr_(ptr), size_(size), debug_(false) {}
    virtual ~Buffer() = default;

    virtual void setDebug(bool debug) { debug_ = debug; }

    /* Starts to send `length` bytes from `offset` on, to `roffset` of the other side's buffer. */
    virtual void send(std::size_t offset, std::size_t length, std::size_t roffset = 0) = 0;
    void send() { send(0, size_); }

    /* Waits for one message to arrive that no call has waited for, or for one to be sent. */
    virtual void waitRecv() = 0;
    virtual void waitSend() = 0;

  protected:
    int slot_;
    void *ptr_;
    std::size_t size_;
    bool debug_;
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
