/*
 * Messages as the tests of the gloo face send them: bytes that tell where they belong, buffers over them, and exchanges
 * between two ranks or all.
 */
#pragma once

#include <set>

#include <gloo/barrier.h>
#include <gloo/context.h>

#include "gloo_harness.h"

using AnyContext = std::shared_ptr<gloo::Context>;
using Bytes = std::vector<unsigned char>;
using Unbound = std::unique_ptr<gloo::transport::UnboundBuffer>;
using Bound = std::unique_ptr<gloo::transport::Buffer>;

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB;

/* Bytes that differ from place to place, and from seed to seed. */
inline Bytes pattern(std::size_t bytes, int seed) {
    Bytes made(bytes);
    for (std::size_t i = 0; i < bytes; i++) {
        made[i] = static_cast<unsigned char>(i * 131 + (i >> 8) * 7 + static_cast<unsigned>(seed) * 29 + 1);
    }
    return made;
}

template <class T> Unbound make_unbound(const AnyContext &context, std::vector<T> &memory) {
    return context->createUnboundBuffer(memory.data(), memory.size() * sizeof(T));
}

template <class T> Bound make_send(const AnyContext &context, int peer, int slot, std::vector<T> &memory) {
    return context->getPair(peer)->createSendBuffer(slot, memory.data(), memory.size() * sizeof(T));
}

template <class T> Bound make_receive(const AnyContext &context, int peer, int slot, std::vector<T> &memory) {
    return context->getPair(peer)->createRecvBuffer(slot, memory.data(), memory.size() * sizeof(T));
}

inline void barrier(const AnyContext &context) { gloo::barrier(gloo::BarrierOptions(context)); }

inline void send_now(const AnyContext &context, int to, uint64_t slot, Bytes bytes) {
    const auto buffer = make_unbound(context, bytes);
    buffer->send(to, slot);
    CHECK(buffer->waitSend());
}

inline Bytes receive_now(const AnyContext &context, int from, uint64_t slot, std::size_t bytes) {
    Bytes got(bytes, 0xee);
    const auto buffer = make_unbound(context, got);
    buffer->recv(from, slot);
    int rank = -1;
    CHECK(buffer->waitRecv(&rank));
    CHECK_EQ(rank, from);
    return got;
}

/* Returns when the peer has called it, too. */
inline void meet(const AnyContext &context, int peer, uint64_t slot) {
    Bytes out(1, 1), in(1);
    const auto sender = make_unbound(context, out), receiver = make_unbound(context, in);
    receiver->recv(peer, slot);
    sender->send(peer, slot);
    CHECK(receiver->waitRecv());
    CHECK(sender->waitSend());
}

/* Each rank sends to each other one, all at once. */
inline void exchange(const AnyContext &context, uint64_t slot, std::size_t bytes) {
    const int rank = context->rank, size = context->size;
    Bytes out = pattern(bytes, rank);
    std::vector<Bytes> in(static_cast<std::size_t>(size), Bytes(bytes, 0xee));
    const auto sender = context->createUnboundBuffer(bytes == 0 ? nullptr : out.data(), bytes);
    std::vector<Unbound> receivers;
    std::set<int> others, sent;
    for (int peer = 0; peer < size; peer++) {
        auto &memory = in[static_cast<std::size_t>(peer)];
        receivers.push_back(context->createUnboundBuffer(bytes == 0 ? nullptr : memory.data(), bytes));
        if (peer != rank) {
            receivers.back()->recv(peer, slot);
            sender->send(peer, slot);
            others.insert(peer);
        }
    }
    for (const int peer : others) {
        int from = -1;
        CHECK(receivers[static_cast<std::size_t>(peer)]->waitRecv(&from));
        CHECK_EQ(from, peer);
        CHECK(in[static_cast<std::size_t>(peer)] == pattern(bytes, peer));
    }
    for (std::size_t i = 0; i < others.size(); i++) {
        int to = -1;
        CHECK(sender->waitSend(&to));
        CHECK(sent.insert(to).second);
    }
    CHECK(sent == others);
}
