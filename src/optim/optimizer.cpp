#include "trireme/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/where.h>

#include <utility>

#include "optim/runs.h"
#include "optim/update.h"
#include "optim/zero_pages.h"
#include "trireme/base/error.h"

namespace trireme {

namespace {

int64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0; }

}  // namespace

const char* optimizer_name(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdam:
      return "Adam";
    case OptimizerKind::kAdamW:
      return "AdamW";
    case OptimizerKind::kAdagrad:
      return "Adagrad";
    case OptimizerKind::kLion:
      return "Lion";
    case OptimizerKind::kSgd:
      return "SGD";
  }
  return "";
}

std::vector<std::string> optimizer_states(const OptimizerOptions& options) {
  switch (options.kind) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      return {"exp_avg", "exp_avg_sq"};
    case OptimizerKind::kAdagrad:
      return {"sum"};
    case OptimizerKind::kLion:
      return {"exp_avg"};
    case OptimizerKind::kSgd:
      if (options.momentum != 0) return {"momentum_buffer"};
      return {};
  }
  return {};
}

void check_optimizer(const OptimizerOptions& options) {
  const auto refuse = [](const char* name, double value, const char* fix) {
    throw ConfigError(str("optimizer.params.", name, "=", value, ": ", fix));
  };
  if (!(options.lr >= 0)) refuse("lr", options.lr, "use 0 or more");
  if (!(options.weight_decay >= 0)) refuse("weight_decay", options.weight_decay, "use 0 or more");
  if (options.kind == OptimizerKind::kSgd) {
    if (!(options.momentum >= 0)) refuse("momentum", options.momentum, "use 0 or more");
    if (options.nesterov && options.momentum == 0) refuse("momentum", 0, "nesterov needs a momentum above 0");
    return;
  }
  if (options.kind != OptimizerKind::kAdagrad) {
    if (!(options.beta1 >= 0 && options.beta1 < 1)) refuse("betas[0]", options.beta1, "use 0 <= beta < 1");
    if (!(options.beta2 >= 0 && options.beta2 < 1)) refuse("betas[1]", options.beta2, "use 0 <= beta < 1");
  }
  // An element whose gradient was always zero divides by eps alone.
  if (options.kind != OptimizerKind::kLion && !(options.eps > 0))
    refuse("eps", options.eps, "use a small number above 0, such as 1e-8");
}

class ShardedOptimizer::Impl {
 public:
  Impl(Pager& pager, const OptimizerOptions& options) : pager_(pager), options_(options) {
    check_optimizer(options);
    const at::NoGradGuard no_grad;
    steps_.resize(pager.parameters().size());
    state_names_ = optimizer_states(options);
    for (const OwnedSlice& slice : pager.owned()) {
      const int64_t numel = slice.weights.numel();
      UpdateSpan span;
      span.weights = slice.weights;
      span.master = slice.weights.scalar_type() == at::kFloat ? slice.weights : slice.weights.to(at::kFloat);
      if (!state_names_.empty()) span.first = zero_pages(numel);
      if (state_names_.size() > 1) span.second = zero_pages(numel);
      spans_.push_back(std::move(span));
    }
  }

  void step(const Window& window, const StepOptions& options) {
    const at::NoGradGuard no_grad;
    const std::vector<OwnedSlice>& owned = pager_.owned();
    for (size_t i = 0; i < owned.size(); ++i) {
      const OwnedSlice& slice = owned[i];
      const UnitLayout& unit = pager_.layout().units[slice.unit];
      refresh_master(i, window.written);
      UpdateSpan span = spans_[i];
      span.gradients = slice.gradients;
      for (const Run& run : plan_runs(unit, slice.begin, slice.weights.numel(), window.touched, steps_))
        update(span.slice(run.begin, run.end), options_, options, run.step);
      pager_.publish(slice.unit);
    }
    for (size_t i = 0; i < steps_.size(); ++i) steps_[i] += window.touched[i] ? 1 : 0;
  }

