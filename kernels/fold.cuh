// The fold of a few operands, as one thread of a grid does its part of it. There are four ways:
//
// - elements: vectors of elements, at addresses that 16-byte loads allow;
// - mixed: the same for short floats among which there are accumulators, four positions at a time;
// - positions: one at a time, in any representation: what lies before and behind the vectors, and addresses that differ
//   in their alignment;
// - step by step: any address at all, for what is rare.
//
// All but the last hold eight loads before they combine any: of eight operands one, of four two, of two four; more
// operands take turns. So the memory sees the same load however many operands there are. All combine in the canonical
// order of src/reduce: equal inputs give equal bits.
#pragma once

#include "element.cuh"

namespace unisono {

// What is held in registers at a time, and what one launch takes at most.
constexpr u32 SLOTS = 8;
constexpr u32 MAX_OPERANDS = 32;
// As many as couriers take.
constexpr u32 MAX_THIN_OPERANDS = 8;

// Whether to do without vectors of short floats: in the fallback, which every user carries and few run.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool LEAN = true;
#else
constexpr bool LEAN = false;
#endif

// The parameter of every kernel; `Arguments` of src/cuda/kernels.rs is the same.
struct Arguments {
    u8 *out;
    // Positions.
    u64 count;
    // How many of `operand` there are: at least one.
    u32 operands;
    // Bit i: operand i holds accumulators.
    u32 wide;
    // 1 if the output holds accumulators, else 0.
    u32 out_wide;
    // What an average divides by; 0 leaves the final step to a later fold, or there is none.
    u32 ranks;
    // Bit i: operand i is multiplied by its scalar.
    u32 scaled;
    // Bit i: nothing stands in the place of operand i, since an operand before it is the sum of a whole subtree, this
    // place included. It has that operand's address and width.
    u32 absent;
    const u8 *operand[MAX_OPERANDS];
    // The scalars of a pre-multiplied sum: accumulators in the low bytes.
    u64 scale[MAX_OPERANDS];
};

// A thread's place in the grid.
struct Worker {
    u32 block, blocks, thread, threads;
};

template <u32 WORDS>
struct alignas(4 * WORDS) Vector {
    u32 word[WORDS];
};

// Combines operands of T by Op. THIN is for who waits for the bus anyway, and knows that there are elements alone, each
// at a multiple of its size: less code.
template <class T, class Op, bool THIN = false>
struct Fold {
    using Memory = typename T::Memory;
    using Accumulator = typename T::Accumulator;
    using Value = typename T::Value;
    using Divider = typename T::Divider;
    // Those of an element or an accumulator; the rest of the integer is 0.
    using Bits = typename Choice<sizeof(Accumulator) == 8, u64, u32>::Type;

    // Whether accumulators differ from elements.
    static constexpr bool SHORT = sizeof(Memory) < sizeof(Accumulator);
    // and whether there may be both.
    static constexpr bool MIXES = SHORT && !THIN;
    static constexpr bool DIVIDES = Op::DIVIDES || (Op::SCALES && T::FLOAT);

    const Arguments &call;
    Worker worker;

    BOTH bool is_wide(u32 operand) const { return MIXES && call.wide >> operand & 1; }
    BOTH u32 size_of(u32 operand) const { return is_wide(operand) ? sizeof(Accumulator) : sizeof(Memory); }
    BOTH u32 size_of_out() const { return MIXES && call.out_wide ? sizeof(Accumulator) : sizeof(Memory); }
    // Bit i: something stands in place `from` + i.
    BOTH u32 present_from(u32 from) const {
        return (~call.absent & 0xffffffff >> (MAX_OPERANDS - call.operands)) >> from;
    }

    BOTH const u8 *address(u32 operand, u64 at) const { return call.operand[operand] + at * size_of(operand); }

    template <class M, class B>
    BOTH static M from_bits(B bits) {
        M value;
        COPY(&value, &bits, sizeof(M));
        return value;
    }

    template <class M>
    BOTH static Bits to_bits(M value) {
        Bits bits = 0;
        COPY(&bits, &value, sizeof(M));
        return bits;
    }

    BOTH static Value combine(Value left, Value right) { return Op::template combine<T>(left, right); }

    BOTH bool is_scaled(u32 operand) const { return Op::SCALES && call.scaled >> operand & 1; }
    BOTH Value scale_of(u32 operand) const { return T::widen(from_bits<Accumulator>(call.scale[operand])); }

