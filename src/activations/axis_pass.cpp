#include "trireme/activations/axis_pass.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "activations/held.h"
#include "activations/selections.h"
#include "activations/written_copies.h"
#include "trireme/base/error.h"
#include "trireme/intercept/program.h"
#include "trireme/intercept/transforms.h"

namespace trireme {
namespace {

constexpr size_t kMostEntered = 4, kMostKept = 256;

bool asks_gradient(const at::Tensor& tensor) { return at::GradMode::is_enabled() && tensor.requires_grad(); }

bool is_written(const OperatorCall& call, size_t argument) {
  return argument < 64 && (call.traits.written >> argument & 1) != 0;
}

AxisGrid grid_of(const std::vector<PassAxis>& axes) {
  std::vector<int> ranks;
  for (const PassAxis& axis : axes) ranks.push_back(axis.exchanges->group().size());
  return AxisGrid(std::move(ranks));
}

int position_of(const std::vector<PassAxis>& axes) {
  int position = 0;
  for (const PassAxis& axis : axes)
    position = position * axis.exchanges->group().size() + axis.exchanges->group().rank();
  return position;
}

std::vector<Undivided> undivided_of(const std::vector<PassAxis>& axes) {
  std::vector<Undivided> all;
  for (const PassAxis& axis : axes) all.push_back(axis.policy->undivided());
  return all;
}

/// A rank's place along each set of axes, the first axis alone first.
std::vector<uint64_t> places_of_streams(const AxisGrid& grid, int position) {
  std::vector<uint64_t> places;
  for (int bits = 1; bits < 1 << grid.axes(); ++bits) {
    uint64_t place = 0;
    for (int axis = 0; axis < grid.axes(); ++axis)
      if ((bits >> axis & 1) != 0)
        place = place * static_cast<uint64_t>(grid.ranks(axis)) + static_cast<uint64_t>(grid.rank(position, axis));
    places.push_back(place + 1);
  }
  return places;
}

std::shared_ptr<const PlacedTensor> known_of(const PartTensor& part) {
  const std::shared_ptr<const PartOf>& of = part.known();
  return std::make_shared<const PlacedTensor>(
      PlacedTensor{.placement = std::shared_ptr<const Placement>(of, &of->placement),
                   .is_parameter = of->is_of_parameter,
                   .is_copy = of->is_copy});
}

/// Null: `tensor` is no part of the pass that has these placements.
PartTensor* own_part(const at::Tensor& tensor, const KeptPlacements& kept) {
  PartTensor* const part = PartTensor::of(tensor);
  const bool is_own = part != nullptr && (part->known()->ranks == nullptr || part->known()->ranks == kept.ranks());
  return is_own ? part : nullptr;
}

class RanksOfPass final : public PartRanks {
 public:
  explicit RanksOfPass(AxisPass& pass) : pass_(&pass) {}
  void leave() { pass_ = nullptr; }
  at::Tensor whole(const at::Tensor& part) override {
    const auto known = pass().find(part);
    if (known != nullptr && known->is_unknown)
      throw StateError(
          str("a function of the program's own gives ", part.sizes(),
              " as the gradient of a whole tensor, of which this rank's part is right in rows that are "
              "not known; make it of parts by cat() or pad(), or write into a tensor of the part's sizes"));
    if (known == nullptr || !known->is_cut() || known->held == Held::kWhole) return part;
    const WithoutInterception own_operators;
    return pass().whole(known->held == Held::kWithin
                            ? placed_argument(part_of_whole(pass(), part, *known->placement), part_by(known->placement))
                            : placed_argument(part, known));
  }
  at::Tensor mean(const at::Tensor& whole, const Placement& placement) override {
    const WithoutInterception own_operators;
    at::Tensor mean = whole;
    for (const Cut& cut : placement.at(pass().position())) {
      AxisExchanges& exchanges = pass().exchanges(cut.axis);
      if (exchanges.law() == GradientLaw::kShares)
        mean = exchanges.all_reduce(mean, "a gradient of a program's function") / exchanges.group().size();
    }
    return mean;
  }

