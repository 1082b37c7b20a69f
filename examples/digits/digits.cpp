// Trains a softmax classifier on 1,797 handwritten digits, the rows divided among the ranks.
//
//   unisono-run -n 4 -- digits data/digits.txt [--gpu] [--weights FILE] [--curve FILE]
//
// The root broadcasts the first weights; in every step each rank computes the gradient over its own rows, and one
// allreduce adds them up. All ranks then take the same step, so they hold the same bits at the end, which an allgather
// of hashes shows. With --gpu, weights and gradients are broadcast and added up in GPU memory: the same calls with
// other pointers, and the same bits.

#include "gpu.h"

#include <unisono.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kPixels = 64;
constexpr std::size_t kClasses = 10;
constexpr std::size_t kWeights = (kPixels + 1) * kClasses;  // the last row is the bias
constexpr std::uint32_t kRoot = 0;
constexpr int kSteps = 400;
constexpr float kRate = 0.5F;
constexpr float kMomentum = 0.9F;
constexpr double kAccuracyWanted = 0.93;

// Every fifth row is held out.
constexpr std::size_t kHeldOut = 5;

using Weights = std::vector<float>;
using Scores = std::array<float, kClasses>;

struct Digit {
    std::array<float, kPixels> pixels;
    std::size_t label;
};

// The rows of one rank.
struct Share {
    std::vector<Digit> training;
    std::vector<Digit> held_out;
    std::size_t training_of_all = 0;
};

void check(unisono_status_t status) {
    if (status != UNISONO_OK) throw std::runtime_error(unisono_last_error());
}

class Group {
public:
    // `on_gpu`: weights and gradients, at most `most` of them, meet in GPU memory.
    Group(bool on_gpu, std::size_t most) {
        unisono_context_t *context = nullptr;
        check(unisono_context_create_from_env(nullptr, &context));
        context_.reset(context);
        if (on_gpu) gpu_ = std::make_unique<GpuMemory>(rank(), most * sizeof(float));
    }

    std::uint32_t rank() const { return unisono_context_rank(context_.get()); }
    std::uint32_t size() const { return unisono_context_size(context_.get()); }
    bool is_root() const { return rank() == kRoot; }

    void broadcast(std::vector<float> &values) {
        float *data = load(values);
        check(unisono_broadcast(context_.get(), data, values.size(), UNISONO_FLOAT32, kRoot, nullptr, nullptr));
        store(values);
    }

    void sum(std::vector<float> &values) {
        float *data = load(values);
        check(unisono_allreduce(context_.get(), data, data, values.size(), UNISONO_FLOAT32, UNISONO_SUM, nullptr,
                                nullptr));
        store(values);
    }

    void sum(std::array<std::int64_t, 2> &values) {
        check(unisono_allreduce(context_.get(), values.data(), values.data(), values.size(), UNISONO_INT64, UNISONO_SUM,
                                nullptr, nullptr));
    }

    std::vector<std::uint64_t> gather(std::uint64_t value) {
        std::vector<std::uint64_t> all(size());
        check(unisono_allgather(context_.get(), &value, all.data(), 1, UNISONO_UINT64, nullptr, nullptr));
        return all;
    }

private:
    // Where the values are for a call, and back from there.
    float *load(std::vector<float> &values) {
        if (!gpu_) return values.data();
        gpu_->load(values.data(), values.size() * sizeof(float));
        return gpu_->data();
    }

    void store(std::vector<float> &values) {
        if (gpu_) gpu_->store(values.data(), values.size() * sizeof(float));
    }

    struct Destroy {
        void operator()(unisono_context_t *context) const { unisono_context_destroy(context); }
    };
    std::unique_ptr<GpuMemory> gpu_;
    std::unique_ptr<unisono_context_t, Destroy> context_;
};

