// Habits of programs that would do nothing, or something else than was meant, without a word: each is told once, with
// the fix.
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "engine/buffers.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/engine/engine.h"
#include "trireme/intercept.h"
#include "trireme/precision/precision.h"

namespace trireme {

namespace {

// Several losses may each have their backward pass before one step().
constexpr int64_t kPassesBeforeStep = 10;
constexpr int kSmallerBatches = 3;

// Indices are integers by right. These are libtorch's words for two operands that must be alike, of which one is
// `dtype`.
bool is_operand_of(at::ScalarType dtype, const std::string& problem) {
  if (problem.find("same dtype") == std::string::npos && problem.find("expected scalar type") == std::string::npos)
    return false;
  const auto has = [&](std::string_view name) { return problem.find(name) != std::string::npos; };
  return has(at::toString(dtype)) || has(c10::scalarTypeToTypeMeta(dtype).name());
}

}  // namespace

// Where units are gathered, an operator that nobody sees would read memory that is not there.
void Engine::require_operators_seen() const {
  const PagerPolicy& policy = pager_->policy();
  const bool gathers = policy.stage == 3 && policy.gather == GatherPolicy::kCopy && group_.size() > 1;
  if (!gathers || c10::impl::tls_is_dispatch_key_included(kInterceptKey)) return;
  throw StateError(
      "forward: this thread is not the one that called initialize(), and at ZeRO stage 3 with gather=\"copy\" "
      "parameters "
      "are gathered in that one alone: call forward() there, or set trireme.gather to \"shared\" or a lower stage");
}

void Engine::look_at(const at::Tensor& input) {
  if (has_told_batch_ || !knows_micro_batch_ || !at::GradMode::is_enabled() || input.dim() < 2) return;
  const int64_t micro_batch = train_micro_batch_size_per_gpu();
  const auto sizes = input.sizes();
  smaller_batches_ = sizes[0] < micro_batch ? smaller_batches_ + 1 : 0;
  // A model may have its samples in another dimension.
  if (std::find(sizes.begin(), sizes.end(), micro_batch) != sizes.end()) return;
  if (sizes[0] < micro_batch && smaller_batches_ < kSmallerBatches) return;
  has_told_batch_ = true;
  if (group_.rank() == 0)
    log(LogLevel::kWarning,
        str("forward: an input of shape ", sizes, " has ", sizes[0], " samples, and train_micro_batch_size_per_gpu is ",
            micro_batch, ": global_samples counts ", micro_batch, "; set train_micro_batch_size_per_gpu to ", sizes[0],
            ", or make batches of ", micro_batch));
}

void Engine::explain_forward(const std::string& problem, const std::vector<at::ScalarType>& inputs) const {
  const PrecisionOptions& precision = config_.precision;
  if (precision.autocast.enabled || problem.find("type") == std::string::npos) return;
  if (!pager_ || pager_->layout().units.empty()) return;
  const at::ScalarType weights = pager_->layout().units.front().dtype;
  const std::string end = str(". libtorch says: ", problem.substr(0, problem.find('\n')));
  const auto differs = [&](at::ScalarType dtype) { return at::isFloatingType(dtype) && dtype != weights; };
  const auto is_odd = [&](at::ScalarType dtype) {
    return at::isFloatingType(dtype) ? dtype != weights && !precision.casts_inputs : is_operand_of(dtype, problem);
  };
  const auto odd = std::find_if(inputs.begin(), inputs.end(), is_odd);
  if (odd != inputs.end())
    throw ShapeError(str("forward: an input is ", short_name(*odd), " and the weights are ", short_name(weights),
                         "; cast the input: input.to(", at::toString(weights), ")", end));
  for (const NamedBuffer& buffer : buffers_->all())
    if (differs(buffer.tensor.scalar_type()))
      throw ShapeError(
          str("forward: buffer '", buffer.name, "' is ", short_name(buffer.tensor.scalar_type()),
              " and the weights are ", short_name(weights),
              "; where the module cannot compute with both, set data_types.buffer_dtype=", short_name(weights), end));
}

// Backward passes of this rank in this window, by backward() or directly.
int64_t Engine::passes_of_window() const {
  return std::max(window_.backward_passes, pager_->gradients_so_far().passes);
}

// Whether this rank had a backward pass for the step() that is being called: since the last one, or, as with no_sync(),
// before the first of several.
bool Engine::has_new_backward() {
  const int64_t gradients = pager_->gradients_so_far().count, passes = passes_of_window();
  const bool has_gradients = std::exchange(window_.gradients_at_step, gradients) < gradients;
  const bool has_passes = std::exchange(window_.passes_at_step, passes) < passes;
  return has_gradients || has_passes || passes > window_.micro_steps;
}

void Engine::tell_missing_backward() {
  if (std::exchange(has_told_backward_, true)) return;
  log(LogLevel::kWarning,
      str("step: rank ", group_.rank(),
          " had no backward pass since its last step(), so its gradients of this micro-batch count as "
          "zero in the mean; call backward(loss) before step() on every rank"));
}

void Engine::tell_missing_step() {
  if (has_told_step_ || !optimizer_ || !config_.managed_gradient_accumulation) return;
  const int64_t passes = passes_of_window() - window_.passes_at_step;
  if (passes <= kPassesBeforeStep) return;
  has_told_step_ = true;
  if (group_.rank() == 0)
    log(LogLevel::kWarning,
        str(passes,
            " backward passes since the last step(), so no weight has changed: call step() of the engine "
            "after each backward(). An optimizer of torch beside the engine changes nothing, because the "
            "engine takes the gradients"));
}

// Samples of all ranks; each is taken to have as many micro-batches as this one.
int64_t Engine::samples_of_window() const {
  if (config_.managed_gradient_accumulation) return train_batch_size();
  return passes_of_window() * train_micro_batch_size_per_gpu() * group_.size();
}

}  // namespace trireme
