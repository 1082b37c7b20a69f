#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "gloo/common/error.h"
#include "gloo/transport/remote_key.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {

/* The context's timeout. */
constexpr auto kUnsetTimeout = std::chrono::milliseconds(-1);

/* Memory to send from and receive into, to and from any ranks. Sends and receives are started and waited for; the
   memory is in use until they have been waited for, or the buffer has ended. */
class UnboundBuffer {
  public:
    UnboundBuffer(void *ptr_, std::size_t size_) : ptr(ptr_), size(size_) {}
    virtual ~UnboundBuffer() = default;

    void *const ptr;
    const std::size_t size;

    /* Waits for one receive, and tells the rank that sent. False if the wait was aborted. A deadline that passes ends
       the context, as in gloo. */
    virtual bool waitRecv(int *rank, std::chrono::milliseconds timeout) = 0;
    /* Waits for one send, and tells the rank that it went to. */
    virtual bool waitSend(int *rank, std::chrono::milliseconds timeout) = 0;

    /* Ends a wait that another thread is in, or else the next one. */
    virtual void abortWaitRecv() = 0;
    virtual void abortWaitSend() = 0;

    bool waitRecv() { return waitRecv(nullptr, kUnsetTimeout); }
    bool waitSend() { return waitSend(nullptr, kUnsetTimeout); }
    bool waitRecv(int *rank) { return waitRecv(rank, kUnsetTimeout); }
    bool waitSend(int *rank) { return waitSend(rank, kUnsetTimeout); }
    bool waitRecv(std::chrono::milliseconds timeout) { return waitRecv(nullptr, timeout); }
    bool waitSend(std::chrono::milliseconds timeout) { return waitSend(nullptr, timeout); }
    template <class Clock> bool waitRecv(std::chrono::time_point<Clock> deadline) { return waitRecv(until(deadline)); }
    template <class Clock> bool waitSend(std::chrono::time_point<Clock> deadline) { return waitSend(until(deadline)); }

    /* From the offset to the buffer's end. */
    static constexpr auto kUnspecifiedByteCount = std::numeric_limits<std::size_t>::max();

    virtual void send(int dstRank, uint64_t slot, std::size_t offset = 0,
                      std::size_t nbytes = kUnspecifiedByteCount) = 0;
    virtual void recv(int srcRank, uint64_t slot, std::size_t offset = 0,
                      std::size_t nbytes = kUnspecifiedByteCount) = 0;
    /* From whichever of these ranks sends first. */
    virtual void recv(std::vector<int> srcRanks, uint64_t slot, std::size_t offset = 0,
                      std::size_t nbytes = kUnspecifiedByteCount) = 0;

    virtual std::unique_ptr<RemoteKey> getRemoteKey() const {
        throw std::runtime_error("getRemoteKey() not implemented");
    }
    virtual void put(const RemoteKey &, uint64_t, std::size_t, std::size_t, std::size_t) {
        throw std::runtime_error("put(RemoteKey) not implemented");
    }
    virtual void get(const RemoteKey &, uint64_t, std::size_t, std::size_t, std::size_t) {
        throw std::runtime_error("get(RemoteKey) not implemented");
    }

  private:
    /* What is left until then; at least a millisecond, since 0 is no limit. */
    template <class Clock> static std::chrono::milliseconds until(std::chrono::time_point<Clock> deadline) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
        return left < std::chrono::milliseconds(1) ? std::chrono::milliseconds(1) : left;
    }
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
