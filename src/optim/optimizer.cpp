#include "trireme/optim/optimizer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <functional>
#include <set>
#include <utility>

#include "optim/client.h"
#include "optim/device_adam.h"
#include "optim/device_update.h"
#include "optim/host_updates.h"
#include "optim/lamb.h"
#include "optim/muon.h"
#include "optim/slices.h"
#include "optim/update.h"
#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {

class ShardedOptimizer::Impl {
 public:
  Impl(Pager& pager, Group& group, GroupedParameters parameters, const UpdateArithmetic& arithmetic,
       const DiskSpace& disk)
      : pager_(pager),
        group_(group),
        slices_(pager, parameters.options, std::move(parameters.group_of), arithmetic, disk),
        is_low_(arithmetic.dtype != at::kFloat),
        steps_(pager.parameters().size()) {
    const c10::Device device = pager.device();
    for (const OptimizerOptions& options : parameters.options) check_update_dtype(options.kind, arithmetic.dtype);
    if (!is_host(device)) device_steps_.emplace(steps_.size(), device);
    for (const OptimizerOptions& group : parameters.options) has_muon_ |= group.kind == OptimizerKind::kMuon;
    const OptimizerKind first = parameters.options[0].kind;
    if (slices_.any_on_device() && first == OptimizerKind::kLamb)
      throw ConfigError(str("optimizer.type: Lamb is for parameters on the host, and these are on ", device.str(),
                            "; use AdamW, Adam, Adagrad, Lion, Muon or SGD, or "
                            "zero_optimization.offload_optimizer.device=cpu with a ratio of 1"),
                        ErrorCode::kUnsupported);
    if (slices_.any_on_device() && arithmetic.rounds_stochastically)
      throw ConfigError(
          str("trireme.stochastic_rounding: it is for parameters on the host, and these are on ", device.str(),
              "; leave it out, or use "
              "zero_optimization.offload_optimizer.device=cpu with a ratio of 1"),
          ErrorCode::kUnsupported);
    by_adam_kernel_ = slices_.any_on_device() && agree_on_adam_kernel(parameters.options);
    // Optimizers of whole parameters exchange them with other ranks, and that is for the program's own thread.
    const bool needs_others = first == OptimizerKind::kLamb || has_muon_ || first == OptimizerKind::kClient;
    if (slices_.any_on_host() && !is_host(device) && !needs_others)
      host_updates_ = std::make_unique<HostUpdates>(pager);
  }

  Impl(Pager& pager, Group& group, const ClientOptimizerFactory& factory, const UpdateArithmetic& arithmetic)
      : Impl(pager, group,
             {.options = {{.kind = OptimizerKind::kClient}}, .group_of = std::vector<int>(pager.parameters().size())},
             arithmetic, {}) {
    std::vector<at::Tensor> parts;
    std::vector<std::string> names;
    for (size_t i = 0; i < slices_.count(); ++i)
      for (const ParameterRange& range : slices_.ranges(i)) {
        client_ranges_.push_back(range);
        parts.push_back(slices_.span(i).master.narrow(0, range.slice_begin, range.numel));
        names.push_back(pager_.parameters()[range.parameter].name);
      }
    client_ = std::make_unique<ClientOptimizer>(factory, std::move(parts), std::move(names));
  }

  void step(ClosedWindow& window, const StepOptions& options) {
    const at::NoGradGuard no_grad;
    slices_.refresh_masters(window.written());
    if (client_) return step_client(window, options);
    if (slices_.any_on_device()) is_low_ ? step_low_on_device(window, options) : step_on_device(window, options);
    if (host_updates_)
      step_beside(window, options);
    else if (slices_.any_on_host())
      step_on_host(window, options);
    count_step(window);
  }

  std::vector<TensorSlice> state() {
    std::vector<TensorSlice> slices = slices_.state();
    if (!client_) return slices;
    client_states_ = client_->states();
    for (const ClientState& state : client_states_) {
      const ParameterRange& range = client_ranges_[state.part];
      const ParameterSpec& parameter = pager_.parameters()[range.parameter];
      slices.push_back({optimizer_state_name(state.name, parameter.name), parameter.model_part(), range.parameter_begin,
                        state.tensor});
    }
    return slices;
  }

