/*
 * A pair's buffers, over the native face's messages.
 *
 * The receiver knows neither when the sender sends nor how much nor where to. So each message begins with a frame of
 * fixed size that says it, and has the content too if that is short; else the content follows. A receive buffer has
 * the next frame's receive under way all the time.
 */
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/detail/native.h"
#include "gloo/detail/patience.h"
#include "gloo/transport/buffer.h"
#include "gloo/detail/tcp/context.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

struct Frame {
    uint64_t offset = 0, bytes = 0;
    /* Names what follows, if anything does. */
    uint64_t sequence = 0;
    char content[104] = {};

    bool isWhole() const { return bytes <= sizeof(content); }
};

/* The tags of a slot's frames, and of what follows one: apart from those of unbound buffers, whose uppermost byte is a
   collective's prefix or 0. */
inline uint64_t frameTag(int slot) { return uint64_t{0xb0} << 56 | static_cast<uint32_t>(slot); }
inline uint64_t contentTag(uint64_t sequence) { return uint64_t{0xb1} << 56 | (sequence & ~(uint64_t{0xff} << 56)); }

/* A started operation; whoever waits for it holds it. */
using SharedWork = std::shared_ptr<unisono_work_t>;

inline SharedWork shared(unisono_work_t *work) { return SharedWork(work, unisono_work_destroy); }

/* What has not ended in time ends the context. */
[[noreturn]] inline void overdue(Context &context, const char *what, uint32_t peer) {
    const std::string cause = MakeString("Timed out waiting ", context.getTimeout().count(), "ms for ", what,
                                         " operation with rank ", peer, " to complete");
    context.fail(cause);
    throw IoException(cause);
}

/* Waits until a work has ended; what has not in time ends the context. */
inline void await(Context &context, const SharedWork &work, const char *what, uint32_t peer,
                  std::chrono::milliseconds timeout) {
    const unisono_status_t status = unisono_work_wait_for(work.get(), detail::milliseconds(timeout));
    if (status == UNISONO_TIMEOUT && unisono_work_status(work.get()) == UNISONO_IN_PROGRESS) {
        overdue(context, what, peer);
    }
    if (status != UNISONO_OK) {
        // In a forked child it is the parent's: it has no outcome here, and never will.
        int32_t done = 0;
        detail::check(unisono_work_test(work.get(), &done));
    }
}

/* A message that was sent from a buffer. */
struct Message {
    std::unique_ptr<Frame> frame;
    const char *content = nullptr;
    SharedWork head, tail;

    bool isSent() const {
        const auto isOver = [](const SharedWork &work) { return unisono_work_status(work.get()) == UNISONO_OK; };
        return isOver(head) && (!tail || isOver(tail));
    }

    /* Only where this rank leaves, or the context has failed, or is another process's: else the other side would wait
       for what follows. */
    void takeBack() const {
        unisono_work_cancel(head.get());
        if (tail) {
            unisono_work_cancel(tail.get());
        }
    }
};

/* Those of a buffer that nobody has waited for. */
struct Outbox : detail::Closable {
    std::mutex mutex;
    std::list<Message> messages;
    /* Those that a call waits for. */
    std::list<Message> awaited;
    /* How many went before them. Nothing else is kept of those: a program need not wait for what the other side answers. */
    std::size_t sent = 0;

    /* Lets go of what has been sent. What has failed stays, for the wait that tells. */
    void settle() {
        while (!messages.empty() && messages.front().isSent()) {
            messages.pop_front();
            sent++;
        }
    }

    std::list<Message> take() {
        std::lock_guard<std::mutex> hold(mutex);
        return std::exchange(messages, {});
    }

    void close() override {
        std::lock_guard<std::mutex> hold(mutex);
        for (const auto *those : {&messages, &awaited}) {
            for (const Message &message : *those) {
                message.takeBack();
            }
        }
        messages.clear();
    }
};

