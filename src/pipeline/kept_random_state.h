// Layers that are built for a moment draw no random numbers that count.
#pragma once

#include <ATen/core/Tensor.h>

#include "trireme/intercept/random_streams.h"

namespace trireme {

/// The model's generator on the host is at the end where it was at the beginning.
class KeptRandomState {
 public:
  KeptRandomState() : state_(RandomStreams::current().state(RandomStream::kModel, c10::kCPU)) {}
  ~KeptRandomState() { RandomStreams::current().set_state(RandomStream::kModel, c10::kCPU, state_); }
  KeptRandomState(const KeptRandomState&) = delete;
  KeptRandomState& operator=(const KeptRandomState&) = delete;

 private:
  const at::Tensor state_;
};

}  // namespace trireme