    BOTH Value value_of(u32 operand, Bits bits) const {
        Value value = is_wide(operand) ? T::widen(from_bits<Accumulator>(bits)) : T::load(from_bits<Memory>(bits));
        return is_scaled(operand) ? T::multiply(value, scale_of(operand)) : value;
    }

    // What is stored for a sum.
    BOTH Bits result(Value sum, const Divider &divider) const {
        if (DIVIDES && call.ranks != 0) sum = divider(sum);
        return MIXES && call.out_wide ? to_bits(T::keep(sum)) : to_bits(T::store(sum));
    }

    // Elements of SIZE positions.
    struct Elements {
        // Longer vectors of 8-bit floats would double the code and gain nothing; of bytes that are scaled they would
        // not fit the registers.
        static constexpr u32 WIDE = sizeof(Memory) == 1 && (T::FLOAT || Op::SCALES) ? 8 : 16;
        static constexpr u32 WORD = sizeof(Memory) > 4 ? sizeof(Memory) : 4;
        static constexpr u32 BYTES = THIN ? WORD : WIDE;
        static constexpr u32 SIZE = BYTES / sizeof(Memory);
        static constexpr u32 WORDS = BYTES / 4;

        using Loaded = Vector<WORDS>;

        // Bitwise operators see words, whatever the elements.
        struct Sum {
            typename Choice<Op::BITWISE, u32, Value>::Type lane[Op::BITWISE ? WORDS : SIZE];

            BOTH void combine_with(const Sum &right) {
#pragma unroll
                for (u32 i = 0; i < sizeof(lane) / sizeof(lane[0]); i++) {
                    if constexpr (Op::BITWISE) {
                        lane[i] = Op::template combine<U32>(lane[i], right.lane[i]);
                    } else {
                        lane[i] = combine(lane[i], right.lane[i]);
                    }
                }
            }
        };

        BOTH static Loaded load(const Fold &fold, u32 operand, u64 at) {
            return *reinterpret_cast<const Loaded *>(fold.call.operand[operand] + at * sizeof(Memory));
        }

        BOTH static Sum unpack(const Fold &fold, u32 operand, const Loaded &loaded) {
            Sum sum;
            if constexpr (Op::BITWISE) {
                COPY(&sum, &loaded, sizeof(sum));
            } else {
                T::template load_all<WORDS>(loaded.word, sum.lane);
                if (fold.is_scaled(operand)) {
                    Value scale = fold.scale_of(operand);
#pragma unroll
                    for (auto &lane : sum.lane) lane = T::multiply(lane, scale);
                }
            }
            return sum;
        }

        BOTH static void store(const Fold &fold, Sum &sum, u64 at, const Divider &divider) {
            Loaded stored;
            if constexpr (Op::BITWISE) {
                COPY(&stored, &sum, sizeof(sum));
            } else {
                if (DIVIDES && fold.call.ranks != 0) {
#pragma unroll
                    for (auto &lane : sum.lane) lane = divider(lane);
                }
                T::template store_all<WORDS>(sum.lane, stored.word);
            }
            *reinterpret_cast<Loaded *>(fold.call.out + at * sizeof(Memory)) = stored;
        }
    };

    // Four positions of short floats, of which some operands hold elements and others accumulators.
    struct Mixed {
        static constexpr u32 SIZE = 4;
        // Of four elements, and of four accumulators.
        static constexpr u32 NARROW = sizeof(Memory), WIDE = sizeof(Accumulator);

        // Elements fill the first of the words.
        using Loaded = Vector<WIDE>;

        struct Sum {
            Value lane[SIZE];

            BOTH void combine_with(const Sum &right) {
#pragma unroll
                for (u32 i = 0; i < SIZE; i++) lane[i] = combine(lane[i], right.lane[i]);
            }
        };

        BOTH static Loaded load(const Fold &fold, u32 operand, u64 at) {
            const u8 *from = fold.address(operand, at);
            if (fold.is_wide(operand)) return *reinterpret_cast<const Loaded *>(from);
            Vector<NARROW> narrow = *reinterpret_cast<const Vector<NARROW> *>(from);
            Loaded loaded;
#pragma unroll
            for (u32 i = 0; i < NARROW; i++) loaded.word[i] = narrow.word[i];
            return loaded;
        }

