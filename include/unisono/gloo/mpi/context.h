/* Contexts of programs that run under MPI. It needs <mpi.h>, and what a program of MPI's is linked with. */
#pragma once

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

/* C's functions are enough. */
#ifndef OMPI_SKIP_MPICXX
#define OMPI_SKIP_MPICXX 1
#endif
#ifndef MPICH_SKIP_MPICXX
#define MPICH_SKIP_MPICXX 1
#endif
#include <mpi.h>

#include "gloo/common/store.h"
#include "gloo/context.h"
#include "gloo/transport/tcp/device.h"

namespace gloo {
inline namespace over_unisono {
namespace mpi {

inline void check(int result, const char *call) {
    if (result != MPI_SUCCESS) {
        GLOO_THROW_IO_EXCEPTION(call, " failed with ", result);
    }
}

/* MPI_Init and, at the end, MPI_Finalize. */
class MPIScope {
  public:
    MPIScope() { check(MPI_Init(nullptr, nullptr), "MPI_Init"); }
    ~MPIScope() { MPI_Finalize(); }
    MPIScope(const MPIScope &) = delete;
    MPIScope &operator=(const MPIScope &) = delete;
};

/* A store of one value, rank 0's, which the others get, each once. */
class BroadcastStore : public IStore {
  public:
    /* Another's value is here from the beginning: MPI waits for it as long as it takes, which is no part of the time
       that the ranks have to meet. */
    BroadcastStore(MPI_Comm communicator, bool isOwn) : communicator_(communicator) {
        if (!isOwn) {
            broadcast(value_);
        }
    }

    void set(const std::string &key, const std::vector<char> &data) override {
        if (key == kFirst) {
            value_ = data;
            broadcast(value_);
        }
    }
    std::vector<char> get(const std::string &key) override {
        GLOO_ENFORCE_EQ(key, kFirst, "this store has one key");
        return value_;
    }
    void wait(const std::vector<std::string> &, const std::chrono::milliseconds &) override {}
    bool has_v2_support() override { return false; }
    std::vector<std::vector<char>> multi_get(const std::vector<std::string> &) override { lacks(); }
    void multi_set(const std::vector<std::string> &, const std::vector<std::vector<char>> &) override { lacks(); }
    void append(const std::string &, const std::vector<char> &) override { lacks(); }
    int64_t add(const std::string &, int64_t) override { lacks(); }

  private:
    static constexpr const char *kFirst = "0";

    void broadcast(std::vector<char> &value) const {
        auto bytes = static_cast<unsigned long>(value.size());
        check(MPI_Bcast(&bytes, 1, MPI_UNSIGNED_LONG, 0, communicator_), "MPI_Bcast");
        value.resize(bytes);
        check(MPI_Bcast(value.data(), static_cast<int>(bytes), MPI_CHAR, 0, communicator_), "MPI_Bcast");
    }

    [[noreturn]] static void lacks() { GLOO_THROW_INVALID_OPERATION_EXCEPTION("this store has set and get alone"); }

    const MPI_Comm communicator_;
    std::vector<char> value_;
};

class Context : public ::gloo::Context {
  public:
    /* Of all processes; MPI begins with the first of these contexts and ends with the last. */
    static std::shared_ptr<Context> createManaged() {
        static std::mutex mutex;
        static std::weak_ptr<MPIScope> running;
        std::lock_guard<std::mutex> hold(mutex);
        auto scope = running.lock();
        if (!scope) {
            int finalized = 0;
            check(MPI_Finalized(&finalized), "MPI_Finalized");
            GLOO_ENFORCE(finalized == 0, "MPI has been finalized, and does not begin again");
            scope = std::make_shared<MPIScope>();
            running = scope;
        }
        auto context = std::make_shared<Context>(MPI_COMM_WORLD);
        context->scope_ = std::move(scope);
        return context;
    }

    /* Of a communicator's processes. The program initialises and finalizes MPI. */
    explicit Context(const MPI_Comm &communicator) : ::gloo::Context(rankIn(communicator), sizeOf(communicator)) {
        check(MPI_Comm_dup(communicator, &communicator_), "MPI_Comm_dup");
    }
    ~Context() override { MPI_Comm_free(&communicator_); }

    /* Every process calls it. */
    void connectFullMesh(const std::shared_ptr<transport::Device> &device) {
        auto context = prepare(device);
        context->createAndConnectAllPairs(std::make_shared<BroadcastStore>(communicator_, rank == 0));
        adopt(device, std::move(context));
    }

  private:
    static int rankIn(MPI_Comm communicator) {
        int rank = 0;
        check(MPI_Comm_rank(communicator, &rank), "MPI_Comm_rank");
        return rank;
    }
    static int sizeOf(MPI_Comm communicator) {
        int size = 0;
        check(MPI_Comm_size(communicator, &size), "MPI_Comm_size");
        return size;
    }

    /* Ends after the communicator. */
    std::shared_ptr<MPIScope> scope_;
    MPI_Comm communicator_;
};

} // namespace mpi
} // namespace over_unisono
} // namespace gloo
