// The kernels of the exchange between GPUs: unisono_lines_<operator>_<type>, unisono_tiles_<operator>_<type> and
// unisono_dealt_<type>, with one parameter, `Combine`; unisono_swap, with one parameter, `Swap`; unisono_move and
// unisono_move_many, with one parameter, `Move`. What groups of calls are made of has kernels for several calls:
// unisono_several_lines_<operator>_<type>, unisono_several_tiles_<operator>_<type> and unisono_several_swap.
// src/cuda/exchange/plan.rs says which grid suits a call.
//
// Every rank of a group launches the same kernel with the same grid, but for what moves, where each has the blocks that
// it needs; all blocks of all of them run at the same time. The kernels wait for nothing but each other and the host's
// abort word.

#include "exchange_dealt.cuh"
#include "exchange_move.cuh"
#include "exchange_swap.cuh"
#include "exchange_tiles.cuh"

namespace unisono {

template <class T, class Op>
DEVICE Combiner<T, Op> combiner_of(const Combine &call, const LinePorts &ports) {
    using Divider = typename Lanes<T, Op>::Divider;
    return Combiner<T, Op>{Divider(call.ranks == 0 ? 1 : call.ranks), call.ranks != 0, call.scaled != 0, call.number,
                           call.group.size, ports.scale};
}

template <class T, class Op>
DEVICE void combine_lines(const Combine &call) {
    __shared__ LinePorts ports;
    // What is called most, without what only others need; for types that are summed often.
    if constexpr (Same<Op, Sum>::VALUE && sizeof(typename T::Memory) > 1) {
        if (call.group.size <= MUTUAL_RANKS && call.is_mutual() && call.ranks == 0) return exchange_mutually<T, Op>(call);
    }
    LineAgent agent(call.group);
    CombineLines<T, Op>(call, ports, combiner_of<T, Op>(call, ports)).run(agent);
}

// Which thread is the first behind each team. A team that has nothing to do on this rank leaves its threads to the
// others.
struct Ends {
    u32 of[3];
};

DEVICE Ends ends_of(const Combine &call) {
    const bool pushes = call.pushes(), combines = call.is_owner(), takes = call.is_taker();
    const u32 push = !pushes ? 0 : combines ? PUSH_THREADS : takes ? TILE_THREADS / 2 : TILE_THREADS;
    const u32 take = !takes ? 0 : pushes && combines ? TAKE_THREADS : TILE_THREADS / 2;
    return Ends{{push, TILE_THREADS - take, TILE_THREADS}};
}

template <class T, class Op>
DEVICE void combine_tiles(const Combine &call) {
    __shared__ LinePorts ports;
    __shared__ TeamState states[3];
    __shared__ u32 pushed;
    if (threadIdx.x == 0) pushed = 0;
    if (__syncthreads_or(call.group.is_latched())) return;
    if (Op::SCALES && call.scaled) {
        LineAgent agent(call.group);
        const u32 others = ((1u << call.group.size) - 1) & ~call.me();
        const u32 to = call.is_source() ? call.owners & others : 0, from = call.is_owner() ? call.sources & others : 0;
        agent.catch_up();
        if (!agent.exchange_scales(ports, to, from, call.scale)) return;
        agent.save();
    }
    const Ends ends = ends_of(call);
    const u32 role = (threadIdx.x >= ends.of[0]) + (threadIdx.x >= ends.of[1]), begin = role == 0 ? 0 : ends.of[role - 1];
    const Team team{1 + role, threadIdx.x - begin, ends.of[role] - begin};
    CombineTiles<T, Op> tiles{call, states[role], combiner_of<T, Op>(call, ports), team, pushed};
    if (role == 0) {
        if (call.pushes()) tiles.scatter();
    } else if (role == 1) {
        if (call.is_owner()) tiles.combine();
    } else {
        if (call.is_taker()) tiles.gather();
    }
}

}  // namespace unisono

#define KERNEL(op, type)                                                                                               \
    ENTRY(unisono_lines_##op##_##type, unisono::Combine, unisono::LINE_THREADS, 1) {                                   \
        unisono::combine_lines<unisono::type, unisono::op>(call);                                                \
    }                                                                                                                  \
    ENTRY(unisono_tiles_##op##_##type, unisono::Combine, unisono::TILE_THREADS, 2) {                                   \
        unisono::combine_tiles<unisono::type, unisono::op>(call);                                                      \
    }

KERNEL(Sum, F32)
#ifdef UNISONO_FEW
KERNEL(Sum, Bf16) KERNEL(Various, I32)
#else
// Where the sign makes no difference, both types of a size share a sum.
KERNEL(Sum, F16) KERNEL(Sum, F64) KERNEL(Sum, Bf16) KERNEL(Sum, F8E4M3) KERNEL(Sum, F8E5M2)
KERNEL(Sum, U8) KERNEL(Sum, U32) KERNEL(Sum, U64)
KERNEL(Various, F16) KERNEL(Various, F32) KERNEL(Various, F64)
KERNEL(Various, Bf16) KERNEL(Various, F8E4M3) KERNEL(Various, F8E5M2)
KERNEL(Various, I8) KERNEL(Various, U8) KERNEL(Various, I32)
KERNEL(Various, U32) KERNEL(Various, I64) KERNEL(Various, U64)
#endif
KERNEL(Copy, U8)

#define SUM_DEALT(type)                                                                                                \
    ENTRY(unisono_dealt_##type, unisono::Combine, unisono::DEALT_THREADS, 2) {                                         \
        unisono::sum_dealt<unisono::type>(call);                                                                       \
    }

SUM_DEALT(F32) SUM_DEALT(Bf16)
#ifndef UNISONO_FEW
SUM_DEALT(F16) SUM_DEALT(F64) SUM_DEALT(U32) SUM_DEALT(U64)
#endif

ENTRY(unisono_move, unisono::Move<16>, unisono::MOVE_THREADS, 2) {
    unisono::Mover<16>::run(call);
}

ENTRY(unisono_move_many, unisono::Move<240>, unisono::MOVE_THREADS, 2) {
    unisono::Mover<240>::run(call);
}

ENTRY(unisono_swap, unisono::Swap, unisono::SWAP_THREADS, 1) {
    unisono::swap(call);
}

#define SEVERAL(op, type)                                                                                              \
    ENTRY(unisono_several_lines_##op##_##type, unisono::Several<unisono::Combine>, unisono::LINE_THREADS, 1) {         \
        unisono::combine_lines<unisono::type, unisono::op>(call.own());                                         \
    }                                                                                                                  \
    ENTRY(unisono_several_tiles_##op##_##type, unisono::Several<unisono::Combine>, unisono::TILE_THREADS, 2) {         \
        __shared__ unisono::Combine own;                                                                               \
        unisono::combine_tiles<unisono::type, unisono::op>(call.own(own));                                             \
    }

SEVERAL(Sum, F32) SEVERAL(Sum, Bf16)
#ifndef UNISONO_FEW
SEVERAL(Sum, F16) SEVERAL(Sum, F64) SEVERAL(Sum, U32) SEVERAL(Sum, U64)
#endif
SEVERAL(Copy, U8)

ENTRY(unisono_several_swap, unisono::Several<unisono::Swap>, unisono::SWAP_THREADS, 1) {
    unisono::swap(call.own());
}