        BOTH static Sum unpack(const Fold &fold, u32 operand, const Loaded &loaded) {
            Sum sum;
            if (fold.is_wide(operand)) {
#pragma unroll
                for (u32 i = 0; i < SIZE; i++) sum.lane[i] = T::widen(from_bits<Accumulator>(loaded.word[i]));
            } else {
                u32 narrow[NARROW];
#pragma unroll
                for (u32 i = 0; i < NARROW; i++) narrow[i] = loaded.word[i];
                T::template load_all<NARROW>(narrow, sum.lane);
            }
            if (fold.is_scaled(operand)) {
                Value scale = fold.scale_of(operand);
#pragma unroll
                for (auto &lane : sum.lane) lane = T::multiply(lane, scale);
            }
            return sum;
        }

        BOTH static void store(const Fold &fold, Sum &sum, u64 at, const Divider &divider) {
            if (DIVIDES && fold.call.ranks != 0) {
#pragma unroll
                for (auto &lane : sum.lane) lane = divider(lane);
            }
            u8 *into = fold.call.out + at * fold.size_of_out();
            if (fold.call.out_wide) {
                Loaded stored;
#pragma unroll
                for (u32 i = 0; i < SIZE; i++) stored.word[i] = static_cast<u32>(to_bits(T::keep(sum.lane[i])));
                *reinterpret_cast<Loaded *>(into) = stored;
            } else {
                Vector<NARROW> stored;
                T::template store_all<NARROW>(sum.lane, stored.word);
                *reinterpret_cast<Vector<NARROW> *>(into) = stored;
            }
        }
    };

    // One position, in any representation, at an address that is a multiple of its size.
    struct Position {
        static constexpr u32 SIZE = 1;
        using Loaded = Bits;

        struct Sum {
            Value value;
            BOTH void combine_with(const Sum &right) { value = combine(value, right.value); }
        };

        BOTH static Bits load(const Fold &fold, u32 operand, u64 at) {
            const u8 *from = fold.address(operand, at);
            if (fold.is_wide(operand)) return to_bits(*reinterpret_cast<const Accumulator *>(from));
            return to_bits(*reinterpret_cast<const Memory *>(from));
        }

        BOTH static Sum unpack(const Fold &fold, u32 operand, Bits loaded) {
            return Sum{fold.value_of(operand, loaded)};
        }

        BOTH static void store(const Fold &fold, Sum &sum, u64 at, const Divider &divider) {
            Bits bits = fold.result(sum.value, divider);
            u8 *into = fold.call.out + at * fold.size_of_out();
            if (MIXES && fold.call.out_wide) {
                *reinterpret_cast<Accumulator *>(into) = from_bits<Accumulator>(bits);
            } else {
                *reinterpret_cast<Memory *>(into) = from_bits<Memory>(bits);
            }
        }
    };

    // Positions of the call without those from `head` to `head + inside`.
    struct Outside {
        u64 head, inside;
        BOTH u64 operator()(u64 i) const { return i < head ? i : i + inside; }
    };

    // Folds `groups` groups; `position` says where each begins.
    template <class Group, class Where>
    BOTH void fold_groups(u64 groups, Where position, const Divider &divider) const {
        // Slot s is for operand s % 2^log of the turn and the group that lies s / 2^log * threads after the thread's
        // first.
        u32 log = call.operands <= 2 ? 1 : call.operands <= 4 ? 2 : 3;
        u32 mask = (1u << log) - 1;
        u64 batch = static_cast<u64>(worker.threads) << (3 - log);
#pragma unroll 1
        for (u64 first = worker.block * batch + worker.thread; first < groups; first += worker.blocks * batch) {
            auto group = [&](u32 slot) { return first + static_cast<u64>(slot >> log) * worker.threads; };
            auto finish = [&](u32 slot, auto &sum) {
                if (group(slot) < groups) Group::store(*this, sum, position(group(slot)), divider);
            };
            // The sums of one turn and of two, as a binary counter of the turns has bits.
            static_assert(MAX_OPERANDS == 4 * SLOTS, "the counter reaches the last turn");
            typename Group::Sum one, two;
#pragma unroll 1
            for (u32 turn = 0;; turn += SLOTS) {
                u32 present = present_from(turn);
                // The first of a turn can always be loaded.
                auto has = [&](u32 slot) { return slot == 0 || present >> (slot & mask) & 1; };
                typename Group::Loaded loaded[SLOTS];
#pragma unroll
                for (u32 slot = 0; slot < SLOTS; slot++) {
                    if (has(slot) && group(slot) < groups) {
                        loaded[slot] = Group::load(*this, turn + (slot & mask), position(group(slot)));
                    }
                }
                auto pair = [&](u32 slot) {
                    auto sum = Group::unpack(*this, turn + (slot & mask), loaded[slot]);
                    if (has(slot + 1)) {
                        sum.combine_with(Group::unpack(*this, turn + (slot + 1 & mask), loaded[slot + 1]));
                    }
                    return sum;
                };
                auto sum = pair(0);
                if (has(2)) {
                    auto right = pair(2);
                    if (log == 1) {
                        finish(2, right);
                    } else {
                        sum.combine_with(right);
                    }
                }
                if (has(4)) {
                    auto half = pair(4);
                    if (has(6)) {
                        auto right = pair(6);
                        if (log == 1) {
                            finish(6, right);
                        } else {
                            half.combine_with(right);
                        }
                    }
                    if (log == 3) {
                        sum.combine_with(half);
                    } else {
                        finish(4, half);
                    }
                }
                bool last = turn + SLOTS >= call.operands;
#pragma unroll 1
                for (u32 level = SLOTS; level < MAX_OPERANDS && (level == SLOTS || last); level *= 2) {
                    if (!(turn & level)) continue;
                    auto left = level == SLOTS ? one : two;
                    // The right half begins with the turn that is a multiple of the level.
                    if (present_from(turn & ~(level - 1)) & 1) left.combine_with(sum);
                    sum = left;
                }
                if (last) {
                    finish(0, sum);
                    break;
                }
                if (turn & SLOTS) {
                    two = sum;
                } else {
                    one = sum;
                }
            }
        }
    }

