// C++17, gloo's headers: the collectives that are functions and move elements, in all forms of input and output, and
// barriers.

#include <algorithm>
#include <numeric>

#include <gloo/allgather.h>
#include <gloo/allgatherv.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/broadcast.h>
#include <gloo/gather.h>
#include <gloo/gatherv.h>
#include <gloo/scatter.h>

#include "gloo_inputs.h"
#include "gloo_threads.h"
#include "gloo_values.h"

namespace {

template <class T> void append(std::vector<T> &to, const std::vector<T> &more) {
    to.insert(to.end(), more.begin(), more.end());
}

/* So many elements of each rank, one after the other. */
template <class T> std::vector<T> gathered(const std::vector<std::size_t> &counts) {
    std::vector<T> all;
    for (std::size_t rank = 0; rank < counts.size(); rank++) {
        append(all, marks<T>(static_cast<int>(rank), 0, counts[rank]));
    }
    return all;
}

template <class T> void broadcast_forms(const GlooContext &context, const std::vector<std::size_t> &counts) {
    for (const std::size_t count : counts) {
        for (int root = 0; root < context->size; root++) {
            const auto expected = marks<T>(root, 0, count);
            for (const bool separate : {false, true}) {
                for (const bool buffered : {false, true}) {
                    auto in = expected;
                    auto out = marks<T>(context->rank, separate ? 1 : 0, count);
                    gloo::BroadcastOptions options(context);
                    options.setRoot(root);
                    if (separate && context->rank == root) {
                        set_input(options, context, in, buffered);
                    }
                    set_output(options, context, out, buffered);
                    gloo::broadcast(options);
                    CHECK(in == expected);
                    CHECK(out == expected);
                }
            }
        }
    }
}

template <class T> void allgather_forms(const GlooContext &context, const std::vector<std::size_t> &counts) {
    for (const std::size_t count : counts) {
        const auto expected = gathered<T>(everyone(context->size, count));
        for (const bool separate : {false, true}) {
            for (const bool buffered : {false, true}) {
                auto in = marks<T>(context->rank, 0, count);
                auto out = marks<T>(99, 0, expected.size());
                gloo::AllgatherOptions options(context);
                if (separate) {
                    set_input(options, context, in, buffered);
                } else {
                    std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(count) * context->rank);
                }
                set_output(options, context, out, buffered);
                gloo::allgather(options);
                CHECK(out == expected);
            }
        }
    }
}

template <class T> void gather_forms(const GlooContext &context, const std::vector<std::size_t> &counts) {
    for (const std::size_t count : counts) {
        const auto expected = gathered<T>(everyone(context->size, count));
        for (int root = 0; root < context->size; root++) {
            for (const bool buffered : {false, true}) {
                auto in = marks<T>(context->rank, 0, count);
                std::vector<T> out(context->rank == root ? expected.size() : 0);
                gloo::GatherOptions options(context);
                options.setRoot(root);
                set_input(options, context, in, buffered);
                if (context->rank == root) {
                    set_output(options, context, out, buffered);
                }
                gloo::gather(options);
                CHECK(context->rank != root || out == expected);
            }
            // The root's input is where its output has it.
            auto out = marks<T>(context->rank, 0, context->rank == root ? expected.size() : count);
            T *mine = out.data();
            gloo::GatherOptions options(context);
            options.setRoot(root);
            if (context->rank == root) {
                mine += static_cast<std::ptrdiff_t>(count) * root;
                std::copy_n(out.begin(), count, mine);
                options.setOutput(out.data(), out.size());
            }
            options.setInput(mine, count);
            gloo::gather(options);
            CHECK(context->rank != root || out == expected);
        }
    }
}

