#include "optim/slices.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "optim/zero_pages.h"
#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/device/stream.h"

namespace trireme {

namespace {

at::Tensor zero_state(const at::Tensor& master) {
  if (is_host(master)) return zero_pages(master.numel(), master.scalar_type());
  return at::zeros({master.numel()}, master.options());
}

}  // namespace

void WeightsInMemory::enter(const OwnedSlice& slice) {
  if (slice.home == home_) return;
  leave();
  if (slice.home != nullptr) slice.home->lease();
  home_ = slice.home;
}

void WeightsInMemory::leave() {
  SliceHome* const home = std::exchange(home_, nullptr);
  if (home != nullptr) use_ == Use::kWrite ? home->put_back() : home->drop();
}

OptimizerSlices::OptimizerSlices(Pager& pager, const std::vector<OptimizerOptions>& groups, std::vector<int> group_of,
                                 const UpdateArithmetic& arithmetic, const DiskSpace& disk)
    : pager_(pager), group_of_(std::move(group_of)) {
  const at::NoGradGuard no_grad;
  for (const OptimizerOptions& group : groups) state_names_.push_back(optimizer_states(group));
  for (const OwnedSlice& slice : pager.owned()) {
    spans_.emplace_back().weights = slice.weights;
    has_master_.push_back(slice.weights.scalar_type() != arithmetic.dtype);
    is_on_host_.push_back(is_host(slice.weights));
  }
  if (disk.is_on() && any_on_host()) put_on_disk(disk, arithmetic.dtype);
  WeightsInMemory weights(WeightsInMemory::Use::kRead);
  for (size_t i = 0; i < spans_.size(); ++i) {
    if (is_on_disk(i)) continue;
    UpdateSpan& span = spans_[i];
    if (has_master_[i]) weights.enter(owned(i));
    span.master = has_master_[i] ? span.weights.to(at::kFloat) : span.weights;
    const size_t states = states_of(i);
    if (states > 0) span.first = zero_state(span.master);
    if (states > 1) span.second = zero_state(span.master);
  }
  for (size_t i = 0; arithmetic.rounds_stochastically && i < spans_.size(); ++i) {
    std::vector<StochasticRounding::Range> rounded;
    for (const ParameterRange& range : ranges(i)) {
      const std::string& name = pager.parameters()[range.parameter].name;
      rounded.push_back({range.slice_begin, range.numel, XXH3_64bits(name.data(), name.size()), range.parameter_begin});
    }
    roundings_.emplace_back(std::move(rounded));
  }
}

UpdateSpan OptimizerSlices::span(size_t i) const {
  UpdateSpan span = spans_[i];
  span.gradients = owned(i).gradients;
  if (!roundings_.empty()) span.rounding = &roundings_[i];
  return span;
}

size_t OptimizerSlices::states_of(size_t i) const {
  size_t states = 0;
  for (const ParameterPlace& placement : pager_.layout().units[unit(i)].parameters)
    states = std::max(states, state_names(placement.index).size());
  return states;
}

void OptimizerSlices::put_on_disk(const DiskSpace& disk, at::ScalarType dtype) {
  std::vector<DiskStates::Slice> slices;
  std::vector<Range> masters;
  for (size_t i = 0; i < spans_.size(); ++i) {
    const int tensors = static_cast<int>(states_of(i)) + (has_master_[i] ? 1 : 0);
    slices.push_back({spans_[i].weights.numel(), is_on_host_[i] ? tensors : 0, dtype});
    if (has_master_[i] && is_on_host_[i]) masters.push_back({i, 0, spans_[i].weights.numel()});
  }
  disk_ = std::make_unique<DiskStates>(std::move(slices), disk);
  WeightsInMemory weights(WeightsInMemory::Use::kRead);
  visit(masters, Access::kWrite, [&](size_t index, const UpdateSpan& span) {
    weights.enter(owned(masters[index].slice));
    span.master.copy_(span.weights);
    for (const at::Tensor& state : {span.first, span.second})
      if (state.defined()) at::Tensor(state).zero_();
  });
}

UpdateSpan OptimizerSlices::span_of(const DiskStates::BlockPlace& place, const std::vector<at::Tensor>& tensors) const {
  UpdateSpan span;
  span.weights = spans_[place.slice].weights.narrow(0, place.begin, place.end - place.begin);
  span.begin = place.begin;
  size_t next = 0;
  span.master = has_master_[place.slice] ? tensors[next++] : span.weights;
  if (next < tensors.size()) span.first = tensors[next++];
  if (next < tensors.size()) span.second = tensors[next++];
  if (const at::Tensor& gradients = pager_.owned()[place.slice].gradients; gradients.defined())
    span.gradients = gradients.narrow(0, place.begin, place.end - place.begin);
  if (!roundings_.empty()) span.rounding = &roundings_[place.slice];
  return span;
}

void OptimizerSlices::visit(const std::vector<Range>& ranges, Access access,
                            const std::function<void(size_t, const UpdateSpan&)>& use) const {
  if (!disk_) {
    for (size_t i = 0; i < ranges.size(); ++i) use(i, span(ranges[i].slice).slice(ranges[i].begin, ranges[i].end));
    return;
  }
  // Each block once, and the ranges that have elements of it.
  std::vector<DiskStates::BlockPlace> places;
  std::vector<std::vector<size_t>> users;
  for (size_t i = 0; i < ranges.size(); ++i) {
    if (!is_on_disk(ranges[i].slice)) continue;
    for (const DiskStates::BlockPlace& place : disk_->blocks(ranges[i].slice, ranges[i].begin, ranges[i].end)) {
      if (places.empty() || places.back().slice != place.slice || places.back().begin != place.begin) {
        places.push_back(place);
        users.emplace_back();
      }
      users.back().push_back(i);
    }
  }
  size_t in_memory = 0;
  const auto use_memory_before = [&](size_t end) {
    for (; in_memory < end; ++in_memory)
      if (const Range& range = ranges[in_memory]; !is_on_disk(range.slice))
        use(in_memory, span(range.slice).slice(range.begin, range.end));
  };
  size_t next = 0;
  disk_->visit(places, access, [&](const DiskStates::BlockPlace& place, const std::vector<at::Tensor>& tensors) {
    const UpdateSpan block = span_of(place, tensors);
    for (const size_t i : users[next++]) {
      use_memory_before(i);
      use(i, block.slice(std::max(ranges[i].begin, place.begin) - place.begin,
                         std::min(ranges[i].end, place.end) - place.begin));
    }
  });
  use_memory_before(ranges.size());
}

bool OptimizerSlices::any(bool on_host) const {
  return std::find(is_on_host_.begin(), is_on_host_.end(), on_host) != is_on_host_.end();
}

std::vector<Run> OptimizerSlices::runs(size_t i, const std::vector<bool>& touched,
                                       const std::vector<int64_t>& steps) const {
  const OwnedSlice& slice = owned(i);
  return plan_runs(pager_.layout().units[slice.unit], slice.begin, slice.weights.numel(), touched, steps, group_of_);
}

std::vector<ParameterRange> OptimizerSlices::ranges(size_t i) const {
  const OwnedSlice& slice = owned(i);
  return ranges_of(pager_.layout().units[slice.unit], slice.begin, slice.weights.numel());
}

void OptimizerSlices::round_weights(const UpdateSpan& span) {
  if (span.has_master()) span.weights.copy_(span.master);
}

std::vector<OptimizerSlices::Range> OptimizerSlices::with_masters(const std::vector<bool>& chosen) const {
  std::vector<Range> result;
  for (size_t i = 0; i < spans_.size(); ++i)
    for (const ParameterRange& range : ranges(i))
      if (has_master_[i] && chosen[range.parameter])
        result.push_back({i, range.slice_begin, range.slice_begin + range.numel});
  return result;
}

// A user's write into 16-bit weights is the new truth; an older master would undo it.
void OptimizerSlices::refresh_masters(const std::vector<bool>& chosen) const {
  const at::NoGradGuard no_grad;
  const std::vector<Range> masters = with_masters(chosen);
  WeightsInMemory weights(WeightsInMemory::Use::kRead);
  visit(masters, Access::kUpdate, [&](size_t index, const UpdateSpan& part) {
    weights.enter(owned(masters[index].slice));
    // Only what differs: elsewhere the master knows more digits than the weight that it was rounded to.
    const at::Tensor unchanged = part.master.to(part.weights.scalar_type()).eq(part.weights);
    part.master.copy_(at::where(unchanged, part.master, part.weights.to(at::kFloat)));
  });
}

void OptimizerSlices::write_back_masters(const std::vector<bool>& chosen) const {
  const at::NoGradGuard no_grad;
  const std::vector<Range> masters = with_masters(chosen);
  WeightsInMemory weights(WeightsInMemory::Use::kWrite);
  visit(masters, Access::kRead, [&](size_t index, const UpdateSpan& part) {
    weights.enter(owned(masters[index].slice));
    round_weights(part);
  });
  weights.leave();
}

std::vector<TensorSlice> OptimizerSlices::state() const {
  std::vector<TensorSlice> slices;
  for (size_t i = 0; i < spans_.size(); ++i) {
    for (const ParameterRange& range : ranges(i)) {
      const std::string& parameter = pager_.parameters()[range.parameter].name;
      int tensor = 0;
      if (has_master_[i]) append(slices, master_name(parameter), i, range, tensor++);
      for (const std::string& state : state_names(range.parameter))
        append(slices, optimizer_state_name(state, parameter), i, range, tensor++);
    }
  }
  return slices;
}

int64_t OptimizerSlices::master_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < spans_.size(); ++i)
    if (has_master_[i]) bytes += spans_[i].weights.numel() * static_cast<int64_t>(sizeof(float));
  return bytes;
}

