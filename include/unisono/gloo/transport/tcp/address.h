#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "gloo/common/logging.h"
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
        GLOO_ENFORCE(bytes.size() >= kBytes && std::memcmp(bytes.data(), kMark, sizeof(kMark)) == 0, "these ",
                     bytes.size(), " bytes are no address of a pair");
        const char *at = bytes.data() + sizeof(kMark);
        std::memcpy(&rank_, at, sizeof(rank_));
        const unisono_unique_id_t none = {};
        unisono_unique_id_t id;
        std::memcpy(&id, at + sizeof(rank_), sizeof(id));
        if (std::memcmp(&id, &none, sizeof(id)) != 0) {
            id_ = id;
        }
    }

    /* As many for all ranks, and as many as gloo's: programs send them in places of one length, or of so many bytes. */
    std::vector<char> bytes() const override {
        std::vector<char> all(kBytes);
        char *at = std::copy(std::begin(kMark), std::end(kMark), all.data());
        std::memcpy(at, &rank_, sizeof(rank_));
        if (id_) {
            std::memcpy(at + sizeof(rank_), &*id_, sizeof(*id_));
        }
        return all;
    }

    std::string str() const override { return "rank " + std::to_string(rank_); }

    int rank() const { return rank_; }
    const std::optional<unisono_unique_id_t> &id() const { return id_; }

  private:
    static constexpr char kMark[4] = {'u', 'n', 'i', '2'};
    static constexpr std::size_t kBytes = sizeof(kMark) + sizeof(int32_t) + sizeof(unisono_unique_id_t);

    int32_t rank_ = -1;
    std::optional<unisono_unique_id_t> id_;
};

} // namespace tcp
} // namespace transport
} // namespace over_unisono
} // namespace gloo
