#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>

#include <utility>
#include <vector>

#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/ownership/home.h"

namespace trireme {

namespace {

/// The subject of a call. Gradients are there without an optimizer.
enum class Subject : uint8_t { kStates, kGradient };

/// A parameter of an engine, as one call was given it.
class Place {
 public:
  Place(const at::Tensor& parameter, const char* call, Subject subject = Subject::kStates)
      : caller_(call), call_(call) {
    const auto place = find_managed(parameter);
    auto* access = place ? dynamic_cast<ParameterAccess*>(place->pager->companion()) : nullptr;
    if (const auto where = access == nullptr ? elsewhere(parameter) : std::nullopt)
      throw StateError(str(call, ": parameter ", *where, ", which has its gradient and its states: every rank of that ",
                           "stage calls it there, of model.local_parameters()"));
    if (access == nullptr)
      throw StateError(
          str(call, ": the tensor ", parameter.defined() ? parameter.sizes() : at::IntArrayRef{},
              " belongs to no engine; pass a parameter of the module that initialize() was given, while the "
              "engine lives, and of a tied parameter of stages the one in the first part that has it"));
    access_ = access;
    index_ = place->parameter;
    if (parameter.sizes() != at::IntArrayRef(spec().shape))
      throw ShapeError(str(call, ": expected parameter '", spec().name, "' itself, of shape ",
                           at::IntArrayRef(spec().shape), ", got a view of shape ", parameter.sizes()));
    if (subject == Subject::kStates && !access->has_optimizer())
      throw StateError(str(call, ": the engine of parameter '", spec().name,
                           "' has no optimizer, so it holds nothing but the weights; read the parameter itself"));
  }

  bool is_frozen() const { return !spec().trainable; }
  ParameterAccess& access() const { return *access_; }
  int index() const { return index_; }

  ParameterAccess::Part state(const std::string& name) const {
    std::string known;
    for (const std::string& state : access_->state_names(index_)) {
      if (state == name) return access_->state(index_, name);
      known += (known.empty() ? "'" : ", '") + state + "'";
    }
    throw ConfigError(str(call_, ": parameter '", spec().name, "' has no optimizer state '", name, "'; it has ",
                          known.empty() ? "none" : known));
  }

  /// Completes the reductions; false where no rank used the parameter.
  bool reduce() const {
    access_->pager().reduce_now();
    bool any = false;
    for (size_t i = 0; i < access_->pager().parameters().size(); ++i)
      any |= access_->pager().has_gradient(static_cast<int>(i));
    if (!any)
      throw StateError(str(call_,
                           ": no parameter that this rank trains has a gradient since the last step; call it between "
                           "backward() and step(), with trireme.smp between the step function and optimizer.step(), "
                           "and not on a stage whose parameters the loss does not need"));
    return access_->pager().has_gradient(index_);
  }
  void require_gradient() const {
    if (!reduce())
      throw StateError(str(call_, ": parameter '", spec().name, "' got no gradient on any rank since the last step"));
  }

  at::Tensor full(const ParameterAccess::Part& part) const {
    return access_->join(index_, access_->gather(index_, part));
  }
  static at::Tensor local(const ParameterAccess::Part& part) { return part.data.to(at::kFloat, false, /*copy=*/true); }

  /// `value`, which must have the shape of the model's parameter, in fp32.
  at::Tensor checked(const at::Tensor& value) const {
    const std::vector<int64_t> shape = access_->whole_shape(index_);
    if (!value.defined() || value.sizes() != at::IntArrayRef(shape))
      throw ShapeError(str(call_, ": parameter '", spec().name, "' has the shape ", at::IntArrayRef(shape),
                           ", got a value of ", value.defined() ? str(value.sizes()) : "no shape"));
    return value.detach().to(at::kFloat);
  }
  at::Tensor checked_local(const at::Tensor& value, const ParameterAccess::Part& part) const {
    if (!value.defined() || value.numel() != part.data.numel() || value.dim() != 1)
      throw ShapeError(str(call_, ": this rank holds ", part.data.numel(), " elements of parameter '", spec().name,
                           "', got a value of ", value.defined() ? str("shape ", value.sizes()) : "no shape"));
    return value.detach().to(at::kFloat);
  }

