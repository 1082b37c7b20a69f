/* What all of the gloo face shares of the native one. Nothing here is gloo's. */
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include <unisono.h>

#include "gloo/common/error.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

template <auto destroy> struct Destroy {
    template <class Handle> void operator()(Handle *handle) const { destroy(handle); }
};
using Work = std::unique_ptr<unisono_work_t, Destroy<unisono_work_destroy>>;

/* gloo's "no timeout" is 0. */
inline uint64_t milliseconds(std::chrono::milliseconds timeout) {
    return timeout == kNoTimeout ? UNISONO_FOREVER : timeout.count() < 0 ? 1 : static_cast<uint64_t>(timeout.count());
}

/* A call's failure as gloo tells it. */
[[noreturn]] inline void raise(unisono_status_t status, const std::string &cause) {
    switch (status) {
    case UNISONO_INVALID_ARGUMENT:
    case UNISONO_INVALID_USAGE:
    case UNISONO_NOT_MEMBER:
    case UNISONO_UNSUPPORTED:
        throw InvalidOperationException(cause);
    case UNISONO_TIMEOUT:
        throw IoException("Timed out: " + cause);
    default:
        throw IoException(cause);
    }
}

inline void check(unisono_status_t status) {
    if (status != UNISONO_OK) {
        raise(status, unisono_last_error());
    }
}

/* A rank, as the native face counts them; a wrong one is found there. */
inline uint32_t rankOf(int rank) { return rank < 0 ? UNISONO_NO_RANK : static_cast<uint32_t>(rank); }

/* The options of a call. */
inline unisono_call_t call(uint64_t tag, std::chrono::milliseconds timeout) {
    unisono_call_t options = UNISONO_CALL_INIT;
    options.tag = tag;
    options.timeout_ms = milliseconds(timeout);
    return options;
}

/* A collective over fixed buffers. */
using AlgorithmHandle = std::unique_ptr<unisono_algorithm_t, Destroy<unisono_algorithm_destroy>>;
inline AlgorithmHandle makeAlgorithm(const unisono_context_t *context, const unisono_algorithm_options_t &options) {
    unisono_algorithm_t *made = nullptr;
    check(unisono_algorithm_create(context, &options, &made));
    return AlgorithmHandle(made);
}

/* A group of this rank alone. */
inline std::shared_ptr<unisono_context_t> alone() {
    unisono_store_t *store = nullptr;
    check(unisono_store_create_hash(&store));
    const std::unique_ptr<unisono_store_t, Destroy<unisono_store_destroy>> meeting(store);
    unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
    options.rank_count = 1;
    options.store = store;
    options.name = "gloo";
    unisono_context_t *made = nullptr;
    check(unisono_context_create(&options, &made));
    return {made, unisono_context_destroy};
}

/* Such a group, made when it is first asked for. */
class Alone {
  public:
    std::shared_ptr<unisono_context_t> native(std::chrono::milliseconds timeout) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (!native_) {
            native_ = alone();
            check(unisono_context_set_timeout(native_.get(), milliseconds(timeout)));
        }
        return native_;
    }

    /* Has a timeout from now on. */
    void tellTimeout(std::chrono::milliseconds timeout) {
        std::lock_guard<std::mutex> hold(mutex_);
        if (native_) {
            check(unisono_context_set_timeout(native_.get(), milliseconds(timeout)));
        }
    }

  private:
    std::mutex mutex_;
    std::shared_ptr<unisono_context_t> native_;
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
