#include "trireme/pipeline/stage_runner.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <exception>
#include <sstream>
#include <type_traits>
#include <utility>

#include "pipeline/mail.h"
#include "pipeline/split_backward.h"
#include "pipeline/tied_copies.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/intercept/random_streams.h"
#include "trireme/precision/autocast.h"
#include "trireme/schedule/check.h"

namespace trireme {
namespace {

using pipeline::Instruction;
using pipeline::Kind;
using pipeline::Placement;
using torch::autograd::impl::gradient_edge;

constexpr const char* kSpent = "This engine is spent: make a new one with initialize(), and load a checkpoint";

/// All micro-batches forward, for parts in any placement.
pipeline::Schedule forwards_only(const pipeline::Schedule& shape, int micro_batches) {
  std::vector<std::vector<pipeline::Computation>> computations(shape.stages);
  for (std::vector<pipeline::Computation>& of_stage : computations)
    for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch)
      for (int chunk = 0; chunk < shape.chunks; ++chunk) of_stage.push_back({Kind::kForward, chunk, micro_batch});
  return pipeline::assemble("inference", shape.stages, micro_batches, shape.chunks, shape.placement, computations);
}

/// Hands on the gradient.
struct Identity : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return std::move(gradients);
  }
};

/// `leaf` with its memory and its gradient, but no leaf: a layer may write into it.
at::Tensor writable(const at::Tensor& leaf) {
  std::shared_ptr<Identity> node(new Identity(), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(leaf));
  at::Tensor value = leaf.detach();
  torch::autograd::set_history(value, node);
  return value;
}

/// All of a schedule, a line for each instruction.
std::string text_of(const pipeline::Schedule& schedule) {
  std::string text = str("schedule '", schedule.name, "' of ", schedule.micro_batches, " micro-batches");
  for (int stage = 0; stage < schedule.stages; ++stage)
    for (const pipeline::Step& step : schedule.streams[stage])
      for (const Instruction& instruction : step) text += str("\nstage ", stage, ", ", to_text(instruction));
  return text;
}

bool splits(const pipeline::Schedule& schedule) {
  for (const std::vector<pipeline::Step>& stream : schedule.streams)
    for (const pipeline::Step& step : stream)
      for (const Instruction& instruction : step)
        if (instruction.kind == Kind::kBackwardInput) return true;
  return false;
}

/// The first line in which two texts differ, by which one is called `mine` and the other `others`.
std::string difference_of(const std::string& mine, const std::string& others) {
  std::istringstream one(mine), other(others);
  std::string line, other_line;
  for (;;) {
    const bool has_line = static_cast<bool>(std::getline(one, line));
    const bool has_other = static_cast<bool>(std::getline(other, other_line));
    if (!has_line && !has_other) return "";
    if (!has_line || !has_other || line != other_line)
      return str("`", has_line ? line : "nothing more", "` on rank 0 and `", has_other ? other_line : "nothing more",
                 "`");
  }
}

/// The activations of one micro-batch in one part, between its first and its last instruction.
struct Slot {
  int micro_batch = -1;  ///< -1: free
  std::optional<Letter> input;
  std::vector<at::Tensor> leaves;  ///< of the input: those that need a gradient
  std::optional<Letter> output;    ///< until it is sent
  torch::autograd::edge_list output_edges;
  std::vector<at::Tensor> output_gradients;
  std::optional<SplitBackward> split;
  std::vector<at::Tensor> input_gradients;  ///< of `leaves`, until they are sent
};

}  // namespace

