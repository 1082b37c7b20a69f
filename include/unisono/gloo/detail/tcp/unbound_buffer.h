#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
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
        Side ends[] = {std::exchange(sides_->sends, {}), std::exchange(sides_->receives, {})};
        hold.unlock();
        // Cancels what is under way; without the lock, for which whoever closes the context waits.
        for (Side &side : ends) {
            side.end();
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
        /* Held while anything is under way: a context that is closed meanwhile is aborted. */
        std::shared_ptr<unisono_context_t> busy;
        /* Messages that no call waits for yet, and those that nobody has reported. */
        std::size_t unclaimed = 0, unreported = 0;
        std::size_t waiters = 0;
        bool aborted = false;

        void end() {
            unisono_buffer_destroy(std::exchange(native, nullptr));
            busy.reset();
        }
    };

    struct Sides : detail::Closable {
        std::mutex mutex;
        /* A wait that has no message may look again. */
        std::condition_variable changed;
        Side sends, receives;
        bool enlisted = false;

        void close() override {
            std::lock_guard<std::mutex> hold(mutex);
            for (Side *side : {&sends, &receives}) {
                // What is under way lets go when it has been reported.
                if (side->unreported == 0) {
                    side->end();
                }
            }
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
        const auto context = context_->native();
        const unisono_call_t call = detail::call(slot, kNoTimeout);
        std::lock_guard<std::mutex> hold(sides_->mutex);
        enlist();
        if (side.native == nullptr) {
            detail::check(unisono_buffer_create(context.get(), ptr, size, &side.native));
        }
        if (const unisono_status_t status = begin(side.native, call); status != UNISONO_OK) {
            const std::string cause = unisono_last_error();
            rest(side);
            detail::raise(status, cause);
        }
        side.busy = context;
        side.unclaimed++;
        side.unreported++;
        sides_->changed.notify_all();
    }

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
            const auto ready = [&] { return side.aborted || side.unclaimed > 0; };
            while (!ready()) {
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
            side.unclaimed--;
            hold.unlock();
            uint32_t peer = UNISONO_NO_RANK;
            const unisono_status_t status = nativeWait(side.native, detail::milliseconds(patience.left()), &peer);
            std::string cause = status == UNISONO_OK ? std::string() : unisono_last_error();
            hold.lock();
            if (status == UNISONO_OK) {
                reported(side);
                if (rank != nullptr) {
                    *rank = static_cast<int>(peer);
                }
                return true;
            }
            // A context that has failed says so by what it failed with, which may be a deadline of another call, or of
            // another rank's.
            if (unisono_status_t failed = unisono_context_status(side.busy.get()); failed != UNISONO_OK) {
                if (status == UNISONO_ABORTED || status == UNISONO_TIMEOUT) {
                    // The wait may have ended by abort() or by its own deadline at the same time.
                    cause = unisono_context_error(side.busy.get());
                } else {
                    failed = status;
                }
                failure_ = cause;
                reported(side);
                sides_->changed.notify_all();
                detail::raise(failed, cause);
            }
            if (status == UNISONO_TIMEOUT) {
                side.unclaimed++;
                sides_->changed.notify_all();
                overdue(hold, what, timeout, cause);
            }
            if (status != UNISONO_ABORTED) {
                reported(side);
                detail::raise(status, cause);
            }
            // abort() ended the wait, this one's or another's; the message goes on.
            side.unclaimed++;
            sides_->changed.notify_all();
        }
    }

    struct Leaving {
        Side &side;
        ~Leaving() { side.waiters--; }
    };

    /* Throws if nothing comes any more that could be waited for. Under the lock, for which whoever closes the context
       waits: it does not find the context in use by this. */
    void checkContext() {
        if (failure_.empty()) {
            enlist();
            const auto context = context_->native();
            if (const unisono_status_t status = unisono_context_status(context.get()); status != UNISONO_OK) {
                failure_ = unisono_context_error(context.get());
                detail::raise(status, failure_);
            }
            return;
        }
        throw IoException(failure_);
    }

    void reported(Side &side) const {
        side.unreported--;
        rest(side);
    }

    /* If nothing is under way. A context that has been closed before has not found this to close it. */
    void rest(Side &side) const {
        if (side.unreported > 0) {
            return;
        }
        if (context_->isConnected()) {
            side.busy.reset();
        } else {
            side.end();
        }
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
        // A waiter may be on its way into the native wait, which knows nothing of an abort before it.
        while (side.aborted && side.waiters > 0) {
            if (side.native != nullptr) {
                unisono_buffer_abort_wait(side.native);
            }
            hold.unlock();
            std::this_thread::sleep_for(std::chrono::microseconds(50));
            hold.lock();
        }
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