Digit parse(const std::string &line) {
    static const std::string scale = "0123456789ABCDEFG";
    Digit digit{};
    if (line.size() != kPixels + 2) throw std::runtime_error("a line of the data has a wrong length");
    for (std::size_t i = 0; i < kPixels; i++) {
        const std::size_t value = scale.find(line[i]);
        if (value == std::string::npos) throw std::runtime_error("a pixel of the data is out of range");
        digit.pixels[i] = static_cast<float>(value) / 16.0F;
    }
    const char label = line[kPixels + 1];
    if (label < '0' || label > '9') throw std::runtime_error("a label of the data is out of range");
    digit.label = static_cast<std::size_t>(label - '0');
    return digit;
}

Share read_share(const std::string &path, std::uint32_t rank, std::uint32_t size) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot open " + path);
    Share share;
    std::size_t held_out_of_all = 0;
    std::size_t row = 0;
    for (std::string line; std::getline(file, line); row++) {
        const bool held_out = row % kHeldOut == 0;
        std::size_t &count = held_out ? held_out_of_all : share.training_of_all;
        if (count++ % size == rank) (held_out ? share.held_out : share.training).push_back(parse(line));
    }
    if (share.training_of_all == 0) throw std::runtime_error(path + " holds no digits");
    return share;
}

// Small numbers around zero, the same on every machine.
Weights first_weights() {
    Weights weights(kWeights);
    std::uint32_t state = 1;
    for (float &weight : weights) {
        state = state * 1664525U + 1013904223U;
        weight = (static_cast<float>(state >> 8) / 16777216.0F - 0.5F) * 0.02F;
    }
    return weights;
}

Scores scores_of(const Weights &weights, const Digit &digit) {
    Scores scores{};
    for (std::size_t c = 0; c < kClasses; c++) scores[c] = weights[kPixels * kClasses + c];
    for (std::size_t i = 0; i < kPixels; i++) {
        for (std::size_t c = 0; c < kClasses; c++) scores[c] += digit.pixels[i] * weights[i * kClasses + c];
    }
    return scores;
}

// Adds the gradient of the cross entropy of `digits` to the first kWeights of `sums`, and their loss to the one after.
void add_gradient(const Weights &weights, const std::vector<Digit> &digits, std::vector<float> &sums) {
    for (const Digit &digit : digits) {
        Scores odds = scores_of(weights, digit);
        const float highest = *std::max_element(odds.begin(), odds.end());
        float total = 0;
        for (float &odd : odds) total += odd = std::exp(odd - highest);
        for (float &odd : odds) odd /= total;
        sums[kWeights] -= std::log(std::max(odds[digit.label], std::numeric_limits<float>::min()));
        odds[digit.label] -= 1;
        for (std::size_t i = 0; i < kPixels; i++) {
            for (std::size_t c = 0; c < kClasses; c++) sums[i * kClasses + c] += digit.pixels[i] * odds[c];
        }
        for (std::size_t c = 0; c < kClasses; c++) sums[kPixels * kClasses + c] += odds[c];
    }
}

double held_out_accuracy(Group &group, const Weights &weights, const std::vector<Digit> &digits) {
    std::array<std::int64_t, 2> right_and_all{0, static_cast<std::int64_t>(digits.size())};
    for (const Digit &digit : digits) {
        const Scores scores = scores_of(weights, digit);
        const auto best = std::max_element(scores.begin(), scores.end()) - scores.begin();
        right_and_all[0] += static_cast<std::size_t>(best) == digit.label;
    }
    group.sum(right_and_all);
    return static_cast<double>(right_and_all[0]) / static_cast<double>(right_and_all[1]);
}

// FNV-1a over the bytes: equal hashes mean equal bits, rounding included.
std::uint64_t hash_of(const Weights &weights) {
    std::uint64_t hash = 14695981039346656037ULL;
    std::vector<unsigned char> bytes(weights.size() * sizeof(float));
    std::memcpy(bytes.data(), weights.data(), bytes.size());
    for (const unsigned char byte : bytes) hash = (hash ^ byte) * 1099511628211ULL;
    return hash;
}

