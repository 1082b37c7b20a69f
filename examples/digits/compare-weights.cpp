// Compares weights that runs with different numbers of processes have saved: compare-weights FILE FILE...
//
// Different numbers of processes add the same gradients up in different groupings, so the weights agree within rounding
// and no better. Prints the largest difference to the first file; fails above the bound.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

constexpr double kBound = 1e-4;

std::vector<double> read(const char *path) {
    std::ifstream file(path);
    return {std::istream_iterator<double>(file), std::istream_iterator<double>()};
}

}  // namespace

int main(int argc, char **argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: compare-weights FILE FILE...\n");
        return 2;
    }
    const std::vector<double> first = read(argv[1]);
    bool agree = !first.empty();
    for (int i = 2; i < argc; i++) {
        const std::vector<double> other = read(argv[i]);
        double difference = 0;
        double largest = 0;
        if (other.size() != first.size()) difference = INFINITY;
        for (std::size_t w = 0; w < std::min(first.size(), other.size()); w++) {
            difference = std::max(difference, std::fabs(first[w] - other[w]));
            largest = std::max(largest, std::fabs(first[w]));
        }
        const bool close = difference <= kBound;  // false for NaN as well
        std::printf("%s and %s: largest difference of %zu weights %.2e, largest weight %.2f, bound %.0e: %s\n", argv[1],
                    argv[i], first.size(), difference, largest, kBound, close ? "agree" : "DO NOT AGREE");
        agree = agree && close;
    }
    return agree ? 0 : 1;
}
