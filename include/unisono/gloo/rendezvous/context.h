#pragma once

#include <memory>
#include <utility>

#include "gloo/context.h"
#include "gloo/rendezvous/store.h"
#include "gloo/transport/tcp/device.h"

namespace gloo {
inline namespace over_unisono {
namespace rendezvous {

class ContextFactory;

/* A context whose ranks meet in a store. */
class Context : public ::gloo::Context {
  public:
    Context(int rank_, int size_, int base_ = 2) : ::gloo::Context(rank_, size_, base_) {}

    /* Returns when all ranks have come, within the context's timeout. Contexts that meet in one store have prefixes. */
    void connectFullMesh(std::shared_ptr<Store> store, const std::shared_ptr<transport::Device> &device) {
        GLOO_ENFORCE(store, "no store was given");
        auto context = prepare(device);
        context->createAndConnectAllPairs(std::move(store));
        adopt(device, std::move(context));
    }

  protected:
    friend class ContextFactory;
};

/* Makes contexts of the ranks of another, without a store. */
class ContextFactory {
  public:
    static constexpr auto kMaxAddressSize = ::gloo::transport::Address::kMaxByteSize;

    explicit ContextFactory(std::shared_ptr<::gloo::Context> backingContext)
        : backingContext_(std::move(backingContext)) {
        GLOO_ENFORCE(backingContext_, "no context was given");
    }

    /* Every rank calls it, in the same order, within the timeout that the other context has now. The new one begins
       with the same. */
    std::shared_ptr<::gloo::Context> makeContext(const std::shared_ptr<transport::Device> &device) {
        auto context = std::make_shared<Context>(backingContext_->rank, backingContext_->size, backingContext_->base);
        context->setTimeout(backingContext_->getTimeout());
        auto made = context->prepare(device);
        made->connectAsDuplicate(backingContext_->native().get());
        context->adopt(device, std::move(made));
        return context;
    }

  private:
    const std::shared_ptr<::gloo::Context> backingContext_;
};

} // namespace rendezvous
} // namespace over_unisono
} // namespace gloo
