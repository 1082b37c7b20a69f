#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/detail/native.h"
#include "gloo/detail/patience.h"
#include "gloo/rendezvous/store.h"

namespace gloo {
inline namespace over_unisono {
namespace rendezvous {

/* A directory that all ranks reach: unisono's file store. It is made if it is missing, and is not removed. */
class FileStore : public Store {
  public:
    explicit FileStore(const std::string &path) {
        unisono_store_t *store = nullptr;
        const unisono_status_t status = unisono_store_create_file(path.c_str(), &store);
        GLOO_ENFORCE(status == UNISONO_OK, unisono_last_error());
        store_.reset(store);
    }

    void set(const std::string &key, const std::vector<char> &data) override {
        detail::check(unisono_store_set(store_.get(), key.c_str(), data.data(), data.size()));
        char *file = nullptr;
        detail::check(unisono_store_key_file(store_.get(), key.c_str(), &file));
        const std::unique_ptr<char, detail::Destroy<unisono_free>> owned(file);
        std::lock_guard<std::mutex> hold(mutex_);
        files_.insert(file);
    }

    std::vector<char> get(const std::string &key) override { return read(key, kDefaultTimeout); }

    void wait(const std::vector<std::string> &keys) override { wait(keys, kDefaultTimeout); }
    void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override {
        const detail::Patience patience(timeout);
        for (const auto &key : keys) {
            read(key, patience.left());
        }
    }

    /* The files of the keys that this object has set. Programs remove them when they have connected, so that the same keys
       serve once more. */
    std::vector<std::string> getAllKeyFilePaths() {
        std::lock_guard<std::mutex> hold(mutex_);
        return {files_.begin(), files_.end()};
    }

  private:
    std::vector<char> read(const std::string &key, std::chrono::milliseconds timeout) {
        void *value = nullptr;
        uint64_t bytes = 0;
        detail::check(unisono_store_get(store_.get(), key.c_str(), detail::milliseconds(timeout), &value, &bytes));
        const std::unique_ptr<void, detail::Destroy<unisono_free>> owned(value);
        const char *first = static_cast<const char *>(value);
        return {first, first + bytes};
    }

    std::unique_ptr<unisono_store_t, detail::Destroy<unisono_store_destroy>> store_;
    std::mutex mutex_;
    std::set<std::string> files_;
};

} // namespace rendezvous
} // namespace over_unisono
} // namespace gloo
