#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/transport/pair.h"
#include "gloo/detail/tcp/buffer.h"
#include "gloo/detail/tcp/context.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

/* This rank and another one of a context, which owns the pair. */
class Pair : public ::gloo::transport::Pair {
  public:
    Pair(Context *context, int peer) : context_(context), peer_(peer) {}

    const Address &address() const override { return context_->address(); }

    /* Tells the address of the other side's pair with this rank. What is told to the last pair of a context connects
       them all, and waits for the other ranks. */
    void connect(const std::vector<char> &bytes) override { context_->introduce(peer_, Address(bytes)); }

    bool isConnected() override { return !closed_ && context_->isConnected(); }

    /* Nothing goes through the pair any more. The last pair to be closed closes the context; until then the other
       side does not know. */
    void close() override {
        if (closed_.exchange(true)) {
            return;
        }
        for (int peer = 0; peer < context_->size; peer++) {
            const auto *pair = static_cast<const Pair *>(context_->getPair(peer).get());
            if (pair != nullptr && !pair->closed_) {
                return;
            }
        }
        context_->close();
    }

    void setSync(bool, bool) override {}

    std::unique_ptr<::gloo::transport::Buffer> createSendBuffer(int slot, void *ptr, std::size_t size) override {
        return std::make_unique<SendBuffer>(open(), peer_, slot, ptr, size);
    }
    std::unique_ptr<::gloo::transport::Buffer> createRecvBuffer(int slot, void *ptr, std::size_t size) override {
        return std::make_unique<RecvBuffer>(open(), peer_, slot, ptr, size);
    }

    void send(::gloo::transport::UnboundBuffer *buf, uint64_t tag, std::size_t offset = 0,
              std::size_t nbytes = 0) override {
        open();
        buf->send(peer_, tag, offset, nbytes);
    }
    void recv(::gloo::transport::UnboundBuffer *buf, uint64_t tag, std::size_t offset = 0,
              std::size_t nbytes = 0) override {
        open();
        buf->recv(peer_, tag, offset, nbytes);
    }

  private:
    std::shared_ptr<Context> open() const {
        if (closed_) {
            throw IoException(MakeString("the pair of ranks ", context_->rank, " and ", peer_, " is closed"));
        }
        return context_->shared_from_this();
    }

    Context *const context_;
    const int peer_;
    std::atomic<bool> closed_{false};
};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