template <class T> void scatter_forms(const GlooContext &context, const std::vector<std::size_t> &counts) {
    const auto size = static_cast<std::size_t>(context->size);
    for (const std::size_t count : counts) {
        for (int root = 0; root < context->size; root++) {
            const auto expected = marks<T>(root, context->rank, count);
            for (const bool adjoining : {true, false}) {
                for (int form = 0; form < 3; form++) {
                    // Those that do not adjoin lie in reverse, with a gap.
                    const std::size_t stride = adjoining ? count : count + 3;
                    std::vector<T> all(size * stride + 1);
                    std::vector<T *> pointers;
                    for (std::size_t to = 0; to < size; to++) {
                        T *place = all.data() + stride * (adjoining ? to : size - 1 - to);
                        const auto part = marks<T>(root, static_cast<int>(to), count);
                        std::copy(part.begin(), part.end(), place);
                        pointers.push_back(place);
                    }
                    const auto given = all;
                    std::vector<T> out(count);
                    gloo::ScatterOptions options(context);
                    options.setRoot(root);
                    if (context->rank == root && form == 0) {
                        options.setInputs(pointers, count);
                    } else if (context->rank == root && form == 1) {
                        options.setInputs(pointers.data(), pointers.size(), count);
                    } else if (context->rank == root) {
                        std::vector<Unbound> buffers;
                        for (T *pointer : pointers) {
                            buffers.push_back(context->createUnboundBuffer(pointer, count * sizeof(T)));
                        }
                        options.template setInputs<T>(std::move(buffers));
                    }
                    set_output(options, context, out, form == 2);
                    gloo::scatter(options);
                    CHECK(all == given);
                    CHECK(out == expected);
                }
            }
        }
    }
}

/* The root's inputs are read where they are. */
void scatter_of_separate_inputs() {
    on_each_size([](const GlooContext &context) {
        const auto size = static_cast<std::size_t>(context->size);
        for (const std::size_t count : {std::size_t{7}, std::size_t{kLong}}) {
            for (int root = 0; root < context->size; root++) {
                std::vector<std::vector<uint32_t>> in;
                for (int to = 0; to < context->size; to++) {
                    in.push_back(marks<uint32_t>(root, to, count));
                }
                const auto given = in;
                auto pointers = addresses(in);
                const bool isRoot = context->rank == root;
                // The first and the last rank get one input, which is no output then.
                pointers.front() = pointers.back();
                const auto from = context->rank == 0 ? size - 1 : static_cast<std::size_t>(context->rank);
                std::vector<uint32_t> out(count);
                for (const bool inPlace : {false, true}) {
                    const bool ontoOwn = inPlace && isRoot && root > 0 && root + 1 < context->size;
                    uint32_t *const place = ontoOwn ? pointers[static_cast<std::size_t>(root)] : out.data();
                    gloo::ScatterOptions options(context);
                    options.setRoot(root);
                    if (isRoot) {
                        options.setInputs(pointers, count);
                    }
                    options.setOutput(place, count);
                    gloo::scatter(options);
                    CHECK(in == given);
                    CHECK(std::equal(given[from].begin(), given[from].end(), place));
                    std::fill(out.begin(), out.end(), 0);
                }
            }
        }
    });
    as_threads(2, [](const GlooContext &context) {
        std::vector<float> own(kMapped, 1), other(kMapped, 2), out(kMapped);
        check_pages_are_kept([&] {
            gloo::ScatterOptions options(context);
            options.setRoot(0);
            if (context->rank == 0) {
                options.setInputs(std::vector<float *>{own.data(), other.data()}, kMapped);
            }
            options.setOutput(out.data(), kMapped);
            gloo::scatter(options);
        });
        CHECK(out.back() == static_cast<float>(context->rank + 1));
    });
}

template <class T> void alltoall_forms(const GlooContext &context, const std::vector<std::size_t> &counts) {
    for (const std::size_t count : counts) {
        std::vector<T> in, expected;
        for (int rank = 0; rank < context->size; rank++) {
            append(in, marks<T>(context->rank, rank, count));
            append(expected, marks<T>(rank, context->rank, count));
        }
        const auto given = in;
        for (const bool buffered : {false, true}) {
            std::vector<T> out(in.size());
            gloo::AlltoallOptions options(context);
            set_input(options, context, in, buffered);
            set_output(options, context, out, buffered);
            gloo::alltoall(options);
            CHECK(in == given);
            CHECK(out == expected);
        }
    }
}

