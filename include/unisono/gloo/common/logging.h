#pragma once

#include <climits>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "gloo/common/error.h"
#include "gloo/common/string.h"

namespace gloo {
inline namespace over_unisono {

enum class LogLevel : std::int8_t {
    UNSET = -1,
    ERROR = 0,
    WARN = 1,
    INFO = 2,
    DEBUG = 3,
};

/* GLOO_LOG_LEVEL: ERROR, WARN (unless set), INFO or DEBUG. It is about what the program logs by the macros below;
   unisono's own messages are UNISONO_LOG's affair. */
inline LogLevel logLevel() {
    static const LogLevel level = [] {
        const char *name = std::getenv("GLOO_LOG_LEVEL");
        const std::string wanted = name == nullptr ? "WARN" : name;
        return wanted == "DEBUG"  ? LogLevel::DEBUG
               : wanted == "INFO" ? LogLevel::INFO
               : wanted == "WARN" ? LogLevel::WARN
                                  : LogLevel::ERROR;
    }();
    return level;
}

/* A condition that GLOO_ENFORCE found not to hold. */
class EnforceNotMet : public std::exception {
  public:
    EnforceNotMet(const char *file, int line, const char *condition, const std::string &message)
        : stack_{MakeString("[enforce fail at ", file, ":", line, "] ", condition, ". ", message)} {}

    std::string msg() const { return stack_.front(); }
    const std::vector<std::string> &msg_stack() const { return stack_; }
    const char *what() const noexcept override { return stack_.front().c_str(); }

  private:
    std::vector<std::string> stack_;
};

namespace detail {

/* Both values of a comparison that did not hold. */
template <class Left, class Right> std::string compared(const Left &left, const Right &right, std::string &&more) {
    return more.empty() ? MakeString(left, " vs ", right) : MakeString(left, " vs ", right, ". ", more);
}

} // namespace detail
} // namespace over_unisono
} // namespace gloo

#define GLOO_LOG_MSG(level, ...)                                                                                       \
    std::cerr << ::gloo::MakeString("[", __FILE__, ":", __LINE__, "] ", level, " ", __VA_ARGS__, "\n")
#define GLOO_LOG_AT_(level, ...)                                                                                       \
    do {                                                                                                               \
        if (::gloo::logLevel() >= ::gloo::LogLevel::level) {                                                           \
            GLOO_LOG_MSG(#level, __VA_ARGS__);                                                                         \
        }                                                                                                              \
    } while (0)
#define GLOO_ERROR(...) GLOO_LOG_AT_(ERROR, __VA_ARGS__)
#define GLOO_WARN(...) GLOO_LOG_AT_(WARN, __VA_ARGS__)
#define GLOO_INFO(...) GLOO_LOG_AT_(INFO, __VA_ARGS__)
#define GLOO_DEBUG(...) GLOO_LOG_AT_(DEBUG, __VA_ARGS__)

#define GLOO_ENFORCE(condition, ...)                                                                                   \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            throw ::gloo::EnforceNotMet(__FILE__, __LINE__, #condition, ::gloo::MakeString(__VA_ARGS__));              \
        }                                                                                                              \
    } while (false)

#define GLOO_ENFORCE_COMPARED_(x, op, y, ...)                                                                          \
    do {                                                                                                               \
        const auto &gloo_left_ = (x);                                                                                  \
        const auto &gloo_right_ = (y);                                                                                 \
        if (!(gloo_left_ op gloo_right_)) {                                                                            \
            throw ::gloo::EnforceNotMet(                                                                               \
                __FILE__, __LINE__, #x " " #op " " #y,                                                                 \
                ::gloo::detail::compared(gloo_left_, gloo_right_, ::gloo::MakeString(__VA_ARGS__)));                   \
        }                                                                                                              \
    } while (false)

#define GLOO_ENFORCE_EQ(x, y, ...) GLOO_ENFORCE_COMPARED_(x, ==, y, __VA_ARGS__)
#define GLOO_ENFORCE_NE(x, y, ...) GLOO_ENFORCE_COMPARED_(x, !=, y, __VA_ARGS__)
#define GLOO_ENFORCE_LE(x, y, ...) GLOO_ENFORCE_COMPARED_(x, <=, y, __VA_ARGS__)
#define GLOO_ENFORCE_LT(x, y, ...) GLOO_ENFORCE_COMPARED_(x, <, y, __VA_ARGS__)
#define GLOO_ENFORCE_GE(x, y, ...) GLOO_ENFORCE_COMPARED_(x, >=, y, __VA_ARGS__)
#define GLOO_ENFORCE_GT(x, y, ...) GLOO_ENFORCE_COMPARED_(x, >, y, __VA_ARGS__)