int64_t OptimizerSlices::state_bytes() const {
  int64_t bytes = 0;
  const size_t parameters = group_of_.size();
  for (size_t i = 0; i < spans_.size(); ++i) {
    const auto itemsize = static_cast<int64_t>(has_master_[i] ? sizeof(float) : spans_[i].weights.element_size());
    for (const Run& run : runs(i, std::vector<bool>(parameters, true), std::vector<int64_t>(parameters)))
      bytes += (run.end - run.begin) * itemsize * static_cast<int64_t>(state_names_[run.group].size());
  }
  return bytes;
}

void OptimizerSlices::append(std::vector<TensorSlice>& slices, const std::string& name, size_t i,
                             const ParameterRange& range, int tensor) const {
  TensorSlice& slice = slices.emplace_back();
  slice.name = name;
  slice.part = pager_.parameters()[range.parameter].model_part();
  slice.begin = range.parameter_begin;
  if (is_on_disk(i)) {
    slice.store = disk_->store(i, tensor, range.slice_begin, range.numel);
    return;
  }
  const at::Tensor* const flat[] = {&spans_[i].master, &spans_[i].first, &spans_[i].second};
  slice.data = flat[tensor + (has_master_[i] ? 0 : 1)]->narrow(0, range.slice_begin, range.numel);
}

}  // namespace trireme
