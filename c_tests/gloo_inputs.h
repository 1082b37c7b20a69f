/*
 * The two ways in which options are given what a collective reads and writes: by address, or as an unbound buffer.
 */
#pragma once

#include "gloo_messages.h"

template <class T, class Options>
void set_input(Options &options, const AnyContext &context, std::vector<T> &memory, bool buffered) {
    if (buffered) {
        options.template setInput<T>(make_unbound(context, memory));
    } else {
        options.setInput(memory.data(), memory.size());
    }
}

template <class T, class Options>
void set_output(Options &options, const AnyContext &context, std::vector<T> &memory, bool buffered) {
    if (buffered) {
        options.template setOutput<T>(make_unbound(context, memory));
    } else {
        options.setOutput(memory.data(), memory.size());
    }
}

/* With a number of elements for each rank. */
template <class T, class Count, class Options> void set_output(Options &options, const AnyContext &context,
                                                               std::vector<T> &memory, const std::vector<Count> &counts,
                                                               bool buffered) {
    if (buffered) {
        options.template setOutput<T>(make_unbound(context, memory), counts);
    } else {
        options.setOutput(memory.data(), counts);
    }
}

template <class T> std::vector<T *> addresses(std::vector<std::vector<T>> &memories) {
    std::vector<T *> all;
    for (auto &memory : memories) {
        all.push_back(memory.data());
    }
    return all;
}

template <class T>
std::vector<Unbound> make_unbounds(const AnyContext &context, std::vector<std::vector<T>> &memories) {
    std::vector<Unbound> all;
    for (auto &memory : memories) {
        all.push_back(make_unbound(context, memory));
    }
    return all;
}
