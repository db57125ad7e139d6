#include "trireme/pipeline/step_runner.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "pipeline/failed_step.h"
#include "pipeline/step_turns.h"
#include "pipeline/whole_gradients.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

constexpr const char* kInterleaved = "interleaved";
constexpr const char* kSimple = "simple";
constexpr const char* kSequential = "sequential";
constexpr const char* kStepSpent = "This engine is spent: make a new one, and load a checkpoint";

/// Pieces of several micro-batches' backward passes come in turns, too: sums of gradients must have the bits of one
/// process all the same, and ranks whose programs have other control flow must not gather parameters in other orders.
constexpr const char* kNoTurns =
    "micro-batches cannot take turns with \"deterministic\", offloaded optimizers, ZeRO stage 2 or 3 without "
    "trireme.pipeline.whole_gradients, layers that ranks share, or parameters that are gathered by copies";
bool may_take_turns(Training& training, bool sums_whole) {
  const PagerPolicy& policy = training.pager().policy();
  const bool gathers = policy.stage == 3 && policy.gather == GatherPolicy::kCopy && training.groups().sums.size() > 1;
  if (training.groups().slices != nullptr && training.groups().slices->size() > 1) return false;
  return !policy.deterministic && policy.offload_ratio == 0 && (policy.stage < 2 || sums_whole) && !gathers;
}

/// The ranks that have one copy of the model together.
Group& copy_of_model(const Grid& grid) {
  if (!grid.topology().has("tensor")) return grid.along({"pipe"});
  return grid.along({"pipe", "tensor"});
}

/// Ends a step's turns; a thread that was left keeps them.
struct EndTurns {
  void operator()(StepTurns* turns) const {
    turns->give_up();
    if (!turns->has_left()) delete turns;
  }
};

/// A pass of this stage over one micro-batch.
struct StagePass {
  bool is_forward;
  int micro_batch;
};

/// The passes of a stage, at most `open` micro-batches at once.
std::vector<StagePass> passes_of(int micro_batches, int open) {
  std::vector<StagePass> passes;
  for (int forward = 0, backward = 0; backward < micro_batches;) {
    if (forward < micro_batches && forward - backward < open)
      passes.push_back({true, forward++});
    else
      passes.push_back({false, backward++});
  }
  return passes;
}

}  // namespace

class StepRunner::Impl {
 public:
  Impl(const Grid& grid, Ownership& ownership, const StepRunnerOptions& options)
      : world_(grid.world()),
        ownership_(ownership),
        options_(checked(options)),
        stages_(grid.along({"pipe"}).clone(grid.along({"pipe"}).name() + "/step")),
        copy_(copy_of_model(grid).clone(copy_of_model(grid).name() + "/seed")),
        all_(world_.clone(world_.name() + "/step")) {}

  void join(Training& training, std::function<void()> check) {
    if (!members_.empty()) {
      require_may_join(training);
      require_may_join(*members_.front().training);
    }
    const bool sums_whole = trireme::sums_whole_gradients(training, world_);
    members_.push_back({.training = &training,
                        .check = std::move(check),
                        .sums_whole = sums_whole,
                        .may_take_turns = trireme::may_take_turns(training, sums_whole)});
  }

  void leave(const Training& training) noexcept {
    std::erase_if(members_, [&](const Member& member) { return member.training == &training; });
  }

  Outputs run(int micro_batches, const Program& program, const std::string& name) {
    for (const Member& member : members_) {
      member.training->condition().require_intact("step");
      member.check();
    }
    const CallerScope caller("step");
    const uint64_t seed = agreed_seed(micro_batches);
    failed_in_.clear();
    return or_end([&] { return execute(micro_batches, program, name, seed); });
  }

  void backward(const at::Tensor& root, const at::Tensor& gradient) {
    ownership_.backward(root, gradient, [this](const at::Tensor& loss) {
      // Where several take part, none has a scale or a pass that the others do not have.
      const Training& first = *members_.front().training;
      if (loss.numel() == 1) first.passes().check_loss(loss);
      return first.step().scale(loss);
    });
  }

