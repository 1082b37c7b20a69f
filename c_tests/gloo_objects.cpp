// C++17, gloo's headers: the collectives that are objects, on ranks that are threads.

#include <algorithm>
#include <atomic>
#include <complex>
#include <cstring>

#include <gloo/allgather_ring.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_local.h>
#include <gloo/allreduce_ring.h>
#include <gloo/allreduce_ring_chunked.h>
#include <gloo/barrier_all_to_all.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/pairwise_exchange.h>
#include <gloo/reduce_scatter.h>

#include "gloo_threads.h"
#include "gloo_values.h"

namespace {

using gloo::ReductionFunction;

/* Of the threads of a test, those that may be asked to combine. */
thread_local bool may_combine = false;
std::atomic<int> combined_elsewhere{0};

/* As gloo has them: plain functions, x[i] = x[i] ∘ y[i]. */
void compose_all(Map *x, const Map *y, std::size_t n) {
    combined_elsewhere += !may_combine;
    for (std::size_t i = 0; i < n; i++) {
        x[i] = compose(x[i], y[i]);
    }
}

void add_floats(float *x, const float *y, std::size_t n) {
    combined_elsewhere += !may_combine;
    for (std::size_t i = 0; i < n; i++) {
        x[i] += y[i];
    }
}

const ReductionFunction<Map> kComposition(gloo::CUSTOM, compose_all);
const ReductionFunction<float> kOwnSum(gloo::CUSTOM, add_floats);

/* As many buffers of so many elements, and their addresses. */
template <class T> struct Buffers {
    Buffers(std::size_t number, int count) : memory(number, std::vector<T>(static_cast<std::size_t>(count))) {
        for (auto &buffer : memory) {
            pointers.push_back(buffer.data());
        }
    }

    void mark_all(int rank, int round = 0) {
        for (std::size_t which = 0; which < memory.size(); which++) {
            const auto source = marks<T>(rank, static_cast<int>(which), memory[which].size(), round);
            std::copy(source.begin(), source.end(), memory[which].begin());
        }
    }

    bool all_are(const std::vector<T> &expected) const {
        return std::all_of(memory.begin(), memory.end(), [&](const auto &buffer) { return buffer == expected; });
    }

    std::vector<std::vector<T>> memory;
    std::vector<T *> pointers;
};

/* Where there is nobody to be connected with, objects need no connection. */
void on_each_group(const Body &body) {
    body(std::make_shared<gloo::rendezvous::Context>(0, 1));
    on_each_size(body);
}

// ---- the allreduces

template <template <class> class Allreduce> void check_allreduce(const GlooContext &context) {
    for (const int count : {0, 1, 7, kLong}) {
        for (const std::size_t number : {1, 2, 3}) {
            Buffers<uint32_t> buffers(number, count);
            Allreduce<uint32_t> algorithm(context, buffers.pointers, count);
            for (int round = 0; round < 2; round++) {
                buffers.mark_all(context->rank, round);
                algorithm.run();
                CHECK(buffers.all_are(sum_of_marks(everyone(context->size, number), buffers.memory[0].size(), round)));
            }
        }
    }
    may_combine = true;
    for (const int count : {0, 1, 3, 1009, 60001}) {
        for (const std::size_t number : {1, 3}) {
            Buffers<Map> buffers(number, count);
            const auto expected = composition_of_marks(everyone(context->size, number), buffers.memory[0].size());
            Allreduce<Map> algorithm(context, buffers.pointers, count, &kComposition);
            for (int round = 0; round < 2; round++) {
                buffers.mark_all(context->rank);
                algorithm.run();
                CHECK(buffers.all_are(expected));
            }
        }
    }
    CHECK_EQ(combined_elsewhere, 0);
}

template <template <class> class Allreduce> void allreduces() { on_each_group(check_allreduce<Allreduce>); }

/* Each rank has as many buffers as it will. */
void different_numbers_of_buffers() {
    as_threads(3, [](const GlooContext &context) {
        const int count = 20001;
        Buffers<uint32_t> buffers(static_cast<std::size_t>(context->rank) + 1, count);
        buffers.mark_all(context->rank);
        gloo::AllreduceHalvingDoubling<uint32_t>(context, buffers.pointers, count).run();
        CHECK(buffers.all_are(sum_of_marks({1, 2, 3}, count)));
    });
}

/* Ranks have nothing to do with each other: one alone makes them, and what all make afterwards meets. */
void local() {
    as_threads(2, [](const GlooContext &context) {
        may_combine = true;
        const std::vector<int> counts{0, 1, 1001};
        for (const int count : context->rank == 0 ? counts : std::vector<int>()) {
            for (const std::size_t number : {1, 3}) {
                Buffers<uint32_t> numbers(number, count);
                numbers.mark_all(0);
                gloo::AllreduceLocal<uint32_t>(context, numbers.pointers, count).run();
                CHECK(numbers.all_are(sum_of_marks({number}, numbers.memory[0].size())));
                Buffers<Map> maps(number, count);
                maps.mark_all(0);
                gloo::AllreduceLocal<Map>(context, maps.pointers, count, &kComposition).run();
                CHECK(maps.all_are(composition_of_marks({number}, maps.memory[0].size())));
            }
        }
        CHECK_EQ(combined_elsewhere, 0);
        Buffers<uint32_t> of_all(1, 10);
        of_all.mark_all(context->rank);
        gloo::AllreduceRing<uint32_t>(context, of_all.pointers, 10).run();
        CHECK(of_all.all_are(sum_of_marks({1, 1}, 10)));
    });
}

template <class Algorithm, class... More>
void check_bits(const GlooContext &context, int count, const std::vector<float> &expected, const More &...more) {
    auto memory = scattered_values(context->rank, static_cast<std::size_t>(count));
    Algorithm(context, std::vector<float *>{memory.data()}, count, more...).run();
    CHECK(expected.empty() || std::memcmp(memory.data(), expected.data(), expected.size() * sizeof(float)) == 0);
}

void same_bits_in_every_way() {
    for (int size = 2; size <= 5; size++) {
        const auto expected = balanced_sums(size, 1000);
        as_threads(size, [&](const GlooContext &context) {
            may_combine = true;
            for (const int count : {1000, 100000}) {
                check_bits<gloo::AllreduceRing<float>>(context, count, expected);
                check_bits<gloo::AllreduceRingChunked<float>>(context, count, expected);
                check_bits<gloo::AllreduceHalvingDoubling<float>>(context, count, expected);
                check_bits<gloo::AllreduceBcube<float>>(context, count, expected);
                check_bits<gloo::AllreduceRing<float>>(context, count, expected, &kOwnSum);
                // The first of the parts of a reduce-scatter.
                std::vector<int> shares(static_cast<std::size_t>(context->size));
                shares[0] = 1000;
                check_bits<gloo::ReduceScatterHalvingDoubling<float>>(
                    context, count, context->rank == 0 ? expected : std::vector<float>(), shares);
            }
        });
    }
}

// ---- functions of the program's own

/* No sum: one more for each time that it is called. */
void add_one_more(uint32_t *x, const uint32_t *y, std::size_t n) {
    combined_elsewhere += !may_combine;
    for (std::size_t i = 0; i < n; i++) {
        x[i] += y[i] + 1;
    }
}

/* A function is the program's own whatever type it says that it has. */
void own_functions_by_the_name_of_gloos() {
    as_threads(3, [](const GlooContext &context) {
        may_combine = true;
        for (const auto type : {gloo::SUM, gloo::PRODUCT, gloo::MIN, gloo::MAX}) {
            const ReductionFunction<uint32_t> function(type, add_one_more);
            CHECK_EQ(function.type(), type);
            const auto check = [&](auto algorithm, std::size_t number, const std::vector<int> &shares) {
                constexpr int count = 1009;
                Buffers<uint32_t> buffers(number, count);
                buffers.mark_all(context->rank);
                algorithm(buffers, count);
                auto expected = sum_of_marks(everyone(3, number), count);
                for (auto &value : expected) {
                    value += static_cast<uint32_t>(3 * number - 1);
                }
                for (auto &memory : buffers.memory) {
                    memory.resize(static_cast<std::size_t>(shares[0]));
                    CHECK(std::equal(memory.begin(), memory.end(), expected.begin() + shares[1]));
                }
            };
            for (const std::size_t number : {1, 2}) {
                const auto whole = {1009, 0};
                check([&](auto &b, int n) { gloo::AllreduceRing<uint32_t>(context, b.pointers, n, &function).run(); },
                      number, whole);
                check([&](auto &b, int n) { gloo::AllreduceBcube<uint32_t>(context, b.pointers, n, &function).run(); },
                      number, whole);
                check([&](auto &b,
                          int n) { gloo::AllreduceHalvingDoubling<uint32_t>(context, b.pointers, n, &function).run(); },
                      number, whole);
                const std::vector<int> shares{9, 600, 400};
                const std::vector<int> mine{shares[static_cast<std::size_t>(context->rank)],
                                            std::vector<int>{0, 9, 609}[static_cast<std::size_t>(context->rank)]};
                check(
                    [&](auto &b, int n) {
                        gloo::ReduceScatterHalvingDoubling<uint32_t>(context, b.pointers, n, shares, &function).run();
                    },
                    number, mine);
            }
        }
        CHECK_EQ(combined_elsewhere, 0);
    });
}

/* Elements that cannot be compared, so that gloo has no least and no greatest of them. */
void own_function_of_complex_numbers() {
    using Complex = std::complex<double>;
    on_each_group([](const GlooContext &context) {
        const ReductionFunction<Complex> product(gloo::CUSTOM, [](Complex *x, const Complex *y, std::size_t n) {
            std::transform(x, x + n, y, x, std::multiplies<Complex>());
        });
        const auto value = [](int rank, std::size_t i) { return Complex(rank + 1, static_cast<double>(i % 5)); };
        for (const int count : {1, 101, 20001}) {
            std::vector<Complex> mine, expected(static_cast<std::size_t>(count), Complex(1, 0));
            for (std::size_t i = 0; i < expected.size(); i++) {
                mine.push_back(value(context->rank, i));
                for (int rank = 0; rank < context->size; rank++) {
                    expected[i] *= value(rank, i);
                }
            }
            auto ring = mine, halving = mine, scattered_too = mine, local_too = mine;
            gloo::AllreduceRing<Complex>(context, {ring.data()}, count, &product).run();
            CHECK(ring == expected);
            gloo::AllreduceHalvingDoubling<Complex>(context, {halving.data()}, count, &product).run();
            CHECK(halving == expected);
            gloo::AllreduceLocal<Complex>(context, {local_too.data()}, count, &product).run();
            CHECK(local_too == mine);
            std::vector<int> shares(static_cast<std::size_t>(context->size));
            shares.back() = count;
            gloo::ReduceScatterHalvingDoubling<Complex>(context, {scattered_too.data()}, count, shares, &product).run();
            CHECK(context->rank + 1 < context->size || scattered_too == expected);
        }
    });
}

void refuse(Map *, const Map *, std::size_t) { throw std::out_of_range("not to be combined"); }

/* Over one rank's own buffers: the others do not wait for it. */
void own_function_that_throws() {
    const ReductionFunction<Map> refusal(gloo::CUSTOM, refuse);
    const auto check = [](const auto &make) {
        as_threads(2, [&](const GlooContext &context) {
            Buffers<Map> buffers(static_cast<std::size_t>(context->rank) + 1, 10);
            auto algorithm = make(context, buffers.pointers);
            gloo::BarrierAllToOne all(context);
            if (context->rank == 0) {
                // Which may come as early as in the barrier.
                CHECK_THROWS(gloo::IoException, "has thrown: not to be combined", (all.run(), algorithm.run()));
            } else {
                all.run();
                CHECK_THROWS(std::out_of_range, "not to be combined", algorithm.run());
            }
        });
    };
    check([&](const GlooContext &context, const std::vector<Map *> &pointers) {
        return gloo::AllreduceRing<Map>(context, pointers, 10, &refusal);
    });
    check([&](const GlooContext &context, const std::vector<Map *> &pointers) {
        return gloo::ReduceScatterHalvingDoubling<Map>(context, pointers, 10, {4, 6}, &refusal);
    });
}

// ---- allgather, broadcast, reduce-scatter, barriers

void allgather_ring() {
    on_each_group([](const GlooContext &context) {
        for (const int count : {0, 1, 7, 100001}) {
            for (const std::size_t number : {1, 3}) {
                Buffers<uint32_t> in(number, count);
                const std::vector<const uint32_t *> pointers(in.pointers.begin(), in.pointers.end());
                std::vector<uint32_t> out(number * static_cast<std::size_t>(count * context->size));
                gloo::AllgatherRing<uint32_t> algorithm(context, pointers, out.data(), count);
                for (int round = 0; round < 2; round++) {
                    in.mark_all(context->rank, round);
                    const auto given = in.memory;
                    std::fill(out.begin(), out.end(), 0xdead);
                    algorithm.run();
                    std::vector<uint32_t> expected;
                    for (int rank = 0; rank < context->size; rank++) {
                        Buffers<uint32_t> theirs(number, count);
                        theirs.mark_all(rank, round);
                        for (const auto &memory : theirs.memory) {
                            expected.insert(expected.end(), memory.begin(), memory.end());
                        }
                    }
                    CHECK(in.memory == given);
                    CHECK(out == expected);
                }
            }
        }
        // The input is where the output has it.
        std::vector<Map> out(static_cast<std::size_t>(context->size), Map{0, 0, 0});
        Map *const mine = out.data() + context->rank;
        *mine = mark<Map>(context->rank, 0, 0);
        gloo::AllgatherRing<Map>(context, {mine}, out.data(), 1).run();
        for (int rank = 0; rank < context->size; rank++) {
            CHECK(out[static_cast<std::size_t>(rank)] == mark<Map>(rank, 0, 0));
        }
    });
}

void broadcast_one_to_all() {
    on_each_group([](const GlooContext &context) {
        for (const int count : {0, 1, 7, 100001}) {
            for (int root = 0; root < context->size; root++) {
                for (const int rootPointer : {0, 2}) {
                    Buffers<uint32_t> buffers(3, count);
                    gloo::BroadcastOneToAll<uint32_t> algorithm(context, buffers.pointers,
                                                                static_cast<std::size_t>(count), root, rootPointer);
                    for (int round = 0; round < 2; round++) {
                        buffers.mark_all(context->rank, round);
                        Buffers<uint32_t> roots(3, count);
                        roots.mark_all(root, round);
                        algorithm.run();
                        CHECK(buffers.all_are(roots.memory[static_cast<std::size_t>(rootPointer)]));
                    }
                }
            }
        }
        // Elements of a class, one buffer, and the root that nobody names.
        std::vector<Map> memory{mark<Map>(context->rank, 0, 0), mark<Map>(context->rank, 0, 1)};
        gloo::BroadcastOneToAll<Map>(context, {memory.data()}, 2).run();
        CHECK(memory[0] == mark<Map>(0, 0, 0));
        CHECK(memory[1] == mark<Map>(0, 0, 1));
    });
}

/* The parts of the result that the ranks get, of a whole that may be longer. */
std::vector<int> shares_of(int pattern, int size) {
    std::vector<int> shares;
    for (int rank = 0; rank < size; rank++) {
        const int patterns[] = {0, 1, (size - rank) * 3, rank % 2 * 11, rank == size - 1 ? 9 : 0, 50001 + rank};
        shares.push_back(patterns[pattern]);
    }
    return shares;
}

template <class T> void check_reduce_scatter(const GlooContext &context, const ReductionFunction<T> *function,
                                             const std::function<std::vector<T>(std::size_t, std::size_t)> &reduced) {
    for (int pattern = 0; pattern < 6; pattern++) {
        const auto shares = shares_of(pattern, context->size);
        int before = 0, total = 0;
        for (int rank = 0; rank < context->size; rank++) {
            before = rank == context->rank ? total : before;
            total += shares[static_cast<std::size_t>(rank)];
        }
        for (const int beyond : {0, 4}) {
            for (const std::size_t number : {1, 2}) {
                Buffers<T> buffers(number, total + beyond);
                gloo::ReduceScatterHalvingDoubling<T> algorithm(context, buffers.pointers, total + beyond, shares,
                                                                function);
                for (int round = 0; round < 2; round++) {
                    buffers.mark_all(context->rank);
                    algorithm.run();
                    const auto expected = reduced(number, buffers.memory[0].size());
                    const auto mine = static_cast<std::size_t>(shares[static_cast<std::size_t>(context->rank)]);
                    for (const auto &memory : buffers.memory) {
                        CHECK(std::equal(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(mine),
                                         expected.begin() + before));
                    }
                }
            }
        }
    }
}

void reduce_scatter() {
    on_each_group([](const GlooContext &context) {
        may_combine = true;
        const auto all = [&](std::size_t number) { return everyone(context->size, number); };
        check_reduce_scatter<uint32_t>(
            context, ReductionFunction<uint32_t>::sum,
            [&](std::size_t number, std::size_t count) { return sum_of_marks(all(number), count); });
        check_reduce_scatter<Map>(context, &kComposition, [&](std::size_t number, std::size_t count) {
            return composition_of_marks(all(number), count);
        });
        CHECK_EQ(combined_elsewhere, 0);
    });
}

/* As in gloo, what a rank by itself has no need of is not looked at. */
void what_a_rank_by_itself_is_told() {
    as_threads(1, [](const GlooContext &context) {
        for (const std::vector<int> &shares : {std::vector<int>{}, {2}, {11}, {-1}, {1, 2}}) {
            Buffers<uint32_t> buffers(2, 10);
            buffers.mark_all(0);
            gloo::ReduceScatterHalvingDoubling<uint32_t>(context, buffers.pointers, 10, shares).run();
            CHECK(buffers.all_are(sum_of_marks({2}, 10)));
        }
        gloo::AllreduceLocal<uint32_t>(context, {}, 10).run();
    });
}

template <class Barrier> void barriers() {
    Barrier(std::make_shared<gloo::rendezvous::Context>(0, 1)).run();
    for (const int size : {1, 2, 5}) {
        check_barrier(size, [](const GlooContext &context) {
            const auto barrier = std::make_shared<Barrier>(context);
            return [object = std::shared_ptr<gloo::Barrier>(barrier)](int) { object->run(); };
        });
    }
}

void pairwise_exchange() {
    for (const auto &[size, destinations] : {std::pair(2, 1), std::pair(4, 1), std::pair(4, 2)}) {
        const int number = destinations;
        as_threads(size, [&](const GlooContext &context) {
            for (const int bytes : {number, 500, kLong}) {
                gloo::PairwiseExchange algorithm(context, bytes, number);
                for (int round = 0; round < 10; round++) {
                    algorithm.run();
                }
            }
        });
    }
}

/* What several buffers are combined in does not come from the system for each run. */
void runs_in_memory_that_is_kept() {
    as_threads(2, [](const GlooContext &context) {
        std::vector<float> one(kMapped, 1), two(kMapped, 1);
        const std::vector<float *> pointers{one.data(), two.data()};
        const int count = static_cast<int>(kMapped);
        gloo::AllreduceRingChunked<float> ring(context, pointers, count);
        check_pages_are_kept([&] { ring.run(); });
        gloo::AllreduceLocal<float> alone(context, pointers, count);
        check_pages_are_kept([&] { alone.run(); });
        gloo::ReduceScatterHalvingDoubling<float> halving(context, pointers, count, {count / 2, count / 2});
        check_pages_are_kept([&] { halving.run(); });
    });
}

} // namespace

