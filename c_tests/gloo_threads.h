/*
 * What the tests of the gloo face do in several threads, and for how long: bodies that run at once, groups of all
 * sizes, calls that must end in time, barriers.
 */
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <future>

#include "gloo_harness.h"

inline void pause_for(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

/* How long a call took that must end within so many seconds. */
template <class Call> double within(double seconds, const Call &call) {
    const double begin = seconds_now();
    call();
    const double took = seconds_now() - begin;
    if (took > seconds) {
        throw std::logic_error(gloo::MakeString("took ", took, " s, not ", seconds, " s at most"));
    }
    return took;
}

/* Whether a call of another thread returns within a moment. */
template <class Result> bool ended(const std::future<Result> &call, int ms) {
    return call.wait_for(std::chrono::milliseconds(ms)) == std::future_status::ready;
}

/* One thread per body, of which each is another rank's or does another thing; throws the first failure. */
inline void at_once(const std::vector<std::function<void()>> &bodies) {
    std::vector<std::future<void>> running;
    for (const auto &body : bodies) {
        running.push_back(std::async(std::launch::async, body));
    }
    std::exception_ptr failure;
    for (auto &one : running) {
        try {
            one.get();
        } catch (...) {
            failure = failure ? failure : std::current_exception();
        }
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

/* The body, in so many threads, each with its number. */
inline void at_once(int count, const std::function<void(int)> &body) {
    std::vector<std::function<void()>> bodies;
    for (int i = 0; i < count; i++) {
        bodies.push_back([&body, i] { body(i); });
    }
    at_once(bodies);
}

/* At once, but every second body begins late, and on every second rank it is the others: each waits long for those that
   have not begun elsewhere. */
inline void staggered(int rank, std::vector<std::function<void()>> bodies) {
    for (std::size_t i = static_cast<std::size_t>(rank + 1) % 2; i < bodies.size(); i += 2) {
        bodies[i] = [body = bodies[i]] {
            pause_for(20);
            body();
        };
    }
    at_once(bodies);
}

inline void on_each_size(const Body &body) {
    for (int size = 1; size <= 5; size++) {
        as_threads(size, body);
    }
}

/* Nobody leaves a round of a barrier before all have come to it. What is made on each rank runs one round. */
inline void check_barrier(int size, const std::function<std::function<void(int round)>(const GlooContext &)> &make) {
    std::atomic<int> begun{0};
    as_threads(size, [&](const GlooContext &context) {
        const auto barrier = make(context);
        for (int round = 1; round <= 20; round++) {
            if (context->rank == round % size) {
                pause_for(2);
            }
            begun++;
            barrier(round);
            CHECK(begun >= size * round);
        }
    });
}