  int group_of(int parameter) const { return client_ ? -1 : slices_.group_of(parameter); }
  const OptimizerSlices& slices() const { return slices_; }

  void match_masters(bool with_states, const std::vector<std::string>& missing) {
    std::vector<bool> has_master(steps_.size(), with_states);
    const std::set<std::string> without(missing.begin(), missing.end());
    for (size_t i = 0; i < has_master.size(); ++i)
      if (without.contains(master_name(pager_.parameters()[i].name))) has_master[i] = false;
    slices_.write_back_masters(has_master);
    has_master.flip();
    slices_.refresh_masters(has_master);
  }

  std::vector<OptimizerOptions> client_groups() const {
    std::vector<OptimizerOptions> groups;
    for (const double lr : client_->learning_rates()) groups.push_back({.kind = OptimizerKind::kClient, .lr = lr});
    return groups;
  }

  // Where the device decides what is applied, it alone knows how often that was.
  std::vector<int64_t> steps() const { return takes_decisions() ? device_steps_->read() : steps_; }
  bool takes_decisions() const { return device_steps_ && !slices_.any_on_host() && !client_ && !has_muon_ && !is_low_; }

  void set_steps(const std::vector<int64_t>& steps) {
    steps_ = steps;
    if (device_steps_) device_steps_->set(steps);
    if (!client_) return;
    std::vector<int64_t> by_part;
    for (const ParameterRange& range : client_ranges_) by_part.push_back(steps_[range.parameter]);
    client_->set_states(std::exchange(client_states_, {}), by_part);
  }

 private:
  /// The part of one parameter that this rank updates.
  struct Part {
    ParameterRange range;
    const OptimizerOptions& options;
    int64_t step = 0;
    UpdateSpan span;
  };

  static bool needs_whole(OptimizerKind kind) { return kind == OptimizerKind::kLamb || kind == OptimizerKind::kMuon; }

  bool is_updated_by(OptimizerKind kind, int parameter, const ClosedWindow& window, const StepOptions& options) const {
    return window.touched()[parameter] && options.groups[slices_.group_of(parameter)].kind == kind;
  }

  std::vector<Part> parts(size_t i, OptimizerKind kind, const ClosedWindow& window, const StepOptions& options) const {
    std::vector<Part> result;
    const UpdateSpan span = slices_.span(i);
    for (const ParameterRange& range : slices_.ranges(i)) {
      if (!is_updated_by(kind, range.parameter, window, options)) continue;
      result.push_back({range, options.groups[slices_.group_of(range.parameter)], steps_[range.parameter] + 1,
                        span.slice(range.slice_begin, range.slice_begin + range.numel)});
    }
    return result;
  }

  /// Moves Lamb's moments. Sums of squares of weights and update, [2, parameters], over all ranks; undefined without
  /// Lamb.
  at::Tensor lamb_norms(const ClosedWindow& window, const StepOptions& options) const {
    if (options.groups[0].kind != OptimizerKind::kLamb) return {};
    const std::vector<ShardMesh>& meshes = pager_.meshes();
    const int64_t mesh_count = static_cast<int64_t>(meshes.size());
    // A row for each mesh, since each mesh sums over its own ranks.
    const at::Tensor by_mesh = at::zeros({mesh_count, 2, static_cast<int64_t>(steps_.size())}, at::kDouble);
    for (size_t i = 0; i < slices_.count(); ++i) {
      const at::Tensor of_mesh = by_mesh[pager_.layout().units[slices_.unit(i)].mesh];
      auto sums = of_mesh.accessor<double, 2>();
      for (const Part& part : parts(i, OptimizerKind::kLamb, window, options)) {
        const LambNorms own = lamb_moments(part.span.master, part.span.gradients.to(at::kFloat), part.span.first,
                                           part.span.second, part.options, options.gradient_factor, part.step);
        sums[0][part.range.parameter] += own.weights;
        sums[1][part.range.parameter] += own.update;
      }
    }
    for (int64_t i = 0; i < mesh_count && pager_.policy().stage > 0; ++i) {
      const ShardMesh& mesh = meshes[i];
      if (mesh.shards.size() > 1) mesh.shards.all_reduce(by_mesh[i]).wait();
      if (mesh.size().pieces > 1) mesh.replicas->all_reduce(by_mesh[i]).wait();
    }
    return by_mesh.sum(0);
  }