class SendBuffer : public Buffer {
  public:
    SendBuffer(std::shared_ptr<Context> context, int peer, int slot, void *ptr, std::size_t size)
        : Buffer(slot, ptr, size), context_(std::move(context)), peer_(detail::rankOf(peer)) {
        context_->enlist(outbox_);
    }

    /* What was sent goes on. No frame is taken back, since one of which a part has gone comes whole all the same: what
       follows it has to come, too, and is sent from a copy if it has not gone. */
    ~SendBuffer() override {
        for (Message &message : outbox_->take()) {
            const uint64_t bytes = message.frame->bytes, sequence = message.frame->sequence;
            if (!letGo(message)) {
                message.takeBack();
            } else if (message.tail) {
                unisono_work_cancel(message.tail.get());
                if (unisono_work_status(message.tail.get()) == UNISONO_ABORTED) {
                    sendCopy(message.content, bytes, sequence);
                }
            }
        }
    }

    using Buffer::send;
    void send(std::size_t offset, std::size_t length, std::size_t roffset = 0) override {
        GLOO_ENFORCE_LE(offset, size_, "the offset lies in the buffer");
        GLOO_ENFORCE_LE(length, size_ - offset, "what is sent lies in the buffer");
        GLOO_ENFORCE(ptr_ != nullptr || length == 0, "the buffer has no memory");
        Message message;
        message.frame = std::make_unique<Frame>();
        message.frame->offset = roffset;
        message.frame->bytes = length;
        message.frame->sequence = context_->nextMessage();
        message.content = static_cast<const char *>(ptr_) + offset;
        const bool whole = message.frame->isWhole();
        if (whole && length > 0) {
            std::memcpy(message.frame->content, message.content, length);
        }
        // Frames leave in the order of the calls.
        std::lock_guard<std::mutex> hold(outbox_->mutex);
        message.head = begin(message.frame.get(), sizeof(Frame), frameTag(slot_));
        if (!whole) {
            try {
                message.tail = begin(message.content, length, contentTag(message.frame->sequence));
            } catch (...) {
                // The frame's memory ends here.
                message.takeBack();
                throw;
            }
        }
        outbox_->messages.push_back(std::move(message));
        outbox_->settle();
    }

    /* One that throws leaves nothing under way: the memory is the program's again. */
    void waitSend() override {
        std::unique_lock<std::mutex> hold(outbox_->mutex);
        // Under the lock, for which whoever closes the context waits.
        context_->native();
        if (outbox_->sent > 0) {
            outbox_->sent--;
            return;
        }
        auto &messages = outbox_->messages, &awaited = outbox_->awaited;
        GLOO_ENFORCE(!messages.empty(), "nothing was sent that has not been waited for");
        awaited.splice(awaited.begin(), messages, messages.begin());
        const auto message = awaited.begin();
        const Awaiting awaiting{*outbox_, message};
        hold.unlock();
        try {
            const detail::Patience patience(context_->getTimeout());
            for (const SharedWork &work : {message->head, message->tail}) {
                if (work) {
                    await(*context_, work, "send", peer_, patience.left());
                    if (const unisono_status_t status = unisono_work_status(work.get()); status != UNISONO_OK) {
                        // Of a context that is closed that is told.
                        context_->native();
                        detail::raise(status, unisono_work_error(work.get()));
                    }
                }
            }
        } catch (...) {
            message->takeBack();
            throw;
        }
    }

    void waitRecv() override { GLOO_THROW_INVALID_OPERATION_EXCEPTION("a send buffer receives nothing"); }

  private:
    SharedWork begin(const void *from, std::size_t bytes, uint64_t tag) {
        const unisono_call_t call = detail::call(tag, kNoTimeout);
        unisono_work_t *work = nullptr;
        detail::check(unisono_send(context_->native().get(), from, bytes, UNISONO_UINT8, peer_, &call, &work));
        return shared(work);
    }

    /* The frame ends when it has gone. */
    static bool letGo(Message &message) {
        const auto free = [](void *user, unisono_status_t, const char *) { delete static_cast<Frame *>(user); };
        if (unisono_work_on_complete(message.head.get(), free, message.frame.get()) != UNISONO_OK) {
            return false;
        }
        static_cast<void>(message.frame.release());
        return true;
    }