 private:
  AxisPass& pass() const {
    if (pass_ == nullptr)
      throw StateError("backward: a program's function computed on parts of an engine that is gone");
    return *pass_;
  }
  AxisPass* pass_;
};

[[noreturn]] void refuse_transform(AxisPass& pass, const OperatorCall& call, const at::Tensor& part) {
  pass.refuse(call, part, "is inside of torch.func's vmap() or grad(), and works on a part",
              "write the batch dim out, and call backward()");
}

/// An operator that gives its argument gives the program's part.
void give_back(OperatorCall& call, const PlacedArguments& given) {
  const auto part_of = [&](const at::Tensor& result) {
    return std::ranges::find_if(
        given, [&](const PlacedArgument& one) { return one.part.defined() && one.tensor.is_same(result); });
  };
  for (const PlacedArgument& one : given)
    if (one.part.defined() && is_written(call, one.index)) PartTensor::of(one.part)->local();
  const size_t count = call.op.schema().returns().size();
  for (size_t i = call.stack.size() - count; i < call.stack.size(); ++i) {
    if (!call.stack[i].isTensor()) continue;
    const auto one = part_of(call.stack[i].toTensor());
    if (one != given.end()) call.stack[i] = one->part;
  }
}

/// The name of the first argument that has one; "": none.
std::string parameter_among(const PlacedArguments& found) {
  for (const PlacedArgument& one : found)
    if (!one.known->parameter.empty()) return one.known->parameter;
  return {};
}

/// The parameter of an operator names its exchanges, where they are counted; those of the operators that it is made of,
/// too, where these compute with none.
class ExchangesOfOperator {
 public:
  ExchangesOfOperator(const std::vector<PassAxis>& axes, const PlacedArguments& found) {
    for (const PassAxis& axis : axes) {
      AxisExchanges& exchanges = *axis.exchanges;
      if (!exchanges.is_counting()) continue;
      if (std::string name = parameter_among(found); !name.empty())
        outer_.emplace_back(&exchanges, exchanges.set_parameter(std::move(name)));
    }
  }
  ~ExchangesOfOperator() {
    for (auto& [exchanges, name] : outer_) exchanges->set_parameter(std::move(name));
  }
  ExchangesOfOperator(const ExchangesOfOperator&) = delete;
  ExchangesOfOperator& operator=(const ExchangesOfOperator&) = delete;

