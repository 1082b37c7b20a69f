#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/transport/address.h"
#include "gloo/transport/buffer.h"
#include "gloo/transport/unbound_buffer.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {

/* This rank and another one. */
class Pair {
  public:
    virtual ~Pair() = default;

    virtual const Address &address() const = 0;
    virtual void connect(const std::vector<char> &bytes) = 0;
    virtual void close() = 0;
    virtual bool isConnected() = 0;

    /* How waits are done is unisono's affair: this changes nothing. */
    virtual void setSync(bool enable, bool busyPoll) = 0;

    virtual std::unique_ptr<Buffer> createSendBuffer(int slot, void *ptr, std::size_t size) = 0;
    virtual std::unique_ptr<Buffer> createRecvBuffer(int slot, void *ptr, std::size_t size) = 0;

    virtual void send(UnboundBuffer *buf, uint64_t tag, std::size_t offset = 0, std::size_t nbytes = 0) = 0;
    virtual void recv(UnboundBuffer *buf, uint64_t tag, std::size_t offset = 0, std::size_t nbytes = 0) = 0;

    virtual void put(UnboundBuffer *, const RemoteKey &, uint64_t, std::size_t, std::size_t, std::size_t) {
        throw std::runtime_error("put() not implemented");
    }
    virtual void get(UnboundBuffer *, const RemoteKey &, uint64_t, std::size_t, std::size_t, std::size_t) {
        throw std::runtime_error("get() not implemented");
    }

    void setLocalRank(int localRank) {
        GLOO_ENFORCE(localRank >= 0, "a local rank is not negative");
        localRank_ = localRank;
    }
    int getLocalRank() const { return localRank_; }

  protected:
    /* The rank among those of this host, as the program has said. */
    int localRank_ = 0;
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