int main() {
    return run_tests({
        {"AllreduceRing", allreduces<gloo::AllreduceRing>},
        {"AllreduceRingChunked", allreduces<gloo::AllreduceRingChunked>},
        {"AllreduceHalvingDoubling", allreduces<gloo::AllreduceHalvingDoubling>},
        {"AllreduceBcube", allreduces<gloo::AllreduceBcube>},
        {"AllreduceLocal", local},
        {"different numbers of buffers", different_numbers_of_buffers},
        {"several buffers in memory that is kept", runs_in_memory_that_is_kept},
        {"the same bits in every way", same_bits_in_every_way},
        {"functions of the program's own by the name of gloo's", own_functions_by_the_name_of_gloos},
        {"a function of the program's own over complex numbers", own_function_of_complex_numbers},
        {"a function that throws", own_function_that_throws},
        {"AllgatherRing", allgather_ring},
        {"BroadcastOneToAll", broadcast_one_to_all},
        {"ReduceScatterHalvingDoubling", reduce_scatter},
        {"what a rank by itself is told", what_a_rank_by_itself_is_told},
        {"BarrierAllToAll", barriers<gloo::BarrierAllToAll>},
        {"BarrierAllToOne", barriers<gloo::BarrierAllToOne>},
        {"PairwiseExchange", pairwise_exchange},
    });
}
