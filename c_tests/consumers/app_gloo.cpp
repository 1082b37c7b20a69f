// A program that was written for gloo: a group of one.
#include <gloo/allreduce.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

int main() {
    auto context = std::make_shared<gloo::rendezvous::Context>(0, 1);
    auto device = gloo::transport::tcp::CreateDevice("localhost");
    context->connectFullMesh(std::make_shared<gloo::rendezvous::HashStore>(), device);
    float in = 3, out = 0;
    gloo::AllreduceOptions options(context);
    options.setInput(&in, 1);
    options.setOutput(&out, 1);
    options.setReduceFunction(static_cast<void (*)(void *, const void *, const void *, size_t)>(&gloo::sum<float>));
    gloo::allreduce(options);
    return out == 3 ? 0 : 1;
}
