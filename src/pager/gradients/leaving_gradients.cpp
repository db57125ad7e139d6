#include "pager/gradients/leaving_gradients.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <utility>

#include "pager/gradients/squares.h"

namespace trireme {

namespace {

// The stream that computes is held up only when the way to the host has fallen this many units behind.
constexpr size_t kUnderWay = 2;

}  // namespace

LeavingGradients::LeavingGradients(const MeshContext& context)
    : context_(context),
      device_(context.device),
      offload_(context.offload),
      stream_(context.offload.is_empty() ? c10::Device(c10::kCPU) : context.device),
      places_(context.layout.units.size()) {
  if (offload_.is_empty()) return;
  for (int i = 0; i < context.units(); ++i) {
    const UnitLayout& unit = context.unit(i);
    if (offload_.owns(i) && unit.mesh == context.number)
      places_[i].on_host = offload_.memory().take(unit.shard_numel, accumulation_dtype(unit, context.policy));
  }
  norms_ = at::zeros({static_cast<int64_t>(places_.size())}, at::TensorOptions().dtype(at::kDouble).device(device_));
}

LeavingGradients::~LeavingGradients() {
  for (const UnderWay& each : under_way_) each.left.stream_wait_quietly();
}

void LeavingGradients::leave(int unit, at::Tensor reduced, bool replaces) {
  const at::NoGradGuard no_grad;
  offload_.await(unit);  // one that this forward did not use may still be being updated
  Place& place = places_[unit];
  const Event made = Event::record(device_);
  {
    const OnStream on(stream_);
    made.stream_wait();
    at::Tensor sum = reduced;
    if (!replaces) sum = place.on_host.to(device_, /*non_blocking=*/true).add_(reduced);
    measure(unit, sum);
    place.on_host.copy_(sum, /*non_blocking=*/true);
    place.arrived = Event::record(device_);
  }
  under_way_.push_back({std::move(reduced), place.arrived});
  while (under_way_.size() > kUnderWay) forget_oldest();
}

void LeavingGradients::rewritten(int unit) {
  const at::NoGradGuard no_grad;
  const OnStream on(stream_);
  measure(unit, places_[unit].on_host.to(device_, /*non_blocking=*/true));
  places_[unit].arrived = Event::record(device_);
  under_way_.push_back({{}, places_[unit].arrived});
}

void LeavingGradients::finish() {
  while (!under_way_.empty()) forget_oldest();
}

void LeavingGradients::measure(int unit, const at::Tensor& gradients) {
  norm(unit).copy_(counted_norm(context_, unit, gradients));
}

void LeavingGradients::forget_oldest() {
  under_way_.front().left.stream_wait();
  under_way_.pop_front();
}

}  // namespace trireme
