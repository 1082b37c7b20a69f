/*
 * What the tests of the gloo face share: checks that say where they failed, and groups of ranks as threads or processes.
 *
 * as_threads(n, body) meets in a HashStore; as_processes(n, seconds, body) forks and meets in a FileStore, and returns how each
 * ended: 0, or what the body returned or threw for. The transport is what UNISONO_TRANSPORT says.
 */
#pragma once

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gloo/common/error.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            throw std::logic_error(gloo::MakeString(__FILE__, ":", __LINE__, ": not true: ", #condition));             \
        }                                                                                                              \
    } while (0)

#define CHECK_EQ(left, right)                                                                                          \
    do {                                                                                                               \
        const auto &left_ = (left);                                                                                    \
        const auto &right_ = (right);                                                                                  \
        if (!(left_ == right_)) {                                                                                      \
            throw std::logic_error(                                                                                    \
                gloo::MakeString(__FILE__, ":", __LINE__, ": ", #left, " is ", left_, ", not ", right_));              \
        }                                                                                                              \
    } while (0)

/* The statement throws an E whose text contains `part`. */
#define CHECK_THROWS(E, part, statement)                                                                               \
    do {                                                                                                               \
        bool thrown_ = false;                                                                                          \
        try {                                                                                                          \
            statement;                                                                                                 \
        } catch (const E &error_) {                                                                                    \
            thrown_ = true;                                                                                            \
            if (std::string(error_.what()).find(part) == std::string::npos) {                                          \
                throw std::logic_error(gloo::MakeString(__FILE__, ":", __LINE__, ": \"", error_.what(),                \
                                                        "\" does not contain \"", part, "\""));                        \
            }                                                                                                          \
        }                                                                                                              \
        if (!thrown_) {                                                                                                \
            throw std::logic_error(gloo::MakeString(__FILE__, ":", __LINE__, ": nothing was thrown: ", #statement));   \
        }                                                                                                              \
    } while (0)

using GlooContext = std::shared_ptr<gloo::rendezvous::Context>;
using Body = std::function<void(const GlooContext &)>;

/* Floats that take memory which malloc asks the system for each time, and returns. */
constexpr std::size_t kMapped = 36u << 18;

/* `run` works in memory that the process has had before, from its second time on: the thread finds no such number of new
   pages. Call it where the thread does itself what is to be done. */
template <class Run> void check_pages_are_kept(const Run &run) {
    run();
    const auto faults = [] {
        rusage usage{};
        getrusage(RUSAGE_THREAD, &usage);
        return usage.ru_minflt;
    };
    const long before = faults();
    constexpr int kRuns = 4;
    for (int i = 0; i < kRuns; i++) {
        run();
    }
    const long of_a_run = (faults() - before) / kRuns;
    CHECK(of_a_run < static_cast<long>(kMapped * sizeof(float)) / sysconf(_SC_PAGESIZE) / 2);
}

inline double seconds_now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline GlooContext connect(int rank, int size, const std::shared_ptr<gloo::rendezvous::Store> &store,
                           std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
    auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
    context->setTimeout(timeout);
    auto device = gloo::transport::tcp::CreateDevice("localhost");
    context->connectFullMesh(store, device);
    return context;
}

/* Runs the body on each rank, a thread each, and throws the first failure. */
inline void as_threads(int size, const Body &body, std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
    const auto store = std::make_shared<gloo::rendezvous::HashStore>();
    std::vector<std::exception_ptr> failures(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; rank++) {
        threads.emplace_back([&, rank] {
            try {
                body(connect(rank, size, store, timeout));
            } catch (...) {
                failures[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        });
    }
    for (auto &thread : threads) {
        thread.join();
    }
    for (const auto &failure : failures) {
        if (failure) {
            std::rethrow_exception(failure);
        }
    }
}

/* How a process ended that its body did not end well. */
constexpr int kIoException = 10, kOtherException = 11;

/* A directory that is removed again. */
class Directory {
  public:
    Directory() {
        std::string name = std::filesystem::temp_directory_path() / "unisono-gloo-XXXXXX";
        if (mkdtemp(name.data()) == nullptr) {
            throw std::runtime_error("cannot make a directory");
        }
        path_ = name;
    }
    ~Directory() {
        std::error_code ignored;
        std::filesystem::remove_all(path_, ignored);
    }
    Directory(const Directory &) = delete;
    Directory &operator=(const Directory &) = delete;
    const std::string &path() const { return path_; }

  private:
    std::string path_;
};

/* Ranks as processes, of which the test may kill or stop some. They are gone when this is. */
class Processes {
  public:
    Processes(int size, const Body &body, std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
        for (int rank = 0; rank < size; rank++) {
            const pid_t pid = fork();
            if (pid == 0) {
                std::_Exit(run(rank, size, body, timeout));
            }
            if (pid < 0) {
                throw std::runtime_error("cannot fork");
            }
            pids_.push_back(pid);
        }
    }
    ~Processes() {
        for (const pid_t pid : pids_) {
            if (pid > 0) {
                ::kill(pid, SIGKILL);
                ::waitpid(pid, nullptr, 0);
            }
        }
    }
    Processes(const Processes &) = delete;
    Processes &operator=(const Processes &) = delete;

    void signal(int rank, int number) const { ::kill(pids_.at(static_cast<std::size_t>(rank)), number); }

    /* The exit status of a rank, which ends within so many seconds; minus the signal that ended it. */
    int wait(int rank, double seconds) {
        pid_t &pid = pids_.at(static_cast<std::size_t>(rank));
        const double end = seconds_now() + seconds;
        int status = 0;
        while (::waitpid(pid, &status, WNOHANG) == 0) {
            if (seconds_now() > end) {
                throw std::logic_error(gloo::MakeString("rank ", rank, " runs on after ", seconds, " s"));
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(2));
        }
        pid = 0;
        return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
    }

  private:
    int run(int rank, int size, const Body &body, std::chrono::milliseconds timeout) const {
        try {
            body(connect(rank, size, std::make_shared<gloo::rendezvous::FileStore>(directory_.path()), timeout));
            return 0;
        } catch (const gloo::IoException &error) {
            std::fprintf(stderr, "rank %d: IoException: %s\n", rank, error.what());
            return kIoException;
        } catch (const std::exception &error) {
            std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
            return kOtherException;
        }
    }

    const Directory directory_;
    std::vector<pid_t> pids_;
};

/* Runs tests by name, and says which failed. */
inline int run_tests(const std::vector<std::pair<const char *, std::function<void()>>> &tests) {
    int failed = 0;
    for (const auto &[name, test] : tests) {
        try {
            test();
            std::printf("ok      %s\n", name);
        } catch (const std::exception &error) {
            std::printf("FAILED  %s: %s\n", name, error.what());
            failed++;
        }
        std::fflush(stdout);
    }
    return failed == 0 ? 0 : 1;
}