    // The same with less code, of operands that are all present.
    template <class Group, u32 ITEMS, class Where>
    BOTH void fold_groups_thinly(u64 groups, Where position, const Divider &divider) const {
        constexpr u32 LEVELS = 3;
        static_assert(1 << LEVELS == MAX_THIN_OPERANDS, "the counter reaches the last operand");
        const u64 step = static_cast<u64>(worker.blocks) * worker.threads;
#pragma unroll 1
        for (u64 first = static_cast<u64>(worker.block) * worker.threads + worker.thread; first < groups; first += ITEMS * step) {
            // Level l holds the sums of 2^l operands, as a binary counter of the operands has bits.
            typename Group::Sum level[LEVELS][ITEMS], sum[ITEMS];
#pragma unroll 1
            for (u32 i = 0; i < call.operands; i++) {
                typename Group::Loaded loaded[ITEMS];
#pragma unroll
                for (u32 item = 0; item < ITEMS; item++) {
                    if (first + item * step < groups) loaded[item] = Group::load(*this, i, position(first + item * step));
                }
#pragma unroll
                for (u32 item = 0; item < ITEMS; item++) sum[item] = Group::unpack(*this, i, loaded[item]);
                const bool last = i + 1 == call.operands;
                bool kept = last;
#pragma unroll
                for (u32 l = 0; l < LEVELS; l++) {
                    if (i >> l & 1) {
                        if (kept && !last) continue;
#pragma unroll
                        for (u32 item = 0; item < ITEMS; item++) {
                            auto left = level[l][item];
                            left.combine_with(sum[item]);
                            sum[item] = left;
                        }
                    } else if (!kept) {
#pragma unroll
                        for (u32 item = 0; item < ITEMS; item++) level[l][item] = sum[item];
                        kept = true;
                    }
                }
            }
#pragma unroll
            for (u32 item = 0; item < ITEMS; item++) {
                if (first + item * step < groups) Group::store(*this, sum[item], position(first + item * step), divider);
            }
        }
    }

    // Folds one position at any address.
    BOTH void fold_step_by_step(u64 at, const Divider &divider) const {
        // Level l holds the sum of 2^l operands, as a binary counter of the operands has bits.
        constexpr u32 LEVELS = 5;
        static_assert(1 << LEVELS == MAX_OPERANDS, "the counter reaches the last operand");
        Value level[LEVELS] = {}, sum{};
#pragma unroll 1
        for (u32 i = 0; i < call.operands; i++) {
            Bits bits = 0;
            const u8 *from = address(i, at);
#pragma unroll 1
            for (u32 byte = 0; byte < size_of(i); byte++) bits |= static_cast<Bits>(from[byte]) << 8 * byte;
            sum = value_of(i, bits);
            bool kept = i + 1 == call.operands;
#pragma unroll
            for (u32 l = 0; l < LEVELS; l++) {
                if (i >> l & 1) {
                    if (!kept || i + 1 == call.operands) {
                        // The right half begins 2^l aligned places.
                        sum = present_from(i >> l << l) & 1 ? combine(level[l], sum) : level[l];
                    }
                } else if (!kept) {
                    level[l] = sum;
                    kept = true;
                }
            }
        }
        Bits bits = result(sum, divider);
        u8 *into = call.out + at * size_of_out();
#pragma unroll 1
        for (u32 byte = 0; byte < size_of_out(); byte++) into[byte] = static_cast<u8>(bits >> 8 * byte);
    }

