#include "recompute/surroundings.h"

#include <ATen/Context.h>
#include <ATen/autocast_mode.h>

#include <algorithm>
#include <mutex>

#include "trireme/intercept.h"

namespace trireme::detail {
namespace {

// A rank that is a thread may have a generator of its own, from which host operators draw.
at::Generator generator_of(at::Device device) {
  const RankContext* context = RankContext::current();
  if (device.is_cpu() && context != nullptr && context->has_own_generator()) return context->own_generator();
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

Surroundings::Surroundings(const std::vector<at::Tensor>& inputs, bool with_generators)
    : autocast_cache_(at::autocast::is_autocast_cache_enabled()) {
  add(at::kCPU, with_generators);
  for (const at::Tensor& input : inputs)
    if (input.defined()) add(input.device(), with_generators);
}

void Surroundings::add(at::Device device, bool with_generators) {
  if (device.is_meta() || std::find(devices_.begin(), devices_.end(), device) != devices_.end()) return;
  devices_.push_back(device);
  autocasts_.push_back({device.type(), at::autocast::is_autocast_enabled(device.type()),
                        at::autocast::get_autocast_dtype(device.type())});
  if (!with_generators) return;
  at::Generator generator = generator_of(device);
  const std::lock_guard lock(generator.mutex());
  generators_.push_back({generator, generator.get_state()});
}

void Surroundings::apply() const {
  for (const Autocast& autocast : autocasts_) {
    at::autocast::set_autocast_enabled(autocast.device, autocast.enabled);
    at::autocast::set_autocast_dtype(autocast.device, autocast.dtype);
  }
  at::autocast::set_autocast_cache_enabled(autocast_cache_);
  for (const GeneratorState& saved : generators_) {
    at::Generator generator = saved.generator;
    const std::lock_guard lock(generator.mutex());
    generator.set_state(saved.state);
  }
}

SurroundingsScope::SurroundingsScope(const Surroundings& then, const std::vector<at::Tensor>& inputs,
                                     bool with_generators)
    : before_(inputs, with_generators) {
  then.apply();
  at::autocast::set_autocast_cache_enabled(false);
}

}  // namespace trireme::detail