    /* A message is waited for until this ends. */
    struct Awaiting {
        Outbox &outbox;
        const std::list<Message>::iterator message;
        ~Awaiting() {
            std::lock_guard<std::mutex> hold(outbox.mutex);
            outbox.awaited.erase(message);
        }
    };

    void sendCopy(const char *content, uint64_t bytes, uint64_t sequence) {
        try {
            auto copy = std::make_unique<std::vector<char>>(content, content + bytes);
            const SharedWork work = begin(copy->data(), copy->size(), contentTag(sequence));
            const auto free = [](void *user, unisono_status_t, const char *) {
                delete static_cast<std::vector<char> *>(user);
            };
            detail::check(unisono_work_on_complete(work.get(), free, copy.get()));
            static_cast<void>(copy.release());
        } catch (const std::exception &) {
            // The context has failed, or is closed: nobody waits for it.
        }
    }

    const std::shared_ptr<Context> context_;
    const uint32_t peer_;
    const std::shared_ptr<Outbox> outbox_ = std::make_shared<Outbox>();
};

/* What comes to a receive buffer: a frame, what follows it, the next frame. It outlives the buffer while a completion is
   late. */
class Inbox : public detail::Closable, public std::enable_shared_from_this<Inbox> {
  public:
    Inbox(std::shared_ptr<Context> context, uint32_t peer, int slot, char *memory, std::size_t size)
        : context_(std::move(context)), peer_(peer), slot_(slot), memory_(memory), size_(size) {}

    /* Receives until something has to be waited for. Nothing is thrown: it may run on a thread of the library. */
    void advance() {
        try {
            while (true) {
                const SharedWork work = receive();
                int32_t done = 0;
                if (!work || unisono_work_test(work.get(), &done) != UNISONO_OK) {
                    return;
                }
                if (done == 0) {
                    auto self = std::make_unique<std::shared_ptr<Inbox>>(shared_from_this());
                    detail::check(unisono_work_on_complete(work.get(), completed, self.get()));
                    static_cast<void>(self.release());
                    return;
                }
                if (!arrive(unisono_work_status(work.get()), unisono_work_error(work.get()))) {
                    return;
                }
            }
        } catch (const std::exception &cause) {
            // The context has failed meanwhile, or is closed.
            std::lock_guard<std::mutex> hold(mutex_);
            fail(UNISONO_PEER_FAILED, cause.what());
        }
    }

    /* Waits for a message that has arrived, and takes it. */
    void take() {
        follow([this] {
            if (arrived_ > 0) {
                arrived_--;
                return true;
            }
            if (status_ != UNISONO_OK) {
                detail::raise(status_, error_);
            }
            return false;
        });
    }

    /* Nothing comes any more. What has begun is waited for: the sender has sent it. */
    void end() {
        try {
            close(false);
            follow([this] { return !follows_ || status_ != UNISONO_OK; });
        } catch (const std::exception &) {
            // It did not come in time, which has ended the context.
            close(true);
        }
    }

    void close() override { close(true); }

  private:
    void close(bool whateverFollows) {
        std::unique_lock<std::mutex> hold(mutex_);
        closed_ = true;
        follows_ = follows_ && !whateverFollows;
        if (whateverFollows && status_ == UNISONO_OK) {
            fail(UNISONO_ABORTED, "the connections of this context are closed");
        }
        const SharedWork work = follows_ ? nullptr : std::move(work_);
        hold.unlock();
        if (work) {
            unisono_work_cancel(work.get());
        }
    }