  /// Where nothing is reduced: what this rank alone has summed.
  std::optional<at::Tensor> gradient_of_this_rank() const {
    const std::optional<at::Tensor> sum = access_->pager().sum_of_this_rank(index_);
    if (!access_->on_any_slice(sum.has_value())) return std::nullopt;
    const at::Tensor own =
        sum ? *sum
            : at::zeros({spec().numel()}, at::TensorOptions().dtype(at::kFloat).device(access_->pager().device()));
    return access_->join(index_, own).div_(access_->loss_scale());
  }
  at::Tensor full_gradient() const { return full(access_->gradient(index_)).div_(access_->loss_scale()); }
  void write_gradient(const at::Tensor& whole) const {
    write(access_->gradient(index_), whole * access_->loss_scale());
    access_->pager().gradient_written(index_);
  }
  /// This rank's elements of `whole`, in the shape of the model's parameter, become those of `part`.
  void write(const ParameterAccess::Part& part, const at::Tensor& whole) const {
    part.write(access_->cut(index_, whole).narrow(0, part.begin, part.data.numel()));
  }

 protected:
  const ParameterSpec& spec() const { return access_->spec(index_); }

 private:
  const at::NoGradGuard no_grad_;
  const CallerScope caller_;
  const char* const call_;
  ParameterAccess* access_ = nullptr;
  int index_ = 0;
};

/// A parameter that is trained, so that it has a master, states and a gradient to write.
class WritablePlace : public Place {
 public:
  WritablePlace(const at::Tensor& parameter, const char* call, Subject subject = Subject::kStates)
      : Place(parameter, call, subject) {
    if (is_frozen())
      throw StateError(str(call, ": parameter '", spec().name,
                           "' is frozen: it has no fp32 master, states or gradient; write the parameter itself"));
  }
};

}  // namespace

std::optional<at::Tensor> safe_get_full_fp32_param(const at::Tensor& parameter) {
  const Place place(parameter, "safe_get_full_fp32_param");
  if (place.is_frozen()) return std::nullopt;
  place.access().settle();
  return place.full(place.access().value(place.index()));
}

at::Tensor whole_weight(const at::Tensor& parameter) {
  const Place place(parameter, "whole_weight", Subject::kGradient);
  return place.access().weight(place.index());
}

std::optional<at::Tensor> safe_get_full_optimizer_state(const at::Tensor& parameter, const std::string& state) {
  const Place place(parameter, "safe_get_full_optimizer_state");
  if (place.is_frozen()) return std::nullopt;
  return place.full(place.state(state));
}

std::vector<std::string> optimizer_state_names(const at::Tensor& parameter) {
  const Place place(parameter, "optimizer_state_names");
  return place.is_frozen() ? std::vector<std::string>() : place.access().state_names(place.index());
}

int64_t step_count(const at::Tensor& parameter) {
  const Place place(parameter, "step_count");
  return place.is_frozen() ? 0 : place.access().step_counts()[place.index()];
}

void set_step_counts(const std::vector<at::Tensor>& parameters, const std::vector<int64_t>& counts) {
  if (parameters.size() != counts.size())
    throw ShapeError(str("set_step_counts: ", parameters.size(), " parameters and ", counts.size(), " counts"));
  if (parameters.empty()) return;
  ParameterAccess& access = WritablePlace(parameters.front(), "set_step_counts").access();
  std::vector<int64_t> all = access.step_counts();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const WritablePlace place(parameters[i], "set_step_counts");
    if (&place.access() != &access) throw StateError("set_step_counts: parameters of several engines");
    all[place.index()] = counts[i];
  }
  access.set_step_counts(all);
}