class StageRunner::Impl {
 public:
  Impl(Engine& engine, const Grid& grid, StageModel model, const PipelineOptions& options)
      : engine_(engine),
        world_(grid.world()),
        stages_(grid.along({"pipe"})),
        model_(std::move(model)),
        options_(options),
        shape_(make(micro_batches())),
        text_(text_of(shape_)),
        all_(world_.clone(world_.name() + "/pipeline")),
        mail_group_(stages_.clone(stages_.name() + "/mail")),
        tied_group_(stages_.clone(stages_.name() + "/tied")),
        mail_(*mail_group_, engine.pager().device(), options.dynamic_shapes),
        tied_(*tied_group_, model_.ties, shape_, engine.pager(), engine.step_->is_deterministic()) {
    if (static_cast<int>(model_.parts.size()) != shape_.chunks)
      throw ConfigError(str("pipeline: schedule '", shape_.name, "' has ", shape_.chunks,
                            " parts on each stage, and stage ", stage(), " was given ", model_.parts.size()));
    if (has_last_part() && !model_.loss)
      throw ConfigError("pipeline: the last stage has no loss function; give it loss_fn");
    counters_.peak_buffers.assign(shape_.chunks, 0);
    find_units();
    choose_sums();
    tied_.follow_owners();
  }

  at::Tensor train_batch(const MicroBatches& data) {
    engine_.require_optimizer("train_batch");
    const CallerScope caller("train_batch");
    follow_batch_size();
    load(data, shape_.micro_batches, "train_batch");
    trains_ = computes_loss_ = true;
    return or_end([&] {
      execute(shape_);
      return mean_loss(shape_.micro_batches);
    });
  }

  EvalResult eval_batch(const MicroBatches& data, const EvalOptions& options) {
    engine_.require_intact("eval_batch");
    const CallerScope caller("eval_batch");
    const at::NoGradGuard no_grad;
    const auto count = static_cast<int>(options.micro_batches.value_or(micro_batches()));
    agree("eval_batch", [&] {
      if (count < 1) throw ConfigError(str("eval_batch: ", count, " micro-batches; use 1 or more"));
      return str(count, " micro-batches, computes_loss ", options.computes_loss);
    });
    const pipeline::Schedule schedule =
        checked(shape_.chunks == 1 ? pipeline::inference(shape_.stages, count) : forwards_only(shape_, count));
    load(data, count, "eval_batch");
    trains_ = false;
    computes_loss_ = options.computes_loss;
    returns_outputs_ = options.returns_outputs;
    return or_end([&] {
      execute(schedule);
      EvalResult result;
      result.outputs = std::exchange(outputs_, {});
      if (options.computes_loss) result.loss = mean_loss(count);
      returns_outputs_ = false;
      return result;
    });
  }

  void reset_activation_shape() {
    engine_.require_alive("reset_activation_shape");
    mail_.forget_shapes();
  }
  void follow_owners() {
    engine_.require_alive("follow_owners");
    tied_.follow_owners();
  }
  void set_schedule(std::function<pipeline::Schedule(int, int)> make) {
    engine_.require_alive("set_schedule");
    pipeline::Schedule schedule;
    std::string text;
    agree("set_schedule", [&] {
      schedule = checked(make(stages_.size(), micro_batches()));
      if (schedule.stages != stages_.size() || schedule.micro_batches != micro_batches())
        throw ConfigError(str("set_schedule: '", schedule.name, "' is of ", schedule.stages, " stages and ",
                              schedule.micro_batches, " micro-batches, and asked for were ", stages_.size(), " and ",
                              micro_batches()));
      if (schedule.chunks != shape_.chunks || schedule.placement != shape_.placement)
        throw ConfigError(str("set_schedule: '", schedule.name, "' has other parts than the model was cut into for '",
                              shape_.name, "'; it needs as many chunks, placed alike"));
      check_training(schedule, tied_parts());
      return text = text_of(schedule);
    });
    make_ = std::move(make);
    shape_ = std::move(schedule);
    text_ = std::move(text);
  }

  int stage() const { return stages_.rank(); }
  int stages() const { return stages_.size(); }
  const PipelineCounters& counters() const { return counters_; }
  bool sums_whole_gradients() const { return sums_whole_; }