 private:
  std::vector<std::pair<AxisExchanges*, std::string>> outer_;
};

/// equal() of two parts that are cut alike: ranks compare their own. False: it is none.
bool run_equal(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found) {
  const std::string& name = call.op.schema().name();
  if (name != "aten::equal" || found.size() != 2 || !(*found[0].known->placement == *found[1].known->placement))
    return false;
  const bool is_same = next.run(call, [&] { return found[0].tensor.equal(found[1].tensor); });
  const WithoutInterception own_operators;
  at::Tensor differences =
      at::full({1}, is_same ? 0 : 1, at::TensorOptions(at::kDouble).device(found[0].tensor.device()));
  for (const Cut& cut : found[0].known->placement->at(pass.position()))
    differences = pass.exchanges(cut.axis).all_reduce(differences, name);
  give(call, {differences.item<double>() == 0});
  return true;
}

}  // namespace

std::shared_ptr<const Placement> KeptPlacements::placement(Placement placement) {
  for (const std::shared_ptr<const Placement>& one : placements_)
    if (*one == placement) return one;
  if (placements_.size() >= kMostKept) placements_.erase(placements_.begin());
  return placements_.emplace_back(std::make_shared<const Placement>(std::move(placement)));
}

std::shared_ptr<const PartOf> KeptPlacements::part_of(std::vector<int64_t> sizes,
                                                      const std::shared_ptr<const Placement>& placement,
                                                      int64_t shares) {
  for (const std::shared_ptr<const PartOf>& one : parts_)
    if (one->sizes == sizes && one->placement == *placement) return one;
  if (parts_.size() >= kMostKept) parts_.erase(parts_.begin());
  return parts_.emplace_back(std::make_shared<const PartOf>(std::move(sizes), *placement, /*is_of_parameter=*/false,
                                                            /*is_copy=*/false, shares, ranks_));
}

RandomStream stream_of(const Placement::Cuts& cuts) {
  uint8_t bits = 0;
  for (const Cut& cut : cuts) bits |= static_cast<uint8_t>(1 << cut.axis);
  return stream_of_axes(bits);
}

PlacedArgument placed_argument(const at::Tensor& tensor, std::shared_ptr<const PlacedTensor> known) {
  if (PartTensor* const part = PartTensor::of(tensor)) return {0, part->local(), std::move(known), tensor};
  return {0, tensor, std::move(known)};
}

void run_opened(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments found) {
  for (PlacedArgument& one : found)  // cut for this operator, or joined: its operators have to know
    if (!one.part.defined() && !(one.known->is_parameter && one.tensor.is_leaf()))
      one.part = pass.as_part(one.tensor, one.known->placement);
  for (size_t i = 0; i < call.traits.arguments; ++i) {
    std::vector<at::Tensor> tensors = tensors_among(call.arguments().slice(i, 1));
    bool has_part = false;
    for (at::Tensor& tensor : tensors)
      for (const PlacedArgument& one : found)
        if (one.index == i && one.part.defined() && one.tensor.is_same(tensor)) {
          tensor = one.part;
          has_part = true;
          break;
        }
    if (has_part) argument(call, i) = with_tensors({argument(call, i)}, tensors)[0];
  }
  next.open(call);
}

std::shared_ptr<const OwnRow> AxisPolicy::own_row(AxisPass&, const c10::OperatorHandle&) { return nullptr; }
bool AxisPolicy::fit(AxisPass&, OperatorCall&, Next, PlacedArguments&) { return true; }
bool AxisPolicy::run(AxisPass&, OperatorCall&, Next, PlacedArguments&) { return false; }
at::Tensor AxisPolicy::summed_product(AxisPass&, const OperatorCall&, Next) { return {}; }
std::optional<Cut> AxisPolicy::scattered(const AxisPass&, const OperatorCall&, const at::Tensor&) { return {}; }

AxisPass::AxisPass(PassOrder order, std::vector<PassAxis> axes)
    : order_(order),
      axes_(std::move(axes)),
      undivided_(undivided_of(axes_)),
      grid_(grid_of(axes_)),
      position_(position_of(axes_)),
      kept_(std::make_shared<RanksOfPass>(*this)),
      scope_(InterceptScope::Watch::kWrites, this) {
  RankContext::of_this_thread().streams().set_slices(places_of_streams(grid_, position_));
}

AxisPass::~AxisPass() {
  static_cast<RanksOfPass&>(*kept_.ranks()).leave();  // graphs may live on
  RankContext::of_this_thread().streams().set_slice(0);
}

void AxisPass::run(OperatorCall& call, Next next) {
  // libtorch's own nodes get local tensors alone, so a part among the arguments is a program's, in backward too.
  const bool has_part = gives_parts_ && has_parts(call, kept_.ranks().get());
  const bool is_forward = torch::autograd::get_current_graph_task_id() == -1 || at::GradMode::is_enabled() ||
                          (gives_parts_ && !has_part && program_runs_in_backward());
  if (!has_part && (!is_forward || table_.is_empty())) return next(call);
  WrittenCopies written;
  PlacedArguments found = find_arguments(call, written);
  const std::shared_ptr<CopyOf> selected = selected_from(*this, call, found);
  if (found.empty())
    next(call);
  else
    run_placed(call, next, std::move(found), has_part);
  for (const auto& [copy, origin] : written) write_back(call, next, copy, *origin);
  if (selected != nullptr) note_origin(*this, selected, call.stack.back().toTensor());
}

void AxisPass::run_placed(OperatorCall& call, Next next, PlacedArguments found, bool has_part) {
  running_ = call.op.schema().name();
  const ExchangesOfOperator named(axes_, found);
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    if (has_tangent(tensor))
      refuse(call, found[0].tensor, "gets a tangent of forward-mode differentiation (jvp()) beside a part",
             "take the derivative by backward(), or of a module before initialize()");
  });
  if (!has_part) return HeldRun(*this, call, next).run(std::move(found));
  const PlacedArguments given = found;
  HeldRun(*this, call, next).run(std::move(found));
  give_back(call, given);
}

