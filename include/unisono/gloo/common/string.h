#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <vector>

#include "gloo/config.h"

namespace gloo {
inline namespace over_unisono {

/* What its arguments print, one after the other. */
template <class... Parts> std::string MakeString(const Parts &...parts) {
    std::ostringstream text;
    static_cast<void>((text << ... << parts));
    return text.str();
}

inline std::string MakeString() { return {}; }

inline std::string MakeString(const std::string &text) { return text; }

inline std::string MakeString(const char *text) { return text; }

/* The elements, with `between` between them. */
template <class T> std::string MakeString(const std::vector<T> &elements, const std::string &between = " ") {
    std::ostringstream text;
    for (std::size_t i = 0; i < elements.size(); i++) {
        text << (i == 0 ? std::string() : between) << elements[i];
    }
    return text.str();
}

} // namespace over_unisono
} // namespace gloo