 private:
  int micro_batches() const { return static_cast<int>(engine_.gradient_accumulation_steps()); }
  int part_of(int chunk) const { return shape_.part_of(stage(), chunk); }
  bool has_part(int part) const { return shape_.stage_of(part) == stage(); }
  bool has_last_part() const { return has_part(shape_.parts() - 1); }
  bool is_last(int chunk) const { return part_of(chunk) == shape_.parts() - 1; }
  int activation_of(int part) const { return Mail::activation_of(part, trains_); }
  static int gradient_of(int part) { return Mail::gradient_of(part); }
  bool stays_here(int part) const { return part >= 0 && part < shape_.parts() && has_part(part); }

  pipeline::Schedule checked(pipeline::Schedule schedule) const {
    pipeline::check(schedule);
    return schedule;
  }
  pipeline::TiedParts tied_parts() const {
    pipeline::TiedParts ties{.parts = {}, .each_micro_batch = engine_.step_->is_deterministic()};
    for (const Tie& tie : model_.ties) ties.parts.push_back(tie.parts);
    return ties;
  }
  pipeline::Schedule make(int micro_batches) const {
    pipeline::Schedule schedule =
        make_ ? make_(stages_.size(), micro_batches)
              : pipeline::make_schedule(options_.schedule, stages_.size(), micro_batches, options_.chunks);
    pipeline::check(schedule);
    if (engine_.optimizer_) check_training(schedule, tied_parts());
    return schedule;
  }

  /// Runs `text` on every rank and compares what it returns, before anything has changed.
  ///
  /// Cost      one all-gather of 8 bytes; where ranks differ, of the texts.
  /// Throws    on every rank: what it threw on the lowest one, or ConfigError with the difference.
  void agree(const char* call, const std::function<std::string()>& text) {
    std::string mine;
    std::exception_ptr own;  // as it was thrown here, Python's with their class
    try {
      mine = str(call, ", ", text());
    } catch (...) {
      own = std::current_exception();
    }
    const auto digest = static_cast<int64_t>(own ? 0 : std::hash<std::string>()(mine) | 1);
    if (are_alike(digest) && !own) return;
    std::vector<std::string> texts;
    try {
      texts = gather_or_throw(*all_, [&] {
        try {
          if (own) std::rethrow_exception(own);
        } catch (const Error&) {
          throw;
        } catch (const std::exception& error) {  // a program's, which is told without Python's traceback
          const std::string why = error.what();
          throw ConfigError(str(call, ": ", why.substr(0, why.find("\n\nAt:"))));
        }
        return mine;
      });
    } catch (const CommError&) {
      throw;
    } catch (...) {
      if (own) std::rethrow_exception(own);
      throw;
    }
    for (size_t rank = 1; rank < texts.size(); ++rank)
      if (texts[rank] != texts[0])
        throw ConfigError(str(call, ": the ranks differ: ", difference_of(texts[0], texts[rank]), " on rank ", rank,
                              "; call set_schedule(), set_train_batch_size() and eval_batch() alike on every rank"));
  }

  bool are_alike(int64_t digest) {
    if (world_.size() == 1) return true;
    const WithoutInterception own_operators;
    const at::Tensor own = at::full({1}, digest, at::kLong), all = at::empty({world_.size()}, at::kLong);
    all_->all_gather(all, own).wait();
    const int64_t* const digests = all.const_data_ptr<int64_t>();
    return std::all_of(digests, digests + world_.size(), [&](int64_t each) { return each == digest; });
  }

  /// The schedule of as many micro-batches as the engine accumulates, the same on every rank.
  void follow_batch_size() {
    const bool is_new = shape_.micro_batches != micro_batches();
    pipeline::Schedule next;
    agree("train_batch", [&] {
      if (!is_new) return text_;
      next = make(micro_batches());
      return text_of(next);
    });
    if (!is_new) return;
    text_ = text_of(next);
    shape_ = std::move(next);
  }

