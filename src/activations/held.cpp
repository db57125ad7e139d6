#include "activations/held.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <utility>

#include "activations/selections.h"

namespace trireme {

at::Tensor part_of_whole(const AxisPass& pass, const at::Tensor& whole, const Placement& placement) {
  at::Tensor part = whole;
  for (const Cut& cut : placement.at(pass.position()))
    part = slice_of(part, cut, pass.grid().rank(pass.position(), cut.axis));
  return part;
}

bool may_hold_within(const AxisPass& pass, const Placement& placement) {
  return std::ranges::all_of(placement.at(pass.position()), [&](const Cut& cut) {
    bool is_view = cut.outer == 1 && pass.policy(cut.axis).writes_within();
    for (int rank = 0; rank < cut.ranges->ranks(); ++rank) is_view = is_view && cut.ranges->of_rank(rank).size() == 1;
    return is_view;
  });
}

void HeldRun::run(PlacedArguments found) {
  const auto is_held = [](Held held) { return [held](const PlacedArgument& one) { return one.known->held == held; }; };
  if (std::ranges::any_of(found, is_held(Held::kWithin)) && run_within(found)) return;
  const bool is_whole = std::ranges::all_of(found, is_held(Held::kWhole));
  // Slices of layers alone are no activations: what they make of inputs is.
  const bool is_made = std::ranges::any_of(found, is_held(Held::kWhole)) && makes_activations() &&
                       std::ranges::all_of(found, [](const PlacedArgument& one) {
                         return one.known->held == Held::kWhole || one.known->is_parameter;
                       });
  if (!is_whole && !is_made)
    std::erase_if(found, is_held(Held::kWhole));
  else if (is_made || realises())
    found = with_parts(found, Held::kWhole);
  else
    return (void)run_on_whole(found);
  pass_.run_found(call_, next_, std::move(found));
}

/// Views of a tensor that is right within this rank's part are so, too; other operators get the part.
bool HeldRun::run_within(const PlacedArguments& found) {
  if (found.size() == 1 && gives_views(call_) && run_on_whole(found)) return true;
  const at::Tensor written = writes_first(call_) ? call_.arguments()[0].toTensor() : at::Tensor();
  const bool is_written = written.defined() && found[0].index == 0 && found[0].known->held == Held::kWithin;
  run(with_parts(found, Held::kWithin));
  if (is_written) call_.stack.back() = written;
  return true;
}

/// False: it has not run, since results of what is right within a part would be right within none.
bool HeldRun::run_on_whole(const PlacedArguments& found) {
  const OperatorRow* const entry = goes_by_mask(call_) ? nullptr : pass_.rows_(call_.op);
  if (entry != nullptr) return pass_.run_row_on_whole(call_, next_, {.entry = entry}, found);
  if (found[0].known->held == Held::kWithin) return false;
  next_(call_);
  return true;
}

bool HeldRun::makes_activations() const {
  const OperatorRow* const entry = pass_.rows_(call_.op);
  return call_.traits.written == 0 && entry != nullptr && entry->makes_activations;
}

/// Whether another call whose arguments are all held whole computes on parts from here on: it makes activations.
bool HeldRun::realises() const {
  if (call_.traits.written != 0) return false;
  if (call_.traits.random) return true;
  const OperatorRow* const entry = pass_.rows_(call_.op);
  bool asks_gradient = false;
  for_each_tensor(call_.arguments(), [&](const at::Tensor& one) {
    asks_gradient = asks_gradient || (one.defined() && at::GradMode::is_enabled() && one.requires_grad());
  });
  return asks_gradient && entry != nullptr;
}

/// This rank's part in place of each argument that is held so.
PlacedArguments HeldRun::with_parts(const PlacedArguments& found, Held held) {
  std::vector<at::Tensor> tensors = tensors_among(call_.arguments());
  const Operands operands = operands_of(call_, found);
  PlacedArguments parts;
  next_.run(call_, [&] {
    for (size_t i = 0; i < operands.size(); ++i) {
      if (operands[i].found == nullptr) continue;
      parts.push_back(*operands[i].found);
      if (parts.back().known->held != held) continue;
      const std::shared_ptr<const Placement> placement = parts.back().known->placement;
      at::Tensor part = part_of_whole(pass_, operands[i].tensor, *placement);
      if (held == Held::kWhole)  // what is written into a view would be lost
        part = gives_views(call_) ? part.clone() : operands[i].tensor.is_contiguous() ? part.contiguous() : part;
      tensors[i] = part;
      parts.back() = {operands[i].index, part, part_by(placement)};
    }
  });
  const std::vector<c10::IValue> arguments = with_tensors(call_.arguments().vec(), tensors);
  for (size_t i = 0; i < arguments.size(); ++i) argument(call_, i) = arguments[i];
  return parts;
}

}  // namespace trireme
