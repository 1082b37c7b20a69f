#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/detail/patience.h"
#include "gloo/detail/tcp/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

/* A buffer of the native face for what is sent, and one for what is received, so that waits for the two can be
   aborted apart. */
class UnboundBuffer : public ::gloo::transport::UnboundBuffer {
  public:
    UnboundBuffer(std::shared_ptr<Context> context, void *ptr_, std::size_t size_)
        : ::gloo::transport::UnboundBuffer(ptr_, size_), context_(std::move(context)) {}

    ~UnboundBuffer() override {
        std::unique_lock<std::mutex> hold(sides_->mutex);
        const Side ends[] = {std::exchange(sides_->sends, {}), std::exchange(sides_->receives, {})};
        hold.unlock();
        // Cancels what is under way; without the lock, for which whoever closes the context waits.
        for (const Side &side : ends) {
            unisono_buffer_destroy(side.native);
        }
    }

    UnboundBuffer(const UnboundBuffer &) = delete;
    UnboundBuffer &operator=(const UnboundBuffer &) = delete;

    using ::gloo::transport::UnboundBuffer::waitRecv;
    using ::gloo::transport::UnboundBuffer::waitSend;
    bool waitRecv(int *rank, std::chrono::milliseconds timeout) override {
        return wait(sides_->receives, "recv", unisono_buffer_wait_receive, rank, timeout);
    }
    bool waitSend(int *rank, std::chrono::milliseconds timeout) override {
        return wait(sides_->sends, "send", unisono_buffer_wait_send, rank, timeout);
    }
    void abortWaitRecv() override { abort(sides_->receives); }
    void abortWaitSend() override { abort(sides_->sends); }

    void send(int dstRank, uint64_t slot, std::size_t offset = 0, std::size_t nbytes = kUnspecifiedByteCount) override {
        nbytes = within(offset, nbytes);
        start(sides_->sends, slot, [&](const unisono_buffer_t *native, const unisono_call_t &call) {
            return unisono_buffer_send(native, offset, nbytes, UNISONO_UINT8, detail::rankOf(dstRank), &call);
        });
    }
    void recv(int srcRank, uint64_t slot, std::size_t offset = 0, std::size_t nbytes = kUnspecifiedByteCount) override {
        recv(std::vector<int>{srcRank}, slot, offset, nbytes);
    }
    void recv(std::vector<int> srcRanks, uint64_t slot, std::size_t offset = 0,
              std::size_t nbytes = kUnspecifiedByteCount) override {
        GLOO_ENFORCE(!srcRanks.empty(), "a receive needs a rank to receive from");
        nbytes = within(offset, nbytes);
        std::vector<uint32_t> ranks;
        for (const int rank : srcRanks) {
            ranks.push_back(detail::rankOf(rank));
        }
        start(sides_->receives, slot, [&](const unisono_buffer_t *native, const unisono_call_t &call) {
            return unisono_buffer_receive(native, offset, nbytes, UNISONO_UINT8, ranks.data(),
                                          static_cast<uint32_t>(ranks.size()), &call);
        });
    }

  private:
    struct Side {
        /* It keeps this rank in the group until the context is closed. */
        unisono_buffer_t *native = nullptr;
        /* Messages that no call waits for yet. */
        std::size_t unclaimed = 0;
        /* Calls that wait, and those of them that are in the native wait. */
        std::size_t waiters = 0, inside = 0;
        /* The other ranks of the messages that were complete when the context was closed. */
        std::list<uint32_t> complete;
        bool aborted = false;

        /* Ends native waits as long as there is one to end: a waiter may be on its way into one, which knows nothing
           of an abort before it. In a forked child there is none: they are the parent's. */
        template <class Any> void endWaits(std::unique_lock<std::mutex> &hold, const Any &any) {
            while (any()) {
                if (native != nullptr && unisono_buffer_abort_wait(native) != UNISONO_OK) {
                    return;
                }
                hold.unlock();
                std::this_thread::sleep_for(std::chrono::microseconds(50));
                hold.lock();
            }
        }

        /* Cancels what is under way. What is complete can be waited for even so. */
        template <class NativeWait> void close(std::unique_lock<std::mutex> &hold, const NativeWait &nativeWait) {
            endWaits(hold, [this] { return inside > 0; });
            unisono_status_t status = UNISONO_OK;
            for (; unclaimed > 0 && status != UNISONO_TIMEOUT; unclaimed--) {
                uint32_t peer = UNISONO_NO_RANK;
                status = nativeWait(native, 0, &peer);
                if (status == UNISONO_OK) {
                    complete.push_back(peer);
                }
            }
            unclaimed = 0;
            unisono_buffer_destroy(std::exchange(native, nullptr));
        }
    };

    struct Sides : detail::Closable {
        std::mutex mutex;
        /* A wait that has no message may look again. */
        std::condition_variable changed;
        Side sends, receives;
        bool enlisted = false;

        void close() override {
            std::unique_lock<std::mutex> hold(mutex);
            sends.close(hold, unisono_buffer_wait_send);
            receives.close(hold, unisono_buffer_wait_receive);
            changed.notify_all();
        }
    };

