// The random streams of a micro-batch, which go with it from stage to stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "trireme/intercept/random_streams.h"

namespace trireme {

/// The streams of `device` that a micro-batch draws from, in the order in which their states travel and are restored:
/// a stream of slices that has not begun restarts from the model's.
inline std::vector<std::pair<RandomStream, c10::Device>> carried_streams(c10::Device device) {
  std::vector<std::pair<RandomStream, c10::Device>> streams;
  for (const c10::Device one : {c10::Device(c10::kCPU), device}) {
    if (!streams.empty() && one.is_cpu()) break;
    streams.emplace_back(RandomStream::kModel, one);
    streams.emplace_back(RandomStream::kSlice, one);
  }
  return streams;
}

/// This rank's states, on `device`, where messages are; undefined ones of streams that have not begun.
inline std::vector<at::Tensor> random_states_of(c10::Device device) {
  std::vector<at::Tensor> states;
  for (const auto& [stream, of] : carried_streams(device)) {
    const at::Tensor state = RandomStreams::current().state(stream, of);
    states.push_back(state.defined() ? state.to(device) : state);
  }
  return states;
}

/// Goes on from random_states_of() another rank.
inline void set_random_states_of(c10::Device device, const std::vector<at::Tensor>& states) {
  size_t next = 0;
  for (const auto& [stream, of] : carried_streams(device)) {
    const at::Tensor& state = states.at(next++);
    RandomStreams::current().set_state(stream, of, state.defined() ? state.cpu() : state);
  }
}

}  // namespace trireme
