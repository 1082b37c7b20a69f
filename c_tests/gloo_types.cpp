// C++17, gloo's headers: the types of elements and the operators over them, of functions and of objects.

#include <complex>
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include <gloo/allreduce_bcube.h>
#include <gloo/allreduce_halving_doubling.h>
#include <gloo/allreduce_local.h>
#include <gloo/allreduce_ring.h>
#include <gloo/reduce_scatter.h>
#include <gloo/types.h>

#include "gloo_inputs.h"
#include "gloo_reductions.h"
#include "gloo_threads.h"
#include "gloo_values.h"

namespace {

// ---- elements

/* A bfloat16 of the program's own. */
struct Bfloat16 {
    uint16_t bits = 0;

    Bfloat16() = default;
    explicit Bfloat16(float value) {
        uint32_t whole;
        std::memcpy(&whole, &value, sizeof(whole));
        bits = static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
    }
    explicit operator float() const {
        const uint32_t whole = uint32_t{bits} << 16;
        float value;
        std::memcpy(&value, &whole, sizeof(value));
        return value;
    }
    friend Bfloat16 operator+(Bfloat16 a, Bfloat16 b) { return Bfloat16(float(a) + float(b)); }
    friend Bfloat16 operator*(Bfloat16 a, Bfloat16 b) { return Bfloat16(float(a) * float(b)); }
    friend bool operator<(Bfloat16 a, Bfloat16 b) { return float(a) < float(b); }
    friend bool operator==(Bfloat16 a, Bfloat16 b) { return float(a) == float(b); }
};

/* As many bits, and a number that floats are made of, but no float: so many 256ths. */
struct Fixed {
    int16_t parts = 0;

    Fixed() = default;
    explicit Fixed(float value) : parts(static_cast<int16_t>(std::lround(value * 256))) {}
    explicit operator float() const { return static_cast<float>(parts) / 256; }
    friend Fixed operator+(Fixed a, Fixed b) { return Fixed(float(a) + float(b)); }
    friend Fixed operator*(Fixed a, Fixed b) { return Fixed(float(a) * float(b)); }
    friend bool operator<(Fixed a, Fixed b) { return a.parts < b.parts; }
    friend bool operator==(Fixed a, Fixed b) { return a.parts == b.parts; }
};

/* Eight bits as IEEE would have them, where the largest exponent stands for infinity: unisono's e4m3 has numbers
   there. */
struct Ieee8 {
    uint8_t bits = 0;