    std::size_t within(std::size_t offset, std::size_t nbytes) const {
        GLOO_ENFORCE_LE(offset, size, "the offset lies in the buffer");
        if (nbytes == kUnspecifiedByteCount) {
            nbytes = size - offset;
        }
        GLOO_ENFORCE_LE(nbytes, size - offset, "the message lies in the buffer");
        return nbytes;
    }

    /* gloo's messages have no deadline of their own: their waits do. */
    template <class Begin> void start(Side &side, uint64_t slot, const Begin &begin) {
        const unisono_call_t call = detail::call(slot, kNoTimeout);
        std::lock_guard<std::mutex> hold(sides_->mutex);
        enlist();
        const auto context = context_->native();
        if (side.native == nullptr) {
            detail::check(unisono_buffer_create(context.get(), ptr, size, &side.native));
        }
        detail::check(begin(side.native, call));
        side.unclaimed++;
        sides_->changed.notify_all();
    }

    /* Before the context is asked for, and both under the lock, for which whoever closes the context waits: it finds
       what has been started with it, and does not find it in use by this. */
    void enlist() {
        if (!std::exchange(sides_->enlisted, true)) {
            context_->enlist(sides_);
        }
    }

    template <class NativeWait> bool wait(Side &side, const char *what, const NativeWait &nativeWait, int *rank,
                                          std::chrono::milliseconds timeout) {
        if (timeout == kUnsetTimeout) {
            timeout = context_->getTimeout();
        }
        const detail::Patience patience(timeout);
        std::unique_lock<std::mutex> hold(sides_->mutex);
        side.waiters++;
        const Leaving leaving{side};
        while (true) {
            while (!side.aborted && side.unclaimed == 0 && side.complete.empty()) {
                checkContext();
                if (patience.isOver()) {
                    overdue(hold, what, timeout, "none was started");
                }
                // A context that fails wakes nobody here.
                sides_->changed.wait_until(hold, std::min(patience.end(), detail::Patience(kLook).end()));
            }
            if (side.aborted) {
                side.aborted = false;
                return false;
            }
            if (!side.complete.empty()) {
                tell(rank, side.complete.front());
                side.complete.pop_front();
                return true;
            }
            side.unclaimed--;
            side.inside++;
            hold.unlock();
            uint32_t peer = UNISONO_NO_RANK;
            const unisono_status_t status = nativeWait(side.native, detail::milliseconds(patience.left()), &peer);
            const std::string cause = status == UNISONO_OK ? std::string() : unisono_last_error();
            hold.lock();
            side.inside--;
            if (status == UNISONO_OK) {
                tell(rank, peer);
                return true;
            }
            tellFailure(status, cause);
            if (status != UNISONO_ABORTED && status != UNISONO_TIMEOUT) {
                detail::raise(status, cause);
            }
            side.unclaimed++;
            sides_->changed.notify_all();
            if (status == UNISONO_TIMEOUT) {
                overdue(hold, what, timeout, cause);
            }
            // abort() ended the wait, this one's or another's; the message goes on.
        }
    }

    static void tell(int *rank, uint32_t peer) {
        if (rank != nullptr) {
            *rank = static_cast<int>(peer);
        }
    }

    struct Leaving {
        Side &side;
        ~Leaving() { side.waiters--; }
    };

    /* Throws if nothing comes any more that could be waited for. */
    void checkContext() {
        if (!failure_.empty()) {
            throw IoException(failure_);
        }
        enlist();
        tellFailure(UNISONO_ABORTED, {});
    }

    /* Throws if the context is closed or has failed. One that has failed says so by what it failed with, which may be a
       deadline of another call, or of another rank's; a message's own failure is told as it is. */
    void tellFailure(unisono_status_t status, const std::string &cause) {
        const auto context = context_->native();
        const unisono_status_t failed = unisono_context_status(context.get());
        if (failed == UNISONO_OK) {
            return;
        }
        // The wait may have ended by abort() or by its own deadline at the same time.
        const bool own = status != UNISONO_ABORTED && status != UNISONO_TIMEOUT;
        failure_ = own ? cause : unisono_context_error(context.get());
        sides_->changed.notify_all();
        detail::raise(own ? status : failed, failure_);
    }

    [[noreturn]] void overdue(std::unique_lock<std::mutex> &hold, const char *what, std::chrono::milliseconds timeout,
                              const std::string &cause) {
        hold.unlock();
        const std::string text =
            MakeString("Timed out waiting ", timeout.count(), "ms for ", what, " operation to complete: ", cause);
        context_->fail(text);
        hold.lock();
        sides_->changed.notify_all();
        throw IoException(text);
    }

    void abort(Side &side) {
        std::unique_lock<std::mutex> hold(sides_->mutex);
        side.aborted = true;
        sides_->changed.notify_all();
        side.endWaits(hold, [&side] { return side.aborted && side.waiters > 0; });
    }

    /* How long a wait that has no message does not look whether the context has failed. */
    static constexpr std::chrono::milliseconds kLook{100};

    const std::shared_ptr<Context> context_;
    const std::shared_ptr<Sides> sides_ = std::make_shared<Sides>();
    /* What the context has failed with, once a wait has told: nothing comes any more that could be waited for. */
    std::string failure_;
};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