  void step_lamb(size_t i, const ClosedWindow& window, const StepOptions& options, const at::Tensor& norms) const {
    const auto sums = norms.accessor<double, 2>();
    for (const Part& part : parts(i, OptimizerKind::kLamb, window, options)) {
      const int parameter = part.range.parameter;
      const double trust = lamb_trust({sums[0][parameter], sums[1][parameter]}, part.options);
      lamb_apply(part.span.master, part.span.first, part.span.second, part.options, trust, part.step);
      OptimizerSlices::round_weights(part.span);
    }
  }

  void step_client(ClosedWindow& window, const StepOptions& options) {
    for (const OwnedSlice& slice : pager_.owned()) pager_.await_owned(slice.unit);
    client_states_.clear();
    std::vector<at::Tensor> gradients;
    for (size_t i = 0; i < slices_.count(); ++i)
      for (const ParameterRange& range : slices_.ranges(i)) {
        const at::Tensor& flat = pager_.owned()[i].gradients;
        gradients.emplace_back();
        if (!window.touched()[range.parameter]) continue;
        gradients.back() = flat.narrow(0, range.slice_begin, range.numel).to(slices_.span(i).master.scalar_type());
        if (options.gradient_factor != 1) gradients.back().mul_(options.gradient_factor);
      }
    std::vector<double> learning_rates;
    for (const OptimizerOptions& group : options.groups) learning_rates.push_back(group.lr);
    client_->step(gradients, learning_rates);
    for (size_t i = 0; i < slices_.count(); ++i) {
      OptimizerSlices::round_weights(slices_.span(i));
      window.publish(slices_.unit(i));
    }
    count_step(window);
  }

  void step_on_host(ClosedWindow& window, const StepOptions& options) {
    for (const OwnedSlice& slice : pager_.owned()) pager_.await_owned(slice.unit);
    const at::Tensor norms = lamb_norms(window, options);
    size_t next = 0;
    const auto finish_before = [&](size_t end) {
      for (; next < end; ++next) {
        if (!slices_.is_on_host(next)) continue;
        if (norms.defined()) step_lamb(next, window, options, norms);
        step_muon(next, window, options);
        window.publish(slices_.unit(next));
      }
    };
    std::vector<UpdateRun> runs;
    for (size_t i = 0; i < slices_.count(); ++i)
      if (slices_.is_on_host(i)) append_runs(runs, i, window, options);
    update_runs(runs, options.gradient_factor, [&](size_t slice) {
      finish_before(slice);
      if (SliceHome* const home = slices_.owned(slice).home) home->lease();
    });
    finish_before(slices_.count());
  }

  /// step_on_host() by another thread, which goes on when the caller does.
  void step_beside(ClosedWindow& window, const StepOptions& options) {
    for (size_t i = 0; i < slices_.count(); ++i) {
      if (!slices_.is_on_host(i)) continue;
      std::vector<UpdateRun> runs;
      append_runs(runs, i, window, options);
      host_updates_->enqueue(window, slices_.unit(i), [this, runs = std::move(runs), factor = options.gradient_factor] {
        update_runs(runs, factor);
      });
    }
  }

  /// A range that is updated by one call, and how.
  struct UpdateRun {
    size_t slice = 0;
    Run run;
    OptimizerOptions options;
  };

  void append_runs(std::vector<UpdateRun>& result, size_t i, const ClosedWindow& window,
                   const StepOptions& options) const {
    for (const Run& run : slices_.runs(i, window.touched(), steps_))
      if (!needs_whole(options.groups[run.group].kind)) result.push_back({i, run, options.groups[run.group]});
  }