void AxisPass::add(const at::Tensor& tensor, PlacedTensor known) {
  if (gives_parts_ && known.is_cut() && known.held == Held::kPart && tensor.is_leaf())
    slices_.add(tensor,
                {.sizes = whole_sizes_of({0, tensor, std::make_shared<const PlacedTensor>(known)}),
                 .placement = *known.placement,
                 .is_of_parameter = known.is_parameter,
                 .ranks = kept_.ranks()},
                known.parameter);
  table_.add(tensor, std::move(known));
}

std::shared_ptr<const PlacedTensor> AxisPass::find(const at::Tensor& tensor) {
  if (PartTensor* const part = own_part(tensor, kept_)) return known_of(*part);
  if (PartTensor::of(tensor) != nullptr) return nullptr;
  return std::this_thread::get_id() == thread_ ? table_.find(tensor) : nullptr;
}

/// From then on the arguments of `call` are local tensors.
PlacedArguments AxisPass::find_arguments(OperatorCall& call, WrittenCopies& written) {
  PlacedArguments found;
  bool is_transformed = false;  // some tensor is one of torch.func's
  for (size_t i = 0; i < call.traits.arguments; ++i) {
    bool has_part = false;
    for_each_tensor(call.arguments().slice(i, 1), [&](const at::Tensor& tensor) {
      if (!tensor.defined()) return;
      if (PartTensor* const part = gives_parts_ ? own_part(tensor, kept_) : nullptr) {
        found.push_back({i, part->local(), known_of(*part), tensor});
        if (found.back().known->is_copy && is_written(call, i))
          refuse(call, found.back().tensor, "writes into a copy of other ranks' elements",
                 "write by torch.where() instead");
        has_part = true;
        return;
      }
      if (gives_parts_ && PartTensor::of(tensor) != nullptr) return;  // another pass's
      const bool is_hidden = !tensor.unsafeGetTensorImpl()->unsafe_storage();
      const at::Tensor& inner = is_hidden ? under_transforms(tensor) : tensor;
      is_transformed = is_transformed || !inner.is_same(tensor);
      auto known = table_.find(inner);
      if (!known) return;
      if (!inner.is_same(tensor)) {
        if (known->held == Held::kWhole) return;
        if (!known->is_copy) refuse_transform(*this, call, inner);
      }
      if (known->is_unknown)
        refuse(call, tensor, "gets a view whose dims are not known",
               torch::autograd::get_current_graph_task_id() == -1
                   ? "make views by libtorch's operators"
                   : str("gradients of gradients (create_graph=True) are not there with ", exchanges(0).setting()));
      if (known->local_count > 0) return check_count(call, i, *known);
      if (known->is_copy) {
        if (is_written(call, i) && known->copy_of != nullptr)
          written.emplace_back(tensor, known->copy_of);
        else if (is_written(call, i))
          refuse(call, tensor, "writes into a copy of other ranks' elements", "write by torch.where() instead");
        if (!known->is_cut()) return;
      }
      found.push_back({i, tensor, std::move(known)});
    });
    if (!has_part) continue;
    c10::IValue& value = argument(call, i);
    if (value.isTensor()) {
      value = found.back().tensor;
      continue;
    }
    std::vector<at::Tensor> tensors = tensors_among(call.arguments().slice(i, 1));
    for (at::Tensor& tensor : tensors)
      if (tensor.defined() && own_part(tensor, kept_) != nullptr) tensor = own_part(tensor, kept_)->local();
    value = with_tensors({value}, tensors)[0];
  }
  if (!is_transformed) return found;
  std::erase_if(found, [](const PlacedArgument& one) { return one.known->held == Held::kWhole; });
  if (!found.empty()) refuse_transform(*this, call, found[0].tensor);
  return found;
}