  void end_window(const Training& training) {
    training.condition().require_intact("step");
    const auto member = std::ranges::find_if(members_, [&](const Member& one) { return one.training == &training; });
    const CallerScope caller("optimizer.step", &training.pager());
    require_equal_windows(member->passes);
    or_end([&] { training.step().end_window(); });
    member->passes = 0;
  }

  const std::string& pipeline() const { return last_; }
  bool has_left() const {
    return std::ranges::any_of(threads_, [](const auto& thread) { return thread->is_left(); });
  }

 private:
  /// A Training whose gradients steps add up.
  struct Member {
    Training* training;
    std::function<void()> check;  ///< before each step
    bool sums_whole;              ///< the gradients of a step's micro-batches
    bool may_take_turns;          ///< gradients have the same bits in the order of turns
    int64_t passes = 0;           ///< backward passes since end_window()
  };

  /// A pass of several goes through the autograd engine once, and each ends its part of it.
  static void require_may_join(const Training& training) {
    const PagerPolicy& policy = training.pager().policy();
    const auto refuse = [](const char* what) {
      throw ConfigError(str("several models in one step function: ", what,
                            " is not there yet with them; put the modules into one model, or leave it out"));
    };
    if (training.config().precision.needs_loss_scale()) refuse("a loss scale (fp16)");
    if (policy.stage > 1) refuse("ZeRO stage 2 or 3");
    if (policy.offload_ratio > 0) refuse("an offloaded optimizer");
    if (policy.deterministic) refuse("\"deterministic\"");
    if (training.groups().slices != nullptr && training.groups().slices->size() > 1) refuse("layers that ranks share");
  }

  bool may_take_turns() const { return std::ranges::all_of(members_, &Member::may_take_turns); }
  c10::Device device() const { return members_.front().training->pager().device(); }

  /// Throws on all ranks, or on none. A rank that has failed tells it here, before others wait for it in the step.
  void require_equal_windows(int64_t passes) {
    const auto difference = or_end([&] { return first_difference(*all_, {passes}); });
    if (difference)
      throw StateError(str("optimizer.step: since the last one ", *difference->of_rank_0,
                           " micro-batches had a backward pass on rank 0 and ", *difference->of_rank, " on rank ",
                           difference->rank,
                           ", so that gradients would have other weights; run as many on every rank"));
    if (passes == 0)
      throw StateError("optimizer.step: no step since the last one called backward(); there are no gradients");
  }

  using Open = std::vector<std::shared_ptr<Ownership::MicroBatch>>;

  static StepRunnerOptions checked(const StepRunnerOptions& options) {
    const std::array known{kInterleaved, kSimple, kSequential};
    if (std::ranges::count(known, std::string_view(options.pipeline)) == 0)
      throw ConfigError(
          str("pipeline \"", options.pipeline, "\" is not one of \"interleaved\", \"simple\", ", "\"sequential\""));
    if (options.active_micro_batches < 0)
      throw ConfigError(str("active_microbatches ", options.active_micro_batches, ": use 1 or more, or 0 for the ",
                            "stages and two more"));
    return options;
  }

  /// The seed of random numbers that the first rank of this copy of the model has, and whether all stages have as many
  /// micro-batches.
  uint64_t agreed_seed(int micro_batches) {
    const WithoutInterception own_operators;
    if (micro_batches < 1) throw ConfigError(str("step: ", micro_batches, " micro-batches; use 1 or more"));
    if (stages_->size() > 1) {
      const auto difference = first_difference(*stages_, {micro_batches, at::GradMode::is_enabled()});
      if (difference)
        throw ConfigError(difference->index == 0
                              ? str("step: ", *difference->of_rank_0, " micro-batches on stage 0 and ",
                                    *difference->of_rank, " on stage ", difference->rank)
                              : str("step: gradients are on on stage ",
                                    *difference->of_rank_0 != 0 ? 0 : difference->rank, " and off on stage ",
                                    *difference->of_rank_0 != 0 ? difference->rank : 0));
    }
    at::Tensor seed = at::empty({1}, at::kLong);
    *seed.mutable_data_ptr<int64_t>() = static_cast<int64_t>(generator_seed());
    if (copy_->size() > 1) copy_->broadcast(seed, 0).wait();
    return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  }

