// C++17: ranks as threads of one process, meeting in a hash store and by a unique id; handles in unique_ptr.

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <unisono.h>

extern "C" unisono_status_t sum_in_another_unit(const unisono_context_t *ctx, float *x, uint64_t count);

namespace {

void check(unisono_status_t status) {
    if (status != UNISONO_OK) {
        throw std::runtime_error(std::string(unisono_status_name(status)) + ": " + unisono_last_error());
    }
}

template <auto destroy> struct Destroy {
    template <class T> void operator()(T *handle) const { destroy(handle); }
};
using Context = std::unique_ptr<unisono_context_t, Destroy<unisono_context_destroy>>;
using Store = std::unique_ptr<unisono_store_t, Destroy<unisono_store_destroy>>;
using Work = std::unique_ptr<unisono_work_t, Destroy<unisono_work_destroy>>;

Context create(const unisono_context_options_t &options) {
    unisono_context_t *ctx = nullptr;
    check(unisono_context_create(&options, &ctx));
    return Context(ctx);
}

void body(const unisono_context_t *ctx) {
    const auto rank = unisono_context_rank(ctx), size = unisono_context_size(ctx);
    std::vector<float> x(10000, static_cast<float>(rank + 1));
    check(sum_in_another_unit(ctx, x.data(), x.size()));
    const float sum = static_cast<float>(size * (size + 1) / 2);
    for (float value : x) {
        if (value != sum) {
            throw std::runtime_error("a wrong sum");
        }
    }
    unisono_call_t call = UNISONO_CALL_INIT;
    call.tag = 3;
    call.timeout_ms = 30000;
    std::vector<float> all(x.size() * size);
    unisono_work_t *started = nullptr;
    check(unisono_allgather(ctx, x.data(), all.data(), x.size(), UNISONO_FLOAT32, &call, &started));
    Work work(started);
    check(unisono_work_wait(work.get()));
    if (all.front() != sum || all.back() != sum) {
        throw std::runtime_error("a wrong block");
    }
}

void run(uint32_t size, const std::function<void(unisono_context_options_t &)> &meet) {
    std::atomic<int> failed{0};
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < size; rank++) {
        threads.emplace_back([&, rank] {
            try {
                unisono_context_options_t options = UNISONO_CONTEXT_OPTIONS_INIT;
                options.rank = rank;
                options.rank_count = size;
                options.timeout_ms = 60000;
                meet(options);
                body(create(options).get());
            } catch (const std::exception &error) {
                std::fprintf(stderr, "rank %u: %s\n", rank, error.what());
                failed++;
            }
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
    if (failed != 0) {
        std::exit(1);
    }
}

}  // namespace

int main() {
    try {
        unisono_store_t *made = nullptr;
        check(unisono_store_create_hash(&made));
        Store store(made);
        run(3, [&](unisono_context_options_t &options) { options.store = store.get(); });
        unisono_unique_id_t id;
        check(unisono_unique_id_create(&id));
        run(3, [&](unisono_context_options_t &options) { options.id = &id; });
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    return 0;
}
