#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>

#include "gloo/common/logging.h"
#include "gloo/detail/native.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"

namespace gloo {
inline namespace over_unisono {

/* This rank's membership in a group. rendezvous::Context and mpi::Context connect it. */
class Context {
  public:
    Context(int rank_, int size_, int base_ = 2) : rank(rank_), size(size_), base(base_) {
        GLOO_ENFORCE_GE(rank, 0, "a rank is not negative");
        GLOO_ENFORCE_LT(rank, size, "ranks are counted from 0");
    }
    virtual ~Context() = default;

    const int rank;
    const int size;
    int base;

    std::shared_ptr<transport::Device> &getDevice() {
        GLOO_ENFORCE(device_, "the context has no device: it is not connected");
        return device_;
    }

    std::unique_ptr<transport::Pair> &getPair(int peer) { return connected().getPair(peer); }

    std::unique_ptr<transport::UnboundBuffer> createUnboundBuffer(void *ptr, std::size_t bytes) {
        return connected().createUnboundBuffer(ptr, bytes);
    }

    /* The first of so many numbers that no other algorithm object of this context has. Ranks make theirs in the same
       order. */
    int nextSlot(int numToSkip = 1) {
        GLOO_ENFORCE_GT(numToSkip, 0, "so many numbers");
        const int first = slot_;
        slot_ += numToSkip;
        return first;
    }

    /* Leaves the group. What this rank still waits for ends with an IoException, and so does what others wait for from
       it, once this rank's CUDA algorithm objects on the context have ended. Messages of unbound buffers that were
       complete can be waited for even so. */
    void closeConnections() {
        for (int peer = 0; peer < size; peer++) {
            if (auto &pair = getPair(peer)) {
                pair->close();
            }
        }
    }

    /* For connecting, and for everything that is given no timeout of its own; 0: no limit. */
    void setTimeout(std::chrono::milliseconds timeout = kTimeoutDefault) {
        GLOO_ENFORCE(timeout.count() >= 0, "a timeout is not negative");
        timeout_ = timeout;
        if (transportContext_) {
            transportContext_->setTimeout(timeout);
        }
        alone_->tellTimeout(timeout);
    }
    std::chrono::milliseconds getTimeout() const { return timeout_; }

    std::unique_ptr<transport::RemoteKey> deserializeRemoteKey(const std::string &serialized) {
        return connected().deserializeRemoteKey(serialized);
    }

    /* unisono's own: the native face's context, for what gloo has no name for. */
    std::shared_ptr<unisono_context_t> native() {
        return isUnconnectedOne() ? alone() : connected().native();
    }
    /* And what is to let go of it when the connections are closed. */
    void enlist(const std::shared_ptr<detail::Closable> &part) {
        if (!isUnconnectedOne()) {
            connected().enlist(part);
        }
    }
    /* Another one, of this rank alone, for what the others have no part in. Closing leaves it. */
    std::shared_ptr<unisono_context_t> alone() { return alone_->native(timeout_); }

  protected:
    transport::Context &connected() const {
        GLOO_ENFORCE(transportContext_, "the context is not connected");
        return *transportContext_;
    }

    /* A transport's context on `device` with this one's timeout. */
    std::shared_ptr<transport::Context> prepare(const std::shared_ptr<transport::Device> &device) const {
        GLOO_ENFORCE(device, "no device was given");
        auto context = device->createContext(rank, size);
        context->setTimeout(timeout_);
        return context;
    }

    /* The transport's context is connected. */
    void adopt(const std::shared_ptr<transport::Device> &device, std::shared_ptr<transport::Context> context) {
        device_ = device;
        transportContext_ = std::move(context);
    }

    std::shared_ptr<transport::Device> device_;
    std::shared_ptr<transport::Context> transportContext_;
    int slot_ = 0;
    std::chrono::milliseconds timeout_ = kTimeoutDefault;

  private:
    /* A group of one has collectives before it is connected, too, as in gloo. */
    bool isUnconnectedOne() const { return size == 1 && !transportContext_; }

    /* What those run on, and what is this rank's own; a copy's, too, as it has the same connections. */
    const std::shared_ptr<detail::Alone> alone_ = std::make_shared<detail::Alone>();
};

} // namespace over_unisono
} // namespace gloo
