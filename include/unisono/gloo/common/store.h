#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gloo/config.h"

/* Stores are held by std::shared_ptr. */
#define GLOO_SHARED_STORE

namespace gloo {
inline namespace over_unisono {

/* A dictionary that all ranks reach, by which they find each other. Of what a store can do, connecting uses set, for the two
   keys of its rank that gloo has ("rank_N" and "N"), and wait_get, for "0". */
class IStore {
  public:
    virtual ~IStore() = default;

    virtual void set(const std::string &key, const std::vector<char> &data) = 0;
    virtual std::vector<char> get(const std::string &key) = 0;
    virtual std::vector<char> wait_get(const std::string &key, const std::chrono::milliseconds &timeout) {
        wait({key}, timeout);
        return get(key);
    }
    virtual void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) = 0;

    virtual bool has_v2_support() = 0;
    virtual std::vector<std::vector<char>> multi_get(const std::vector<std::string> &keys) = 0;
    virtual void multi_set(const std::vector<std::string> &keys, const std::vector<std::vector<char>> &values) = 0;
    virtual void append(const std::string &key, const std::vector<char> &value) = 0;
    virtual int64_t add(const std::string &key, int64_t value) = 0;
};

} // namespace over_unisono
} // namespace gloo
