#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gloo/rendezvous/store.h"

namespace gloo {
inline namespace over_unisono {
namespace rendezvous {

/* The keys of another store that begin with a prefix, so that several contexts meet in one store. */
class PrefixStore : public Store {
  public:
    PrefixStore(const std::string &prefix, std::shared_ptr<Store> store) : prefix_(prefix), store_(std::move(store)) {}
    /* A store that outlives this one. */
    PrefixStore(const std::string &prefix, Store &store) : PrefixStore(prefix, {std::shared_ptr<void>(), &store}) {}

    void set(const std::string &key, const std::vector<char> &data) override { store_->set(joinKey(key), data); }
    std::vector<char> get(const std::string &key) override { return store_->get(joinKey(key)); }
    std::vector<char> wait_get(const std::string &key, const std::chrono::milliseconds &timeout) override {
        return store_->wait_get(joinKey(key), timeout);
    }
    void wait(const std::vector<std::string> &keys) override { wait(keys, kDefaultTimeout); }
    void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override {
        store_->wait(joinKeys(keys), timeout);
    }

    bool has_v2_support() override { return store_->has_v2_support(); }
    std::vector<std::vector<char>> multi_get(const std::vector<std::string> &keys) override {
        return store_->multi_get(joinKeys(keys));
    }
    void multi_set(const std::vector<std::string> &keys, const std::vector<std::vector<char>> &values) override {
        store_->multi_set(joinKeys(keys), values);
    }
    void append(const std::string &key, const std::vector<char> &data) override { store_->append(joinKey(key), data); }
    int64_t add(const std::string &key, int64_t value) override { return store_->add(joinKey(key), value); }

  protected:
    /* What derived classes use, by gloo's names. */
    std::string joinKey(const std::string &key) const { return prefix_ + "/" + key; }

    const std::string prefix_;
    const std::shared_ptr<Store> store_;

  private:
    std::vector<std::string> joinKeys(const std::vector<std::string> &keys) const {
        std::vector<std::string> all;
        for (const auto &key : keys) {
            all.push_back(joinKey(key));
        }
        return all;
    }
};

} // namespace rendezvous
} // namespace over_unisono
} // namespace gloo