std::optional<at::Tensor> safe_get_full_grad(const at::Tensor& parameter) {
  const Place place(parameter, "safe_get_full_grad", Subject::kGradient);
  if (place.is_frozen()) return std::nullopt;
  if (place.access().pager().defers_reductions()) return place.gradient_of_this_rank();
  if (!place.reduce()) return std::nullopt;
  return place.full_gradient();
}

void safe_set_full_fp32_param(const at::Tensor& parameter, const at::Tensor& value) {
  const WritablePlace place(parameter, "safe_set_full_fp32_param");
  place.access().set_value(place.index(), parameter, place.checked(value));
}

void safe_set_full_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state) {
  const WritablePlace place(parameter, "safe_set_full_optimizer_state");
  place.write(place.state(state), place.checked(value));
}

void safe_set_full_grad(const at::Tensor& parameter, const at::Tensor& value) {
  const WritablePlace place(parameter, "safe_set_full_grad", Subject::kGradient);
  const at::Tensor whole = place.checked(value);
  place.require_gradient();
  place.write_gradient(whole);
}

std::optional<at::Tensor> safe_get_local_fp32_param(const at::Tensor& parameter) {
  const Place place(parameter, "safe_get_local_fp32_param");
  if (place.is_frozen()) return std::nullopt;
  place.access().settle();
  return Place::local(place.access().value(place.index()));
}

std::optional<at::Tensor> safe_get_local_optimizer_state(const at::Tensor& parameter, const std::string& state) {
  const Place place(parameter, "safe_get_local_optimizer_state");
  if (place.is_frozen()) return std::nullopt;
  return Place::local(place.state(state));
}

std::optional<at::Tensor> safe_get_local_grad(const at::Tensor& parameter) {
  const Place place(parameter, "safe_get_local_grad", Subject::kGradient);
  if (place.is_frozen() || !place.reduce()) return std::nullopt;
  return Place::local(place.access().gradient(place.index())).div_(place.access().loss_scale());
}

void safe_set_local_fp32_param(const at::Tensor& parameter, const at::Tensor& value) {
  const WritablePlace place(parameter, "safe_set_local_fp32_param");
  ParameterAccess& access = place.access();
  ParameterAccess::Part part = access.value(place.index());
  part.data = place.checked_local(value, part);
  access.set_value(place.index(), parameter, access.join(place.index(), access.gather(place.index(), part)));
}

void safe_set_local_optimizer_state(const at::Tensor& parameter, const at::Tensor& value, const std::string& state) {
  const WritablePlace place(parameter, "safe_set_local_optimizer_state");
  const ParameterAccess::Part part = place.state(state);
  part.write(place.checked_local(value, part));
}

void safe_set_local_grad(const at::Tensor& parameter, const at::Tensor& value) {
  const WritablePlace place(parameter, "safe_set_local_grad", Subject::kGradient);
  place.require_gradient();
  const ParameterAccess::Part part = place.access().gradient(place.index());
  part.write(place.checked_local(value, part) * place.access().loss_scale());
  place.access().pager().gradient_written(place.index());
}

void safe_update_full_grad_vectorized(const std::vector<at::Tensor>& parameters, const GradientUpdate& update) {
  constexpr const char* kCall = "safe_update_full_grad_vectorized";
  for (const at::Tensor& parameter : parameters) (void)Place(parameter, kCall, Subject::kGradient);  // all or nothing
  bool reduced = false;
  for (const at::Tensor& parameter : parameters) {
    const Place place(parameter, kCall, Subject::kGradient);
    if (place.is_frozen()) continue;
    if (!std::exchange(reduced, true)) (void)place.reduce();
    if (!place.access().pager().has_gradient(place.index())) continue;
    place.write_gradient(place.checked(update(place.full_gradient(), parameter)));
  }
}

}  // namespace trireme
