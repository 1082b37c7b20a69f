#pragma once

#include "gloo/detail/options.h"

namespace gloo {
inline namespace over_unisono {

/* The root has an input for each rank, which goes to that rank's output. */
class ScatterOptions : public detail::Rooted<detail::CollectiveOptions> {
  public:
    explicit ScatterOptions(const std::shared_ptr<Context> &context_) : Rooted(context_) {}

    template <class T> void setInputs(std::vector<std::unique_ptr<transport::UnboundBuffer>> buffers) {
        in.clear();
        for (auto &buffer : buffers) {
            in.emplace_back(std::move(buffer));
        }
    }
    template <class T> void setInputs(std::vector<T *> memory, std::size_t elements) {
        setInputs(memory.data(), memory.size(), elements);
    }
    template <class T> void setInputs(T **memory, std::size_t count, std::size_t elements) {
        in.clear();
        for (std::size_t i = 0; i < count; i++) {
            in.emplace_back(memory[i], elements * sizeof(T));
        }
    }
    template <class T> void setOutput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        out = detail::Span(std::move(buffer));
    }
    template <class T> void setOutput(T *memory, std::size_t elements) {
        out = detail::Span(memory, elements * sizeof(T));
    }

    friend void scatter(const ScatterOptions &options);

  protected:
    std::vector<detail::Span> in;
    detail::Span out;
};

inline void scatter(const ScatterOptions &options) {
    const uint32_t root = options.checkedRoot();
    GLOO_ENFORCE(options.out.isGiven(), "every rank has an output");
    const std::size_t bytes = options.out.bytes();
    const unisono_call_t call = options.call(kScatterSlotPrefix);
    const auto context = options.context->native();
    const char *all = nullptr;
    if (options.isRoot()) {
        GLOO_ENFORCE_EQ(options.in.size(), static_cast<std::size_t>(options.context->size),
                        "the root has an input for each rank");
        all = options.in.front().data();
        bool adjoining = true;
        std::vector<void *> buffers;
        for (const auto &input : options.in) {
            GLOO_ENFORCE_EQ(input.bytes(), bytes, "bytes of an input and of the output");
            adjoining = adjoining && input.data() == all + buffers.size() * bytes;
            buffers.push_back(input.data());
        }
        if (!adjoining && bytes > 0) {
            buffers.push_back(options.out.data());
            unisono_algorithm_options_t prepared = UNISONO_ALGORITHM_OPTIONS_INIT;
            prepared.collective = UNISONO_SCATTER;
            prepared.pointers = buffers.data();
            prepared.pointer_count = buffers.size();
            prepared.count = bytes;
            prepared.dtype = UNISONO_UINT8;
            prepared.root_rank = root;
            prepared.call = &call;
            detail::check(unisono_algorithm_run(detail::makeAlgorithm(context.get(), prepared).get()));
            return;
        }
    }
    detail::check(
        unisono_scatter(context.get(), all, options.out.data(), bytes, UNISONO_UINT8, root, &call, nullptr));
}

} // namespace over_unisono
} // namespace gloo
