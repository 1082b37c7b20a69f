// Contexts of the gloo face whose processes MPI has started: mpirun -n 3 cpp_gloo_mpi.

#include <cstdio>
#include <memory>

#include <gloo/allreduce.h>
#include <gloo/mpi/context.h>
#include <gloo/transport/tcp/device.h>

namespace {

void sum(const std::shared_ptr<gloo::Context> &context) {
    int value = context->rank + 1;
    gloo::AllreduceOptions options(context);
    options.setOutput(&value, 1);
    options.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, std::size_t)>(&gloo::sum<int>));
    gloo::allreduce(options);
    GLOO_ENFORCE_EQ(value, context->size * (context->size + 1) / 2, "the sum of all ranks");
}

} // namespace

int main() {
    try {
        auto device = gloo::transport::tcp::CreateDevice("localhost");
        auto context = gloo::mpi::Context::createManaged();
        GLOO_ENFORCE_EQ(context->size, 3, "processes");
        context->connectFullMesh(device);
        sum(context);
        // Of a part of the processes; one is alone.
        MPI_Comm part;
        MPI_Comm_split(MPI_COMM_WORLD, context->rank == 1, context->rank, &part);
        {
            auto smaller = std::make_shared<gloo::mpi::Context>(part);
            GLOO_ENFORCE_EQ(smaller->size, context->rank == 1 ? 1 : 2, "processes of the part");
            smaller->connectFullMesh(device);
            sum(smaller);
        }
        MPI_Comm_free(&part);
        sum(context);
        return 0;
    } catch (const std::exception &error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
