// The Redis store of the gloo face, over a server that this test starts: cpp_gloo_redis REDIS-SERVER.

#include <csignal>

#include <arpa/inet.h>
#include <sys/socket.h>

#include <gloo/rendezvous/prefix_store.h>
#include <gloo/rendezvous/redis_store.h>

#include "gloo_harness.h"

namespace {

int free_port() {
    const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    CHECK(::bind(socket, reinterpret_cast<sockaddr *>(&address), size) == 0);
    CHECK(::getsockname(socket, reinterpret_cast<sockaddr *>(&address), &size) == 0);
    ::close(socket);
    return ntohs(address.sin_port);
}

class Server {
  public:
    explicit Server(const char *program) : port(free_port()) {
        const std::string number = std::to_string(port);
        pid_ = fork();
        if (pid_ == 0) {
            execl(program, program, "--port", number.c_str(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no",
                  "--loglevel", "warning", static_cast<char *>(nullptr));
            std::_Exit(127);
        }
    }
    ~Server() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }
    Server(const Server &) = delete;
    Server &operator=(const Server &) = delete;

    std::shared_ptr<gloo::rendezvous::RedisStore> store() const {
        const double end = seconds_now() + 10;
        while (true) {
            try {
                return std::make_shared<gloo::rendezvous::RedisStore>("127.0.0.1", port);
            } catch (const gloo::IoException &) {
                if (seconds_now() > end) {
                    throw;
                }
                std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
        }
    }

    void signal(int number) const { ::kill(pid_, number); }

    const int port;

  private:
    pid_t pid_;
};

void values(const Server &server) {
    const auto one = server.store(), other = server.store();
    const std::vector<char> value = {'a', '\0', 'b'};
    one->set("key", value);
    CHECK(other->get("key") == value);
    CHECK(other->check({"key"}) && !other->check({"key", "missing"}));
    CHECK_THROWS(gloo::EnforceNotMet, "'key' has been set before", other->set("key", value));
    CHECK_THROWS(gloo::IoException, "Timed out waiting 50ms for key(s): key missing",
                 other->wait({"key", "missing"}, std::chrono::milliseconds(50)));
}

void meeting(const Server &server) {
    std::vector<std::thread> ranks;
    std::vector<std::string> failures(3);
    for (int rank = 0; rank < 3; rank++) {
        ranks.emplace_back([&, rank] {
            try {
                const auto store = std::make_shared<gloo::rendezvous::PrefixStore>("job", server.store());
                CHECK_EQ(unisono_context_size(connect(rank, 3, store)->native().get()), 3u);
            } catch (const std::exception &error) {
                failures[static_cast<std::size_t>(rank)] = error.what();
            }
        });
    }
    for (auto &rank : ranks) {
        rank.join();
    }
    for (const auto &failure : failures) {
        CHECK_EQ(failure, "");
    }
}

/* A server that is stopped ends a wait; one that is slow for a moment only does not end the store. */
void a_server_that_does_not_answer(const Server &server) {
    const auto store = server.store(), other = server.store();
    const std::chrono::milliseconds moment(50);
    server.signal(SIGSTOP);
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        server.signal(SIGCONT);
    });
    std::string slow;
    try {
        store->wait({"absent"}, moment);
    } catch (const gloo::IoException &error) {
        slow = error.what();
    }
    later.join();
    CHECK(slow.find("Timed out waiting 50ms for key(s): absent") != std::string::npos);
    store->set("after", {'x'});
    CHECK(store->check({"after"}));

    server.signal(SIGSTOP);
    const double begin = seconds_now();
    std::string stopped;
    try {
        other->wait({"absent"}, moment);
    } catch (const gloo::IoException &error) {
        stopped = error.what();
    }
    const double took = seconds_now() - begin;
    server.signal(SIGCONT);
    CHECK(stopped.find("Timed out waiting 1000ms for Redis to answer EXISTS") != std::string::npos);
    CHECK(took < 5);
}

void no_server() {
    const int port = free_port();
    CHECK_THROWS(gloo::IoException, "cannot connect to Redis at 127.0.0.1",
                 gloo::rendezvous::RedisStore("127.0.0.1", port));
}

} // namespace

int main(int count, char **arguments) {
    if (count != 2) {
        std::fprintf(stderr, "usage: %s REDIS-SERVER\n", arguments[0]);
        return 2;
    }
    const Server server(arguments[1]);
    return run_tests(
        {{"values", [&] { values(server); }},
         {"meeting", [&] { meeting(server); }},
         {"a server that does not answer", [&] { a_server_that_does_not_answer(server); }},
         {"no_server", no_server}});
}
