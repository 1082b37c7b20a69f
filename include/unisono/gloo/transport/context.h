#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "gloo/common/store.h"
#include "gloo/detail/native.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/unbound_buffer.h"

namespace gloo {
inline namespace over_unisono {

/* How long connecting, and each operation that is given no other timeout, may take. */
constexpr std::chrono::milliseconds kTimeoutDefault = std::chrono::seconds(30);

namespace detail {

/* What lets go of a context that is closed. */
class Closable {
  public:
    virtual ~Closable() = default;
    virtual void close() = 0;
};

} // namespace detail

namespace transport {

/* The pairs of a rank with all others. */
class Context {
  public:
    using slot_t = uint64_t;
    using rank_t = int;

    Context(int rank_, int size_) : rank(rank_), size(size_), pairs_(size_ > 0 ? static_cast<std::size_t>(size_) : 0) {}
    virtual ~Context() = default;

    const int rank;
    const int size;

    /* No pair for the rank itself. */
    virtual std::unique_ptr<Pair> &getPair(int peer) { return pairs_.at(static_cast<std::size_t>(peer)); }
    virtual std::unique_ptr<Pair> &createPair(int peer) = 0;
    virtual void createAndConnectAllPairs(std::shared_ptr<IStore> store) = 0;
    virtual std::unique_ptr<UnboundBuffer> createUnboundBuffer(void *ptr, std::size_t size) = 0;

    virtual void setTimeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
    std::chrono::milliseconds getTimeout() const { return timeout_; }

    virtual std::unique_ptr<RemoteKey> deserializeRemoteKey(const std::string &) {
        throw std::runtime_error("deserializeRemoteKey() not implemented");
    }

    /* unisono's own: the context of the native face that this one is. Collectives run on it. */
    virtual std::shared_ptr<unisono_context_t> native() {
        throw InvalidOperationException("this transport is not unisono's: it has no collectives");
    }

    /* unisono's own: connects this one as a duplicate of a context of the native face. Every rank calls it. */
    virtual void connectAsDuplicate(const unisono_context_t *) {
        throw InvalidOperationException("this transport is not unisono's: its contexts are made with a store");
    }

    /* unisono's own: to be closed with this context, if it is still there. Whatever is made of a native context keeps
       this rank in the group. */
    virtual void enlist(const std::shared_ptr<detail::Closable> &) {}

  protected:
    std::vector<std::unique_ptr<Pair>> pairs_;
    std::chrono::milliseconds timeout_ = kTimeoutDefault;
};

} // namespace transport
} // namespace over_unisono
} // namespace gloo
