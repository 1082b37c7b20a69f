// C++17, gloo's headers: what is wrong, late, or differs among the ranks, in functions and in objects.

#include <future>

#include <gloo/allgather.h>
#include <gloo/allgather_ring.h>
#include <gloo/allgatherv.h>
#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_local.h>
#include <gloo/allreduce_ring.h>
#include <gloo/alltoall.h>
#include <gloo/alltoallv.h>
#include <gloo/barrier.h>
#include <gloo/barrier_all_to_one.h>
#include <gloo/broadcast.h>
#include <gloo/broadcast_one_to_all.h>
#include <gloo/cuda_allreduce_ring.h>
#include <gloo/cuda_broadcast_one_to_all.h>
#include <gloo/gather.h>
#include <gloo/gatherv.h>
#include <gloo/pairwise_exchange.h>
#include <gloo/reduce_scatter.h>
#include <gloo/scatter.h>

#include "gloo_reductions.h"
#include "gloo_threads.h"

namespace {

using std::chrono::milliseconds;

// ---- what is wrong

#define CHECK_REFUSED(statement) CHECK_THROWS(gloo::EnforceNotMet, "", statement)

void wrong_reductions(const GlooContext &context) {
    std::vector<float> in(6, 1), out(6), shorter(5);
    const auto sum = gloos<float>(Op::sum);
    {
        gloo::AllreduceOptions options(context);
        options.setReduceFunction(sum);
        CHECK_REFUSED(gloo::allreduce(options));
        options.setInput(in.data(), in.size());
        CHECK_REFUSED(gloo::allreduce(options));
        options.setOutput(shorter.data(), shorter.size());
        CHECK_REFUSED(gloo::allreduce(options));
        options.setOutputs(std::vector<float *>{}, 6);
        CHECK_REFUSED(gloo::allreduce(options));
        std::vector<Unbound> unlike;
        unlike.push_back(make_unbound(context, out));
        unlike.push_back(make_unbound(context, shorter));
        options.setOutputs<float>(std::move(unlike));
        CHECK_REFUSED(gloo::allreduce(options));
        options.setOutput(out.data(), out.size());
        options.setReduceFunction(nullptr);
        CHECK_REFUSED(gloo::allreduce(options));
    }
    {
        gloo::AllreduceOptions options(context);
        options.setOutput(out.data(), out.size());
        CHECK_REFUSED(gloo::allreduce(options));
        options.setReduceFunction(sum);
        options.setOutput<float>(nullptr, 6);
        CHECK_THROWS(gloo::InvalidOperationException, "", gloo::allreduce(options));
    }
    {
        gloo::ReduceOptions options(context);
        options.setOutput(out.data(), out.size());
        options.setReduceFunction(sum);
        CHECK_REFUSED(gloo::reduce(options));
        for (const int root : {-1, context->size, 1000}) {
            options.setRoot(root);
            CHECK_REFUSED(gloo::reduce(options));
        }
        options.setRoot(context->rank);
        options.setInput(shorter.data(), shorter.size());
        CHECK_REFUSED(gloo::reduce(options));
        options.setInput(in.data(), in.size());
        options.setReduceFunction(nullptr);
        CHECK_REFUSED(gloo::reduce(options));
    }
    {
        gloo::ReduceOptions options(context);
        options.setReduceFunction(sum);
        options.setRoot(context->rank);
        CHECK_REFUSED(gloo::reduce(options));
        options.setInput(in.data(), in.size());
        CHECK_REFUSED(gloo::reduce(options));
    }
}

void wrong_movements(const GlooContext &context) {
    std::vector<float> in(6, 1), out(6), shorter(5);
    const int other = (context->rank + 1) % context->size;
    {
        gloo::BroadcastOptions options(context);
        options.setRoot(context->rank);
        CHECK_REFUSED(gloo::broadcast(options));
        options.setInput(in.data(), in.size());
        CHECK_REFUSED(gloo::broadcast(options));
        options.setOutput(shorter.data(), shorter.size());
        CHECK_REFUSED(gloo::broadcast(options));
        options.setOutput(out.data(), out.size());
        for (const int root : {-1, context->size, other}) {
            options.setRoot(root);
            CHECK_REFUSED(gloo::broadcast(options));
        }
    }
    {
        gloo::AllgatherOptions options(context);
        options.setInput(in.data(), 3);
        CHECK_REFUSED(gloo::allgather(options));
        options.setOutput(reinterpret_cast<char *>(out.data()), 3);
        CHECK_REFUSED(gloo::allgather(options));
        options.setOutput(out.data(), 4);
        CHECK_REFUSED(gloo::allgather(options));
    }
    {
        gloo::GatherOptions options(context);
        options.setRoot(context->rank);
        CHECK_REFUSED(gloo::gather(options));
        options.setInput(in.data(), 3);
        CHECK_REFUSED(gloo::gather(options));
        options.setOutput(out.data(), 5);
        CHECK_REFUSED(gloo::gather(options));
        options.setOutput(out.data(), 6);
        options.setRoot(context->size);
        CHECK_REFUSED(gloo::gather(options));
    }
    {
        gloo::ScatterOptions options(context);
        options.setRoot(context->rank);
        options.setInputs(std::vector<float *>{in.data(), in.data() + 3}, 3);
        CHECK_REFUSED(gloo::scatter(options));
        options.setOutput(out.data(), 2);
        CHECK_REFUSED(gloo::scatter(options));
        options.setOutput(out.data(), 3);
        options.setInputs(std::vector<float *>{in.data()}, 3);
        CHECK_REFUSED(gloo::scatter(options));
        options.setInputs(std::vector<float *>{}, 3);
        CHECK_REFUSED(gloo::scatter(options));
        options.setRoot(-1);
        CHECK_REFUSED(gloo::scatter(options));
    }
    {
        gloo::AlltoallOptions options(context);
        options.setInput(in.data(), 6);
        CHECK_REFUSED(gloo::alltoall(options));
        options.setOutput(out.data(), 4);
        CHECK_REFUSED(gloo::alltoall(options));
        options.setInput(reinterpret_cast<char *>(in.data()), 5);
        options.setOutput(reinterpret_cast<char *>(out.data()), 5);
        CHECK_REFUSED(gloo::alltoall(options));
        options.setInput<float>(nullptr, 6);
        options.setOutput(out.data(), 6);
        CHECK_THROWS(gloo::InvalidOperationException, "", gloo::alltoall(options));
    }
}

void wrong_counts(const GlooContext &context) {
    std::vector<float> in(6, 1), out(6);
    {
        gloo::AllgathervOptions options(context);
        CHECK_REFUSED(gloo::allgatherv(options));
        options.setInput(in.data(), 3);
        CHECK_REFUSED(gloo::allgatherv(options));
        options.setOutput(out.data(), std::vector<std::size_t>{2, 2, 2});
        CHECK_REFUSED(gloo::allgatherv(options));
        options.setOutput(out.data(), std::vector<std::size_t>{2, 2});
        CHECK_REFUSED(gloo::allgatherv(options));
        CHECK_REFUSED(options.setOutput<float>(make_unbound(context, out), std::vector<std::size_t>{3, 2}));
    }
    {
        gloo::GathervOptions options(context);
        options.setRoot(context->rank);
        CHECK_REFUSED(gloo::gatherv(options));
        options.setInput(in.data(), 3);
        CHECK_REFUSED(gloo::gatherv(options));
        options.setOutput(out.data(), std::vector<std::size_t>{3});
        CHECK_REFUSED(gloo::gatherv(options));
        options.setOutput(out.data(), std::vector<std::size_t>{2, 2});
        CHECK_REFUSED(gloo::gatherv(options));
        CHECK_REFUSED(options.setOutput<float>(make_unbound(context, out), std::vector<std::size_t>{3, 4}));
        options.setRoot(2);
        CHECK_REFUSED(gloo::gatherv(options));
    }
    {
        gloo::AlltoallvOptions options(context);
        CHECK_REFUSED(gloo::alltoallv(options));
        options.setInput(in.data(), {3, 3});
        CHECK_REFUSED(gloo::alltoallv(options));
        options.setOutput(out.data(), {6});
        CHECK_REFUSED(gloo::alltoallv(options));
        CHECK_REFUSED(options.setOutput(out.data(), {7, -1}));
        CHECK_REFUSED(options.setInput<float>(make_unbound(context, in), {3, 4}));
        // To itself; counted in bytes.
        std::vector<int64_t> sent{1, 1}, received = sent;
        received[static_cast<std::size_t>(context->rank)] = 2;
        options.setInput(in.data(), sent);
        options.setOutput(out.data(), received);
        const std::string text = gloo::MakeString("4 vs 8. rank ", context->rank, " receives from itself as many bytes");
        CHECK_THROWS(gloo::EnforceNotMet, text, gloo::alltoallv(options));
    }
}

void what_is_wrong_is_thrown() {
    as_threads(2, [](const GlooContext &context) {
        wrong_reductions(context);
        check_sum(context);
        wrong_movements(context);
        check_sum(context);
        wrong_counts(context);
        check_sum(context);
        // Also where the others are not wrong, and wait.
        if (context->rank == 0) {
            gloo::AllreduceOptions options(context);
            CHECK_REFUSED(gloo::allreduce(options));
        }
        check_sum(context);
    });
}

void what_is_wrong_in_objects() {
    as_threads(2, [](const GlooContext &context) {
        using Pointers = std::vector<float *>;
        std::vector<float> memory(6, 1);
        const Pointers none, one{memory.data()};
        CHECK_THROWS(gloo::EnforceNotMet, "", gloo::AllreduceRing<float>(context, none, 6));
        CHECK_THROWS(gloo::EnforceNotMet, "", gloo::AllreduceBcube<float>(context, one, 6, nullptr));
        CHECK_THROWS(gloo::InvalidOperationException, "", gloo::AllreduceRing<float>(context, Pointers{nullptr}, 6));
        CHECK_THROWS(gloo::EnforceNotMet, "", gloo::AllgatherRing<float>(context, {}, memory.data(), 1));
        for (const int root : {-1, 2}) {
            CHECK_THROWS(gloo::EnforceNotMet, "", gloo::BroadcastOneToAll<float>(context, one, 6, root));
        }
        for (const int pointer : {-1, 1}) {
            CHECK_THROWS(gloo::EnforceNotMet, "", gloo::BroadcastOneToAll<float>(context, one, 6, 0, pointer));
        }
        using Scatter = gloo::ReduceScatterHalvingDoubling<float>;
        const auto sum = gloo::ReductionFunction<float>::sum;
        CHECK_THROWS(gloo::EnforceNotMet, "", Scatter(context, none, 6, {3, 3}, sum));
        CHECK_THROWS(gloo::EnforceNotMet, "", Scatter(context, one, 6, {6}, sum));
        CHECK_THROWS(gloo::EnforceNotMet, "", Scatter(context, one, 6, {3, 4}, sum));
        CHECK_THROWS(gloo::EnforceNotMet, "", Scatter(context, one, 6, {3, 3}, nullptr));
        CHECK_THROWS(gloo::EnforceNotMet, "", gloo::PairwiseExchange(context, 0, 1));
        CHECK_THROWS(gloo::EnforceNotMet, "", gloo::PairwiseExchange(context, 1000, 2));
        gloo::AllreduceRing<float>(context, one, 6).run();
        CHECK(memory == std::vector<float>(6, 2));
    });
    as_threads(3, [](const GlooContext &context) {
        CHECK_THROWS(gloo::EnforceNotMet, "", gloo::PairwiseExchange(context, 1000, 1));
        gloo::BarrierAllToOne(context).run();
    });
}

/* A context that is not connected has no collectives. */
void without_a_connection() {
    auto context = std::make_shared<gloo::rendezvous::Context>(0, 2);
    std::vector<float> memory(3);
    CHECK_REFUSED(allreduce(context, memory, gloos<float>(Op::sum)));
    CHECK_REFUSED(gloo::barrier(gloo::BarrierOptions(context)));
}

// ---- what is late, and what differs

/* Rank 0 runs what rank 1 has prepared, too, and does not run. */
using Prepare = std::function<std::function<void()>(const GlooContext &)>;

void check_times_out(const Prepare &prepare) {
    std::promise<void> done;
    auto over = done.get_future();
    as_threads(2, [&](const GlooContext &context) {
        const auto run = prepare(context);
        if (context->rank == 1) {
            over.wait_for(std::chrono::seconds(10));
            return;
        }
        const double start = seconds_now();
        std::string text;
        try {
            run();
        } catch (const std::exception &error) {
            text = dynamic_cast<const gloo::IoException *>(&error) == nullptr ? "no IoException" : error.what();
        }
        const double seconds = seconds_now() - start;
        done.set_value();
        if (text.find("Timed out") == std::string::npos || text.find("rank 1") == std::string::npos) {
            throw std::logic_error("\"" + text + "\" does not say that it timed out, and for whom");
        }
        CHECK(seconds > 0.09);
        CHECK(seconds < 5);
    });
}

void timeouts() {
    for (const Function &function : {Function(gloos<float>(Op::sum)), own_sum<float>()}) {
        for (const std::size_t count : {7, 100000}) {
            check_times_out([&](const GlooContext &context) {
                return [&function, context, memory = std::vector<float>(count)]() mutable {
                    gloo::AllreduceOptions options(context);
                    options.setOutput(memory.data(), memory.size());
                    options.setReduceFunction(function);
                    options.setTimeout(milliseconds(100));
                    gloo::allreduce(options);
                };
            });
        }
    }
    // The context's timeout is that of options made afterwards.
    check_times_out([](const GlooContext &context) {
        context->setTimeout(milliseconds(100));
        return [context] { barrier(context); };
    });
    check_times_out([](const GlooContext &context) {
        return [context, memory = std::vector<float>(10)]() mutable {
            gloo::BroadcastOptions options(context);
            options.setRoot(1);
            options.setOutput(memory.data(), memory.size());
            options.setTimeout(milliseconds(100));
            gloo::broadcast(options);
        };
    });
}

/* By the context's timeout when they run. */
template <class Made, class... More> void check_object_times_out(const More &...more) {
    check_times_out([&](const GlooContext &context) {
        const auto object = std::make_shared<Made>(context, more...);
        context->setTimeout(milliseconds(100));
        return [object] { object->run(); };
    });
}

void timeouts_of_objects() {
    std::vector<float> memory(1000);
    const std::vector<float *> pointers{memory.data()};
    check_object_times_out<gloo::BarrierAllToOne>();
    check_object_times_out<gloo::PairwiseExchange>(1000, 1);
    // One memory for both ranks: the one that does not come touches nothing of it.
    std::vector<float> out(2000);
    check_object_times_out<gloo::AllgatherRing<float>>(std::vector<const float *>{memory.data()}, out.data(), 1000);
    check_object_times_out<gloo::BroadcastOneToAll<float>>(pointers, std::size_t{1000}, 1);
    check_object_times_out<gloo::CudaAllreduceRing<float>>(pointers, 1000);
    check_object_times_out<gloo::CudaBroadcastOneToAll<float>>(pointers, 1000, 1);
    check_object_times_out<gloo::AllreduceHalvingDoubling<float>>(pointers, 1000);
    const gloo::ReductionFunction<float> own(gloo::CUSTOM, [](float *x, const float *y, std::size_t n) {
        for (std::size_t i = 0; i < n; i++) {
            x[i] += y[i];
        }
    });
    const std::vector<int> shares{500, 500};
    for (const auto *function : {gloo::ReductionFunction<float>::sum, &own}) {
        check_object_times_out<gloo::AllreduceRing<float>>(pointers, 1000, function);
        check_object_times_out<gloo::ReduceScatterHalvingDoubling<float>>(pointers, 1000, shares, function);
    }
}

/* The rank whose function throws has what it threw; the others, which are in the call, are told. */
void a_function_that_throws() {
    using Run = std::function<void(const GlooContext &, std::vector<float> &, const Function &)>;
    const std::vector<Run> runs{
        [](const GlooContext &context, std::vector<float> &memory, const Function &function) {
            allreduce(context, memory, function);
        },
        [](const GlooContext &context, std::vector<float> &memory, const Function &function) {
            reduce_to(context, 0, memory, function);
            // Who is not the root may have been done before that.
            check_sum(context);
        },
    };
    for (const Run &run : runs) {
        std::atomic<int> told{0};
        as_threads(3, [&](const GlooContext &context) {
            std::vector<float> memory(1000, 1);
            const auto own = own_sum<float>();
            const bool throws = context->rank == 1;
            const Function function = [&](void *c, const void *a, const void *b, std::size_t n) {
                if (throws) {
                    throw std::range_error("no sums today");
                }
                own(c, a, b, n);
            };
            if (throws) {
                CHECK_THROWS(std::range_error, "no sums today", run(context, memory, function));
            } else {
                CHECK_THROWS(gloo::IoException, "no sums today", run(context, memory, function));
            }
            // Nobody leaves before the others have been told.
            told++;
            for (int i = 0; i < 20000 && told < 3; i++) {
                pause_for(1);
            }
        });
    }
}

/* A timeout of 0 is none. */
void no_timeout() {
    as_threads(2, [](const GlooContext &context) {
        if (context->rank == 1) {
            pause_for(150);
        }
        context->setTimeout(milliseconds(50));
        gloo::BarrierOptions options(context);
        options.setTimeout(gloo::kNoTimeout);
        gloo::barrier(options);
    });
}

/* One that is not set is the context's, as where it is given to a wait. */
void unset_timeout() {
    as_threads(2, [](const GlooContext &context) {
        std::vector<float> memory(10);
        for (const Function &function : {Function(gloos<float>(Op::sum)), own_sum<float>()}) {
            gloo::AllreduceOptions options(context);
            options.setOutput(memory.data(), memory.size());
            options.setReduceFunction(function);
            options.setTimeout(gloo::transport::kUnsetTimeout);
            if (context->rank == 1) {
                pause_for(150);
            }
            gloo::allreduce(options);
        }
    });
    check_times_out([](const GlooContext &context) {
        gloo::BarrierOptions options(context);
        options.setTimeout(gloo::transport::kUnsetTimeout);
        context->setTimeout(milliseconds(100));
        return [options] { gloo::barrier(options); };
    });
}

/* Both ranks are told. */
void check_differs(const Body &operation) {
    as_threads(2, [&](const GlooContext &context) {
        const double start = seconds_now();
        CHECK_THROWS(gloo::IoException, "differs", operation(context));
        CHECK(seconds_now() - start < 5);
    });
}

void differing_calls() {
    for (const Function &function : {Function(gloos<float>(Op::sum)), own_sum<float>()}) {
        for (const std::size_t count : {1000, 100000}) {
            check_differs([&](const GlooContext &context) {
                std::vector<float> memory(count * static_cast<std::size_t>(context->rank + 1));
                allreduce(context, memory, function, 5);
            });
        }
    }
    check_differs([](const GlooContext &context) {
        std::vector<float> memory(1000);
        allreduce(context, memory, gloos<float>(context->rank == 0 ? Op::sum : Op::max));
    });
    // Different collectives of one kind.
    check_differs([](const GlooContext &context) {
        std::vector<float> in(10), out(20);
        if (context->rank == 0) {
            gloo::AllgatherOptions options(context);
            options.setInput(in.data(), 10);
            options.setOutput(out.data(), 20);
            gloo::allgather(options);
        } else {
            gloo::AllgathervOptions options(context);
            options.setInput(in.data(), 10);
            options.setOutput(out.data(), std::vector<std::size_t>{5, 10});
            gloo::allgatherv(options);
        }
    });
}

void differing_objects() {
    check_differs([](const GlooContext &context) {
        std::vector<float> memory(2000);
        gloo::AllreduceRing<float>(context, {memory.data()}, 1000 * (context->rank + 1)).run();
    });
}

} // namespace

int main() {
    return run_tests({
        {"what is wrong is thrown", what_is_wrong_is_thrown},
        {"what is wrong in objects is thrown", what_is_wrong_in_objects},
        {"without a connection", without_a_connection},
        {"timeouts", timeouts},
        {"timeouts of objects", timeouts_of_objects},
        {"a function that throws", a_function_that_throws},
        {"no timeout", no_timeout},
        {"a timeout that is not set", unset_timeout},
        {"calls that differ", differing_calls},
        {"objects that differ", differing_objects},
    });
}