  /// Whether it is so on one of the stages.
  bool any_stage(bool is_so) {
    if (stages_->size() == 1) return is_so;
    const WithoutInterception own_operators;
    const at::Tensor any = at::empty({1}, at::kLong);
    *any.mutable_data_ptr<int64_t>() = is_so ? 1 : 0;
    stages_->all_reduce(any, ReduceOp::kMax).wait();
    return *any.const_data_ptr<int64_t>() != 0;
  }

  /// The program of steps of one name, as they have shown it, on every stage alike. One that once came back to a stage
  /// may do so again.
  struct Known {
    bool comes_back = false;      ///< a stage needs what a later one has computed
    bool writes_twice = false;    ///< what runs again in the backward pass writes what outlives the micro-batch
    bool carries_state = false;   ///< turns of other micro-batches may write what one uses
    bool writes_lasting = false;  ///< a micro-batch writes what is older than itself
    bool reads_values = false;    ///< turns depend on values, or have differed
    std::vector<int> turns = {};  ///< stages, of the last micro-batch's forward pass
    std::vector<double> costs = {};
    bool is_told = false;  ///< by rank 0

    bool is_line() const { return !comes_back && std::ranges::is_sorted(turns, std::ranges::less_equal()); }
  };

  /// An order that is right for any program, until one has been seen with gradients.
  ForwardOrder order_of(const Known* known) const {
    if (known == nullptr || stages_->size() == 1 || options_.pipeline == kSequential || known->writes_twice)
      return ForwardOrder::kOneByOne;
    const bool may_take_turns = !known->carries_state && this->may_take_turns();
    // A program that reads values may come back to a stage by them.
    if (known->is_line() && !(known->reads_values && may_take_turns)) return ForwardOrder::kAhead;
    return may_take_turns ? ForwardOrder::kTurns : ForwardOrder::kOneByOne;
  }

  /// At most how many micro-batches are open at once on a stage.
  int active(int micro_batches) const {
    if (options_.pipeline == kSimple) return micro_batches;
    return std::min(options_.active_micro_batches > 0 ? options_.active_micro_batches : stages_->size() + 2,
                    micro_batches);
  }

  Outputs execute(int micro_batches, const Program& program, const std::string& name, uint64_t seed) {
    const bool has_gradients = at::GradMode::is_enabled();
    const auto found = known_.find(name);
    order_ = order_of(has_gradients && found != known_.end() ? &found->second : nullptr);
    is_known_ = found != known_.end();
    last_ = order_ == ForwardOrder::kOneByOne ? kSequential : options_.pipeline;
    Open open(micro_batches);
    const auto run_forward = [&](int micro_batch) {
      open[micro_batch] = named("forward", micro_batch, [&] { return forward(micro_batch, program, seed); });
    };
    const auto run_piece = [&](int micro_batch, int piece) {
      named("backward", micro_batch,
            [&] { backward_piece(*open[micro_batch], piece, micro_batch == micro_batches - 1); });
    };
    const MicroBatchWork work{
        .forward = run_forward,
        .pieces = [&](int micro_batch) { return pieces_of(*open[micro_batch]); },
        .backward = run_piece,
    };
    std::optional<pipeline::Schedule> schedule;
    std::unique_ptr<StepTurns, EndTurns> turns;
    if (order_ == ForwardOrder::kTurns) {
      schedule = pipeline::visits_schedule(found->second.turns, {.micro_batches = micro_batches,
                                                                 .active = active(micro_batches),
                                                                 .forwards_first = options_.pipeline == kSimple,
                                                                 .times = found->second.costs});
      turns.reset(new StepTurns(ownership_, *schedule, device(), work, threads_, found->second.writes_lasting));
      turns->run();
    } else {
      const int ahead = order_ == ForwardOrder::kAhead
                            ? std::min(options_.pipeline == kSimple ? micro_batches : stages_->size() - stages_->rank(),
                                       active(micro_batches))
                            : 1;
      for (const StagePass& pass : passes_of(micro_batches, has_gradients ? ahead : micro_batches)) {
        if (pass.is_forward)
          work.forward(pass.micro_batch);
        else
          for (int piece = work.pieces(pass.micro_batch) - 1; piece >= 0; --piece)
            work.backward(pass.micro_batch, piece);
      }
    }
    Outputs outputs = finish(open);
    if (has_gradients) learn(name, open);
    return outputs;
  }

