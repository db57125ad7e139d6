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

OptimizerSlices::OptimizerSlices(Pager& pager, const std::vector<OptimizerOptions>& groups, std::vector<int> group_of,
                                 const UpdateArithmetic& arithmetic)
    : pager_(pager), group_of_(std::move(group_of)) {
  const at::NoGradGuard no_grad;
  for (const OptimizerOptions& group : groups) state_names_.push_back(optimizer_states(group));
  for (const OwnedSlice& slice : pager.owned()) {
    const at::Tensor& weights = slice.weights;
    size_t states = 0;  // of the groups that the unit has parameters of
    for (const Placement& placement : pager.layout().units[slice.unit].parameters)
      states = std::max(states, state_names(placement.index).size());
    UpdateSpan span;
    span.weights = weights;
    span.master = weights.scalar_type() == arithmetic.dtype ? weights : weights.to(at::kFloat);
    if (states > 0) span.first = zero_state(span.master);
    if (states > 1) span.second = zero_state(span.master);
    spans_.push_back(std::move(span));
    is_on_host_.push_back(is_host(weights));
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
  span.gradients = pager_.owned()[i].gradients;
  if (!roundings_.empty()) span.rounding = &roundings_[i];
  return span;
}

bool OptimizerSlices::any(bool on_host) const {
  return std::find(is_on_host_.begin(), is_on_host_.end(), on_host) != is_on_host_.end();
}

std::vector<Run> OptimizerSlices::runs(size_t i, const std::vector<bool>& touched,
                                       const std::vector<int64_t>& steps) const {
  const OwnedSlice& slice = pager_.owned()[i];
  return plan_runs(pager_.layout().units[slice.unit], slice.begin, slice.weights.numel(), touched, steps, group_of_);
}

std::vector<ParameterRange> OptimizerSlices::ranges(size_t i) const {
  const OwnedSlice& slice = pager_.owned()[i];
  return ranges_of(pager_.layout().units[slice.unit], slice.begin, slice.weights.numel());
}

void OptimizerSlices::round_weights(const UpdateSpan& span) {
  if (span.has_master()) span.weights.copy_(span.master);
}

// A user's write into 16-bit weights is the new truth; an older master would undo it.
void OptimizerSlices::refresh_masters(const std::vector<bool>& chosen) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < spans_.size(); ++i) {
    if (!spans_[i].has_master()) continue;
    for (const ParameterRange& range : ranges(i)) {
      if (!chosen[range.parameter]) continue;
      const UpdateSpan part = spans_[i].slice(range.slice_begin, range.slice_begin + range.numel);
      // Only what differs: elsewhere the master knows more digits than the weight that it was rounded to.
      const at::Tensor unchanged = part.master.to(part.weights.scalar_type()).eq(part.weights);
      part.master.copy_(at::where(unchanged, part.master, part.weights.to(at::kFloat)));
    }
  }
}

void OptimizerSlices::write_back_masters(const std::vector<bool>& chosen) const {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < spans_.size(); ++i)
    for (const ParameterRange& range : ranges(i))
      if (chosen[range.parameter]) round_weights(spans_[i].slice(range.slice_begin, range.slice_begin + range.numel));
}

std::vector<TensorSlice> OptimizerSlices::state() const {
  std::vector<TensorSlice> slices;
  for (size_t i = 0; i < spans_.size(); ++i) {
    const UpdateSpan& span = spans_[i];
    for (const ParameterRange& range : ranges(i)) {
      const std::string& parameter = pager_.parameters()[range.parameter].name;
      if (span.has_master()) append(slices, master_name(parameter), range, span.master);
      const std::vector<std::string>& names = state_names(range.parameter);
      for (size_t state = 0; state < names.size(); ++state)
        append(slices, optimizer_state_name(names[state], parameter), range, state == 0 ? span.first : span.second);
    }
  }
  return slices;
}

int64_t OptimizerSlices::master_bytes() const {
  int64_t bytes = 0;
  for (const UpdateSpan& span : spans_) bytes += span.has_master() ? static_cast<int64_t>(span.master.nbytes()) : 0;
  return bytes;
}

int64_t OptimizerSlices::state_bytes() const {
  int64_t bytes = 0;
  const size_t parameters = group_of_.size();
  for (size_t i = 0; i < spans_.size(); ++i)
    for (const Run& run : runs(i, std::vector<bool>(parameters, true), std::vector<int64_t>(parameters)))
      bytes += (run.end - run.begin) * spans_[i].master.element_size() *
               static_cast<int64_t>(state_names_[run.group].size());
  return bytes;
}

void OptimizerSlices::append(std::vector<TensorSlice>& slices, const std::string& name, const ParameterRange& range,
                             const at::Tensor& flat) const {
  TensorSlice& slice = slices.emplace_back();
  slice.name = name;
  slice.part = pager_.parameters()[range.parameter].model_part();
  slice.begin = range.parameter_begin;
  slice.data = flat.narrow(0, range.slice_begin, range.numel);
}

}  // namespace trireme