// ---- and with a number of elements for each rank

/* How many elements rank `from` has for rank `to`: none, uneven, from one alone, and long ones beside none. */
std::size_t uneven(int pattern, int from, int to, int size) {
    const auto number = static_cast<std::size_t>(from * 3 + to);
    switch (pattern) {
    case 0:
        return 0;
    case 1:
        return number % 4 * 5;
    case 2:
        return from == size - 1 ? 11 + number : 0;
    default:
        return from == 0 ? kLong + number : number % 2;
    }
}

/* What each has for all together. */
std::vector<std::size_t> uneven_counts(int pattern, int size) {
    std::vector<std::size_t> counts;
    for (int rank = 0; rank < size; rank++) {
        counts.push_back(uneven(pattern, rank, 0, size));
    }
    return counts;
}

template <class T> void allgatherv_forms(const GlooContext &context, int patterns) {
    for (int pattern = 0; pattern < patterns; pattern++) {
        const auto counts = uneven_counts(pattern, context->size);
        const auto expected = gathered<T>(counts);
        const auto before = std::accumulate(counts.begin(), counts.begin() + context->rank, std::size_t{0});
        for (const bool separate : {false, true}) {
            for (const bool buffered : {false, true}) {
                auto in = marks<T>(context->rank, 0, counts[static_cast<std::size_t>(context->rank)]);
                std::vector<T> out(expected.size());
                gloo::AllgathervOptions options(context);
                if (separate) {
                    set_input(options, context, in, buffered);
                } else {
                    std::copy(in.begin(), in.end(), out.begin() + static_cast<std::ptrdiff_t>(before));
                }
                set_output(options, context, out, counts, buffered);
                gloo::allgatherv(options);
                CHECK(out == expected);
            }
        }
    }
}

template <class T> void gatherv_forms(const GlooContext &context, int patterns) {
    for (int pattern = 0; pattern < patterns; pattern++) {
        const auto counts = uneven_counts(pattern, context->size);
        const auto expected = gathered<T>(counts);
        for (int root = 0; root < context->size; root++) {
            for (const bool buffered : {false, true}) {
                // Ranks that give the counts, too, may have longer inputs.
                for (const bool padded : {false, true}) {
                    const bool is_root = context->rank == root;
                    auto in = marks<T>(context->rank, 0, counts[static_cast<std::size_t>(context->rank)]);
                    if (padded && !is_root) {
                        in.resize(in.size() + 5);
                    }
                    std::vector<T> out(expected.size());
                    gloo::GathervOptions options(context);
                    options.setRoot(root);
                    set_input(options, context, in, buffered);
                    if (padded || is_root) {
                        set_output(options, context, out, counts, buffered);
                    }
                    gloo::gatherv(options);
                    CHECK(out == (is_root ? expected : std::vector<T>(expected.size())));
                }
            }
        }
    }
}

template <class T> void alltoallv_forms(const GlooContext &context, int patterns) {
    for (int pattern = 0; pattern < patterns; pattern++) {
        std::vector<T> in, expected;
        std::vector<int64_t> to, from;
        for (int rank = 0; rank < context->size; rank++) {
            const std::size_t sent = uneven(pattern, context->rank, rank, context->size);
            const std::size_t received = uneven(pattern, rank, context->rank, context->size);
            append(in, marks<T>(context->rank, rank, sent));
            append(expected, marks<T>(rank, context->rank, received));
            to.push_back(static_cast<int64_t>(sent));
            from.push_back(static_cast<int64_t>(received));
        }
        const auto given = in;
        for (const bool buffered : {false, true}) {
            std::vector<T> out(expected.size());
            gloo::AlltoallvOptions options(context);
            if (buffered) {
                options.setInput<T>(make_unbound(context, in), to);
            } else {
                options.setInput(in.data(), to);
            }
            set_output(options, context, out, from, buffered);
            gloo::alltoallv(options);
            CHECK(in == given);
            CHECK(out == expected);
        }
    }
}