  /// Runs `work`; what it throws is of this pass of the micro-batch.
  template <class Work>
  std::invoke_result_t<const Work&> named(const char* pass, int micro_batch, const Work& work) {
    const std::string text = str("stage ", stages_->rank(), ", ", pass, ", micro-batch ", micro_batch);
    const SubjectScope subject(text);
    try {
      return work();
    } catch (const CommError&) {
      throw;
    } catch (const std::exception&) {
      if (failed_in_.empty()) failed_in_ = text;
      throw;
    }
  }

  std::shared_ptr<Ownership::MicroBatch> forward(int micro_batch, const Program& program, uint64_t seed) {
    auto now = ownership_.begin(first_ + micro_batch, seed, order_, /*measures=*/!is_known_);
    inside_forwards(0, [&] {
      const Ownership::Scope operators(ownership_, *now);
      ownership_.end_forward(program(micro_batch));
    });
    return now;
  }

  /// Runs `work` in a forward of all, from number `first` on.
  template <class Work>
  void inside_forwards(size_t first, const Work& work) {
    if (first == members_.size()) return work();
    const ForwardScope scope = members_[first].training->begin_forward();
    inside_forwards(first + 1, work);
  }

  void learn(const std::string& name, const Open& open) {
    Known& known = known_[name];
    const ForwardFacts last = ownership_.facts(*open.back());
    if (known.turns.empty()) known.turns = last.turns;
    for (const auto& micro_batch : open) {
      const ForwardFacts facts = ownership_.facts(*micro_batch);
      known.writes_lasting = known.writes_lasting || facts.writes_lasting;
      known.reads_values = known.reads_values || facts.reads_values || facts.turns != known.turns;
      known.comes_back = known.comes_back || facts.comes_back;
      known.writes_twice = known.writes_twice || facts.writes_twice;
      known.carries_state = known.carries_state || facts.carries_state;
    }
    // Stages may see other parts of a program's own state; where passes take turns a change is an error.
    if (order_ != ForwardOrder::kTurns) known.carries_state = any_stage(known.carries_state);
    // Forward passes whose turns differ would write in another order than one process.
    known.carries_state = known.carries_state || (known.writes_lasting && known.reads_values);
    known.turns = last.turns;
    if (!is_known_) known.costs = last.costs;
    if (known.costs.size() != known.turns.size()) known.costs.clear();
    tell(known);
  }

  /// In what order, and why, where it is another one than the program asked for.
  void tell(Known& known) {
    const ForwardOrder order = order_of(&known);
    if (stages_->size() == 1 || options_.pipeline == kSequential || order == ForwardOrder::kAhead || world_.rank() != 0)
      return;
    if (std::exchange(known.is_told, true)) return;
    std::string path;
    for (const int stage : known.turns) path += str(path.empty() ? "" : ", ", stage);
    const std::string instead =
        str("micro-batches run one after the other (pipeline \"sequential\") in place of \"", options_.pipeline, "\"");
    if (known.writes_twice)
      log(LogLevel::kInfo, str("smp: a function that torch.utils.checkpoint runs writes tensors that outlive the step, "
                               "as batch norm its statistics, and does so again in the backward pass, so ",
                               instead));
    else if (order == ForwardOrder::kTurns)
      log(LogLevel::kInfo, str("smp: a stage needs what a later one has computed, or may need it by values (turns of "
                               "stages: ",
                               path,
                               "), so micro-batches take turns on a stage, each forward pass in a "
                               "thread of its own"));
    else if (known.carries_state)
      log(LogLevel::kInfo, str("smp: a stage needs what a later one has computed (turns of stages: ", path,
                               "), and uses tensors that other micro-batches write, or changes attributes or "
                               "generators that they use, so ",
                               instead));
    else
      log(LogLevel::kInfo, str("smp: a stage needs what a later one has computed (turns of stages: ", path, "), and ",
                               kNoTurns, ", so ", instead));
  }

