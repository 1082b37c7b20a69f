// C++17, gloo's headers: the collectives that are functions and combine: all forms of input and output, the program's
// own functions, the order of combination, operations beside each other.

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include <gloo/broadcast.h>

#include "gloo_inputs.h"
#include "gloo_reductions.h"
#include "gloo_threads.h"
#include "gloo_values.h"

namespace {

// ---- allreduce and reduce in all forms

struct Form {
    std::size_t inputs, outputs;
};

void allreduce_in_form(const GlooContext &context, Form form, std::size_t count, bool buffered, Way way,
                       const std::vector<uint32_t> &expected) {
    std::vector<std::vector<uint32_t>> in(form.inputs), out(form.outputs, std::vector<uint32_t>(count, 0xdead));
    for (std::size_t input = 0; input < in.size(); input++) {
        in[input] = marks<uint32_t>(context->rank, static_cast<int>(input), count);
    }
    const auto given = in;

    gloo::AllreduceOptions options(context);
    options.setAlgorithm(way);
    options.setReduceFunction(gloos<uint32_t>(Op::sum));
    if (in.size() == 1) {
        set_input(options, context, in[0], buffered);
    } else if (in.size() > 1 && buffered) {
        options.setInputs<uint32_t>(make_unbounds(context, in));
    } else if (in.size() > 1) {
        options.setInputs(addresses(in), count);
    }
    if (out.size() == 1) {
        set_output(options, context, out[0], buffered);
    } else if (buffered) {
        options.setOutputs<uint32_t>(make_unbounds(context, out));
    } else {
        auto pointers = addresses(out);
        options.setOutputs(pointers.data(), pointers.size(), count);
    }
    // The options can be used again.
    for (int round = 0; round < 2; round++) {
        for (std::size_t output = 0; output < out.size() && in.empty(); output++) {
            const auto source = marks<uint32_t>(context->rank, static_cast<int>(output), count);
            std::copy(source.begin(), source.end(), out[output].begin());
        }
        gloo::allreduce(options);
        CHECK(in == given);
        for (auto &memory : out) {
            CHECK(memory == expected);
            std::fill(memory.begin(), memory.end(), 1);
        }
    }
}

void allreduce_forms() {
    on_each_size([](const GlooContext &context) {
        for (const Form form : {Form{0, 1}, Form{0, 3}, Form{1, 1}, Form{1, 2}, Form{3, 1}, Form{3, 2}}) {
            const auto inputs = everyone(context->size, form.inputs > 0 ? form.inputs : form.outputs);
            for (const std::size_t count : {0, 1, 7, kLong}) {
                const auto expected = sum_of_marks(inputs, count);
                for (const bool buffered : {false, true}) {
                    for (const auto way : {Way::UNSPECIFIED, Way::RING, Way::BCUBE}) {
                        if (count < kLong || buffered == (way == Way::BCUBE)) {
                            allreduce_in_form(context, form, count, buffered, way, expected);
                        }
                    }
                }
            }
        }
    });
}

/* Each rank has as many inputs and outputs as it will. */
void allreduce_in_different_forms() {
    as_threads(4, [](const GlooContext &context) {
        const Form forms[] = {{0, 1}, {3, 2}, {1, 1}, {0, 2}};
        for (const std::size_t count : {7, 20001}) {
            allreduce_in_form(context, forms[context->rank], count, context->rank % 2 == 1, Way::UNSPECIFIED,
                              sum_of_marks({1, 3, 1, 2}, count));
        }
    });
}

/* Inputs stay as they are, also where an output is one of them. */
void allreduce_onto_an_input() {
    on_each_size([](const GlooContext &context) {
        for (const int count : {1, 7, kLong}) {
            const auto expected = sum_of_marks(everyone(context->size, 3), static_cast<std::size_t>(count));
            for (std::size_t onto = 0; onto < 3; onto++) {
                std::vector<std::vector<uint32_t>> in;
                for (int input = 0; input < 3; input++) {
                    in.push_back(marks<uint32_t>(context->rank, input, static_cast<std::size_t>(count)));
                }
                auto due = in;
                due[onto] = expected;
                gloo::AllreduceOptions options(context);
                options.setInputs(addresses(in), static_cast<std::size_t>(count));
                options.setOutput(in[onto].data(), in[onto].size());
                options.setReduceFunction(gloos<uint32_t>(Op::sum));
                gloo::allreduce(options);
                CHECK(in == due);
            }
        }
    });
}

/* What several inputs are combined in does not come from the system for each call. */
void allreduce_in_memory_that_is_kept() {
    as_threads(2, [](const GlooContext &context) {
        std::vector<std::vector<float>> in(3, std::vector<float>(kMapped, 1));
        std::vector<float> out(kMapped);
        check_pages_are_kept([&] {
            gloo::AllreduceOptions options(context);
            options.setInputs(addresses(in), kMapped);
            options.setOutput(out.data(), kMapped);
            options.setReduceFunction(gloos<float>(Op::sum));
            gloo::allreduce(options);
        });
        CHECK(out.front() == 6 && out.back() == 6);
    });
}

void reduce_forms() {
    on_each_size([](const GlooContext &context) {
        const auto inputs = everyone(context->size, 1);
        for (const std::size_t count : {0, 1, 7, kLong}) {
            const auto expected = sum_of_marks(inputs, count);
            for (int root = 0; root < context->size; root++) {
                // An input and an output; the output alone; on others than the root the input alone.
                for (int form = 0; form < 3; form++) {
                    const bool buffered = (form + root) % 2 == 0;
                    const bool isRoot = context->rank == root;
                    auto in = marks<uint32_t>(context->rank, 0, count);
                    const auto given = in;
                    std::vector<uint32_t> out(count, 0xdead);
                    gloo::ReduceOptions options(context);
                    options.setRoot(root);
                    options.setTag(static_cast<uint32_t>(form));
                    options.setReduceFunction(gloos<uint32_t>(Op::sum));
                    if (form == 1) {
                        out = in;
                    } else {
                        set_input(options, context, in, buffered);
                    }
                    if (form < 2 || isRoot) {
                        set_output(options, context, out, buffered);
                    }
                    gloo::reduce(options);
                    CHECK(in == given);
                    CHECK(!isRoot || out == expected);
                }
            }
        }
    });
}

// ---- functions of the program's own

/* They run in the thread that called, and the result is in the order of the ranks, everywhere the same. */
void own_functions() {
    on_each_size([](const GlooContext &context) {
        const auto self = std::this_thread::get_id();
        const auto size = static_cast<std::size_t>(context->size);
        for (const std::size_t count : {0, 1, 3, 1009, 60001}) {
            const auto mine = marks<Map>(context->rank, 0, count);
            const auto expected = composition_of_marks(everyone(context->size, 1), count);
            if (size > 1 && count > 0) {
                CHECK(!(compose(mark<Map>(0, 0, 0), mark<Map>(1, 0, 0)) ==
                        compose(mark<Map>(1, 0, 0), mark<Map>(0, 0, 0))));
            }

            std::mutex mutex;
            std::set<std::thread::id> threads;
            std::size_t misaligned = 0, elements = 0;
            const auto composing = elementwise<Map>(compose);
            const Function function = [&](void *c, const void *a, const void *b, std::size_t n) {
                std::lock_guard<std::mutex> hold(mutex);
                threads.insert(std::this_thread::get_id());
                misaligned += reinterpret_cast<uintptr_t>(c) % alignof(Map) != 0;
                misaligned += reinterpret_cast<uintptr_t>(b) % alignof(Map) != 0;
                elements += n;
                composing(c, a, b, n);
            };
            const auto check_calls = [&] {
                std::lock_guard<std::mutex> hold(mutex);
                CHECK(threads.empty() || (threads.size() == 1 && *threads.begin() == self));
                CHECK_EQ(misaligned, 0u);
            };
            auto out = mine;
            allreduce(context, out, function);
            CHECK(out == expected);
            check_calls();
            // Somebody has called it for each element, so often as there is to combine.
            uint64_t calls = elements;
            std::vector<uint64_t> total{calls};
            allreduce(context, total, gloos<uint64_t>(Op::sum));
            CHECK(total[0] >= (size - 1) * count);

            for (int root = 0; root < context->size; root++) {
                const auto reduced = reduce_to(context, root, mine, function);
                CHECK(context->rank != root || reduced == expected);
                // The root in place.
                auto memory = mine;
                gloo::ReduceOptions options(context);
                options.setRoot(root);
                options.setReduceFunction(function);
                if (context->rank == root) {
                    options.setOutput(memory.data(), count);
                } else {
                    options.setInput(memory.data(), count);
                }
                gloo::reduce(options);
                CHECK(memory == (context->rank == root ? expected : mine));
                check_calls();
            }
        }
    });
}

/* A rank's own inputs are combined in their order, before those of the ranks above it. */
void own_function_of_several_inputs() {
    as_threads(3, [](const GlooContext &context) {
        constexpr std::size_t count = 501;
        const auto expected = composition_of_marks(everyone(3, 3), count);
        for (const bool separate : {false, true}) {
            std::vector<std::vector<Map>> in;
            for (int input = 0; input < 3; input++) {
                in.push_back(marks<Map>(context->rank, input, count));
            }
            std::vector<Map> out(count);
            gloo::AllreduceOptions options(context);
            options.setReduceFunction(elementwise<Map>(compose));
            if (separate) {
                options.setInputs(addresses(in), count);
                options.setOutput(out.data(), count);
            } else {
                options.setOutputs(addresses(in), count);
            }
            gloo::allreduce(options);
            CHECK(separate ? out == expected : in == std::vector<std::vector<Map>>(3, expected));
        }
    });
}

/* What a function throws reaches whoever called. */
void own_function_that_throws() {
    as_threads(1, [](const GlooContext &context) {
        std::vector<Map> a(3), b(3);
        gloo::AllreduceOptions options(context);
        options.setOutputs(std::vector<Map *>{a.data(), b.data()}, 3);
        options.setReduceFunction(
            [](void *, const void *, const void *, std::size_t) { throw std::out_of_range("not to be combined"); });
        CHECK_THROWS(std::out_of_range, "not to be combined", gloo::allreduce(options));
        check_sum(context);
    });
    // Over one rank's own inputs: the others do not wait for it.
    as_threads(2, [](const GlooContext &context) {
        std::vector<Map> a(3), b(3);
        gloo::AllreduceOptions options(context);
        options.setReduceFunction(
            [](void *, const void *, const void *, std::size_t) { throw std::out_of_range("not to be combined"); });
        if (context->rank == 0) {
            options.setOutput(a.data(), 3);
            // Which may come as early as in the barrier.
            CHECK_THROWS(gloo::IoException, "has thrown: not to be combined",
                         (barrier(context), gloo::allreduce(options)));
        } else {
            barrier(context);
            options.setOutputs(std::vector<Map *>{a.data(), b.data()}, 3);
            CHECK_THROWS(std::out_of_range, "not to be combined", gloo::allreduce(options));
        }
    });
}

// ---- the order of combination

bool same_bits(const std::vector<float> &a, const std::vector<float> &b, std::size_t count) {
    return a.size() >= count && b.size() >= count && std::memcmp(a.data(), b.data(), count * sizeof(float)) == 0;
}

void same_bits_in_every_way() {
    for (int size = 2; size <= 5; size++) {
        const auto expected = balanced_sums(size, 1000);
        std::vector<float> one_by_one = scattered_values(size - 1, 1000);
        for (int rank = size - 2; rank >= 0; rank--) {
            for (std::size_t i = 0; i < one_by_one.size(); i++) {
                one_by_one[i] += scattered(rank, i);
            }
        }
        CHECK(size == 2 || !same_bits(expected, one_by_one, 1000));
        as_threads(size, [&](const GlooContext &context) {
            for (const std::size_t count : {1, 1000, 100000}) {
                const auto mine = scattered_values(context->rank, count);
                const std::size_t compared = std::min(count, expected.size());
                for (const auto way : {Way::UNSPECIFIED, Way::RING, Way::BCUBE}) {
                    for (const Function &function : {Function(gloos<float>(Op::sum)), own_sum<float>()}) {
                        auto out = mine;
                        allreduce(context, out, function, 0, way);
                        CHECK(same_bits(out, expected, compared));
                    }
                }
                const auto reduced = reduce_to(context, 0, mine, gloos<float>(Op::sum));
                CHECK(context->rank != 0 || same_bits(reduced, expected, compared));
            }
        });
    }
}

// ---- beside each other

void sum_often(const GlooContext &context, uint32_t tag, std::size_t count, const Function &function) {
    for (uint64_t round = 0; round < 30; round++) {
        std::vector<uint64_t> memory(count);
        for (std::size_t i = 0; i < count; i++) {
            memory[i] = (round + 1) * (tag + i) * static_cast<uint64_t>(context->rank + 1);
        }
        allreduce(context, memory, function, tag);
        const auto ranks = static_cast<uint64_t>(context->size);
        for (std::size_t i = 0; i < count; i++) {
            CHECK_EQ(memory[i], (round + 1) * (tag + i) * (ranks * (ranks + 1) / 2));
        }
    }
}

void tags_at_the_same_time() {
    for (const int size : {2, 3}) {
        as_threads(size, [](const GlooContext &context) {
            const Function sum = gloos<uint64_t>(Op::sum), own = own_sum<uint64_t>();
            staggered(context->rank,
                      {[&] { sum_often(context, 1, 5, sum); }, [&] { sum_often(context, 2, 30000, sum); }});
            staggered(context->rank,
                      {[&] { sum_often(context, 0xffffffff, 5, own); }, [&] { sum_often(context, 0, 3000, own); }});
        });
    }
}

void kinds_at_the_same_time() {
    for (const int size : {2, 3}) {
        as_threads(size, [](const GlooContext &context) {
            const auto broadcast_often = [&] {
                for (int round = 0; round < 30; round++) {
                    const int root = round % context->size;
                    const auto expected = marks<uint32_t>(root, round, 3000);
                    auto memory = marks<uint32_t>(context->rank, round, 3000);
                    gloo::BroadcastOptions options(context);
                    options.setRoot(root);
                    options.setTag(7);
                    options.setOutput(memory.data(), memory.size());
                    gloo::broadcast(options);
                    CHECK(memory == expected);
                }
            };
            staggered(context->rank, {[&] { sum_often(context, 7, 3000, gloos<uint64_t>(Op::sum)); }, broadcast_often});
        });
    }
}

} // namespace

int main() {
    return run_tests({
        {"allreduce in all forms", allreduce_forms},
        {"allreduce in forms that differ among the ranks", allreduce_in_different_forms},
        {"allreduce onto an input", allreduce_onto_an_input},
        {"allreduce of several inputs in memory that is kept", allreduce_in_memory_that_is_kept},
        {"reduce in all forms", reduce_forms},
        {"functions of the program's own", own_functions},
        {"a function of the program's own over several inputs", own_function_of_several_inputs},
        {"a function that throws", own_function_that_throws},
        {"the same bits in every way", same_bits_in_every_way},
        {"tags at the same time", tags_at_the_same_time},
        {"kinds at the same time", kinds_at_the_same_time},
    });
}