  /// Runs `work`, without which the engine does not go on: stages that wait for this one would wait for ever, and
  /// messages of a step that has ended would arrive in the next one.
  template <class Work>
  std::invoke_result_t<const Work&> or_end(const Work& work) {
    try {
      return work();
    } catch (c10::Error& error) {
      end(error.what_without_backtrace());
      error.add_context(kSpent);
      throw;
    } catch (const Error& error) {
      end(error.what());
      throw_error(error.code(), str(error.what(), ". ", kSpent));
    } catch (const std::exception& error) {
      end(error.what());
      throw;
    }
  }

  void end(const std::string& why) {
    const std::string text =
        str(CallerScope::current("pipeline"), failed_in_.empty() ? " failed" : " failed in ", failed_in_, ": ", why);
    engine_.failure_ = text;
    for (Group* const group : {all_.get(), mail_group_.get(), tied_group_.get()}) group->abort(text);
    if (&engine_.group() != &world_) engine_.group().abort(text);
    engine_.pager().defer_reductions(false);
    slots_.clear();
    handed_over_.clear();
    batches_.clear();
  }

  /// All micro-batches of a window, before anything has changed: the end of the data, or what loading them throws, is
  /// told on every rank.
  void load(const MicroBatches& data, int count, const char* call) {
    batches_.clear();
    all_or_throw(*all_, [&] {
      if (!has_part(0) && !has_last_part()) return;
      for (int i = 0; i < count; ++i) {
        std::optional<MicroBatch> batch = data();
        if (!batch)
          throw DataError(str(call, ": the data ended after ", i, " of ", count,
                              " micro-batches; stop before, or begin the data anew"));
        batches_.push_back(*std::move(batch));
      }
    });
  }

  void execute(const pipeline::Schedule& schedule) {
    slots_.assign(schedule.chunks, {});
    for (int chunk = 0; chunk < schedule.chunks; ++chunk) slots_[chunk].resize(schedule.buffers[stage()][chunk]);
    passes_left_.assign(schedule.chunks, schedule.micro_batches);
    loss_.reset();
    handed_over_.clear();
    splits_backward_ = trains_ && splits(schedule);
    expect_letters(schedule);
    for (const pipeline::Step& step : schedule.streams[stage()])
      for (const Instruction& instruction : step) {
        ++counters_.instructions;
        if (instruction.kind == Kind::kStep) {  // all stages as one
          if (trains_) end_window();
          continue;
        }
        const std::string text = subject_of(instruction);
        const SubjectScope subject(text);
        try {
          run(instruction);
        } catch (const CommError&) {
          throw;  // names the instruction already
        } catch (const std::exception& error) {
          failed_in_ = text;
          log(LogLevel::kError, str(CallerScope::current("pipeline"), " failed in ", text, ": ", error.what()));
          throw;
        }
      }
    mail_.flush();
    batches_.clear();
  }

  void expect_letters(const pipeline::Schedule& schedule) {
    std::map<int, std::vector<Mail::Expected>> letters;  // by sender
    for (const pipeline::Step& step : schedule.streams[stage()])
      for (const Instruction& instruction : step) {
        const int part = part_of(instruction.chunk);
        if (instruction.kind == Kind::kReceiveActivation)
          letters[instruction.peer].push_back(
              {{activation_of(part - 1), instruction.micro_batch}, subject_of(instruction)});
        if (instruction.kind == Kind::kReceiveGradient)
          letters[instruction.peer].push_back({{gradient_of(part), instruction.micro_batch}, subject_of(instruction)});
      }
    for (const auto& [from, of_sender] : letters) mail_.expect(from, of_sender);
  }

  /// For errors.
  std::string subject_of(const Instruction& instruction) const {
    return str("stage ", stage(), ", ", name_of(instruction.kind), ", micro-batch ", instruction.micro_batch);
  }

