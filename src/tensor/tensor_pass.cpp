#include "tensor/tensor_pass.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/intercept/transforms.h"

namespace trireme::tensor {
namespace {

constexpr size_t kMostEntered = 4;

/// Operators of which results share an argument's memory. An argument that is written is a result, too, and no view.
bool gives_views(const OperatorCall& call) {
  const auto& returns = call.op.schema().returns();
  return std::any_of(returns.begin(), returns.end(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

bool asks_gradient(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

}  // namespace

TensorPass::TensorPass(Group& group)
    : group_(group),
      grid_({group.size()}),
      exchanges_(std::make_shared<AxisExchanges>(group, GradientLaw::kWhole, "tensor_parallel")),
      scope_(InterceptScope::Watch::kWrites, this) {
  RankContext::of_this_thread().streams().set_slice(static_cast<uint64_t>(group.rank()) + 1);
}

TensorPass::~TensorPass() { RankContext::of_this_thread().streams().set_slice(0); }

void TensorPass::run(OperatorCall& call, Next next) {
  const bool is_forward = torch::autograd::get_current_graph_task_id() == -1 || at::GradMode::is_enabled();
  if (!is_forward || table_.is_empty()) return next(call);
  CutArguments found = find_arguments(call);
  if (found.empty()) return next(call);
  running_ = call.op.schema().name();
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    if (has_tangent(tensor))
      refuse(call, found[0].tensor, "gets a tangent of forward-mode differentiation (jvp()) beside a part",
             "take the derivative by backward(), or of a module before initialize()");
  });
  run_found(call, next, std::move(found));
}

CutArguments TensorPass::find_arguments(const OperatorCall& call) {
  CutArguments found;
  for (size_t i = 0; i < call.traits.arguments; ++i)
    for_each_tensor(call.arguments().slice(i, 1), [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      const bool is_hidden = !tensor.unsafeGetTensorImpl()->unsafe_storage();
      const at::Tensor& inner = is_hidden ? under_transforms(tensor) : tensor;
      auto known = table_.find(inner);
      if (!known) return;
      if (is_hidden && !inner.is_same(tensor) && !known->is_copy)
        refuse(call, inner, "is inside of torch.func's vmap() or grad(), and works on a part",
               "write the batch dim out, and call backward()");
      if (known->is_unknown)
        refuse(call, tensor, "gets a view whose dims are not known",
               torch::autograd::get_current_graph_task_id() == -1
                   ? "make views by libtorch's operators"
                   : "gradients of gradients (create_graph=True) are not there with tensor_parallel");
      if (known->local_count > 0) return check_count(call, i, *known);
      if (known->is_copy) {
        if (i < 64 && (call.traits.written >> i & 1) != 0)
          refuse(call, tensor, "writes into a copy of other ranks' elements", "write by torch.where() instead");
        return;
      }
      found.push_back({i, tensor, std::move(known->cut), known->gathers_output, known->is_parameter});
    });
  return found;
}

void TensorPass::run_found(OperatorCall& call, Next next, CutArguments found) {
  for (CutArgument& one : found) {  // parameters of which other ranks have elements, too
    if (!one.tensor.is_leaf() || !asks_gradient(one.tensor) || !one.cut.ranges->overlaps()) continue;
    if (!call.arguments()[one.index].isTensor() || (one.index < 64 && (call.traits.written >> one.index & 1) != 0))
      continue;
    one.tensor = next.run(call, [&] { return exchanges_->share(one.tensor, one.cut, running_); });
    argument(call, one.index) = one.tensor;
  }
  if (call.traits.random && !value_of(call, "generator").isNone()) return run_whole(call, next, found);
  if (auto registered = registered_(call.op)) return run_row(call, next, {.registered = std::move(registered)}, found);
  const OperatorRule* const rule = rules_(call.op);
  if (rule != nullptr && rule->role == OperatorRole::kAttention && !fit_heads(call, next, found))
    return run_whole(call, next, found);
  if (rule != nullptr && rule->role == OperatorRole::kClassLoss) return run_class_loss(call, next, found);
  if (rule != nullptr && rule->role == OperatorRole::kPart && !takes_wholes()) return run_part(call, next, found);
  if (const OperatorRow* const entry = rows_(call.op)) {
    if (!mean_wholes(call, found[0])) return run_whole(call, next, found);
    return run_row(call, next, {.entry = entry}, found);
  }
  if (rule != nullptr && (rule->role == OperatorRole::kNone || rule->role == OperatorRole::kNew)) return next(call);
  if (rule != nullptr) return run_whole(call, next, found);
  run_without_rule(call, next, found);
}

/// Code of libtorch's own, of which nothing is known but that it is made of other operators, runs on wholes.
void TensorPass::run_without_rule(OperatorCall& call, Next next, const CutArguments& found) {
  if (call.traits.composite && !call.traits.random) return run_whole(call, next, found);
  refuse(call, found[0].tensor, "is not known to tensor parallelism, and has an argument",
         "gather it first (engine.gather(tensor)), say by register_partition_rule() what its slices are, or leave the "
         "parameter whole that it is computed from (partition_config, \"partition_type\": \"skip\")");
}

/// Right whatever the operator does, as long as it writes nothing.
void TensorPass::run_whole(OperatorCall& call, Next next, const CutArguments& found) {
  for (const CutArgument& one : found)
    if (one.index < 64 && (call.traits.written >> one.index & 1) != 0)
      refuse(call, one.tensor, "writes across slices, into",
             "write into whole tensors, or along dims that are not cut");
  const bool views = gives_views(call);
  const auto whole_of = [&](const at::Tensor& tensor) {
    for (const CutArgument& one : found)
      if (one.tensor.is_same(tensor)) return next.run(call, [&] { return whole(one); });
    return tensor;
  };
  for (size_t i = 0; i < call.traits.arguments; ++i) {
    if (std::none_of(found.begin(), found.end(), [&](const CutArgument& one) { return one.index == i; })) continue;
    c10::IValue& value = argument(call, i);
    if (value.isTensor()) {
      c10::IValue made = whole_of(value.toTensor());
      argument(call, i) = std::move(made);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(whole_of(tensor));
      argument(call, i) = std::move(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList().vec())
        list.push_back(tensor ? std::optional(whole_of(*tensor)) : std::nullopt);
      argument(call, i) = std::move(list);
    }
  }
  next(call);
  if (!views) return;
  for_each_tensor(call.results(), [&](const at::Tensor& result) {
    if (result.defined() && result.has_storage()) table_.add(result, {.is_copy = true});
  });
}

// --- what handlers are made of ---

std::vector<int64_t> TensorPass::whole_sizes_of(const CutArgument& one) const {
  std::vector<int64_t> sizes = one.tensor.sizes().vec();
  sizes[static_cast<size_t>(one.cut.dim)] = one.cut.whole();
  return sizes;
}

std::optional<std::vector<int64_t>> TensorPass::whole_sizes(const at::Tensor& tensor) {
  if (torch::autograd::get_current_graph_task_id() != -1 && !at::GradMode::is_enabled()) return {};
  const auto known = find(tensor);
  if (!known || !known->is_cut()) return {};
  return whole_sizes_of({0, tensor, known->cut});
}

/// The result of `make` for `tensor`, computed once for all layers that use it.
template <class Make>
at::Tensor TensorPass::entered_once(const at::Tensor& tensor, const Make& make) {
  if (tensor.is_inference()) return make();  // it has no version
  for (const Entered& one : entered_)
    if (one.whole._unsafe_get_target() == tensor.unsafeGetTensorImpl() && !one.whole.expired() &&
        one.version == tensor._version() && one.has_gradient == asks_gradient(tensor))
      return one.result;
  std::erase_if(entered_, [](const Entered& one) { return one.whole.expired(); });
  if (entered_.size() >= kMostEntered) entered_.erase(entered_.begin());
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  at::Tensor result = make();
  entered_.push_back(
      {Weak(tensor.getIntrusivePtr()), static_cast<uint32_t>(tensor._version()), asks_gradient(tensor), result});
  return result;
}

at::Tensor TensorPass::enter(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  exchanges_->see(tensor, running_);
  if (!asks_gradient(tensor)) return tensor;
  return entered_once(tensor, [&] { return exchanges_->enter(tensor, running_); });
}

at::Tensor TensorPass::enter_whole(const CutArgument& one) {
  if (one.cut.ranges->overlaps()) return enter(whole(one));
  return entered_once(one.tensor, [&] { return exchanges_->gather_and_enter(one.tensor, one.cut, running_); });
}

TensorPass::Sum TensorPass::sum(const at::Tensor& part, const OperatorCall& call) {
  const int64_t dim = part.dim() - 2;
  const std::string& name = call.op.schema().name();
  // Two dims may be anything: a matrix of weights alone, as a penalty has it.
  const bool is_of_tokens =
      part.dim() > 2 || name == "aten::linear" || name == "aten::addmm" || name == "aten::embedding";
  if (!shards_tokens_ || !is_of_tokens || dim < 0 || part.size(dim) < group_.size() || part.numel() == 0)
    return {exchanges_->sum(part, name_of(call)), {}};
  if (!takes_wholes())
    throw StateError(
        str(name_of(call),
            ": tokens are sharded (tensor_parallel.sequence_parallel), and a C++ module that reads sizes of "
            "activations sees those of its own tokens; leave sequence_parallel out, or, where the module "
            "reads sizes of its inputs alone, set InitializeOptions::takes_sizes_from_inputs"));
  Cut cut{.dim = dim, .ranges = std::make_shared<const Ranges>(Ranges::even(part.size(dim), group_.size()))};
  at::Tensor own = exchanges_->scatter(part, cut, name_of(call));
  return {std::move(own), std::move(cut)};
}

at::Tensor TensorPass::take(const at::Tensor& tensor, const Cut& cut) {
  return slice_of(enter(tensor), cut, group_.rank());
}

at::Tensor TensorPass::whole(const CutArgument& one) { return exchanges_->gather(one.tensor, one.cut, running_); }

at::Tensor TensorPass::recut(const CutArgument& one, const Cut& cut) {
  const std::vector<Interval>& asked = cut.ranges->of_rank(group_.rank());
  if (one.cut.has_same_ranges(cut)) return one.tensor;
  bool is_inside = one.cut.outer == cut.outer && one.cut.ranges->whole() == cut.ranges->whole();
  for (int rank = 0; is_inside && rank < group_.size(); ++rank)
    for (const Interval& part : cut.ranges->of_rank(rank))
      is_inside = is_inside && one.cut.ranges->place_of(rank, part).size() == part.size();
  if (!is_inside) return take(whole(one), cut);
  std::vector<std::vector<Interval>> local(group_.size());
  for (const Interval& part : asked) local[group_.rank()].push_back(one.cut.ranges->place_of(group_.rank(), part));
  return slice_of(one.tensor,
                  {.dim = one.cut.dim,
                   .outer = cut.outer,
                   .ranges = std::make_shared<const Ranges>(one.cut.ranges->local(group_.rank()), std::move(local))},
                  group_.rank());
}

at::Tensor TensorPass::beside(const OperatorCall& call, const at::Tensor& tensor, int64_t from_right,
                              const CutArgument& lead) {
  if (!tensor.defined() || tensor.dim() < from_right) return enter(tensor);
  const int64_t dim = tensor.dim() - from_right;
  if (tensor.size(dim) == 1) return enter(tensor);
  if (tensor.size(dim) == lead.cut.whole()) return take(tensor, cut_along(lead.cut, dim));
  refuse(call, lead.tensor, str("joins ", tensor.sizes(), ", which is not cut, with a part"),
         str("make it of the whole's size, ", lead.cut.whole(), " in dim ", dim));
}

/// A program that reads sizes of a slice divides a sum over all ranks by the number of its own elements.
void TensorPass::check_count(const OperatorCall& call, size_t index, const CutTensor& sum) const {
  const std::string& name = call.op.schema().name();
  const bool divides = name.starts_with("aten::div") || name.starts_with("aten::true_divide");
  if ((!divides && !name.starts_with("aten::mul")) || sum.local_count == sum.whole_count) return;
  for (size_t i = 0; i < std::min<size_t>(call.traits.arguments, 2); ++i) {
    const c10::IValue& value = call.arguments()[i];
    const bool is_number = value.isTensor() && value.toTensor().defined() && value.toTensor().dim() == 0 &&
                           value.toTensor().unsafeGetTensorImpl()->is_wrapped_number();
    if (i == index || (!is_number && !value.isScalar())) continue;
    const WithoutInterception unseen;
    const double number = is_number ? value.toTensor().item<double>() : value.toScalar().toDouble();
    const double count = divides ? number : 1 / number;
    if (std::abs(count - static_cast<double>(sum.local_count)) > 1e-6 * count) continue;
    throw StateError(str(name_of(call), " divides a sum over the ", sum.whole_count,
                         " elements of a tensor that is cut by ", sum.local_count, ", the number that rank ",
                         group_.rank(), " of group '", group_.name(), "' has; use mean(), or the whole's number"));
  }
}

std::string TensorPass::name_of(const OperatorCall& call) const { return call.op.schema().name(); }

void TensorPass::refuse(const OperatorCall& call, const at::Tensor& tensor, const std::string& reason,
                        const std::string& fix) {
  const auto known = table_.find(tensor);
  const std::string& parameter = known ? known->parameter : std::string();
  throw StateError(str(name_of(call), " ", reason, ": ", tensor.sizes(), " is a slice",
                       parameter.empty() ? "" : " of \"", parameter, parameter.empty() ? "" : "\"", ", that of rank ",
                       group_.rank(), " of group '", group_.name(), "'; ", fix));
}

}  // namespace trireme::tensor
