#include "trireme/pipeline/stage_runner.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <exception>
#include <set>
#include <type_traits>
#include <utility>

#include "pipeline/failed_step.h"
#include "pipeline/messages.h"
#include "pipeline/micro_batch_feed.h"
#include "pipeline/rank_agreement.h"
#include "pipeline/schedule_choice.h"
#include "pipeline/sequence_cut.h"
#include "pipeline/stage_work.h"
#include "pipeline/whole_gradients.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/notices.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/comm/device_group.h"
#include "trireme/intercept.h"
#include "trireme/observe/run_status.h"
#include "trireme/schedule/check.h"

namespace trireme {
namespace {

using pipeline::Instruction;
using pipeline::Kind;

constexpr const char* kSpent = "This engine is spent: make a new one with initialize(), and load a checkpoint";

/// All micro-batches forward, for parts in any placement.
pipeline::Schedule forwards_only(const pipeline::Schedule& shape, int micro_batches) {
  if (shape.chunks == 1) return pipeline::inference(shape.stages, micro_batches);
  std::vector<std::vector<pipeline::Computation>> computations(shape.stages);
  for (std::vector<pipeline::Computation>& of_stage : computations)
    for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch)
      for (int chunk = 0; chunk < shape.chunks; ++chunk) of_stage.push_back({Kind::kForward, chunk, micro_batch});
  return pipeline::assemble("inference", shape.stages, micro_batches, shape.chunks, shape.order, computations);
}

ScheduleChoice::Make configured(const PipelineOptions& options) {
  return [name = options.schedule, chunks = options.chunks](int stages, int micro_batches) {
    return pipeline::make_schedule(name, stages, micro_batches, chunks);
  };
}

pipeline::TiedParts tied_parts(const StageModel& model, bool each_micro_batch) {
  pipeline::TiedParts ties{.parts = {}, .each_micro_batch = each_micro_batch};
  for (const Tie& tie : model.ties) ties.parts.push_back(tie.parts);
  return ties;
}

}  // namespace

class StageRunner::Impl {
 public:
  Impl(Training& training, const Grid& grid, StageModel model, const PipelineOptions& options)
      : training_(training),
        world_(grid.world()),
        stages_(grid.along({"pipe"})),
        model_(std::move(model)),
        schedule_(configured(options), stages_.size(), micro_batches(),
                  tied_parts(model_, training.step().is_deterministic()), training.step().optimizer() != nullptr),
        all_(world_.clone(world_.name() + "/pipeline")),
        message_group_(stages_.clone(stages_.name() + "/messages")),
        tied_group_(stages_.clone(stages_.name() + "/tied")),
        messages_(served(*message_group_, message_devices_), training.pager().device(), options.dynamic_shapes),
        feed_(*all_, has_part(0) || has_last_part()),
        cut_(training.passes().find<SequenceParallel>(), training.groups().along("sequence"), stages_, *all_,
             {.inputs = has_part(0), .labels = has_last_part()}),
        sums_whole_(trireme::sums_whole_gradients(training, world_)),
        work_(training, checked(model_), {feed_, cut_}, served(*tied_group_, tied_devices_), schedule_.current(),
              sums_whole_) {}

  at::Tensor train_batch(const MicroBatches& data) {
    training_.condition().require_intact("train_batch");
    const CallerScope caller("train_batch", &training_.pager());
    schedule_.follow(*all_, micro_batches());
    const pipeline::Schedule& schedule = schedule_.current();
    feed_.load(data, schedule.micro_batches, "train_batch");
    cut_.agree(feed_, schedule.micro_batches);
    return or_end([&] {
      execute(schedule, {.trains = true, .computes_loss = true});
      const at::Tensor loss = mean_loss(schedule.micro_batches);
      training_.counts().note_loss(loss);
      return loss;
    });
  }

