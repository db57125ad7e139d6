#include "pipeline/stage_work.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cstddef>
#include <memory>

#include "pipeline/carried_random_state.h"
#include "trireme/base/error.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"
#include "trireme/pipeline/values.h"
#include "trireme/precision/autocast.h"

namespace trireme {
namespace {

using pipeline::Instruction;
using pipeline::Kind;
using torch::autograd::impl::gradient_edge;

bool splits(const pipeline::Schedule& schedule) {
  for (const std::vector<pipeline::Step>& stream : schedule.streams)
    for (const pipeline::Step& step : stream)
      for (const Instruction& instruction : step)
        if (instruction.kind == Kind::kBackwardInput) return true;
  return false;
}

/// Those that output_of() has put behind the tensors of the value.
void take_random_states(c10::Device device, Message& message) {
  const size_t left = message.value.tensors.size() - carried_streams(device).size();
  set_random_states_of(
      device, {message.value.tensors.begin() + static_cast<std::ptrdiff_t>(left), message.value.tensors.end()});
  message.value.tensors.resize(left);
  message.requires_grad.resize(left);
  message.cuts.resize(left);
}

}  // namespace

StageWork::StageWork(Training& training, const StageModel& model, const Data& data, Group& tied_group,
                     const pipeline::Schedule& shape, bool sums_whole)
    : training_(training),
      model_(model),
      data_(data),
      stage_(tied_group.rank()),
      tied_(tied_group, model.ties, shape, training.pager(), training.step().is_deterministic()),
      sums_whole_(sums_whole),
      peak_buffers_(shape.chunks),
      schedule_(&shape) {
  find_units();
  tied_.follow_owners();
}

/// A unit that spans parts, or has a parameter that no part names, is of each of them.
void StageWork::find_units() {
  units_.assign(model_.parts.size(), {});
  if (model_.parameters.empty() || model_.parts.size() == 1) return;
  const Pager& pager = training_.pager();
  std::vector<bool> is_named(pager.parameters().size());
  for (size_t chunk = 0; chunk < units_.size(); ++chunk) {
    units_[chunk].resize(pager.layout().units.size());
    for (const at::Tensor& parameter : model_.parameters[chunk]) {
      const auto place = find_managed(parameter);
      if (!place || place->pager != &pager) continue;  // the copy of a tied one
      is_named[place->parameter] = true;
      units_[chunk][pager.layout().unit_of[place->parameter]] = true;
    }
  }
  for (size_t i = 0; i < is_named.size(); ++i)
    if (!is_named[i])
      for (std::vector<bool>& of_chunk : units_) of_chunk[pager.layout().unit_of[i]] = true;
}

void StageWork::begin(const pipeline::Schedule& schedule, WorkMode mode) {
  schedule_ = &schedule;
  mode_ = mode;
  splits_backward_ = mode.trains && splits(schedule);
  slots_.assign(schedule.chunks, {});
  for (int chunk = 0; chunk < schedule.chunks; ++chunk) slots_[chunk].resize(schedule.buffers[stage_][chunk]);
  passes_left_.assign(schedule.chunks, schedule.micro_batches);
  handed_over_.clear();
  loss_.reset();
  outputs_.clear();
}

void StageWork::clear() {
  slots_.clear();
  handed_over_.clear();
}

void StageWork::end_window() {
  tied_.clear();
  tied_.follow_owners();
}

/// The slot of an instruction, taken for its micro-batch where it is free.
StageWork::Slot& StageWork::slot(const Instruction& instruction) {
  Slot& slot = slots_[instruction.chunk].at(instruction.buffer);
  if (slot.micro_batch == instruction.micro_batch) return slot;
  if (slot.micro_batch >= 0)
    throw Error(ErrorCode::kInternal,
                str("pipeline: buffer ", instruction.buffer, " is still micro-batch ", slot.micro_batch, "'s"));
  slot.micro_batch = instruction.micro_batch;
  const auto& of_chunk = slots_[instruction.chunk];
  const auto used = std::count_if(of_chunk.begin(), of_chunk.end(), [](const Slot& it) { return it.micro_batch >= 0; });
  int& peak = peak_buffers_[instruction.chunk];
  peak = std::max(peak, static_cast<int>(used));
  return slot;
}

/// Frees the slot after the last instruction of its micro-batch.
void StageWork::release_if_over(const Instruction& instruction) {
  Slot& slot = this->slot(instruction);
  const bool has_graph = !slot.output_edges.empty() || slot.split;
  if (slot.output || has_graph || !slot.leaves.empty() || !slot.input_gradients.empty()) return;
  slot = {};
}

Message StageWork::take_over(int kind, int micro_batch) {
  return std::move(handed_over_.extract({kind, micro_batch}).mapped());
}

void StageWork::put_input(const Instruction& instruction, Message message) {
  slot(instruction).input = std::move(message);
}

Message StageWork::take_output(const Instruction& instruction) {
  Message message = *std::exchange(slot(instruction).output, std::nullopt);
  release_if_over(instruction);
  return message;
}

Message StageWork::take_input_gradients(const Instruction& instruction) {
  Message message = gradients_of(slot(instruction));
  release_if_over(instruction);
  return message;
}

/// Gradients of a part's outputs, those of `message` that are not missing.
void StageWork::put_output_gradients(const Instruction& instruction, Message message) {
  Slot& slot = this->slot(instruction);
  torch::autograd::edge_list edges;
  for (size_t i = 0; i < message.value.tensors.size(); ++i) {
    if (message.is_missing[i]) continue;
    edges.push_back(slot.output_edges[i]);
    slot.output_gradients.push_back(message.value.tensors[i]);
  }
  slot.output_edges = std::move(edges);
}

// --- forward -------------------------------------------------------------------------------------------------------

void StageWork::forward(const Instruction& instruction) {
  Slot& slot = this->slot(instruction);
  const int part = part_of(instruction.chunk);
  ForwardScope scope = training_.begin_forward();
  c10::IValue input = part == 0 ? first_input(instruction, scope) : input_of(slot, instruction);
  const c10::IValue output = model_.parts[instruction.chunk](std::move(input));
  if (is_last(instruction.chunk)) {
    finish_forward(slot, output, instruction.micro_batch);
    refuse_reentrant(slot);
    return release_if_over(instruction);
  }
  Message message = output_of(slot, output);
  refuse_reentrant(slot);
  if (!stays_here(part + 1)) {
    slot.output = std::move(message);
    return;
  }
  handed_over_[{Messages::activation_of(part, mode_.trains), instruction.micro_batch}] = std::move(message);
  release_if_over(instruction);
}

c10::IValue StageWork::first_input(const Instruction& instruction, ForwardScope& scope) {
  if (carries_random_state()) training_.step().start_micro_batch(instruction.micro_batch);
  FlatValue given = flatten(data_.feed.at(instruction.micro_batch).inputs);
  for (at::Tensor& tensor : given.tensors) tensor = scope.input(tensor);
  return data_.cut.part_of(unflatten(given), instruction.micro_batch);
}

/// The activation of the part before; where gradients go back, on leaves.
c10::IValue StageWork::input_of(Slot& slot, const Instruction& instruction) {
  const int before = part_of(instruction.chunk) - 1;
  if (stays_here(before))
    slot.input = take_over(Messages::activation_of(before, mode_.trains), instruction.micro_batch);
  Message& message = *slot.input;
  if (carries_random_state()) take_random_states(training_.pager().device(), message);
  for (size_t i = 0; i < message.value.tensors.size(); ++i) {
    at::Tensor& tensor = message.value.tensors[i];
    if (mode_.trains && message.requires_grad[i]) {
      slot.leaves.push_back(tensor.set_requires_grad(true));
      tensor = writable(slot.leaves.back());
    }
    tensor = training_.passes().taken(tensor, message.cuts[i]);
  }
  c10::IValue input = unflatten(message.value);
  slot.input.reset();
  return input;
}

/// `value` as it goes to the part after. Its graph is kept by its edges.
Message StageWork::output_of(Slot& slot, const c10::IValue& value) const {
  Message message{.value = flatten(value)};
  for (at::Tensor& tensor : message.value.tensors) {
    SentTensor sent = training_.passes().sent(tensor);
    tensor = std::move(sent.tensor);
    message.cuts.push_back(std::move(sent.cut));
    const bool requires_grad = mode_.trains && tensor.defined() && tensor.requires_grad();
    message.requires_grad.push_back(requires_grad);
    if (requires_grad) slot.output_edges.push_back(gradient_edge(tensor));
    if (tensor.defined()) tensor = tensor.detach();
  }
  if (!carries_random_state()) return message;
  for (at::Tensor& state : random_states_of(training_.pager().device())) {
    message.value.tensors.push_back(std::move(state));
    message.requires_grad.push_back(false);
    message.cuts.emplace_back();
  }
  return message;
}

void StageWork::refuse_reentrant(const Slot& slot) const {
  if (!splits_backward_ || slot.output_edges.empty()) return;
  const std::string node = reentrant_node(slot.output_edges);
  if (!node.empty())
    throw ConfigError(str("pipeline: schedule '", schedule_->name, "' splits backward passes in two, and ", node,
                          " of reentrant checkpointing cannot be split; use use_reentrant=False, as ",
                          "trireme.checkpointing.checkpoint does, or schedule '",
                          schedule_->chunks == 1 ? "1f1b" : "interleaved", "'"));
}

/// `value`, with the whole of each tensor that is a part. An object of a program's is handed on as it is, but where
/// ranks have some tokens each, of which its tensors may be some.
c10::IValue StageWork::whole(const c10::IValue& value) const {
  if (training_.passes().cuts.empty()) return value;
  if (value.isCapsule() && (data_.cut.is_on() || training_.config().tensor.sequence_parallel))
    throw ConfigError(
        "eval_batch: the last layer returns an object of the program's own, whose tensors may be parts of sequences; "
        "return tensors, numbers, texts, and tuples, lists or dictionaries of these, or ask for no outputs");
  if (value.isCapsule()) return value;
  FlatValue flat = flatten(value);
  for (at::Tensor& tensor : flat.tensors) tensor = training_.passes().whole(tensor);
  return unflatten(flat);
}

void StageWork::finish_forward(Slot& slot, const c10::IValue& output, int micro_batch) {
  if (mode_.returns_outputs) outputs_.push_back(whole(output));
  if (!mode_.computes_loss) return;
  const at::Tensor loss = model_.loss(output, data_.cut.part_of(data_.feed.at(micro_batch).labels, micro_batch));
  if (!loss.defined() || loss.numel() != 1 || !at::isFloatingType(loss.scalar_type()))
    throw ShapeError(str("pipeline: the loss function returned ",
                         loss.defined() ? str(loss.scalar_type(), " ", loss.sizes()) : "nothing",
                         "; expected one floating element"));
  if (mode_.trains) training_.passes().check_loss(loss);
  if (!mode_.trains && training_.passes().is_part(loss))
    throw StateError("eval_batch: the loss is of a part of the activations alone; take the sum() or mean() of all");
  const WithoutInterception own_operators;
  const at::Tensor value = loss.detach().to(at::kFloat).reshape({});
  loss_ = loss_.defined() ? loss_ + value : value;
  if (!mode_.trains) return;
  const at::Tensor scaled = training_.step().scale(loss);
  slot.output_edges = {gradient_edge(scaled)};
  slot.output_gradients = {at::ones_like(scaled)};
}

// --- backward ------------------------------------------------------------------------------------------------------

void StageWork::backward(const Instruction& instruction) {
  const int part = part_of(instruction.chunk);
  Slot& slot = this->slot(instruction);
  const bool gives_inputs = instruction.kind != Kind::kBackwardWeight;
  if (gives_inputs && stays_here(part + 1))
    put_output_gradients(instruction, take_over(Messages::gradient_of(part), instruction.micro_batch));
  if (instruction.kind == Kind::kBackwardInput)
    backward_inputs(slot);
  else
    backward_weights(slot, instruction);
  if (gives_inputs && stays_here(part - 1))
    handed_over_[{Messages::gradient_of(part - 1), instruction.micro_batch}] = gradients_of(slot);
  release_if_over(instruction);
}

/// The first half of a backward pass: what the part before waits for.
void StageWork::backward_inputs(Slot& slot) {
  const AutocastScope off(AutocastOptions{}, training_.pager().device().type());
  slot.split.emplace(std::exchange(slot.output_edges, {}), slot.leaves);
  slot.input_gradients = slot.split->input_gradients(std::exchange(slot.output_gradients, {}));
}

/// All of a backward pass, or its second half.
void StageWork::backward_weights(Slot& slot, const Instruction& instruction) {
  const int chunk = instruction.chunk;
  SplitBackward::Rest roots{std::exchange(slot.output_edges, {}), std::exchange(slot.output_gradients, {})};
  if (slot.split) roots = std::exchange(slot.split, std::nullopt)->rest();
  const bool is_last_pass = --passes_left_[chunk] == 0;
  const bool is_last_of_stage = std::ranges::all_of(passes_left_, [](int passes) { return passes == 0; });
  const bool sums_whole = sums_whole_ && schedule_->micro_batches > 1;
  training_.pager().defer_reductions(sums_whole && !is_last_of_stage);
  if (!sums_whole) training_.pager().expect_units(units_[chunk]);
  const TiedCopies::Pass pass{.chunk = chunk, .micro_batch = instruction.micro_batch, .is_last = is_last_pass};
  TiedCopies::Roots tied = tied_.receive(pass);
  roots.from.insert(roots.from.end(), tied.edges.begin(), tied.edges.end());
  roots.gradients.insert(roots.gradients.end(), tied.gradients.begin(), tied.gradients.end());
  training_.step().backward_from(roots.from, roots.gradients, {.ends_micro_batch = true});
  tied_.send(pass);
  if (instruction.kind == Kind::kBackward)
    for (at::Tensor& leaf : slot.leaves)
      slot.input_gradients.push_back(std::exchange(leaf.mutable_grad(), at::Tensor()));
}

/// Gradients of the inputs, zeros where there is none.
Message StageWork::gradients_of(Slot& slot) {
  Message message;
  for (size_t i = 0; i < slot.input_gradients.size(); ++i) {
    at::Tensor& gradient = slot.input_gradients[i];
    message.is_missing.push_back(!gradient.defined());
    message.requires_grad.push_back(false);
    message.value.tensors.push_back(gradient.defined() ? gradient : at::zeros_like(slot.leaves[i]).detach());
  }
  slot.input_gradients.clear();
  slot.leaves.clear();
  return message;
}

}  // namespace trireme
