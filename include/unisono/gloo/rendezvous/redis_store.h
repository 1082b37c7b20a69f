/* A store in a Redis server. It needs hiredis: its header, and -lhiredis. */
#pragma once

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <hiredis/hiredis.h>

#include "gloo/config.h"
#include "gloo/detail/patience.h"
#include "gloo/rendezvous/store.h"

namespace gloo {
inline namespace over_unisono {
namespace rendezvous {

/* A key that has been set stays as it is: a job has a prefix of its own. A store is used by one thread at a time. */
class RedisStore : public Store {
  public:
    explicit RedisStore(const std::string &host, int port = 6379) {
        const timeval patience = {2, 0};
        redis_ = redisConnectWithTimeout(host.c_str(), port, patience);
        GLOO_ENFORCE(redis_ != nullptr, "no memory for a connection to Redis");
        if (redis_->err != 0) {
            const std::string cause = redis_->errstr;
            redisFree(redis_);
            GLOO_THROW_IO_EXCEPTION("cannot connect to Redis at ", host, ":", port, ": ", cause);
        }
    }
    ~RedisStore() override { redisFree(redis_); }
    RedisStore(const RedisStore &) = delete;
    RedisStore &operator=(const RedisStore &) = delete;

    void set(const std::string &key, const std::vector<char> &data) override {
        const Reply reply = command({"SETNX", key, {data.begin(), data.end()}}, REDIS_REPLY_INTEGER);
        GLOO_ENFORCE(reply->integer == 1, "the key '", key, "' has been set before");
    }

    std::vector<char> get(const std::string &key) override {
        wait({key});
        const Reply reply = command({"GET", key}, REDIS_REPLY_STRING);
        return {reply->str, reply->str + reply->len};
    }

    bool check(const std::vector<std::string> &keys) { return check(keys, kPatience); }

    void wait(const std::vector<std::string> &keys) override { wait(keys, kDefaultTimeout); }
    /* Redis has no wait for a key that serves this: it is asked every few milliseconds. */
    void wait(const std::vector<std::string> &keys, const std::chrono::milliseconds &timeout) override {
        const detail::Patience patience(timeout);
        while (!check(keys, std::clamp(patience.left(), kAnswer, kPatience))) {
            if (patience.isOver()) {
                GLOO_THROW_IO_EXCEPTION("Timed out waiting ", timeout.count(), "ms for key(s): ", MakeString(keys));
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
    }

  protected:
    redisContext *redis_;

  private:
    /* How long the server may take for an answer. One that has taken longer is not asked again: its answer would be
       taken for the next command's. */
    static constexpr std::chrono::milliseconds kPatience{10000};
    /* However little of a wait is left, a server that is there gets as long: a wait that ends leaves the store as it
       was. */
    static constexpr std::chrono::milliseconds kAnswer{1000};

    bool check(const std::vector<std::string> &keys, std::chrono::milliseconds patience) {
        std::vector<std::string> words = {"EXISTS"};
        words.insert(words.end(), keys.begin(), keys.end());
        return command(words, REDIS_REPLY_INTEGER, patience)->integer == static_cast<long long>(keys.size());
    }

    struct Free {
        void operator()(redisReply *reply) const { freeReplyObject(reply); }
    };
    using Reply = std::unique_ptr<redisReply, Free>;

    Reply command(const std::vector<std::string> &words, int expected, std::chrono::milliseconds patience = kPatience) {
        const long long limit = patience.count();
        const timeval end = {static_cast<time_t>(limit / 1000), static_cast<suseconds_t>(limit % 1000 * 1000)};
        if (redis_->err == 0 && redisSetTimeout(redis_, end) != REDIS_OK) {
            GLOO_THROW_IO_EXCEPTION("Redis: ", words[0], ": ", redis_->errstr);
        }
        std::vector<const char *> texts;
        std::vector<std::size_t> lengths;
        for (const auto &word : words) {
            texts.push_back(word.data());
            lengths.push_back(word.size());
        }
        Reply reply(static_cast<redisReply *>(
            redisCommandArgv(redis_, static_cast<int>(words.size()), texts.data(), lengths.data())));
        if (!reply) {
            if (redis_->err == REDIS_ERR_IO && errno == EAGAIN) {
                GLOO_THROW_IO_EXCEPTION("Timed out waiting ", limit, "ms for Redis to answer ", words[0]);
            }
            GLOO_THROW_IO_EXCEPTION("Redis: ", words[0], ": ", redis_->errstr);
        }
        if (reply->type == REDIS_REPLY_ERROR) {
            GLOO_THROW_IO_EXCEPTION("Redis: ", words[0], ": ", reply->str);
        }
        GLOO_ENFORCE_EQ(reply->type, expected, "Redis: ", words[0]);
        return reply;
    }
};

} // namespace rendezvous
} // namespace over_unisono
} // namespace gloo