  EvalResult eval_batch(const MicroBatches& data, const EvalOptions& options) {
    training_.condition().require_intact("eval_batch");
    const CallerScope caller("eval_batch");
    const at::NoGradGuard no_grad;
    const auto count = static_cast<int>(options.micro_batches.value_or(micro_batches()));
    agree(*all_, "eval_batch", [&] {
      if (count < 1) throw ConfigError(str("eval_batch: ", count, " micro-batches; use 1 or more"));
      return str(count, " micro-batches, computes_loss ", options.computes_loss);
    });
    const pipeline::Schedule schedule = forwards_only(schedule_.current(), count);
    pipeline::check(schedule);
    feed_.load(data, count, "eval_batch");
    cut_.agree(feed_, count);
    return or_end([&] {
      execute(schedule, {.computes_loss = options.computes_loss, .returns_outputs = options.returns_outputs});
      EvalResult result;
      result.outputs = work_.take_outputs();
      if (options.computes_loss) result.loss = mean_loss(count);
      return result;
    });
  }

  void reset_activation_shape() {
    training_.condition().require_alive("reset_activation_shape");
    messages_.forget_shapes();
  }
  void follow_owners() {
    training_.condition().require_alive("follow_owners");
    work_.follow_owners();
  }
  void set_schedule(ScheduleChoice::Make make) {
    training_.condition().require_alive("set_schedule");
    schedule_.set(*all_, std::move(make));
  }

  int stage() const { return stages_.rank(); }
  int stages() const { return stages_.size(); }
  PipelineCounters counters() const { return {.instructions = instructions_, .peak_buffers = work_.peak_buffers()}; }
  bool sums_whole_gradients() const { return sums_whole_; }

 private:
  int micro_batches() const { return static_cast<int>(training_.step().accumulation_steps()); }
  int part_of(int chunk) const { return schedule_.current().part_of(stage(), chunk); }
  bool has_part(int part) const { return schedule_.current().stage_of(part) == stage(); }
  bool has_last_part() const { return has_part(schedule_.current().parts() - 1); }

  /// A group for the tensors that stages send each other. Collective.
  Group& served(Group& group, std::unique_ptr<Group>& made) const {
    return group_for(group, training_.pager().device(), made);
  }

  const StageModel& checked(const StageModel& model) const {
    const pipeline::Schedule& schedule = schedule_.current();
    if (static_cast<int>(model.parts.size()) != schedule.chunks)
      throw ConfigError(str("pipeline: schedule '", schedule.name, "' has ", schedule.chunks,
                            " parts on each stage, and stage ", stage(), " was given ", model.parts.size()));
    if (has_last_part() && !model.loss)
      throw ConfigError("pipeline: the last stage has no loss function; give it loss_fn");
    return model;
  }

  template <class Work>
  std::invoke_result_t<const Work&> or_end(const Work& work) {
    return run_or_end(work, kSpent, [this](const std::string& why) { end(why); });
  }

  void end(const std::string& why) {
    const std::string text =
        str(CallerScope::current("pipeline"), failed_in_.empty() ? " failed" : " failed in ", failed_in_, ": ", why);
    for (Group* const group :
         {all_.get(), message_devices_.get(), tied_devices_.get(), message_group_.get(), tied_group_.get()})
      if (group != nullptr) group->abort(text);
    end_training(training_, world_, text);
    work_.clear();
    feed_.clear();
  }