  /// `before` is called with the slice of each run: all before it are final, its weights are not there yet.
  void update_runs(const std::vector<UpdateRun>& runs, double gradient_factor,
                   const std::function<void(size_t slice)>& before = {}) const {
    std::vector<OptimizerSlices::Range> ranges;
    for (const UpdateRun& each : runs) ranges.push_back({each.slice, each.run.begin, each.run.end});
    slices_.visit(ranges, OptimizerSlices::Access::kUpdate, [&](size_t index, const UpdateSpan& span) {
      const UpdateRun& each = runs[index];
      if (before) before(each.slice);
      update(span, each.options, gradient_factor, each.run.step);
    });
  }

  // By numbers of the host, as Muon: no kernel takes them from the device.
  void step_low_on_device(ClosedWindow& window, const StepOptions& options) {
    const WithoutInterception own_operators;
    for (size_t i = 0; i < slices_.count(); ++i) {
      if (slices_.is_on_host(i)) continue;
      std::vector<UpdateRun> runs;
      append_runs(runs, i, window, options);
      update_runs(runs, options.gradient_factor);
      window.publish(slices_.unit(i));
    }
  }

  // All ranges of a group by one call, and then all units are final.
  void step_on_device(ClosedWindow& window, const StepOptions& options) {
    const WithoutInterception own_operators;
    const StepDecision decision = options.decision ? *options.decision : decision_of(options.gradient_factor);
    device_steps_->begin(window.touched());
    std::vector<std::vector<DeviceRun>> by_group(options.groups.size());
    for (size_t i = 0; i < slices_.count(); ++i) {
      if (slices_.is_on_host(i)) continue;
      const UpdateSpan span = slices_.span(i);
      for (const Run& run : slices_.runs(i, window.touched(), device_steps_->histories()))
        by_group[run.group].push_back({span.slice(run.begin, run.end), device_steps_->of(run.parameter)});
    }
    for (size_t group = 0; group < by_group.size(); ++group) {
      if (!is_on_devices(options.groups[group].kind)) continue;
      const at::Tensor lr = decision.lr.empty() ? number(options.groups[group].lr) : decision.lr[group];
      update_on_device(by_group[group], options.groups[group], decision, lr, by_adam_kernel_);
    }
    device_steps_->end(decision.skip);
    for (size_t i = 0; i < slices_.count(); ++i) {
      if (slices_.is_on_host(i)) continue;
      step_muon(i, window, options);
      window.publish(slices_.unit(i));
    }
  }

  // Filled in by a kernel: a copy from the host would be waited for.
  at::Tensor number(double value) const {
    return at::full({}, value, at::TensorOptions().dtype(at::kFloat).device(pager_.device()));
  }
  StepDecision decision_of(double gradient_factor) const { return {.gradient_factor = number(gradient_factor)}; }

  /// Collective. Before training: to compile takes a while, and later there may be no memory for a kernel.
  bool agree_on_adam_kernel(const std::vector<OptimizerOptions>& options) const {
    bool has_adam = false, has_master = false;
    for (const OptimizerOptions& group : options) has_adam |= is_adam(group.kind);
    for (size_t i = 0; i < slices_.count(); ++i) has_master |= slices_.has_master(i);
    return has_adam && has_master && is_true_on_all(group_, has_adam_kernel(pager_.device()));
  }

  void count_step(const ClosedWindow& window) {
    for (size_t i = 0; i < steps_.size(); ++i) steps_[i] += window.touched()[i] ? 1 : 0;
  }

