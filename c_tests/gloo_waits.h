/*
 * All that a rank of the gloo face may be waiting in when another one dies, stops, leaves or closes, or when time is
 * over.
 */
#pragma once

#include <functional>

#include "gloo_reductions.h"

struct Wait {
    const char *name;
    /* Waits for the peer, which must not answer. Unbound buffers wait as long as is said, the others as long as the
       context says. */
    std::function<void(const AnyContext &, int peer, std::chrono::milliseconds)> call;
    bool takesTime = false;
    /* Ends on every rank when any of them is missing. */
    bool collective = false;
    /* For whoever comes first. */
    bool anyone = false;
};

inline const std::vector<Wait> &waits() {
    using std::chrono::milliseconds;
    static const auto receive = [](const AnyContext &context, auto from, milliseconds timeout) {
        Bytes memory(100);
        const auto buffer = make_unbound(context, memory);
        buffer->recv(from, 1);
        buffer->waitRecv(timeout);
    };
    static const std::vector<Wait> all{
        {"waitRecv", [](const AnyContext &context, int from, milliseconds timeout) { receive(context, from, timeout); },
         true},
        {"waitRecv from any",
         [](const AnyContext &context, int from, milliseconds timeout) {
             std::vector<int> others{from};
             for (int rank = 0; rank < context->size; rank++) {
                 if (rank != context->rank && rank != from) {
                     others.push_back(rank);
                 }
             }
             receive(context, others, timeout);
         },
         true, false, true},
        {"waitSend",
         [](const AnyContext &context, int to, milliseconds timeout) {
             // So long a message is not sent before the other side asks for it.
             Bytes memory(20 * MiB);
             const auto buffer = make_unbound(context, memory);
             buffer->send(to, 2);
             buffer->waitSend(timeout);
         },
         true},
        {"waitRecv of a pair",
         [](const AnyContext &context, int from, milliseconds) {
             Bytes memory(100);
             make_receive(context, from, 1, memory)->waitRecv();
         }},
        {"waitSend of a pair",
         [](const AnyContext &context, int to, milliseconds) {
             Bytes memory(20 * MiB);
             const auto buffer = make_send(context, to, 2, memory);
             buffer->send();
             buffer->waitSend();
         }},
        {"allreduce", [](const AnyContext &context, int, milliseconds) { check_sum(context, 3 * MiB); }, false, true},
        {"barrier", [](const AnyContext &context, int, milliseconds) { barrier(context); }, false, true},
    };
    return all;
}
