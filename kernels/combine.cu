// Couriers that combine, too: unisono_combine_<operator>_<type>, each with one parameter, `Courier`.
#include "courier.cuh"
#include "fold.cuh"

namespace unisono {

template <class Fold>
DEVICE void serve(const Courier &call) {
    __shared__ Arguments sheet;
    Clerk clerk(call);
#pragma unroll 1
    for (;;) {
        const Order order = clerk.take();
        if (order.action == COMBINE) {
            for (u32 i = threadIdx.x; i < sizeof(sheet) / 4; i += blockDim.x) {
                reinterpret_cast<u32 *>(&sheet)[i] = reinterpret_cast<const u32 *>(order.from)[i];
            }
            __syncthreads();
            Fold{sheet, Worker{clerk.block, clerk.blocks, threadIdx.x, blockDim.x}}.run();
        } else {
            clerk.carry_share(order);
        }
        clerk.report(order);
        if (order.last) return;
    }
}

}  // namespace unisono

#define KERNEL(op, type)                                                                                               \
    ENTRY(unisono_combine_##op##_##type, unisono::Courier, unisono::COURIER_THREADS, 1) {                              \
        unisono::serve<unisono::Fold<unisono::type, unisono::op, true>>(call);                                         \
    }

FOR_EACH_KERNEL(KERNEL)