    explicit operator float() const {
        const int exponent = bits >> 3 & 15;
        const float fraction = static_cast<float>(bits & 7) / 8;
        const float size = exponent == 15 ? HUGE_VALF
                           : exponent == 0 ? std::ldexp(fraction, -6)
                                           : std::ldexp(1 + fraction, exponent - 7);
        return bits & 128 ? -size : size;
    }
    friend Ieee8 operator+(Ieee8 a, Ieee8) { return a; }
    friend Ieee8 operator*(Ieee8 a, Ieee8) { return a; }
    friend bool operator<(Ieee8 a, Ieee8 b) { return float(a) < float(b); }
};

double number(gloo::float16 value) { return value.value(); }
template <class T> double number(T value) {
    if constexpr (std::is_arithmetic_v<T>) {
        return static_cast<double>(value);
    } else {
        return static_cast<double>(static_cast<float>(value));
    }
}

/* Integers wrap; other numbers of these tests are so small and whole that nothing is rounded. */
template <class T> T combined(Op op, T a, T b) {
    if (op == Op::min || op == Op::max) {
        return (b < a) == (op == Op::min) ? b : a;
    }
    if constexpr (std::is_integral_v<T>) {
        const auto left = static_cast<uint64_t>(a), right = static_cast<uint64_t>(b);
        return static_cast<T>(op == Op::sum ? left + right : left * right);
    } else {
        const double result = op == Op::sum ? number(a) + number(b) : number(a) * number(b);
        return T(static_cast<float>(result));
    }
}

/* Integers of all bits; else 1, 2 or 3 with a sign. */
template <class T> T operand(int rank, std::size_t i) {
    const uint64_t bits = mix(static_cast<uint64_t>(rank), i, 77);
    if constexpr (std::is_integral_v<T>) {
        return static_cast<T>(bits);
    } else {
        return T(static_cast<float>(bits % 3 + 1) * (bits & 64 ? -1.0f : 1.0f));
    }
}

// ---- types and operators

/* What a rank has, and what comes of it. */
template <class T> struct Operands {
    Operands(const GlooContext &context, Op op, std::size_t count) {
        for (std::size_t i = 0; i < count; i++) {
            T all = operand<T>(0, i);
            for (int rank = 1; rank < context->size; rank++) {
                all = combined(op, all, operand<T>(rank, i));
            }
            expected.push_back(all);
            mine.push_back(operand<T>(context->rank, i));
        }
    }
    std::vector<T> mine, expected;
};

template <class T, class Given>
void check_function(const GlooContext &context, const Operands<T> &operands, const Given &function) {
    auto out = operands.mine;
    allreduce(context, out, function);
    CHECK(out == operands.expected);
    const int root = context->size - 1;
    const auto reduced = reduce_to(context, root, operands.mine, function);
    CHECK(context->rank != root || reduced == operands.expected);
}

template <class T> void check_functions(const GlooContext &context, std::size_t count, bool everyWay) {
    for (const Op op : {Op::sum, Op::product, Op::min, Op::max}) {
        const Operands<T> operands(context, op, count);
        // As it is, in an object, and unrecognised.
        check_function(context, operands, gloos<T>(op));
        if (everyWay) {
            check_function(context, operands, Function(gloos<T>(op)));
            check_function(context, operands, elementwise<T>([op](T a, T b) { return combined(op, a, b); }));
        }
    }
}

template <class T> void check_objects(const GlooContext &context, std::size_t count) {
    using Functions = gloo::ReductionFunction<T>;
    using Case = std::tuple<Op, const Functions *, gloo::ReductionType>;
    for (const auto &[op, function, type] :
         {Case(Op::sum, Functions::sum, gloo::SUM), Case(Op::product, Functions::product, gloo::PRODUCT),
          Case(Op::min, Functions::min, gloo::MIN), Case(Op::max, Functions::max, gloo::MAX)}) {
        CHECK_EQ(function->type(), type);
        const Operands<T> operands(context, op, count);
        auto ring = operands.mine, halving = operands.mine;
        gloo::AllreduceRing<T>(context, {ring.data()}, static_cast<int>(count), function).run();
        CHECK(ring == operands.expected);
        gloo::AllreduceHalvingDoubling<T>(context, {halving.data()}, static_cast<int>(count), function).run();
        CHECK(halving == operands.expected);
    }
}

template <class... Types> void check_types(const GlooContext &context, std::size_t count, bool everyWay) {
    (check_functions<Types>(context, count, everyWay), ...);
}

template <class... Types> void check_types_of_objects(const GlooContext &context, std::size_t count) {
    (check_objects<Types>(context, count), ...);
}

void types_and_operators() {
    for (const int size : {1, 2, 5}) {
        as_threads(size, [](const GlooContext &context) {
            for (const std::size_t count : {1, 1001}) {
                check_types<int8_t, uint8_t, int32_t, uint32_t, int64_t, uint64_t, long long, float, double,
                            gloo::float16, Bfloat16, int16_t, uint16_t>(context, count, true);
            }
        });
    }
    as_threads(3, [](const GlooContext &context) {
        check_types<int8_t, uint8_t, int32_t, uint32_t, int64_t, uint64_t, float, double, gloo::float16, Bfloat16,
                    int16_t>(context, 100003, false);
    });
}

void types_and_operators_of_objects() {
    for (const int size : {1, 2, 5}) {
        as_threads(size, [](const GlooContext &context) {
            for (const std::size_t count : {1, 1001}) {
                check_types_of_objects<int8_t, uint8_t, int32_t, uint32_t, int64_t, uint64_t, float, double,
                                       gloo::float16, int16_t, uint16_t>(context, count);
            }
        });
    }
    as_threads(2, [](const GlooContext &context) {
        std::complex<double> number(context->rank, 1);
        gloo::AllreduceBcube<std::complex<double>>(context, {&number}, 1).run();
        CHECK(number == std::complex<double>(1, 2));
    });
}

/* A rank has a number so large that a half added to it is rounded away, the others a half each: only who adds up in
   float finds two. `large` has 2 between it and the next number above it. */
template <class T> std::vector<T> halves(const GlooContext &context, float large, std::size_t count) {
    std::vector<T> mine;
    for (std::size_t i = 0; i < count; i++) {
        mine.push_back(T(static_cast<int>(i % 4) == context->rank ? large : 0.5f));
    }
    return mine;
}

template <class T> void check_rounded_once(const GlooContext &context, float large) {
    for (const std::size_t count : {1, 33, 100003}) {
        const auto mine = halves<T>(context, large, count);
        auto once = mine, step = mine;
        allreduce(context, once, gloos<T>(Op::sum));
        CHECK(once == std::vector<T>(count, T(large + 2)));
        // The same function, unrecognised.
        allreduce(context, step,
                  [](void *c, const void *a, const void *b, std::size_t n) { gloo::sum<T>(c, a, b, n); });
        CHECK(step == std::vector<T>(count, T(large)));
        const auto reduced = reduce_to(context, 1, mine, gloos<T>(Op::sum));
        CHECK(context->rank != 1 || reduced == std::vector<T>(count, T(large + 2)));
    }
}

/* In objects, too. */
template <template <class> class Allreduce> void check_halves_of(const GlooContext &context) {
    for (const int count : {1, 1001, 100003}) {
        auto memory = halves<gloo::float16>(context, 2048, static_cast<std::size_t>(count));
        Allreduce<gloo::float16>(context, {memory.data()}, count).run();
        CHECK(memory == std::vector<gloo::float16>(memory.size(), gloo::float16(2050.0f)));
    }
}

void short_floats_are_rounded_once() {
    as_threads(5, [](const GlooContext &context) {
        check_rounded_once<gloo::float16>(context, 2048);
        check_rounded_once<Bfloat16>(context, 256);
    });
}

/* What has as many bytes is not a short float for that, nor what reads most bits alike. */
void other_short_types() {
    CHECK(gloo::detail::typeOf<Bfloat16>() == UNISONO_BFLOAT16);
    CHECK(gloo::detail::typeOf<Fixed>() == gloo::detail::kUnknown);
    CHECK(gloo::detail::typeOf<Ieee8>() == gloo::detail::kUnknown);
    as_threads(3, [](const GlooContext &context) {
        std::vector<Fixed> sum, expected;
        std::vector<int16_t> whole, wholeExpected;
        for (int i = 0; i < 1000; i++) {
            sum.push_back(Fixed(static_cast<float>(i + context->rank) / 32));
            expected.push_back(Fixed(static_cast<float>(3 * i + 3) / 32));
            whole.push_back(static_cast<int16_t>(0x3f00 - 1000 * context->rank - i));
            wholeExpected.push_back(static_cast<int16_t>(3 * 0x3f00 - 3000 - 3 * i));
        }
        allreduce(context, sum, gloos<Fixed>(Op::sum));
        CHECK(sum == expected);
        allreduce(context, whole, gloos<int16_t>(Op::sum));
        CHECK(whole == wholeExpected);
    });
}

void complex_numbers() {
    on_each_size([](const GlooContext &context) {
        using Complex = std::complex<double>;
        for (const std::size_t count : {1, 101, 50001}) {
            std::vector<Complex> mine, sum, product(count, Complex(1, 0));
            for (std::size_t i = 0; i < count; i++) {
                mine.emplace_back(context->rank + 1, static_cast<double>(i % 5));
                sum.emplace_back(context->size * (context->size + 1) / 2, static_cast<double>(i % 5) * context->size);
                for (int rank = 0; rank < context->size; rank++) {
                    product[i] *= Complex(rank + 1, static_cast<double>(i % 5));
                }
            }
            auto multiplied = mine;
            // One that gloo has, over a type that unisono has not; and one of the program's.
            const Pointer pointer = &gloo::sum<Complex>;
            allreduce(context, mine, pointer);
            CHECK(mine == sum);
            allreduce(context, multiplied, elementwise<Complex>([](Complex a, Complex b) { return a * b; }));
            CHECK(multiplied == product);
        }
    });
}

void halves_are_rounded_once() {
    as_threads(5, [](const GlooContext &context) {
        check_halves_of<gloo::AllreduceRing>(context);
        check_halves_of<gloo::AllreduceBcube>(context);
    });
}

// ---- several inputs of a rank

/* Two ranks have these values each, in a buffer per value. What comes of one rank's, and of both. */
template <class T>
void check_several(const GlooContext &context, Op op, const std::vector<float> &values, float one, float both) {
    using Functions = gloo::ReductionFunction<T>;
    constexpr int count = 1001;
    const auto *function = op == Op::sum ? Functions::sum : op == Op::min ? Functions::min : Functions::max;
    std::vector<std::vector<T>> given;
    for (const float value : values) {
        given.emplace_back(count, T(value));
    }
    const auto is = [](const std::vector<T> &memory, float expected) {
        return std::all_of(memory.begin(), memory.end(), [&](T element) {
            return std::isnan(expected) ? std::isnan(number(element)) : element == T(expected);
        });
    };
    for (const bool separate : {false, true}) {
        auto in = given;
        std::vector<T> out(count);
        gloo::AllreduceOptions options(context);
        options.setReduceFunction(gloos<T>(op));
        if (separate) {
            options.setInputs(addresses(in), count);
            options.setOutput(out.data(), count);
        } else {
            options.setOutputs(addresses(in), count);
        }
        gloo::allreduce(options);
        for (std::size_t i = 0; i < in.size(); i++) {
            CHECK(separate ? is(in[i], values[i]) : is(in[i], both));
        }
        CHECK(!separate || is(out, both));
    }
    auto ring = given, local = given, parts = given;
    gloo::AllreduceRing<T>(context, addresses(ring), count, function).run();
    gloo::AllreduceLocal<T>(context, addresses(local), count, function).run();
    gloo::ReduceScatterHalvingDoubling<T>(context, addresses(parts), count, {500, 501}, function).run();
    for (std::size_t i = 0; i < given.size(); i++) {
        CHECK(is(ring[i], both));
        CHECK(is(local[i], one));
        parts[i].resize(500 + static_cast<std::size_t>(context->rank));
        CHECK(is(parts[i], both));
    }
}

/* They are combined as those of ranks are: a NaN stays, short floats are rounded when all are added, and four are added in
   pairs. */
void several_inputs_of_a_rank() {
    as_threads(2, [](const GlooContext &context) {
        for (const Op op : {Op::min, Op::max}) {
            check_several<float>(context, op, {1, NAN}, NAN, NAN);
            check_several<float>(context, op, {NAN, 1, 2}, NAN, NAN);
            check_several<gloo::float16>(context, op, {1, NAN, 2}, NAN, NAN);
        }
        check_several<gloo::float16>(context, Op::sum, {2048, 1, 1}, 2050, 4100);
        check_several<Bfloat16>(context, Op::sum, {256, 1, 1}, 258, 516);
        check_several<float>(context, Op::sum, {16777216, 1, 1, 1}, 16777218, 33554436);
    });
}

} // namespace

int main() {
    return run_tests({
        {"types and operators of functions", types_and_operators},
        {"types and operators of objects", types_and_operators_of_objects},
        {"short floats are rounded once", short_floats_are_rounded_once},
        {"other types of two bytes", other_short_types},
        {"complex numbers", complex_numbers},
        {"halves are rounded once by objects", halves_are_rounded_once},
        {"several inputs of a rank", several_inputs_of_a_rank},
    });
}