  int pieces_of(const Ownership::MicroBatch& micro_batch) {
    if (!ownership_.has_root(micro_batch)) return 0;
    for (Member& member : members_) ++member.passes;
    return ownership_.pieces(micro_batch);
  }

  void backward_piece(Ownership::MicroBatch& micro_batch, int piece, bool is_of_last) {
    const Ownership::Roots roots = ownership_.receive_gradients(micro_batch, piece);
    for (const Member& member : members_) member.training->pager().defer_reductions(member.sums_whole && !is_of_last);
    const bool is_end = piece == 0;
    if (is_end || !roots.edges.empty())
      members_.front().training->step().backward_from(roots.edges, roots.gradients,
                                                      {.ends_micro_batch = is_end, .goes_on = !is_end});
    // The pass has reached the others' parameters, too, and is one of theirs.
    if (is_end)
      for (size_t other = 1; other < members_.size(); ++other)
        members_[other].training->step().backward_from({}, {}, {.ends_micro_batch = true});
    ownership_.send_gradients(micro_batch, piece);
  }

  Outputs finish(const Open& open) {
    first_ += static_cast<int64_t>(open.size());
    Outputs outputs;
    for (const auto& micro_batch : open) outputs.push_back(ownership_.outputs(*micro_batch));
    ownership_.finish();
    return outputs;
  }

  template <class Work>
  std::invoke_result_t<const Work&> or_end(const Work& work) {
    return run_or_end(work, kStepSpent, [this](const std::string& why) { end(why); });
  }

  void end(const std::string& why) {
    const std::string text =
        str(CallerScope::current("step"), failed_in_.empty() ? " failed" : " failed in ", failed_in_, ": ", why);
    ownership_.abort(text);
    for (Group* const group : {stages_.get(), copy_.get(), all_.get()}) group->abort(text);
    for (const Member& member : members_) end_training(*member.training, world_, text);
  }

  Group& world_;
  Ownership& ownership_;
  const StepRunnerOptions options_;
  const std::unique_ptr<Group> stages_, copy_, all_;  ///< without other users
  std::vector<Member> members_;                       ///< the same on every rank, in the order of join()
  std::map<std::string, Known> known_;                ///< by the name of a program
  StepTurns::Threads threads_;
  ForwardOrder order_ = ForwardOrder::kOneByOne;  ///< of the step
  bool is_known_ = false;                         ///< the program of the step
  int64_t first_ = 0;                             ///< micro-batch of the step, of all
  std::string last_ = kSequential;
  std::string failed_in_;
};

StepRunner::StepRunner(const Grid& grid, Ownership& ownership, const StepRunnerOptions& options)
    : impl_(std::make_unique<Impl>(grid, ownership, options)) {}
StepRunner::~StepRunner() = default;

void StepRunner::join(Training& training, std::function<void()> check) { impl_->join(training, std::move(check)); }
void StepRunner::leave(const Training& training) noexcept { impl_->leave(training); }

StepRunner::Outputs StepRunner::run(int micro_batches, const Program& program, const std::string& name) {
  return impl_->run(micro_batches, program, name);
}
bool StepRunner::is_given_up() noexcept {
  const MicroBatchThread* const thread = MicroBatchThread::current();
  return thread != nullptr && thread->is_given_up();
}
void StepRunner::stay_if_left() {
  if (MicroBatchThread* const thread = MicroBatchThread::current()) thread->stay_if_left();
}
bool StepRunner::has_left() const { return impl_->has_left(); }
void StepRunner::backward(const at::Tensor& root, const at::Tensor& gradient) { impl_->backward(root, gradient); }
void StepRunner::end_window(const Training& training) { impl_->end_window(training); }
const std::string& StepRunner::pipeline() const { return impl_->pipeline(); }

}  // namespace trireme
