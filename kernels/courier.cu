// The courier that only carries. Those that combine, too, are in combine.cu.
//
// unisono_courier has one parameter, `Courier`.
#include "courier.cuh"

ENTRY(unisono_courier, unisono::Courier, unisono::COURIER_THREADS, 1) {
    using namespace unisono;
    Clerk clerk(call);
#pragma unroll 1
    for (;;) {
        const Order order = clerk.take();
        clerk.carry_share(order);
        clerk.report(order);
        if (order.last) return;
    }
}