  void execute(const pipeline::Schedule& schedule, WorkMode mode) {
    is_training_ = mode.trains;
    work_.begin(schedule, mode);
    expect_messages(schedule);
    for (const pipeline::Step& step : schedule.streams[stage()])
      for (const Instruction& instruction : step) {
        ++instructions_;
        if (instruction.kind == Kind::kStep) {  // all stages as one
          if (is_training_) end_window();
          continue;
        }
        const std::string text = subject_of(instruction);
        const SubjectScope subject(text);
        const NoticeScope notice(Notice::Kind::kStage, text);
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
    messages_.flush();
    feed_.clear();
  }

  void expect_messages(const pipeline::Schedule& schedule) {
    std::map<int, std::vector<Messages::Expected>> messages;  // by sender
    for (const pipeline::Step& step : schedule.streams[stage()])
      for (const Instruction& instruction : step) {
        const int part = part_of(instruction.chunk);
        if (instruction.kind == Kind::kReceiveActivation)
          messages[instruction.peer].push_back({activation_key(part - 1, instruction), subject_of(instruction)});
        if (instruction.kind == Kind::kReceiveGradient)
          messages[instruction.peer].push_back({gradient_key(part, instruction), subject_of(instruction)});
      }
    for (const auto& [from, of_sender] : messages) messages_.expect(from, of_sender);
  }

  Messages::Key activation_key(int part, const Instruction& instruction) const {
    return {Messages::activation_of(part, is_training_), instruction.micro_batch};
  }
  static Messages::Key gradient_key(int part, const Instruction& instruction) {
    return {Messages::gradient_of(part), instruction.micro_batch};
  }

  /// For errors.
  std::string subject_of(const Instruction& instruction) const {
    return str("stage ", stage(), ", ", name_of(instruction.kind), ", micro-batch ", instruction.micro_batch);
  }

  void run(const Instruction& instruction) {
    switch (instruction.kind) {
      case Kind::kLoadMicroBatch:
        return;  // the feed has them all
      case Kind::kReceiveActivation:
        return work_.put_input(instruction, messages_.receive(instruction.peer));
      case Kind::kSendActivation:
        return messages_.send(instruction.peer, activation_key(part_of(instruction.chunk), instruction),
                              work_.take_output(instruction));
      case Kind::kForward:
        return work_.forward(instruction);
      case Kind::kReceiveGradient:
        return work_.put_output_gradients(instruction, messages_.receive(instruction.peer));
      case Kind::kSendGradient:
        return messages_.send(instruction.peer, gradient_key(part_of(instruction.chunk) - 1, instruction),
                              work_.take_input_gradients(instruction));
      case Kind::kBackward:
      case Kind::kBackwardInput:
      case Kind::kBackwardWeight:
        return work_.backward(instruction);
      case Kind::kReduceTiedGradients:
      case Kind::kReduceGradients:
      case Kind::kStep:
        return;  // end_window() does that
    }
  }

  void end_window() {
    // A stage that has failed tells it here, before this one waits for it among the ranks of the step.
    if (world_.size() > 1) all_->barrier();
    training_.step().end_window();
    work_.end_window();
  }

  /// Over micro-batches and data-parallel ranks, on every rank, on its device, for which the host does not wait.
  at::Tensor mean_loss(int count) {
    const WithoutInterception own_operators;
    const at::NoGradGuard no_grad;
    const c10::Device device = training_.pager().device();
    const int data_ranks = world_.size() / stages_.size();
    at::Tensor mean = at::zeros({}, at::TensorOptions().dtype(at::kFloat).device(device));
    if (work_.loss().defined()) mean = work_.loss() / count;
    mean = mean.reshape({1}).contiguous();
    if (world_.size() > 1) (all_->serves(device) ? *all_ : training_.groups().model).all_reduce(mean).wait();
    return (data_ranks > 1 ? mean / data_ranks : mean).reshape({});
  }

  Training& training_;
  Group& world_;
  Group& stages_;
  const StageModel model_;
  ScheduleChoice schedule_;
  std::unique_ptr<Group> all_;  ///< `world_`, with no other user
  std::unique_ptr<Group> message_group_, tied_group_;
  std::unique_ptr<Group> message_devices_, tied_devices_;  ///< over the ranks of those, where they serve the host alone
  Messages messages_;
  MicroBatchFeed feed_;
  SequenceCut cut_;
  const bool sums_whole_;  ///< the gradients of a step's micro-batches
  StageWork work_;
  int64_t instructions_ = 0;
  bool is_training_ = false;  ///< not evaluating
  std::string failed_in_;     ///< the instruction that ended the engine
};

std::set<std::string> names_of_copies(const StageModel& model) {
  if (!model.module)
    throw ConfigError("StageModel: `module` is null; give one, without parameters where the stage's parts have none");
  return names_of_copies(model.ties, *model.module);
}

StageRunner::StageRunner(Training& training, const Grid& grid, StageModel model, const PipelineOptions& options)
    : impl_(std::make_unique<Impl>(training, grid, std::move(model), options)) {}
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
