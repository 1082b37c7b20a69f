/* What the options of all collectives share. */
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "gloo/common/logging.h"
#include "gloo/context.h"
#include "gloo/detail/element.h"
#include "gloo/detail/native.h"
#include "gloo/transport/unbound_buffer.h"
#include "gloo/types.h"

namespace gloo {
inline namespace over_unisono {
namespace detail {

/* Memory that a collective is given, by its address or as a buffer, which is then the collective's. */
class Span {
  public:
    Span() = default;
    Span(void *memory, std::size_t bytes) : memory_(memory), bytes_(bytes), given_(true) {}
    explicit Span(std::unique_ptr<transport::UnboundBuffer> buffer) : Span(buffer->ptr, buffer->size) {
        owned_ = std::move(buffer);
    }

    bool isGiven() const { return given_; }
    char *data() const { return static_cast<char *>(memory_); }
    std::size_t bytes() const { return bytes_; }

  private:
    void *memory_ = nullptr;
    std::size_t bytes_ = 0;
    bool given_ = false;
    std::unique_ptr<transport::UnboundBuffer> owned_;
};

inline void copy(const Span &from, const Span &to) {
    if (from.bytes() > 0 && from.data() != to.data()) {
        std::memmove(to.data(), from.data(), from.bytes());
    }
}

/* Where a rank's part of an output that all ranks fill is read. An input that overlaps the output goes to its place
   first, as in gloo: what comes from the others could be written over it. */
inline const char *partFrom(const Span &in, const Span &place, const Span &out) {
    if (!in.isGiven()) {
        return place.data();
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(in.data());
    const auto outBegin = reinterpret_cast<std::uintptr_t>(out.data());
    if (begin >= outBegin + out.bytes() || outBegin >= begin + in.bytes()) {
        return in.data();
    }
    copy(in, place);
    return place.data();
}

class CollectiveOptions {
  public:
    /* Operations that run at the same time have different tags, or are of different kinds. */
    void setTag(uint32_t tag_) { tag = tag_; }
    /* For the whole operation; 0: no limit, kUnsetTimeout: the context's. */
    void setTimeout(std::chrono::milliseconds timeout_) { timeout = timeout_; }

  protected:
    explicit CollectiveOptions(const std::shared_ptr<Context> &context_)
        : context(context_), timeout(context_->getTimeout()) {}

    /* The options of the native call. */
    unisono_call_t call(uint8_t prefix) const {
        const bool isSet = timeout != transport::kUnsetTimeout;
        return detail::call(Slot::build(prefix, tag), isSet ? timeout : context->getTimeout());
    }

    std::shared_ptr<Context> context;
    uint32_t tag = 0;
    std::chrono::milliseconds timeout;
};

/* With one input and one output. */
class InOutOptions : public CollectiveOptions {
  public:
    template <class T> void setInput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        take<T>(in, Span(std::move(buffer)));
    }
    template <class T> void setInput(T *memory, std::size_t elements) {
        take<T>(in, Span(memory, elements * sizeof(T)));
    }
    template <class T> void setOutput(std::unique_ptr<transport::UnboundBuffer> buffer) {
        take<T>(out, Span(std::move(buffer)));
    }
    template <class T> void setOutput(T *memory, std::size_t elements) {
        take<T>(out, Span(memory, elements * sizeof(T)));
    }

  protected:
    using CollectiveOptions::CollectiveOptions;

    template <class T> void take(Span &place, Span given) {
        element = Element::of<T>();
        place = std::move(given);
    }

    Span in, out;
    Element element;
};

/* With a root, too. */
template <class Options> class Rooted : public Options {
  public:
    void setRoot(int root_) { root = root_; }

  protected:
    using Options::Options;

    uint32_t checkedRoot() const {
        GLOO_ENFORCE(root >= 0 && root < this->context->size, "root ", root, " of ", this->context->size, " ranks");
        return static_cast<uint32_t>(root);
    }
    bool isRoot() const { return root == this->context->rank; }

    int root = -1;
};

/* How many elements of `size` bytes each rank has, in bytes. */
template <class Count> std::vector<uint64_t> inBytes(const std::vector<Count> &counts, std::size_t size) {
    std::vector<uint64_t> bytes;
    for (const Count count : counts) {
        GLOO_ENFORCE(count >= Count{0}, "a count is not negative");
        bytes.push_back(static_cast<uint64_t>(count) * size);
    }
    return bytes;
}

inline uint64_t total(const std::vector<uint64_t> &bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
}

/* Memory that consists of a part for each rank. */
class Parts {
  public:
    Parts() = default;
    Parts(Span span, std::vector<uint64_t> bytes) : span_(std::move(span)), bytes_(std::move(bytes)) {
        GLOO_ENFORCE_EQ(total(bytes_), span_.bytes(), "the parts of all ranks make up the buffer");
    }

    /* For memory of which only the counts are known. */
    template <class Count> static Parts at(void *memory, const std::vector<Count> &counts, std::size_t size) {
        auto bytes = inBytes(counts, size);
        const uint64_t all = total(bytes);
        return Parts(Span(memory, all), std::move(bytes));
    }

    const Span &span() const { return span_; }
    bool isGiven() const { return span_.isGiven(); }
    bool areOf(int ranks) const { return bytes_.size() == static_cast<std::size_t>(ranks); }
    const std::vector<uint64_t> &bytes() const { return bytes_; }
    /* A rank's part. */
    Span of(int rank) const {
        const auto end = bytes_.begin() + rank;
        return Span(span_.data() + std::accumulate(bytes_.begin(), end, uint64_t{0}), *end);
    }

  private:
    Span span_;
    std::vector<uint64_t> bytes_;
};

} // namespace detail
} // namespace over_unisono
} // namespace gloo