    /* Moves what is under way until there is what is waited for. */
    template <class Ready> void follow(const Ready &ready) {
        const detail::Patience patience(context_->getTimeout());
        SharedWork seen;
        while (true) {
            std::unique_lock<std::mutex> hold(mutex_);
            if (ready()) {
                return;
            }
            const SharedWork work = work_;
            hold.unlock();
            if (work && work != seen) {
                await(*context_, work, "recv", peer_, patience.left());
                seen = work;
            } else if (patience.isOver()) {
                overdue(*context_, "recv", peer_);
            } else {
                // It has ended, and another thread is about to say so.
                std::this_thread::yield();
            }
        }
    }

    /* Starts to receive what comes next. */
    SharedWork receive() {
        std::lock_guard<std::mutex> hold(mutex_);
        if (closed_ && !follows_) {
            return nullptr;
        }
        char *const to = follows_ ? memory_ + frame_.offset : reinterpret_cast<char *>(&frame_);
        const uint64_t bytes = follows_ ? frame_.bytes : sizeof(Frame);
        const unisono_call_t call = detail::call(follows_ ? contentTag(frame_.sequence) : frameTag(slot_), kNoTimeout);
        unisono_work_t *work = nullptr;
        detail::check(unisono_receive(context_->native().get(), to, bytes, UNISONO_UINT8, peer_, &call, &work));
        work_ = shared(work);
        return work_;
    }

    /* What was received last is there, or does not come. Whether to go on. */
    bool arrive(unisono_status_t status, const char *error) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (closed_ && !follows_) {
            return false;
        }
        if (status != UNISONO_OK) {
            // A sender that has taken a message back may send it once more; one that has gone fails the next, too.
            if (!again_ && status == UNISONO_PEER_FAILED) {
                again_ = true;
                return true;
            }
            fail(status, error);
            return false;
        }
        again_ = false;
        if (!follows_) {
            if (frame_.offset > size_ || frame_.bytes > size_ - frame_.offset) {
                fail(UNISONO_MISMATCH,
                     MakeString("rank ", peer_, " sent ", frame_.bytes, " bytes to offset ", frame_.offset,
                                " of a receive buffer of ", size_, " (slot ", slot_, ")"));
                return false;
            }
            if (!frame_.isWhole()) {
                follows_ = true;
                return true;
            }
            if (frame_.bytes > 0) {
                std::memcpy(memory_ + frame_.offset, frame_.content, frame_.bytes);
            }
        }
        follows_ = false;
        arrived_++;
        return true;
    }

    void fail(unisono_status_t status, const std::string &error) {
        status_ = status;
        error_ = error;
    }

    static void completed(void *user, unisono_status_t status, const char *error) {
        const std::unique_ptr<std::shared_ptr<Inbox>> self(static_cast<std::shared_ptr<Inbox> *>(user));
        if ((*self)->arrive(status, error)) {
            (*self)->advance();
        }
    }

    const std::shared_ptr<Context> context_;
    const uint32_t peer_;
    const int slot_;
    char *const memory_;
    const std::size_t size_;
    std::mutex mutex_;
    Frame frame_;
    /* What the frame announces is under way. */
    bool follows_ = false;
    bool again_ = false;
    SharedWork work_;
    std::size_t arrived_ = 0;
    bool closed_ = false;
    unisono_status_t status_ = UNISONO_OK;
    std::string error_;
};

class RecvBuffer : public Buffer {
  public:
    RecvBuffer(const std::shared_ptr<Context> &context, int peer, int slot, void *ptr, std::size_t size)
        : Buffer(slot, ptr, size),
          inbox_(std::make_shared<Inbox>(context, detail::rankOf(peer), slot, static_cast<char *>(ptr), size)) {
        context->enlist(inbox_);
        inbox_->advance();
    }

    ~RecvBuffer() override { inbox_->end(); }

    void waitRecv() override { inbox_->take(); }

    using Buffer::send;
    void send(std::size_t, std::size_t, std::size_t = 0) override {
        GLOO_THROW_INVALID_OPERATION_EXCEPTION("a receive buffer sends nothing");
    }
    void waitSend() override { GLOO_THROW_INVALID_OPERATION_EXCEPTION("a receive buffer sends nothing"); }

  private:
    const std::shared_ptr<Inbox> inbox_;
};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
