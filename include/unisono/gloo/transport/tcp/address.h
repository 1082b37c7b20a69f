#pragma once

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "gloo/detail/native.h"
#include "gloo/transport/address.h"

namespace gloo {
inline namespace over_unisono {
namespace transport {
namespace tcp {

/* What a pair tells the other side: its rank, and on rank 0 the unique id by which all ranks of the context meet. */
class Address : public ::gloo::transport::Address {
  public:
    Address() = default;
    explicit Address(int rank) : rank_(rank) {}
    Address(int rank, const unisono_unique_id_t &id) : rank_(rank), id_(id) {}

    explicit Address(const std::vector<char> &bytes) {
        if (bytes.size() < sizeof(kMark) + sizeof(rank_) || std::memcmp(bytes.data(), kMark, sizeof(kMark)) != 0) {
            throw InvalidOperationException("these " + std::to_string(bytes.size()) +
                                            " bytes are no address of a pair");
        }
        const char *rest = bytes.data() + sizeof(kMark);
        std::memcpy(&rank_, rest, sizeof(rank_));
        if (bytes.size() >= sizeof(kMark) + sizeof(rank_) + sizeof(unisono_unique_id_t)) {
            std::memcpy(&id_.emplace(), rest + sizeof(rank_), sizeof(unisono_unique_id_t));
        }
    }

    std::vector<char> bytes() const override {
        std::vector<char> all(kMark, kMark + sizeof(kMark));
        const auto add = [&all](const void *part, std::size_t size) {
            const char *first = static_cast<const char *>(part);
            all.insert(all.end(), first, first + size);
        };
        add(&rank_, sizeof(rank_));
        if (id_) {
            add(&*id_, sizeof(*id_));
        }
        return all;
    }

    std::string str() const override { return "rank " + std::to_string(rank_); }

    int rank() const { return rank_; }
    const std::optional<unisono_unique_id_t> &id() const { return id_; }

  private:
    static constexpr char kMark[8] = {'u', 'n', 'i', 's', 'o', 'n', 'o', '1'};

    int rank_ = -1;
    std::optional<unisono_unique_id_t> id_;
};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