  void refresh_masters(const std::vector<bool>& chosen) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < spans_.size(); ++i) refresh_master(i, chosen);
  }

  std::vector<TensorSlice> state() const {
    std::vector<TensorSlice> slices;
    for (size_t i = 0; i < spans_.size(); ++i) {
      const UpdateSpan& span = spans_[i];
      for (const Portion& portion : portions(i)) {
        if (has_master(span)) append(slices, "master.", portion, span.master);
        for (size_t state = 0; state < state_names_.size(); ++state)
          append(slices, str("optimizer.", state_names_[state], "."), portion, state == 0 ? span.first : span.second);
      }
    }
    return slices;
  }

  void write_back_masters(const std::vector<bool>& chosen) {
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < spans_.size(); ++i) {
      if (!has_master(spans_[i])) continue;
      for (const Portion& portion : portions(i)) {
        if (!chosen[portion.parameter]) continue;
        const UpdateSpan part = spans_[i].slice(portion.slice_begin, portion.slice_begin + portion.numel);
        part.weights.copy_(part.master);
      }
    }
  }

  int64_t master_bytes() const {
    int64_t bytes = 0;
    for (const UpdateSpan& span : spans_) bytes += has_master(span) ? bytes_of(span.master) : 0;
    return bytes;
  }

  int64_t state_bytes() const {
    int64_t bytes = 0;
    for (const UpdateSpan& span : spans_) bytes += bytes_of(span.first) + bytes_of(span.second);
    return bytes;
  }

  const OptimizerOptions& options() const { return options_; }
  std::vector<int64_t>& steps() { return steps_; }

 private:
  static bool has_master(const UpdateSpan& span) { return !span.master.is_same(span.weights); }

  std::vector<Portion> portions(size_t i) const {
    const OwnedSlice& slice = pager_.owned()[i];
    return portions_of(pager_.layout().units[slice.unit], slice.begin, slice.weights.numel());
  }

  void append(std::vector<TensorSlice>& slices, const std::string& prefix, const Portion& portion,
              const at::Tensor& flat) const {
    const ParameterSpec& parameter = pager_.parameters()[portion.parameter];
    slices.push_back({prefix + parameter.name, parameter.shape, portion.parameter_begin,
                      flat.narrow(0, portion.slice_begin, portion.numel)});
  }

  /// What the user wrote into 16-bit weights is the new truth; an older master would undo it.
  void refresh_master(size_t i, const std::vector<bool>& written) {
    UpdateSpan& span = spans_[i];
    if (!has_master(span)) return;
    for (const Portion& portion : portions(i)) {
      if (!written[portion.parameter]) continue;
      const UpdateSpan part = span.slice(portion.slice_begin, portion.slice_begin + portion.numel);
      // Only what differs: elsewhere the master knows more digits than the weight that it was rounded to.
      const at::Tensor unchanged = part.master.to(part.weights.scalar_type()).eq(part.weights);
      part.master.copy_(at::where(unchanged, part.master, part.weights.to(at::kFloat)));
    }
  }

  Pager& pager_;
  const OptimizerOptions options_;
  std::vector<std::string> state_names_;
  std::vector<UpdateSpan> spans_;  ///< by owned slice; gradients undefined
  std::vector<int64_t> steps_;     ///< by parameter: how often it was updated
};

ShardedOptimizer::ShardedOptimizer(Pager& pager, const OptimizerOptions& options)
    : impl_(std::make_unique<Impl>(pager, options)) {}
ShardedOptimizer::~ShardedOptimizer() = default;

void ShardedOptimizer::step(const Window& window, const StepOptions& options) { impl_->step(window, options); }
const OptimizerOptions& ShardedOptimizer::options() const { return impl_->options(); }
void ShardedOptimizer::refresh_masters(const std::vector<bool>& chosen) { impl_->refresh_masters(chosen); }
std::vector<TensorSlice> ShardedOptimizer::state() { return impl_->state(); }
std::vector<int64_t> ShardedOptimizer::step_counts() const { return impl_->steps(); }

void ShardedOptimizer::set_step_counts(const std::vector<int64_t>& counts) {
  if (counts.size() != impl_->steps().size())
    throw ShapeError(
        str("set_step_counts: expected one count per parameter (", impl_->steps().size(), "), got ", counts.size()));
  impl_->steps() = counts;
}

void ShardedOptimizer::write_back_masters(const std::vector<bool>& chosen) { impl_->write_back_masters(chosen); }
int64_t ShardedOptimizer::master_bytes() const { return impl_->master_bytes(); }
int64_t ShardedOptimizer::state_bytes() const { return impl_->state_bytes(); }

}  // namespace trireme
