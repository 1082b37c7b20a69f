#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/common/utils.h"
#include "gloo/transport/context.h"
#include "gloo/transport/tcp/address.h"
#include "gloo/detail/patience.h"
#include "gloo/detail/tcp/device.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

/* A context of unisono's native face, as gloo's pairs and buffers. */
class Context : public ::gloo::transport::Context, public std::enable_shared_from_this<Context> {
  public:
    Context(std::shared_ptr<Device> device, int rank_, int size_)
        : ::gloo::transport::Context(rank_, size_), device_(std::move(device)) {}

    /* Rank 0 makes a unique id and puts it into the store; all meet by it. */
    void createAndConnectAllPairs(std::shared_ptr<IStore> store) override;

    std::unique_ptr<::gloo::transport::Pair> &createPair(int peer) override;
    std::unique_ptr<::gloo::transport::UnboundBuffer> createUnboundBuffer(void *ptr, std::size_t bytes) override;

    /* To be held as long as a collective is under way: a context that is closed meanwhile is aborted. */
    std::shared_ptr<unisono_context_t> native() override {
        std::lock_guard<std::mutex> hold(mutex_);
        if (!native_ && !closed_ && size == 1) {
            // There is no pair that could be connected.
            native_ = detail::alone();
            tellTimeout();
        }
        if (!native_) {
            throw IoException(closed_ ? "the connections of this context are closed" : notConnected());
        }
        return native_;
    }

    void connectAsDuplicate(const unisono_context_t *other) override {
        unisono_context_t *native = nullptr;
        detail::check(unisono_context_duplicate(other, &native));
        createAllPairs();
        hold(native);
    }

    void setTimeout(std::chrono::milliseconds timeout) override {
        std::lock_guard<std::mutex> hold(mutex_);
        timeout_ = timeout;
        tellTimeout();
    }

    bool isConnected() const {
        std::lock_guard<std::mutex> hold(mutex_);
        return native_ != nullptr;
    }

    void enlist(const std::shared_ptr<detail::Closable> &part) override {
        std::lock_guard<std::mutex> hold(mutex_);
        if (parts_.size() >= sweep_) {
            const auto gone = [](const std::weak_ptr<detail::Closable> &other) { return other.expired(); };
            parts_.erase(std::remove_if(parts_.begin(), parts_.end(), gone), parts_.end());
            sweep_ = 2 * parts_.size() + 16;
        }
        parts_.push_back(part);
    }

    /* A number that no other message of this rank in this context has. */
    uint64_t nextMessage() { return messages_++; }

    /* Leaves the group. What is under way here ends. */
    void close() {
        std::unique_lock<std::mutex> hold(mutex_);
        closed_ = true;
        const auto parts = std::move(parts_);
        const auto native = std::move(native_);
        native_.reset();
        hold.unlock();
        for (const auto &part : parts) {
            if (const auto there = part.lock()) {
                there->close();
            }
        }
        // Whoever is in a collective holds it. Messages have been ended one by one.
        if (native && native.use_count() > 1) {
            unisono_context_abort(native.get());
        }
    }

