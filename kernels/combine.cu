// Couriers that combine, too: unisono_combine_<operator>_<type>, each with one parameter, `Courier`.
#include "courier.cuh"
#include "fold.cuh"

namespace unisono {

// A sheet is an `Arguments` of few operands: its head, so many operands, and as many scalars.
constexpr u32 SHEET_HEAD = 5, SHEET_OPERANDS = 8, SHEET_WORDS = SHEET_HEAD + 2 * SHEET_OPERANDS;
static_assert(sizeof(Arguments) == 8 * (SHEET_HEAD + 2 * MAX_OPERANDS));

template <class Fold>
DEVICE void serve(const Courier &call) {
    __shared__ Arguments sheet;
    Clerk clerk(call);
#pragma unroll 1
    for (;;) {
        const Order order = clerk.take();
        if (order.action == PAIR) {
            if (threadIdx.x == 0) {
                sheet.out = order.to;
                sheet.count = order.bytes;
                sheet.operands = 2;
                sheet.wide = sheet.out_wide = sheet.scaled = sheet.absent = 0;
                sheet.ranks = order.back[2];
                sheet.operand[0] = order.from;
                sheet.operand[1] = reinterpret_cast<const u8 *>(order.back[0] | static_cast<u64>(order.back[1]) << 32);
            }
        } else if (order.action == COMBINE) {
            for (u32 i = threadIdx.x; i < SHEET_WORDS; i += blockDim.x) {
                const u32 at = i < SHEET_HEAD + SHEET_OPERANDS ? i : i - SHEET_OPERANDS + MAX_OPERANDS;
                reinterpret_cast<u64 *>(&sheet)[at] = reinterpret_cast<const u64 *>(order.from)[i];
            }
        } else {
            clerk.carry_share(order);
        }
        if (order.action == PAIR || order.action == COMBINE) {
            __syncthreads();
            Fold{sheet, Worker{clerk.block, clerk.blocks, threadIdx.x, blockDim.x}}.run();
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