  void step_muon(size_t i, const ClosedWindow& window, const StepOptions& options) const {
    const OwnedSlice& slice = pager_.owned()[i];
    const UnitLayout& unit = pager_.layout().units[slice.unit];
    std::vector<PlacedMatrix> matrices;  // of the whole unit: every rank takes part, whatever it holds of them
    for (const ParameterPlace& placement : unit.parameters)
      if (is_updated_by(OptimizerKind::kMuon, placement.index, window, options))
        matrices.push_back({placement.begin, pager_.parameters()[placement.index].shape,
                            options.groups[slices_.group_of(placement.index)].ns_steps});
    if (matrices.empty()) return;

    const std::vector<Part> own = parts(i, OptimizerKind::kMuon, window, options);
    const at::Tensor directions = at::zeros({slice.weights.numel()}, slice.weights.options().dtype(at::kFloat));
    for (const Part& part : own)
      directions.narrow(0, part.range.slice_begin, part.range.numel)
          .copy_(muon_direction(part.span.first, part.span.gradients, part.options.momentum, options.gradient_factor));
    const at::Tensor updates = orthogonalise_parts(directions, matrices, unit, pager_.mesh_of(slice.unit));
    for (const Part& part : own) {
      muon_apply(part.span.master, updates.narrow(0, part.range.slice_begin, part.range.numel), part.options,
                 pager_.parameters()[part.range.parameter].shape);
      OptimizerSlices::round_weights(part.span);
    }
  }

  Pager& pager_;
  Group& group_;
  OptimizerSlices slices_;
  const bool is_low_;  ///< updates in the weights' own 16 bits
  bool has_muon_ = false;
  bool by_adam_kernel_ = false;
  std::vector<int64_t> steps_;                 ///< by parameter: how often it was updated; on the host
  std::optional<DeviceSteps> device_steps_;    ///< the same on a device
  std::unique_ptr<ClientOptimizer> client_;    ///< instead of our own
  std::vector<ParameterRange> client_ranges_;  ///< by its part
  std::vector<ClientState> client_states_;     ///< what a load writes into
  std::unique_ptr<HostUpdates> host_updates_;  ///< of what is offloaded; the last member, its thread uses the others
};

ShardedOptimizer::ShardedOptimizer(Pager& pager, Group& group, GroupedParameters parameters,
                                   const UpdateArithmetic& arithmetic, const DiskSpace& disk)
    : impl_(std::make_unique<Impl>(pager, group, std::move(parameters), arithmetic, disk)) {}
ShardedOptimizer::ShardedOptimizer(Pager& pager, Group& group, const ClientOptimizerFactory& factory,
                                   const UpdateArithmetic& arithmetic)
    : impl_(std::make_unique<Impl>(pager, group, factory, arithmetic)) {}
ShardedOptimizer::~ShardedOptimizer() = default;

bool ShardedOptimizer::takes_decisions() const { return impl_->takes_decisions(); }
std::vector<OptimizerOptions> ShardedOptimizer::client_groups() const { return impl_->client_groups(); }

void ShardedOptimizer::step(ClosedWindow& window, const StepOptions& options) { impl_->step(window, options); }
void ShardedOptimizer::refresh_masters(const std::vector<bool>& chosen) { impl_->slices().refresh_masters(chosen); }
std::vector<TensorSlice> ShardedOptimizer::state() { return impl_->state(); }
std::vector<TensorSlice> ShardedOptimizer::own_state() const { return impl_->slices().state(); }
const std::vector<std::string>& ShardedOptimizer::state_names(int parameter) const {
  return impl_->slices().state_names(parameter);
}
int ShardedOptimizer::group_of(int parameter) const { return impl_->group_of(parameter); }
std::vector<int64_t> ShardedOptimizer::step_counts() const { return impl_->steps(); }

void ShardedOptimizer::set_step_counts(const std::vector<int64_t>& counts) {
  if (counts.size() != impl_->steps().size())
    throw ShapeError(
        str("set_step_counts: expected one count per parameter (", impl_->steps().size(), "), got ", counts.size()));
  impl_->set_steps(counts);
}

void ShardedOptimizer::match_masters(bool with_states, const std::vector<std::string>& missing) {
  impl_->match_masters(with_states, missing);
}
DiskUse ShardedOptimizer::disk_use() const { return impl_->slices().disk_use(); }
int64_t ShardedOptimizer::master_bytes() const { return impl_->slices().master_bytes(); }
int64_t ShardedOptimizer::state_bytes() const { return impl_->slices().state_bytes(); }

}  // namespace trireme