  void run(const Instruction& instruction) {
    switch (instruction.kind) {
      case Kind::kLoadMicroBatch:
        return;  // load() has them all
      case Kind::kReceiveActivation:
        slot(instruction).input = mail_.receive(instruction.peer);
        return;
      case Kind::kSendActivation:
        mail_.send(instruction.peer, {activation_of(part_of(instruction.chunk)), instruction.micro_batch},
                   *std::exchange(slot(instruction).output, std::nullopt));
        return release_if_over(instruction);
      case Kind::kForward:
        return forward(instruction);
      case Kind::kReceiveGradient:
        return take_gradients(instruction, mail_.receive(instruction.peer));
      case Kind::kSendGradient:
        return send_gradients(instruction);
      case Kind::kBackward:
      case Kind::kBackwardInput:
      case Kind::kBackwardWeight:
        return backward(instruction);
      case Kind::kReduceTiedGradients:
      case Kind::kReduceGradients:
      case Kind::kStep:
        return;  // end_window() does that
    }
  }

  /// All ranks that share this stage alike, whatever memory each has.
  void choose_sums() {
    const Pager& pager = engine_.pager();
    const PagerPolicy& policy = pager.policy();
    sums_whole_ = engine_.config().pipeline.whole_gradients.value_or(false);
    const bool can_save = policy.stage >= 2 && engine_.group().size() > 1;
    if (engine_.config().pipeline.whole_gradients || !can_save || policy.deterministic || policy.offload_ratio > 0)
      return;
    const WithoutInterception own_operators;
    const WholeGradients cost = whole_gradients_of(pager, world_.size());
    const at::Tensor is_too_much = at::full({1}, cost.fit() ? 0 : 1, at::kByte);
    engine_.group().all_reduce(is_too_much, ReduceOp::kMax).wait();
    sums_whole_ = is_too_much.item<uint8_t>() == 0;
    if (world_.rank() == 0)
      log(LogLevel::kInfo, str("trireme.pipeline.whole_gradients: \"auto\" is ", sums_whole_ ? "true" : "false",
                               " on stage 0, where whole gradients are ", cost.sum_bytes, " bytes beside ",
                               cost.kept_bytes, " of weights and states, of ", cost.memory_bytes));
  }

