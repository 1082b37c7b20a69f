#pragma once

#include <chrono>
#include <exception>
#include <stdexcept>
#include <string>

#include "gloo/common/string.h"

#define GLOO_ERROR_MSG(...) ::gloo::MakeString("[", __FILE__, ":", __LINE__, "] ", __VA_ARGS__)

namespace gloo {
inline namespace over_unisono {

/* A timeout that never ends a wait. */
constexpr std::chrono::milliseconds kNoTimeout = std::chrono::milliseconds::zero();

/* What gloo's operations throw. */
struct Exception : public std::runtime_error {
    Exception() = delete;
    explicit Exception(const std::string &message) : std::runtime_error(message) {}
};

/* The call is wrong: an argument, the moment, or what is not there. The context goes on. */
struct InvalidOperationException : public Exception {
    InvalidOperationException() = delete;
    explicit InvalidOperationException(const std::string &message) : Exception(message) {}
};

/* A peer failed, or a deadline passed ("Timed out"). The text names the rank and what it last did; of a message that was
   waited for in vain, the rank alone. */
struct IoException : public Exception {
    IoException() = delete;
    explicit IoException(const std::string &message) : Exception(message) {}
};

} // namespace over_unisono
} // namespace gloo

#define GLOO_THROW(...) throw ::gloo::Exception(GLOO_ERROR_MSG(__VA_ARGS__))
#define GLOO_THROW_INVALID_OPERATION_EXCEPTION(...) throw ::gloo::InvalidOperationException(GLOO_ERROR_MSG(__VA_ARGS__))
#define GLOO_THROW_IO_EXCEPTION(...) throw ::gloo::IoException(GLOO_ERROR_MSG(__VA_ARGS__))