/// Parameters of which other ranks have elements, too.
void AxisPass::share_elements(OperatorCall& call, Next next, PlacedArguments& found) {
  for (PlacedArgument& one : found) {
    if (!one.known->is_parameter || !one.tensor.is_leaf() || !asks_gradient(one.tensor)) continue;
    if (!call.arguments()[one.index].isTensor() || is_written(call, one.index)) continue;
    for (const Cut& cut : one.known->placement->at(position_)) {
      if (!cut.ranges->overlaps()) continue;
      one.tensor = next.run(call, [&] { return exchanges(cut.axis).share(one.tensor, cut, running_); });
      one.part = at::Tensor();
      argument(call, one.index) = one.tensor;
    }
  }
}

void AxisPass::run_found(OperatorCall& call, Next next, PlacedArguments found) {
  share_elements(call, next, found);
  if (call.traits.random && !value_of(call, "generator").isNone()) return run_whole(call, next, found);
  for (const PassAxis& axis : axes_)
    if (auto own = axis.policy->own_row(*this, call.op)) return run_row(call, next, {.own = std::move(own)}, found);
  for (const PassAxis& axis : axes_)
    if (!axis.policy->fit(*this, call, next, found)) return run_whole(call, next, found);
  for (const PassAxis& axis : axes_)
    if (axis.policy->run(*this, call, next, found)) return;
  const OperatorRule* const rule = rules_(call.op);
  if (rule != nullptr && run_selection(*this, call, next, found, rule->role)) return;
  if (rule != nullptr && rule->role == OperatorRole::kRead && run_equal(*this, call, next, found)) return;
  if (goes_by_mask(call)) return run_whole(call, next, found);
  if (const OperatorRow* const entry = rows_(call.op)) return run_row(call, next, {.entry = entry}, found);
  if (rule != nullptr && rule->role == OperatorRole::kNew) return next(call);
  if (rule != nullptr && rule->role == OperatorRole::kNone) {
    // An operator that looks at its arguments, as TorchScript reads sizes, sees them as the program does.
    return call.traits.composite ? run_opened(*this, call, next, found) : next(call);
  }
  // Code of libtorch's own, of which nothing is known but that it is made of other operators, runs on wholes.
  if (rule != nullptr || (call.traits.composite && !call.traits.random)) return run_whole(call, next, found);
  const int axis = found[0].known->placement->at(position_).front().axis;
  refuse(call, found[0].tensor, str("is not known to ", axes_[axis].policy->name(), ", and has an argument"),
         axes_[axis].policy->fix_for_unknown(call.op));
}

void AxisPass::run_over_others(int axis, OperatorCall& call, Next next, PlacedArguments found) {
  for (PlacedArgument& one : found) {
    Placement placement = *one.known->placement;
    for (Placement::Cuts& cuts : placement)
      cuts.erase(std::remove_if(cuts.begin(), cuts.end(), [axis](const Cut& cut) { return cut.axis == axis; }),
                 cuts.end());
    PlacedTensor known = *one.known;
    known.placement = kept_.placement(std::move(placement));
    one.known = std::make_shared<const PlacedTensor>(std::move(known));
  }
  std::erase_if(found, [this](const PlacedArgument& one) { return one.known->placement->at(position_).empty(); });
  found.empty() ? next(call) : run_found(call, next, std::move(found));
}

