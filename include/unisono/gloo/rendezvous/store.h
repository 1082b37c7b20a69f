#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gloo/common/error.h"
#include "gloo/common/logging.h"
#include "gloo/common/store.h"

/* Stores have multi_get, multi_set, append and add, if has_v2_support says so. */
#define GLOO_STORE_HAS_STORE_V2 1

namespace gloo {
inline namespace over_unisono {
namespace rendezvous {

/* What a program's own store is derived from: set, get and wait are all that connecting needs. */
class Store : public IStore {
  public:
    static constexpr std::chrono::milliseconds kDefaultTimeout = std::chrono::seconds(30);

    void set(const std::string &key, const std::vector<char> &data) override = 0;
    std::vector<char> get(const std::string &key) override = 0;
    virtual void wait(const std::vector<std::string> &keys) = 0;
    /* A store that does not override this waits as long as it will. */
    void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &) override { wait(keys); }

    bool has_v2_support() override { return false; }
    std::vector<std::vector<char>> multi_get(const std::vector<std::string> &) override { lacks("multi_get"); }
    void multi_set(const std::vector<std::string> &, const std::vector<std::vector<char>> &) override {
        lacks("multi_set");
    }
    void append(const std::string &, const std::vector<char> &) override { lacks("append"); }
    int64_t add(const std::string &, int64_t) override { lacks("add"); }

    /* Programs of before GLOO_SHARED_STORE give connectFullMesh the store itself, which outlives the call. */
    operator std::shared_ptr<Store>() { return {std::shared_ptr<void>(), this}; }

  private:
    [[noreturn]] static void lacks(const char *what) {
        GLOO_THROW_INVALID_OPERATION_EXCEPTION("this store doesn't support ", what);
    }
};

} // namespace rendezvous
} // namespace over_unisono
} // namespace gloo
