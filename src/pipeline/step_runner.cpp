#include "trireme/pipeline/step_runner.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <exception>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>

#include "pipeline/failed_step.h"
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
  Impl(Training& training, const Grid& grid, Ownership& ownership, const StepRunnerOptions& options)
      : training_(training),
        world_(grid.world()),
        ownership_(ownership),
        options_(checked(options)),
        stages_(grid.along({"pipe"}).clone(grid.along({"pipe"}).name() + "/step")),
        all_(world_.clone(world_.name() + "/step")),
        sums_whole_(trireme::sums_whole_gradients(training, world_)) {}

  Outputs run(int micro_batches, const Program& program) {
    training_.condition().require_intact("step");
    const CallerScope caller("step");
    const uint64_t seed = agreed_seed(micro_batches);
    return or_end([&] { return execute(micro_batches, program, seed); });
  }

  void backward(const at::Tensor& root, const at::Tensor& gradient) {
    ownership_.backward(root, gradient, [this](const at::Tensor& loss) {
      if (loss.numel() == 1) training_.passes().check_loss(loss);
      return training_.step().scale(loss);
    });
  }

  void end_window() {
    training_.condition().require_intact("step");
    const CallerScope caller("optimizer.step");
    require_equal_windows();
    or_end([&] { training_.step().end_window(); });
    passes_ = 0;
  }

  const std::string& pipeline() const { return last_; }

 private:
  /// Throws on all ranks, or on none. A rank that has failed tells it here, before others wait for it in the step.
  void require_equal_windows() {
    const auto difference = or_end([&] { return first_difference(*all_, {passes_}); });
    if (difference)
      throw StateError(str("optimizer.step: since the last one ", *difference->of_rank_0,
                           " micro-batches had a backward pass on rank 0 and ", *difference->of_rank, " on rank ",
                           difference->rank,
                           ", so that gradients would have other weights; run as many on every rank"));
    if (passes_ == 0)
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

  /// Stage 0's seed of random numbers, and whether all stages have as many micro-batches.
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
    if (stages_->size() > 1) stages_->broadcast(seed, 0).wait();
    return static_cast<uint64_t>(*seed.const_data_ptr<int64_t>());
  }

  /// How many micro-batches are open at once. Before the visits of a program are known, and where it comes back to a
  /// stage, one: an order that is safe for any program. On one stage more are of no use.
  int open_at_once(int micro_batches) const {
    if (!runs_ahead_ || stages_->size() == 1) return 1;
    if (options_.pipeline == kSimple) return micro_batches;
    const int active = options_.active_micro_batches > 0 ? options_.active_micro_batches : stages_->size() + 2;
    return std::min({stages_->size() - stages_->rank(), active, micro_batches});
  }

  Outputs execute(int micro_batches, const Program& program, uint64_t seed) {
    const bool has_gradients = at::GradMode::is_enabled();
    runs_ahead_ = has_gradients && has_trained_ && !writes_twice_ && options_.pipeline != kSequential &&
                  is_monotone_.value_or(false);
    has_trained_ = has_trained_ || has_gradients;
    last_ = runs_ahead_ ? options_.pipeline : kSequential;
    const int open_at_most = has_gradients ? open_at_once(micro_batches) : micro_batches;
    Open open(micro_batches);
    for (const StagePass& pass : passes_of(micro_batches, open_at_most)) {
      const std::string text = str("stage ", stages_->rank(), ", ", pass.is_forward ? "forward" : "backward",
                                   ", micro-batch ", pass.micro_batch);
      const SubjectScope subject(text);
      try {
        if (pass.is_forward)
          open[pass.micro_batch] = forward(pass.micro_batch, program, seed);
        else
          backward_pass(*open[pass.micro_batch], pass.micro_batch == micro_batches - 1);
      } catch (const CommError&) {
        throw;
      } catch (const std::exception& error) {
        failed_in_ = text;
        throw;
      }
    }
    return finish(open);
  }

  std::shared_ptr<Ownership::MicroBatch> forward(int micro_batch, const Program& program, uint64_t seed) {
    auto now = ownership_.begin(begun_++, seed, runs_ahead_);
    ForwardScope scope = training_.begin_forward();
    const Ownership::Scope operators(ownership_, *now);
    ownership_.end_forward(program(micro_batch));
    follow_visits(*now);
    follow_writes(*now);
    return now;
  }

  /// A region that writes what outlives the micro-batch runs again before the next one's forward pass, as in one
  /// process.
  void follow_writes(const Ownership::MicroBatch& micro_batch) {
    if (writes_twice_ || !ownership_.writes_twice(micro_batch)) return;
    writes_twice_ = true;
    if (options_.pipeline == kSequential || world_.rank() != 0) return;
    log(LogLevel::kInfo,
        str("smp: a function that torch.utils.checkpoint runs writes tensors that outlive the step, as "
            "batch norm its statistics, and does so again in the backward pass, so micro-batches run "
            "one after the other (pipeline \"sequential\") in place of \"",
            options_.pipeline, "\""));
  }

  /// A program that once came back to a stage may do so again.
  void follow_visits(const Ownership::MicroBatch& micro_batch) {
    const bool was_monotone = is_monotone_.value_or(true);
    is_monotone_ = was_monotone && !ownership_.comes_back(micro_batch);
    if (!was_monotone || *is_monotone_ || options_.pipeline == kSequential || world_.rank() != 0) return;
    std::string path;
    for (const int stage : ownership_.visits(micro_batch)) path += str(path.empty() ? "" : ", ", stage);
    log(LogLevel::kInfo, str("smp: a stage needs what a later one has computed (operators are on stages ", path,
                             "), so micro-batches run one after the other (pipeline \"sequential\") in place of \"",
                             options_.pipeline, "\""));
  }

  void backward_pass(Ownership::MicroBatch& micro_batch, bool is_last) {
    if (!ownership_.has_root(micro_batch)) return;
    ++passes_;
    training_.pager().defer_reductions(sums_whole_ && !is_last);
    for (int piece = ownership_.pieces(micro_batch) - 1; piece >= 0; --piece) {
      const Ownership::Roots roots = ownership_.receive_gradients(micro_batch, piece);
      const bool is_end = piece == 0;
      if (is_end || !roots.edges.empty())
        training_.step().backward_from(roots.edges, roots.gradients, {.ends_micro_batch = is_end, .goes_on = !is_end});
      ownership_.send_gradients(micro_batch, piece);
    }
  }

  Outputs finish(Open& open) {
    Outputs outputs;
    for (auto& micro_batch : open) {
      outputs.push_back(ownership_.outputs(*micro_batch));
      micro_batch.reset();
    }
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
    for (Group* const group : {stages_.get(), all_.get()}) group->abort(text);
    end_training(training_, world_, text);
  }

  Training& training_;
  Group& world_;
  Ownership& ownership_;
  const StepRunnerOptions options_;
  const std::unique_ptr<Group> stages_, all_;  ///< without other users
  const bool sums_whole_;                      ///< the gradients of a step's micro-batches
  std::optional<bool> is_monotone_;            ///< no stage has needed a later one, as far as programs have run
  bool writes_twice_ = false;                  ///< a region has written what outlives its micro-batch
  bool has_trained_ = false;                   ///< a step has run with gradients, by which both are known
  bool runs_ahead_ = false;                    ///< the step, of other stages
  int64_t begun_ = 0;                          ///< micro-batches
  int64_t passes_ = 0;                         ///< backward passes since end_window()
  std::string last_ = kSequential;
  std::string failed_in_;
};

StepRunner::StepRunner(Training& training, const Grid& grid, Ownership& ownership, const StepRunnerOptions& options)
    : impl_(std::make_unique<Impl>(training, grid, ownership, options)) {}
StepRunner::~StepRunner() = default;

StepRunner::Outputs StepRunner::run(int micro_batches, const Program& program) {
  return impl_->run(micro_batches, program);
}
void StepRunner::backward(const at::Tensor& root, const at::Tensor& gradient) { impl_->backward(root, gradient); }
void StepRunner::end_window() { impl_->end_window(); }
const std::string& StepRunner::pipeline() const { return impl_->pipeline(); }

}  // namespace trireme
