#include "training/forward_checks.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/intercept.h"
#include "trireme/precision/autocast.h"
#include "trireme/training/forward.h"

namespace trireme {

namespace {

constexpr int kSmallerBatches = 3;

// Indices are integers by right. These are libtorch's words for two operands that must be alike, of which one is
// `dtype`.
bool is_operand_of(at::ScalarType dtype, const std::string& problem) {
  if (problem.find("same dtype") == std::string::npos && problem.find("expected scalar type") == std::string::npos)
    return false;
  const auto has = [&](std::string_view name) { return problem.find(name) != std::string::npos; };
  return has(at::toString(dtype)) || has(c10::scalarTypeToTypeMeta(dtype).name());
}

void explain_autocast_around(const AutocastOptions& autocast) {
  if (autocast.enabled)
    log(LogLevel::kInfo,
        str("forward: autocast is on around it; inside, torch_autocast's dtype holds, ", short_name(autocast.dtype)));
  else
    log(LogLevel::kWarning,
        "forward: autocast is on around it, and torch_autocast.enabled is false: inside, autocast is off. Set "
        "torch_autocast.enabled=true to have it");
}

}  // namespace

void ForwardChecks::begin() {
  if (!has_explained_autocast_ && AutocastScope::is_on(pager_.device().type())) {
    has_explained_autocast_ = true;
    if (group_.rank() == 0) explain_autocast_around(precision_.autocast);
  }
  // Where units are gathered, an operator that nobody sees would read memory that is not there.
  const PagerPolicy& policy = pager_.policy();
  const bool gathers = policy.stage == 3 && policy.gather == GatherPolicy::kCopy && group_.size() > 1;
  if (!gathers || c10::impl::tls_is_dispatch_key_included(kInterceptKey)) return;
  throw StateError(
      "forward: this thread is not the one that called initialize(), and at ZeRO stage 3 with gather=\"copy\" "
      "parameters are gathered in that one alone: call forward() there, or set trireme.gather to \"shared\" or a lower "
      "stage");
}

void ForwardChecks::look_at(const at::Tensor& input, int64_t micro_batch) {
  if (!looks_ || !at::GradMode::is_enabled() || input.dim() < 2) return;
  const auto sizes = input.sizes();
  smaller_batches_ = sizes[0] < micro_batch ? smaller_batches_ + 1 : 0;
  // A model may have its samples in another dim.
  if (std::find(sizes.begin(), sizes.end(), micro_batch) != sizes.end()) return;
  if (sizes[0] < micro_batch && smaller_batches_ < kSmallerBatches) return;
  looks_ = false;
  if (group_.rank() == 0)
    log(LogLevel::kWarning,
        str("forward: an input of shape ", sizes, " has ", sizes[0], " samples, and train_micro_batch_size_per_gpu is ",
            micro_batch, ": global_samples counts ", micro_batch, "; set train_micro_batch_size_per_gpu to ", sizes[0],
            ", or make batches of ", micro_batch));
}

void ForwardChecks::explain(const std::string& problem, const std::vector<at::ScalarType>& inputs) const {
  if (precision_.autocast.enabled || problem.find("type") == std::string::npos) return;
  if (pager_.layout().units.empty()) return;
  const at::ScalarType weights = pager_.layout().units.front().dtype;
  const std::string end = str(". libtorch says: ", problem.substr(0, problem.find('\n')));
  const auto differs = [&](at::ScalarType dtype) { return at::isFloatingType(dtype) && dtype != weights; };
  const auto is_odd = [&](at::ScalarType dtype) {
    return at::isFloatingType(dtype) ? dtype != weights && !precision_.casts_inputs : is_operand_of(dtype, problem);
  };
  const auto odd = std::find_if(inputs.begin(), inputs.end(), is_odd);
  if (odd != inputs.end())
    throw ShapeError(str("forward: an input is ", short_name(*odd), " and the weights are ", short_name(weights),
                         "; cast the input: input.to(", at::toString(weights), ")", end));
  for (const NamedBuffer& buffer : buffers_.all())
    if (differs(buffer.tensor.scalar_type()))
      throw ShapeError(
          str("forward: buffer '", buffer.name, "' is ", short_name(buffer.tensor.scalar_type()),
              " and the weights are ", short_name(weights),
              "; where the module cannot compute with both, set data_types.buffer_dtype=", short_name(weights), end));
}

void ForwardScope::look_at(const at::Tensor& input) { checks_.look_at(input, micro_batch_); }
void ForwardScope::explain(const std::string& problem, const std::vector<at::ScalarType>& inputs) const {
  checks_.explain(problem, inputs);
}

}  // namespace trireme