void save(const std::string &path, const Weights &weights) {
    std::ofstream file(path);
    char text[32];
    for (const float weight : weights) {
        std::snprintf(text, sizeof text, "%.9g\n", static_cast<double>(weight));
        file << text;
    }
    if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

int train(const std::string &data, bool on_gpu, const std::string &weights_path, const std::string &curve_path) {
    Group group(on_gpu, kWeights + 1);
    const Share share = read_share(data, group.rank(), group.size());

    // All but the root start from nonsense, which only the broadcast can cure.
    Weights weights = group.is_root() ? first_weights() : Weights(kWeights, std::nanf(""));
    group.broadcast(weights);

    std::ofstream curve;
    if (group.is_root() && !curve_path.empty()) curve.open(curve_path);
    const auto start = std::chrono::steady_clock::now();
    std::vector<float> velocity(kWeights, 0.0F);
    std::vector<float> sums(kWeights + 1);
    double accuracy = 0;
    for (int step = 0; step <= kSteps; step++) {
        std::fill(sums.begin(), sums.end(), 0.0F);
        add_gradient(weights, share.training, sums);
        group.sum(sums);

        if (step % 50 == 0 || (!curve_path.empty() && step % 5 == 0)) {
            const double loss = sums[kWeights] / static_cast<double>(share.training_of_all);
            accuracy = held_out_accuracy(group, weights, share.held_out);
            if (curve) curve << step << ',' << loss << ',' << accuracy << '\n';
            if (group.is_root() && step % 50 == 0) {
                std::printf("step %3d   loss %.4f   held-out accuracy %.4f\n", step, loss, accuracy);
                std::fflush(stdout);
            }
        }
        if (step == kSteps) break;
        for (std::size_t i = 0; i < kWeights; i++) {
            velocity[i] = kMomentum * velocity[i] - kRate * sums[i] / static_cast<float>(share.training_of_all);
            weights[i] += velocity[i];
        }
    }
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;

    const std::vector<std::uint64_t> hashes = group.gather(hash_of(weights));
    const bool same = std::all_of(hashes.begin(), hashes.end(), [&](std::uint64_t hash) { return hash == hashes[0]; });
    if (group.is_root()) {
        std::printf("%u process%s, %d steps in %.2f s, accuracy on held-out rows %.4f\n", group.size(),
                    group.size() == 1 ? "" : "es", kSteps, seconds.count(), accuracy);
        for (std::size_t rank = 0; rank < hashes.size(); rank++) {
            std::printf("rank %zu holds weights with hash %016llx\n", rank,
                        static_cast<unsigned long long>(hashes[rank]));
        }
        std::printf("%s\n", same ? "all ranks hold the same bits" : "THE RANKS HOLD DIFFERENT BITS");
        if (!weights_path.empty()) save(weights_path, weights);
        if (accuracy < kAccuracyWanted) std::printf("the accuracy is below %.2f\n", kAccuracyWanted);
    }
    return same && accuracy >= kAccuracyWanted ? 0 : 1;
}

}  // namespace

int main(int argc, char **argv) {
    std::string data, weights, curve;
    bool on_gpu = false;
    for (int i = 1; i < argc; i++) {
        const std::string argument = argv[i];
        if ((argument == "--weights" || argument == "--curve") && i + 1 < argc) {
            (argument == "--weights" ? weights : curve) = argv[++i];
        } else if (argument == "--gpu") {
            on_gpu = true;
        } else if (data.empty() && argument[0] != '-') {
            data = argument;
        } else {
            data.clear();
            break;
        }
    }
    if (data.empty()) {
        std::fprintf(stderr, "usage: digits DATA [--gpu] [--weights FILE] [--curve FILE]\n");
        return 2;
    }
    try {
        return train(data, on_gpu, weights, curve);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "digits: %s\n", error.what());
        return 1;
    }
}