  /// A unit that spans parts, or has a parameter that no part names, is of each of them.
  void find_units() {
    units_.assign(model_.parts.size(), {});
    if (model_.parameters.empty() || model_.parts.size() == 1) return;
    const Pager& pager = engine_.pager();
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

  /// The slot of an instruction, taken for its micro-batch where it is free.
  Slot& slot(const Instruction& instruction) {
    Slot& slot = slots_[instruction.chunk].at(instruction.buffer);
    if (slot.micro_batch == instruction.micro_batch) return slot;
    if (slot.micro_batch >= 0)
      throw Error(ErrorCode::kInternal,
                  str("pipeline: buffer ", instruction.buffer, " is still micro-batch ", slot.micro_batch, "'s"));
    slot.micro_batch = instruction.micro_batch;
    const auto& of_chunk = slots_[instruction.chunk];
    const auto used =
        std::count_if(of_chunk.begin(), of_chunk.end(), [](const Slot& it) { return it.micro_batch >= 0; });
    int& peak = counters_.peak_buffers[instruction.chunk];
    peak = std::max(peak, static_cast<int>(used));
    return slot;
  }

  /// Frees the slot after the last instruction of its micro-batch.
  void release_if_over(const Instruction& instruction) {
    Slot& slot = this->slot(instruction);
    const bool has_graph = !slot.output_edges.empty() || slot.split;
    if (slot.output || has_graph || !slot.leaves.empty() || !slot.input_gradients.empty()) return;
    slot = {};
  }

  void forward(const Instruction& instruction) {
    Slot& slot = this->slot(instruction);
    const int part = part_of(instruction.chunk);
    const bool carries_random_state = trains_ && engine_.step_->is_deterministic();
    c10::IValue input;
    ForwardScope scope = engine_.begin_scheduled_forward();
    if (part == 0) {
      if (carries_random_state) engine_.step_->start_micro_batch(instruction.micro_batch);
      FlatValue given = flatten(batches_[instruction.micro_batch].inputs);
      for (at::Tensor& tensor : given.tensors) tensor = scope.input(tensor);
      input = unflatten(given);
    } else {
      if (stays_here(part - 1)) slot.input = take_over(activation_of(part - 1), instruction.micro_batch);
      Letter& letter = *slot.input;
      if (carries_random_state) {
        RandomStreams::current().set_state(RandomStream::kModel, c10::kCPU, letter.value.tensors.back());
        letter.value.tensors.pop_back();
        letter.requires_grad.pop_back();
      }
      for (size_t i = 0; trains_ && i < letter.value.tensors.size(); ++i)
        if (letter.requires_grad[i]) {
          slot.leaves.push_back(letter.value.tensors[i].set_requires_grad(true));
          letter.value.tensors[i] = writable(slot.leaves.back());
        }
      input = unflatten(letter.value);
      slot.input.reset();
    }
    const c10::IValue output = model_.parts[instruction.chunk](std::move(input));
    if (is_last(instruction.chunk)) {
      finish_forward(slot, output, instruction.micro_batch);
      refuse_reentrant(slot);
      return release_if_over(instruction);
    }
    Letter letter{.value = flatten(output)};
    for (at::Tensor& tensor : letter.value.tensors) {
      const bool requires_grad = trains_ && tensor.defined() && tensor.requires_grad();
      letter.requires_grad.push_back(requires_grad);
      if (requires_grad) slot.output_edges.push_back(gradient_edge(tensor));
      if (tensor.defined()) tensor = tensor.detach();  // the graph is kept by its edges
    }
    refuse_reentrant(slot);
    if (carries_random_state) {
      letter.value.tensors.push_back(RandomStreams::current().state(RandomStream::kModel, c10::kCPU));
      letter.requires_grad.push_back(false);
    }
    if (stays_here(part + 1)) {
      handed_over_[{activation_of(part), instruction.micro_batch}] = std::move(letter);
      return release_if_over(instruction);
    }
    slot.output = std::move(letter);
  }

  void refuse_reentrant(const Slot& slot) const {
    if (!splits_backward_ || slot.output_edges.empty()) return;
    const std::string node = reentrant_node(slot.output_edges);
    if (!node.empty())
      throw ConfigError(str("pipeline: schedule '", shape_.name, "' splits backward passes in two, and ", node,
                            " of reentrant checkpointing cannot be split; use use_reentrant=False, as ",
                            "trireme.checkpointing.checkpoint does, or schedule '",
                            shape_.chunks == 1 ? "1f1b" : "interleaved", "'"));
  }

  void finish_forward(Slot& slot, const c10::IValue& output, int micro_batch) {
    if (returns_outputs_) outputs_.push_back(output);
    if (!computes_loss_) return;
    const at::Tensor loss = model_.loss(output, batches_[micro_batch].labels);
    if (!loss.defined() || loss.numel() != 1 || !at::isFloatingType(loss.scalar_type()))
      throw ShapeError(str("pipeline: the loss function returned ",
                           loss.defined() ? str(loss.scalar_type(), " ", loss.sizes()) : "nothing",
                           "; expected one floating element"));
    const WithoutInterception own_operators;
    const at::Tensor value = loss.detach().to(at::kFloat).reshape({});
    loss_ = loss_.defined() ? loss_ + value : value;
    if (!trains_) return;
    const at::Tensor scaled = engine_.scale(loss);
    slot.output_edges = {gradient_edge(scaled)};
    slot.output_gradients = {at::ones_like(scaled)};
  }

  /// Gradients of a part's outputs, those of `letter` that are not missing.
  void take_gradients(const Instruction& instruction, Letter letter) {
    Slot& slot = this->slot(instruction);
    torch::autograd::edge_list edges;
    for (size_t i = 0; i < letter.value.tensors.size(); ++i) {
      if (letter.is_missing[i]) continue;
      edges.push_back(slot.output_edges[i]);
      slot.output_gradients.push_back(letter.value.tensors[i]);
    }
    slot.output_edges = std::move(edges);
  }

  void send_gradients(const Instruction& instruction) {
    Slot& slot = this->slot(instruction);
    mail_.send(instruction.peer, {gradient_of(part_of(instruction.chunk) - 1), instruction.micro_batch},
               gradients_of(slot));
    release_if_over(instruction);
  }

  /// Gradients of the inputs, zeros where there is none.
  static Letter gradients_of(Slot& slot) {
    Letter letter;
    for (size_t i = 0; i < slot.input_gradients.size(); ++i) {
      at::Tensor& gradient = slot.input_gradients[i];
      letter.is_missing.push_back(!gradient.defined());
      letter.requires_grad.push_back(false);
      letter.value.tensors.push_back(gradient.defined() ? gradient : at::zeros_like(slot.leaves[i]).detach());
    }
    slot.input_gradients.clear();
    slot.leaves.clear();
    return letter;
  }

  Letter take_over(int kind, int micro_batch) { return std::move(handed_over_.extract({kind, micro_batch}).mapped()); }

  void backward(const Instruction& instruction) {
    const int chunk = instruction.chunk;
    const int part = part_of(chunk);
    Slot& slot = this->slot(instruction);
    const bool gives_inputs = instruction.kind != Kind::kBackwardWeight;
    if (gives_inputs && stays_here(part + 1))
      take_gradients(instruction, take_over(gradient_of(part), instruction.micro_batch));
    if (instruction.kind == Kind::kBackwardInput) {
      const AutocastScope off(AutocastOptions{}, engine_.pager().device().type());
      slot.split.emplace(std::exchange(slot.output_edges, {}), slot.leaves);
      slot.input_gradients = slot.split->input_gradients(std::exchange(slot.output_gradients, {}));
    } else {
      SplitBackward::Rest roots{std::exchange(slot.output_edges, {}), std::exchange(slot.output_gradients, {})};
      if (slot.split) roots = std::exchange(slot.split, std::nullopt)->rest();
      const bool is_last_pass = --passes_left_[chunk] == 0;
      const bool is_last_of_stage = std::ranges::all_of(passes_left_, [](int passes) { return passes == 0; });
      const bool sums_whole = sums_whole_ && shape_.micro_batches > 1;
      engine_.pager().defer_reductions(sums_whole && !is_last_of_stage);
      if (!sums_whole) engine_.pager().expect_units(units_[chunk]);
      const TiedCopies::Pass pass{.chunk = chunk, .micro_batch = instruction.micro_batch, .is_last = is_last_pass};
      TiedCopies::Roots tied = tied_.receive(pass);
      roots.from.insert(roots.from.end(), tied.edges.begin(), tied.edges.end());
      roots.gradients.insert(roots.gradients.end(), tied.gradients.begin(), tied.gradients.end());
      engine_.step_->backward_from(roots.from, roots.gradients, {.ends_micro_batch = true});
      tied_.send(pass);
      if (instruction.kind == Kind::kBackward)
        for (at::Tensor& leaf : slot.leaves)
          slot.input_gradients.push_back(std::exchange(leaf.mutable_grad(), at::Tensor()));
    }
    if (gives_inputs && stays_here(part - 1)) {
      Letter letter = gradients_of(slot);
      handed_over_[{gradient_of(part - 1), instruction.micro_batch}] = std::move(letter);
    }
    release_if_over(instruction);
  }

  void end_window() {
    // A stage that has failed tells it here, before this one waits for it among the ranks of the step.
    if (world_.size() > 1) all_->barrier();
    engine_.step_->end_window();
    tied_.clear();
    tied_.follow_owners();
  }

  /// Over micro-batches and data-parallel ranks, on every rank.
  at::Tensor mean_loss(int count) {
    const WithoutInterception own_operators;
    const at::NoGradGuard no_grad;
    const int data_ranks = world_.size() / stages_.size();
    at::Tensor mean = at::zeros({}, at::TensorOptions().dtype(at::kFloat));
    if (loss_.defined()) mean = loss_.cpu() / count;
    mean = mean.reshape({1}).contiguous();
    if (world_.size() > 1) all_->all_reduce(mean).wait();
    return (data_ranks > 1 ? mean / data_ranks : mean).reshape({});
  }

  Engine& engine_;
  Group& world_;
  Group& stages_;
  const StageModel model_;
  const PipelineOptions options_;
  std::function<pipeline::Schedule(int, int)> make_;
  pipeline::Schedule shape_;    ///< of the last train_batch()
  std::string text_;            ///< of `shape_`
  std::unique_ptr<Group> all_;  ///< `world_`, with no other user
  std::unique_ptr<Group> mail_group_, tied_group_;
  Mail mail_;
  TiedCopies tied_;
  bool sums_whole_ = false;               ///< the gradients of a step's micro-batches
  std::vector<std::vector<bool>> units_;  ///< by chunk and unit: what its passes reach; empty: all
  PipelineCounters counters_;
  std::string failed_in_;  ///< the instruction that ended the engine

  // Of the window that runs:
  std::vector<MicroBatch> batches_;
  std::vector<std::vector<Slot>> slots_;               ///< by chunk and buffer
  std::vector<int> passes_left_;                       ///< by chunk
  std::map<std::pair<int, int>, Letter> handed_over_;  ///< between parts of this stage, by kind and micro-batch
  bool trains_ = false, computes_loss_ = false, returns_outputs_ = false, splits_backward_ = false;
  at::Tensor loss_;  ///< sum over the micro-batches so far
  std::vector<c10::IValue> outputs_;
};

WholeGradients whole_gradients_of(const Pager& pager, int ranks) {
  constexpr int64_t kMaster = 4, kStates = 8;
  WholeGradients cost{.memory_bytes = total_memory(pager.device()) / (is_host(pager.device()) ? ranks : 1)};
  const bool shards_weights = pager.policy().stage == 3;
  for (const UnitLayout& unit : pager.layout().units) {
    const auto itemsize = static_cast<int64_t>(c10::elementSize(unit.dtype));
    cost.kept_bytes += itemsize * (shards_weights ? unit.shard_numel : unit.numel());
    if (!unit.trainable) continue;
    const bool has_master = unit.dtype != at::kFloat;
    cost.kept_bytes += unit.piece_numel() * (kStates + (has_master ? kMaster : 0));
    const at::ScalarType sum = has_master ? pager.policy().accumulation_dtype : at::kFloat;
    cost.sum_bytes += unit.numel() * static_cast<int64_t>(c10::elementSize(sum));
  }
  return cost;
}

std::set<std::string> names_of_copies(const StageModel& model) { return names_of_copies(model.ties, *model.module); }

StageRunner::StageRunner(Engine& engine, const Grid& grid, StageModel model, const PipelineOptions& options)
    : impl_(std::make_unique<Impl>(engine, grid, std::move(model), options)) {}
StageRunner::~StageRunner() = default;

at::Tensor StageRunner::train_batch(const MicroBatches& data) { return impl_->train_batch(data); }
EvalResult StageRunner::eval_batch(const MicroBatches& data, const EvalOptions& options) {
  return impl_->eval_batch(data, options);
}
void StageRunner::reset_activation_shape() { impl_->reset_activation_shape(); }
void StageRunner::follow_owners() { impl_->follow_owners(); }
void StageRunner::set_schedule(std::function<pipeline::Schedule(int, int)> make) {
  impl_->set_schedule(std::move(make));
}
bool StageRunner::is_first_stage() const { return stage() == 0; }
bool StageRunner::is_last_stage() const { return stage() == stages() - 1; }
int StageRunner::stage() const { return impl_->stage(); }
int StageRunner::stages() const { return impl_->stages(); }
PipelineCounters StageRunner::counters() const { return impl_->counters(); }
bool StageRunner::sums_whole_gradients() const { return impl_->sums_whole_gradients(); }

}  // namespace trireme
