#include "recompute/surroundings.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

namespace trireme::detail {

Surroundings::Surroundings(const std::vector<at::Tensor>& inputs, bool with_streams)
    : autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  add(at::kCPU, with_streams);
  for (const at::Tensor& input : inputs)
    if (input.defined()) add(input.device(), with_streams);
}

void Surroundings::add(at::Device device, bool with_streams) {
  if (device.is_meta() || std::find(devices_.begin(), devices_.end(), device) != devices_.end()) return;
  devices_.push_back(device);
  autocasts_.push_back({device.type(), at::autocast::is_autocast_enabled(device.type()),
                        at::autocast::get_autocast_dtype(device.type())});
  if (!with_streams) return;
  for (const RandomStream stream : {RandomStream::kModel, RandomStream::kSlice})
    streams_.push_back({stream, device, RandomStreams::current().state(stream, device)});
}

void Surroundings::apply() const {
  for (const Autocast& autocast : autocasts_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  for (const StreamState& saved : streams_) RandomStreams::current().set_state(saved.stream, saved.device, saved.state);
}

SurroundingsScope::SurroundingsScope(const Surroundings& then, const std::vector<at::Tensor>& inputs, bool with_streams)
    : before_(inputs, with_streams) {
  then.apply();
  at::autocast::set_autocast_cache_enabled(false);
}

}  // namespace trireme::detail
