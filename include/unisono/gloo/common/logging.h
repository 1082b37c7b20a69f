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

/* The checkers of GLOO_ENFORCE_THAT, to which programs add their own: what they return says what is wrong, if anything is. */
namespace enforce_detail {

struct EnforceOK {};

class EnforceFailMessage {
  public:
    EnforceFailMessage(EnforceOK) {}
    EnforceFailMessage(std::string &&message) : bad_(true), message_(std::move(message)) {}

    bool bad() const { return bad_; }
    std::string get_message_and_free(std::string &&more) const {
        return more.empty() ? message_ : MakeString(message_, ". ", more);
    }

  private:
    bool bad_ = false;
    std::string message_;
};

#define GLOO_CHECKER_(name, op)                                                                                        \
    template <class Left, class Right> EnforceFailMessage name(const Left &left, const Right &right) {                 \
        if (left op right) {                                                                                           \
            return EnforceOK();                                                                                        \
        }                                                                                                              \
        return MakeString(left, " vs ", right);                                                                        \
    }
GLOO_CHECKER_(Equals, ==)
GLOO_CHECKER_(NotEquals, !=)
GLOO_CHECKER_(Greater, >)
GLOO_CHECKER_(GreaterEquals, >=)
GLOO_CHECKER_(Less, <)
GLOO_CHECKER_(LessEquals, <=)
#undef GLOO_CHECKER_

} // namespace enforce_detail
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

#define GLOO_ENFORCE_FOUND_(checked, text, ...)                                                                        \
    do {                                                                                                               \
        const ::gloo::enforce_detail::EnforceFailMessage gloo_found_ = (checked);                                      \
        if (gloo_found_.bad()) {                                                                                       \
            throw ::gloo::EnforceNotMet(__FILE__, __LINE__, text,                                                      \
                                        gloo_found_.get_message_and_free(::gloo::MakeString(__VA_ARGS__)));            \
        }                                                                                                              \
    } while (false)
#define GLOO_ENFORCE_COMPARED_(checker, x, op, y, ...)                                                                 \
    GLOO_ENFORCE_FOUND_(::gloo::enforce_detail::checker((x), (y)), #x " " #op " " #y, __VA_ARGS__)

#define GLOO_ENFORCE_THAT(checked, ...)                                                                                \
    do {                                                                                                               \
        using namespace ::gloo::enforce_detail;                                                                        \
        GLOO_ENFORCE_FOUND_(checked, #checked, __VA_ARGS__);                                                           \
    } while (false)
#define GLOO_ENFORCE_EQ(x, y, ...) GLOO_ENFORCE_COMPARED_(Equals, x, ==, y, __VA_ARGS__)
#define GLOO_ENFORCE_NE(x, y, ...) GLOO_ENFORCE_COMPARED_(NotEquals, x, !=, y, __VA_ARGS__)
#define GLOO_ENFORCE_LE(x, y, ...) GLOO_ENFORCE_COMPARED_(LessEquals, x, <=, y, __VA_ARGS__)
#define GLOO_ENFORCE_LT(x, y, ...) GLOO_ENFORCE_COMPARED_(Less, x, <, y, __VA_ARGS__)
#define GLOO_ENFORCE_GE(x, y, ...) GLOO_ENFORCE_COMPARED_(GreaterEquals, x, >=, y, __VA_ARGS__)
#define GLOO_ENFORCE_GT(x, y, ...) GLOO_ENFORCE_COMPARED_(Greater, x, >, y, __VA_ARGS__)
