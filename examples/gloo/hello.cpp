// A program for gloo, as it is: each of N processes adds its rank to a sum.
//
//   hello RANK N DIRECTORY      (the directory is new, and the same for all)

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>

#include <gloo/allreduce.h>
#include <gloo/barrier.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

int main(int count, char **arguments) try {
    if (count != 4) {
        std::fprintf(stderr, "usage: %s RANK N DIRECTORY\n", arguments[0]);
        return 2;
    }
    const int rank = std::atoi(arguments[1]), size = std::atoi(arguments[2]);
    auto device = gloo::transport::tcp::CreateDevice("localhost");
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    context->connectFullMesh(std::make_shared<gloo::rendezvous::FileStore>(arguments[3]), device);

    float x[4] = {1, 2, 3, static_cast<float>(rank)};
    gloo::AllreduceOptions options(context);
    options.setOutput(x, 4);
    options.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
    gloo::allreduce(options);
    std::printf("rank %d: %g %g %g %g\n", rank, x[0], x[1], x[2], x[3]);

    gloo::BarrierOptions barrier(context);
    gloo::barrier(barrier);
    return 0;
} catch (const std::exception &error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
}