void AxisPass::run_whole(OperatorCall& call, Next next, const PlacedArguments& found) {
  for (const PlacedArgument& one : found)
    for (const Cut& cut : one.known->placement->at(position_)) {
      if (undivided_[cut.axis] == Undivided::kGather || is_of_numbers(one.tensor)) continue;
      if (gives_parts_ && call.traits.composite && !call.traits.random) return run_opened(*this, call, next, found);
      refuse(call, one.tensor,
             str("needs whole tensors, and ", axes_[cut.axis].policy->name(), " cuts dim ", cut.dim, " of ",
                 at::IntArrayRef(whole_sizes_of(one))),
             axes_[cut.axis].policy->fix_for_unknown(call.op), cut.axis);
    }
  run_gathered(call, next, found);
}

/// Right whatever the operator does, as long as it writes nothing.
void AxisPass::run_gathered(OperatorCall& call, Next next, const PlacedArguments& found) {
  for (const PlacedArgument& one : found)
    if (is_written(call, one.index))
      refuse(call, one.tensor, "writes across slices, into",
             "write into whole tensors, or along dims that are not cut");
  const bool views = gives_views(call);
  std::vector<at::Tensor> tensors;
  for (const Operand& one : operands_of(call, found))
    tensors.push_back(one.found != nullptr ? next.run(call, [&] { return whole(*one.found); }) : one.tensor);
  const std::vector<c10::IValue> arguments = with_tensors(call.arguments().vec(), tensors);
  for (size_t i = 0; i < arguments.size(); ++i) argument(call, i) = arguments[i];
  next(call);
  if (!views) return;
  for_each_tensor(call.results(), [&](const at::Tensor& result) {
    if (result.defined() && result.has_storage()) table_.add(result, {.is_copy = true});
  });
}

bool gives_views(const OperatorCall& call) {
  return std::ranges::any_of(call.op.schema().returns(), [](const c10::Argument& result) {
    return result.alias_info() != nullptr && !result.alias_info()->isWrite();
  });
}

// --- what policies are made of ---

const Cut* AxisPass::cut_of(const PlacedTensor& known, int axis) const {
  const Placement::Cuts& cuts = known.placement->at(position_);
  const auto* const found = std::ranges::find(cuts, axis, &Cut::axis);
  return found != cuts.end() ? found : nullptr;
}

PlacedTensor AxisPass::with_cut(const PlacedTensor& known, const Cut& cut) {
  Placement placement = known.placement != nullptr ? *known.placement : Placement(grid_.positions());
  for (int position = 0; position < grid_.positions(); ++position) {
    Placement::Cuts& cuts = placement.at(position);
    auto* at = std::ranges::find_if(cuts, [&](const Cut& one) { return one.axis >= cut.axis; });
    if (at != cuts.end() && at->axis == cut.axis)
      *at = cut;
    else
      cuts.insert(at, cut);
  }
  PlacedTensor made = known;
  made.placement = kept_.placement(std::move(placement));
  return made;
}

std::vector<int64_t> AxisPass::whole_sizes_of(const PlacedArgument& one) const {
  std::vector<int64_t> sizes = one.tensor.sizes().vec();
  const Placement::Cuts& cuts = one.known->placement->at(position_);
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) sizes[cut->dim] = cut->whole();
  return sizes;
}

std::optional<std::vector<int64_t>> AxisPass::whole_sizes(const at::Tensor& tensor) {
  if (torch::autograd::get_current_graph_task_id() != -1 && !at::GradMode::is_enabled()) return {};
  auto known = find(tensor);
  if (!known || !known->is_cut() || known->held == Held::kWhole || PartTensor::of(tensor) != nullptr) return {};
  if (known->held == Held::kWithin) return tensor.sizes().vec();
  return whole_sizes_of({0, tensor, std::move(known)});
}