    // Whether the short floats of a call are not all elements.
    BOTH bool is_mixed() const { return MIXES && (call.wide != 0 || call.out_wide != 0); }

    // The groups that the addresses allow, `inside` being a multiple of their size: every address is a multiple of its
    // own position's size, and all lie as far into a group.
    template <class Group>
    BOTH Outside groups() const {
        auto positions = [](const u8 *address, bool wide) {
            return reinterpret_cast<u64>(address) / (wide ? sizeof(Accumulator) : sizeof(Memory));
        };
        u64 phase = positions(call.out, MIXES && call.out_wide), differ = 0;
#pragma unroll 1
        for (u32 i = 0; i < call.operands; i++) differ |= positions(call.operand[i], is_wide(i)) ^ phase;
        u64 head = (0 - phase) % Group::SIZE;
        if (differ % Group::SIZE != 0 || head >= call.count) return Outside{0, 0};
        return Outside{head, (call.count - head) / Group::SIZE * Group::SIZE};
    }

    // Folds the groups that the addresses allow; answers what is left.
    template <class Group>
    BOTH Outside fold_inside(const Divider &divider) const {
        Outside outside = groups<Group>();
        auto position = [&](u64 i) { return outside.head + i * Group::SIZE; };
        if constexpr (THIN) {
            // Sums of four lanes take twice the registers.
            fold_groups_thinly<Group, Group::SIZE == 4 ? 2 : 4>(outside.inside / Group::SIZE, position, divider);
        } else {
            fold_groups<Group>(outside.inside / Group::SIZE, position, divider);
        }
        return outside;
    }

    BOTH void run() const {
        Divider divider(DIVIDES && call.ranks != 0 ? call.ranks : 1);
        Outside outside{0, 0};
        if constexpr (THIN) {
            if constexpr (Elements::SIZE > 1) outside = fold_inside<Elements>(divider);
            fold_groups_thinly<Position, Elements::SIZE == 1 ? 4 : 1>(call.count - outside.inside, outside, divider);
            return;
        }
        u64 misaligned = reinterpret_cast<u64>(call.out) & (size_of_out() - 1);
#pragma unroll 1
        for (u32 i = 0; i < call.operands; i++) misaligned |= reinterpret_cast<u64>(call.operand[i]) & (size_of(i) - 1);
        if (misaligned != 0) {
            u64 stride = static_cast<u64>(worker.blocks) * worker.threads;
            u64 at = static_cast<u64>(worker.block) * worker.threads + worker.thread;
#pragma unroll 1
            for (; at < call.count; at += stride) fold_step_by_step(at, divider);
            return;
        }
        if constexpr (!SHORT) {
            outside = fold_inside<Elements>(divider);
        } else if constexpr (!LEAN) {
            outside = is_mixed() ? fold_inside<Mixed>(divider) : fold_inside<Elements>(divider);
        }
        fold_groups<Position>(call.count - outside.inside, outside, divider);
    }
};

}  // namespace unisono

// Every kernel: operator, type. Where the sign makes no difference, both types of a size share one; where nothing but
// the bits does, all types share the bytes'.
#define FOR_EACH_FLOAT(K, op) K(op, F16) K(op, F32) K(op, F64) K(op, Bf16) K(op, F8E4M3) K(op, F8E5M2)
#define FOR_EACH_INTEGER(K, op) K(op, I8) K(op, U8) K(op, I32) K(op, U32) K(op, I64) K(op, U64)
#define FOR_EACH_UNSIGNED(K, op) K(op, U8) K(op, U32) K(op, U64)
#define FOR_EACH_KERNEL(K)                                                                                             \
    FOR_EACH_FLOAT(K, Sum) FOR_EACH_UNSIGNED(K, Sum)                                                                   \
    FOR_EACH_INTEGER(K, Average)                                                                                       \
    FOR_EACH_FLOAT(K, Product) FOR_EACH_UNSIGNED(K, Product)                                                           \
    FOR_EACH_FLOAT(K, Min) FOR_EACH_INTEGER(K, Min)                                                                    \
    FOR_EACH_FLOAT(K, Max) FOR_EACH_INTEGER(K, Max)                                                                    \
    K(And, U8) K(Or, U8) K(Xor, U8)