    /* A wait has timed out: gloo's context ends then, here and on the others, which are told why. */
    void fail(const std::string &cause) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (native_) {
            unisono_context_abort_because(native_.get(), cause.c_str());
        }
    }

    // ---- pairs that are connected one by one

    /* What the pairs of this rank tell the others. */
    const Address &address() {
        std::lock_guard<std::mutex> hold(mutex_);
        if (!address_ && rank == 0 && !native_) {
            told_ = device_->makeId();
            address_ = Address(rank, *told_);
        } else if (!address_) {
            address_ = Address(rank);
        }
        return *address_;
    }

    /* The pair with `peer` has been told the other's address. The last one connects all. */
    void introduce(int peer, const Address &other) {
        std::unique_lock<std::mutex> hold(mutex_);
        GLOO_ENFORCE_EQ(other.rank(), peer, "the address is another rank's");
        if (other.id()) {
            id_ = other.id();
        }
        const bool isNew = introduced_.insert(peer).second;
        const bool last = isNew && introduced_.size() + 1 == static_cast<std::size_t>(size) && !native_;
        const auto id = rank == 0 && address_ ? address_->id() : id_;
        hold.unlock();
        if (!last) {
            return;
        }
        try {
            GLOO_ENFORCE(id, "no pair has been told the address of rank 0's");
            meet(*id, timeout_);
        } catch (...) {
            // It is not connected: who tries again is to hear so again.
            hold.lock();
            introduced_.erase(peer);
            throw;
        }
    }

  private:
    /* Why; in a program that connects some of the pairs alone, which are missing. */
    std::string notConnected() const {
        std::string missing;
        for (int peer = 0; peer < size && !introduced_.empty(); peer++) {
            if (peer != rank && introduced_.count(peer) == 0) {
                missing += MakeString(missing.empty() ? "" : ", ", peer);
            }
        }
        return missing.empty() ? "this context is not connected"
                               : MakeString("this context is not connected: unisono connects all ranks of a context at "
                                            "once, and rank ",
                                            rank, " has not connected its pairs with ranks ", missing);
    }

    void createAllPairs() {
        for (int peer = 0; peer < size; peer++) {
            if (peer != rank) {
                createPair(peer);
            }
        }
    }

    void hold(unisono_context_t *native) {
        std::unique_lock<std::mutex> hold(mutex_);
        native_.reset(native, unisono_context_destroy);
        tellTimeout();
        // All are here: if not by the id that the pairs tell, nobody comes by that.
        const auto told = std::move(told_);
        hold.unlock();
    }

    /* For what has no timeout of its own, as making a context of this one. */
    void tellTimeout() const {
        if (native_) {
            unisono_context_set_timeout(native_.get(), detail::milliseconds(timeout_));
        }
    }

    void meet(const unisono_unique_id_t &id, std::chrono::milliseconds timeout) {
        unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
        options.rank = static_cast<uint32_t>(rank);
        options.rank_count = static_cast<uint32_t>(size);
        options.id = &id;
        options.name = "gloo";
        options.timeout_ms = detail::milliseconds(timeout);
        options.interface = device_->interface();
        unisono_context_t *native = nullptr;
        detail::check(unisono_context_create(&options, &native));
        hold(native);
    }

    std::shared_ptr<Device> device_;
    mutable std::mutex mutex_;
    std::shared_ptr<unisono_context_t> native_;
    bool closed_ = false;
    std::vector<std::weak_ptr<detail::Closable>> parts_;
    /* When there are so many, those that have ended are let go of: so seldom that each costs the same, however many
       there are. */
    std::size_t sweep_ = 16;
    std::atomic<uint64_t> messages_{0};
    std::optional<Address> address_;
    /* The id in the address, as long as somebody may meet by it. */
    ServedId told_;
    std::optional<unisono_unique_id_t> id_;
    /* The ranks whose pairs with this one have been connected. */
    std::set<int> introduced_;
};

inline void Context::createAndConnectAllPairs(std::shared_ptr<IStore> store) {
    // Waiting for the id and meeting have it together.
    const detail::Patience patience(timeout_);
    // The keys that gloo uses, of which programs remove some afterwards. Of the values only rank 0's is read.
    const auto set = [&](const std::string &key, const std::string &value) {
        store->set(key, std::vector<char>(value.begin(), value.end()));
    };
    const std::string mine = std::to_string(rank);
    createAllPairs();
    set("rank_" + mine, getHostname());
    unisono_unique_id_t id;
    // Served for as long as this lasts, should there be no meeting.
    ServedId made;
    if (rank == 0) {
        try {
            made = device_->makeId();
            id = *made;
        } catch (const std::exception &cause) {
            // So that the others do not wait for it.
            set(mine, cause.what());
            throw;
        }
        const char *bytes = reinterpret_cast<const char *>(id.bytes);
        set(mine, '\0' + std::string(bytes, sizeof(id.bytes)));
    } else {
        set(mine, "here");
        const std::vector<char> value = store->wait_get("0", patience.left());
        if (value.size() != 1 + sizeof(id.bytes) || value[0] != '\0') {
            throw IoException("rank 0 could not begin: " + std::string(value.begin(), value.end()));
        }
        std::memcpy(id.bytes, value.data() + 1, sizeof(id.bytes));
    }
    meet(id, patience.left());
}

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