/// The result of `make` for `tensor`, computed once for all layers that use it.
template <class Make>
at::Tensor AxisPass::entered_once(const at::Tensor& tensor, int axis, const Make& make) {
  if (tensor.is_inference()) return make();  // it has no version
  for (const Entered& one : entered_)
    if (one.whole._unsafe_get_target() == tensor.unsafeGetTensorImpl() && !one.whole.expired() && one.axis == axis &&
        one.version == tensor._version() && one.has_gradient == asks_gradient(tensor))
      return one.result;
  std::erase_if(entered_, [](const Entered& one) { return one.whole.expired(); });
  if (entered_.size() >= kMostEntered * axes_.size()) entered_.erase(entered_.begin());
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  at::Tensor result = make();
  entered_.push_back(
      {Weak(tensor.getIntrusivePtr()), static_cast<uint32_t>(tensor._version()), asks_gradient(tensor), axis, result});
  return result;
}

at::Tensor AxisPass::enter(const at::Tensor& tensor, int axis) {
  if (!tensor.defined()) return tensor;
  exchanges(axis).see(tensor, running_);
  if (!asks_gradient(tensor) || exchanges(axis).law() == GradientLaw::kShares) return tensor;
  return entered_once(tensor, axis, [&] { return exchanges(axis).enter(tensor, running_); });
}

at::Tensor AxisPass::gather(const at::Tensor& part, const Cut& cut, bool enters) {
  if (!enters) return exchanges(cut.axis).gather(part, cut, running_);
  if (cut.ranges->overlaps()) return enter(exchanges(cut.axis).gather(part, cut, running_), cut.axis);
  return entered_once(part, cut.axis, [&] { return exchanges(cut.axis).gather_and_enter(part, cut, running_); });
}

int64_t AxisPass::shares_of(const Placement& placement) const {
  int64_t shares = 1;
  for (const Cut& cut : placement.at(position_))
    if (exchanges(cut.axis).law() == GradientLaw::kShares) shares *= grid_.ranks(cut.axis);
  return shares;
}

at::Tensor AxisPass::as_part(const at::Tensor& local, const std::shared_ptr<const Placement>& placement) {
  if (gives_parts_)
    return PartTensor::wrap(
        local, kept_.part_of(whole_sizes_of({0, local, part_by(placement)}), placement, shares_of(*placement)));
  table_.add(local, {.placement = placement});
  return local;
}

at::Tensor AxisPass::whole(const PlacedArgument& one) {
  at::Tensor tensor = one.tensor;
  const Placement::Cuts& cuts = one.known->placement->at(position_);
  for (auto cut = cuts.rbegin(); cut != cuts.rend(); ++cut) tensor = gather(tensor, *cut, /*enters=*/false);
  return tensor;
}

bool AxisPass::may_read_parts() const {
  return !gives_parts_ &&
         std::ranges::any_of(axes_, [](const PassAxis& axis) { return axis.policy->may_read_parts(); });
}

/// A program that reads sizes of a part divides a sum over all ranks by the number of its own elements.
void AxisPass::check_count(const OperatorCall& call, size_t index, const PlacedTensor& sum) const {
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
    throw StateError(str(name, " divides a sum over the ", sum.whole_count, " elements of a tensor that is cut by ",
                         sum.local_count, ", the number that rank ", group(0).rank(), " of group '", group(0).name(),
                         "' has; use mean(), or the whole's number"));
  }
}

void AxisPass::refuse(const OperatorCall& call, const at::Tensor& tensor, const std::string& reason,
                      const std::string& fix, int axis) {
  const auto known = table_.find(tensor);
  const std::string& parameter = known ? known->parameter : std::string();
  const bool is_cut = known && known->is_cut() && !known->placement->at(position_).empty();
  if (axis < 0) axis = is_cut ? known->placement->at(position_).front().axis : 0;
  Group& of = group(axis);
  throw StateError(str(call.op.schema().name(), " ", reason, ": ", tensor.sizes(), " is a slice",
                       parameter.empty() ? "" : " of \"", parameter, parameter.empty() ? "" : "\"", ", that of rank ",
                       of.rank(), " of group '", of.name(), "'; ", fix));
}

}  // namespace trireme