/* Elements of one byte, of eight, and of 24, of all lengths; and many of two. */
template <template <class> class Forms, class Lengths> void moved(const Lengths &few, const Lengths &many) {
    on_each_size([&](const GlooContext &context) {
        Forms<uint8_t>::run(context, few);
        Forms<double>::run(context, few);
        Forms<Map>::run(context, few);
        Forms<uint16_t>::run(context, many);
    });
}

template <class T> struct Uniform {
    static void run(const GlooContext &context, const std::vector<std::size_t> &counts) {
        broadcast_forms<T>(context, counts);
        allgather_forms<T>(context, counts);
        gather_forms<T>(context, counts);
        scatter_forms<T>(context, counts);
        alltoall_forms<T>(context, counts);
    }
};

template <class T> struct Uneven {
    static void run(const GlooContext &context, int patterns) {
        allgatherv_forms<T>(context, patterns);
        gatherv_forms<T>(context, patterns);
        alltoallv_forms<T>(context, patterns);
    }
};

/* An input anywhere in the output, or half outside of it, on each rank. */
template <class T> void allgather_overlaps(const GlooContext &context, const std::vector<std::size_t> &counts) {
    const auto before = std::accumulate(counts.begin(), counts.begin() + context->rank, std::size_t{0});
    const auto mine = marks<T>(context->rank, 0, counts[static_cast<std::size_t>(context->rank)]);
    const auto expected = gathered<T>(counts);
    const bool even = counts == everyone(context->size, mine.size());
    // A little before and behind its own place; and from where it ends as the output begins to where it begins as that
    // ends.
    std::vector<std::size_t> places{mine.size() + before - 1, mine.size() + before + 1};
    for (std::size_t step = 0; step <= 8; step++) {
        places.push_back((mine.size() + expected.size()) * step / 8);
    }
    for (const std::size_t place : places) {
        for (const bool listed : {false, true}) {
            if (!listed && !even) {
                continue;
            }
            auto memory = marks<T>(99, 0, expected.size() + 2 * mine.size());
            std::copy(mine.begin(), mine.end(), memory.begin() + static_cast<std::ptrdiff_t>(place));
            auto whole = memory;
            std::copy(expected.begin(), expected.end(), whole.begin() + static_cast<std::ptrdiff_t>(mine.size()));
            T *const in = memory.data() + place, *const out = memory.data() + mine.size();
            if (listed) {
                gloo::AllgathervOptions options(context);
                options.setInput(in, mine.size());
                options.setOutput(out, counts);
                gloo::allgatherv(options);
            } else {
                gloo::AllgatherOptions options(context);
                options.setInput(in, mine.size());
                options.setOutput(out, expected.size());
                gloo::allgather(options);
            }
            CHECK(memory == whole);
        }
    }
}

void inputs_that_overlap_outputs() {
    as_threads(3, [](const GlooContext &context) {
        allgather_overlaps<double>(context, {1, 1, 1});
        allgather_overlaps<double>(context, {1 << 17, 1 << 17, 1 << 17});
        allgather_overlaps<double>(context, {1 << 17, 3, 1 << 16});
    });
}

void movement_forms() { moved<Uniform>(std::vector<std::size_t>{0, 1, 7}, std::vector<std::size_t>{513, kLong}); }

void uneven_forms() { moved<Uneven>(3, 4); }

void barriers() {
    check_barrier(5, [](const GlooContext &context) {
        return [context](int round) {
            gloo::BarrierOptions options(context);
            options.setTag(static_cast<uint32_t>(round % 3));
            gloo::barrier(options);
        };
    });
    as_threads(1, [](const GlooContext &context) { gloo::barrier(gloo::BarrierOptions(context)); });
}

} // namespace

int main() {
    return run_tests({
        {"broadcast, allgather, gather, scatter and alltoall in all forms", movement_forms},
        {"scatter of separate inputs", scatter_of_separate_inputs},
        {"allgatherv, gatherv and alltoallv in all forms", uneven_forms},
        {"allgather and allgatherv of inputs that overlap the output", inputs_that_overlap_outputs},
        {"barrier", barriers},
    });
}
