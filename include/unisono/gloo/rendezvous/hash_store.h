#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "gloo/detail/patience.h"
#include "gloo/rendezvous/store.h"

namespace gloo {
inline namespace over_unisono {
namespace rendezvous {

/* For ranks that are threads of one process. */
class HashStore : public Store {
  public:
    /* A key is set once: contexts that meet in one store have prefixes. */
    void set(const std::string &key, const std::vector<char> &data) override {
        change([&] { GLOO_ENFORCE(map_.emplace(key, data).second, "the key '", key, "' has been set before"); });
    }

    /* What is not there is empty: this does not wait. */
    std::vector<char> get(const std::string &key) override {
        std::lock_guard<std::mutex> hold(m_);
        const auto found = map_.find(key);
        return found == map_.end() ? std::vector<char>() : found->second;
    }

    void wait(const std::vector<std::string> &keys) override { wait(keys, kDefaultTimeout); }
    void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override {
        std::unique_lock<std::mutex> hold(m_);
        await(hold, keys, timeout);
    }

    bool has_v2_support() override { return true; }
    std::vector<std::vector<char>> multi_get(const std::vector<std::string> &keys) override {
        std::unique_lock<std::mutex> hold(m_);
        await(hold, keys, kDefaultTimeout);
        std::vector<std::vector<char>> found;
        for (const auto &key : keys) {
            found.push_back(map_.at(key));
        }
        return found;
    }
    void multi_set(const std::vector<std::string> &keys, const std::vector<std::vector<char>> &values) override {
        GLOO_ENFORCE_EQ(keys.size(), values.size(), "a value for each key");
        change([&] {
            for (std::size_t i = 0; i < keys.size(); i++) {
                map_[keys[i]] = values[i];
            }
        });
    }
    void append(const std::string &key, const std::vector<char> &data) override {
        change([&] {
            auto &value = map_[key];
            value.insert(value.end(), data.begin(), data.end());
        });
    }
    /* The sum is kept as decimal digits. */
    int64_t add(const std::string &key, int64_t amount) override {
        int64_t sum = amount;
        change([&] {
            auto &value = map_[key];
            sum += value.empty() ? 0 : std::stoll(std::string(value.begin(), value.end()));
            const std::string digits = std::to_string(sum);
            value.assign(digits.begin(), digits.end());
        });
        return sum;
    }

  protected:
    /* What derived classes use, by gloo's names. */
    std::mutex m_;
    std::condition_variable cv_;
    std::unordered_map<std::string, std::vector<char>> map_;

  private:
    template <class Change> void change(const Change &make) {
        std::lock_guard<std::mutex> hold(m_);
        make();
        cv_.notify_all();
    }

    void await(std::unique_lock<std::mutex> &hold, const std::vector<std::string> &keys,
               std::chrono::milliseconds timeout) {
        const auto there = [&] {
            for (const auto &key : keys) {
                if (map_.count(key) == 0) {
                    return false;
                }
            }
            return true;
        };
        if (!cv_.wait_until(hold, detail::Patience(timeout).end(), there)) {
            GLOO_THROW_IO_EXCEPTION("Timed out waiting ", timeout.count(), "ms for key(s): ", MakeString(keys));
        }
    }
};

} // namespace rendezvous
} // namespace over_unisono
} // namespace gloo
