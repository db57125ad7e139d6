// Operators by their rows: what each rank computes of its parts, and what it needs of others.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <ranges>
#include <utility>

#include "activations/held.h"
#include "trireme/activations/axis_pass.h"
#include "trireme/activations/decide.h"
#include "trireme/base/error.h"
#include "trireme/intercept/program.h"

namespace trireme {
namespace {

constexpr int kParameterLeads = 1, kWrittenLeads = 2;

at::Tensor joined(FactorKind kind, const at::Tensor& parts) {
  switch (kind) {
    case FactorKind::kMaximum:
      return at::amax(parts, 0);
    case FactorKind::kMinimum:
      return at::amin(parts, 0);
    case FactorKind::kProduct:
      return at::prod(parts, 0);
    case FactorKind::kAny:
      return at::any(parts, 0);
    case FactorKind::kAll:
      return at::all(parts, 0);
    default:
      throw Error(ErrorCode::kInternal, "activations: no such join");
  }
}

/// Where equal elements share a gradient, ranks would have to count them.
bool shares_gradient(FactorKind kind) { return kind == FactorKind::kMaximum || kind == FactorKind::kMinimum; }

/// Whether it is made of operators, and yet its kernel reads numbers itself, which a part does not have: in torch 2.15.
bool reads_numbers(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name == "aten::quantile" || name == "aten::nanquantile";
}

/// Attention draws, too, and its schema does not say so.
bool has_dropout(const OperatorCall& call) {
  const c10::IValue share = value_of(call, "dropout_p");
  return share.isDouble() && share.toDouble() > 0;
}

/// A word for what a call does along a dim of which its row knows no other way.
const char* verb_of(const OperatorCall& call, FactorKind kind) {
  const std::string& name = call.op.schema().name();
  if (name.find("sort") != std::string::npos || name.find("topk") != std::string::npos) return "sorts along";
  if (name.find("conv") != std::string::npos) return "has windows along";
  if (name.find("norm") != std::string::npos) return "normalises over";
  switch (kind) {
    case FactorKind::kEach:
      return "needs all of";
    case FactorKind::kWhole:
      return "mixes elements of";
    case FactorKind::kPlaces:
      return "takes single elements of";
    default:
      return "reduces";
  }
}

/// A value in place of another one that is equal to it up to rounding, with its gradient.
struct InPlaceOf : torch::autograd::Function<InPlaceOf> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& other, const at::Tensor& value) {
    return value.to(other.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0], {}};
  }
};

/// The argument that is added behind a sum, left out before it.
c10::IValue nothing_for(const c10::Argument& argument, const at::Tensor& term) {
  if (argument.type()->kind() == c10::TypeKind::OptionalType) return {};
  return at::zeros({1}, term.options());
}

}  // namespace

Operands operands_of(const OperatorCall& call, const PlacedArguments& found) {
  Operands operands;
  auto known = found.begin();  // in the order of the arguments
  for (size_t i = 0; i < call.traits.arguments; ++i) {
    const bool is_written = i < 64 && (call.traits.written >> i & 1) != 0;
    const auto add = [&](const at::Tensor& tensor) {
      const bool is_found = known != found.end() && known->index == i && known->tensor.is_same(tensor);
      operands.push_back({i, tensor, is_found ? &*known : nullptr, is_written});
      if (is_found) ++known;
    };
    const c10::IValue& value = call.arguments()[i];
    if (value.isTensor())
      add(value.toTensor());
    else if (value.isTensorList() || value.isOptionalTensorList())
      for (const at::Tensor& tensor : tensors_among(call.arguments().slice(i, 1))) add(tensor);
  }
  return operands;
}

/// The decision about a call, alike for all that differ in their tensors' values alone.
struct AxisPass::Decided {
  enum class Way : uint8_t { kByRow, kWhole, kGathered, kWithin, kNewSizes, kRefused };
  Row row = {};
  Decision decision = {};
  std::optional<RowCall> of_wholes = {};
  Way way = Way::kByRow;
  int term = -1;                 ///< the operand that is left out and added behind the join
  bool copies = false;           ///< what would be views of the arguments shares no memory with them
  bool counts_extremes = false;  ///< equal ones of all ranks share a gradient
  bool has_moves = false;        ///< an operand has to be exchanged, or entered
  bool is_known = false;         ///< `plain` is: arguments that are no tensors mean the same in each such call
  std::vector<std::pair<size_t, c10::IValue>> plain = {};      ///< arguments that mean something else here
  std::vector<std::vector<int>> entered = {};                  ///< by operand: axes along which it enters as a whole
  std::vector<std::vector<Step>> steps = {};                   ///< by operand
  std::vector<std::shared_ptr<const Placement>> results = {};  ///< null: whole
  std::shared_ptr<const Placement> within = nullptr;           ///< kWithin: of what is written, whole until then
  std::vector<std::vector<Step>> back = {};                    ///< of results, to:
  std::vector<std::shared_ptr<const Placement>> returned = {};
  std::vector<std::shared_ptr<const PartOf>> parts = {};    ///< of results, as they were last
  std::vector<std::shared_ptr<const Placement>> kept = {};  ///< what the key names by address; so the next one
  std::shared_ptr<const OwnRow> own = {};
};

/// One operator that runs by its row.
class RowRun {
 public:
  using Decided = AxisPass::Decided;
  RowRun(AxisPass& pass, OperatorCall& call, Next next, const AxisPass::Meaning& meaning, Operands operands)
      : pass_(pass), call_(call), next_(next), meaning_(meaning), operands_(std::move(operands)) {}

  void run(const PlacedArguments& found);
  bool run_on_whole();

 private:
  void run_within(const Decided& made, PlacedArguments found);
  struct Joined {
    at::Tensor tensor;
    std::shared_ptr<const Placement> placement;  ///< null: whole
    c10::SmallVector<int, 2> scattered = {};     ///< axes along which ranks have parts of the sum
  };
  std::optional<Row> row_for(const RowCall& of_wholes);
  std::shared_ptr<Decided> decided();
  void decide_on(Decided& made, bool asks_gradient);
  at::Tensor localise(Decided& made, LocalCall& here);
  at::Tensor placed(const Decided& made, size_t operand);
  /// `tensor` by other cuts. `entered`: axes along which a whole of it enters.
  at::Tensor exchanged(at::Tensor tensor, const Placement& given, const Placement& wanted,
                       const std::vector<Step>& steps, const std::vector<int>& entered = {});
  at::Tensor recut(const at::Tensor& part, const Cut& from, const Cut& to);
  [[noreturn]] void refuse(const Decided& made);
  at::Tensor extreme(const Decided& made, const at::Tensor& own);
  at::Tensor summed_product(const Decision& decision);
  void finish(Decided& made, const LocalCall& here, bool joins, const at::Tensor& added);
  const std::shared_ptr<const PartOf>& part_of(Decided& made, size_t i, const Joined& one, bool is_of_parameter);
  void put_results(const std::vector<at::Tensor>& results);
  at::Tensor summed(const at::Tensor& part, int axis, double share = 1);
  void join(Joined& result, const Decision::Join& join);
  void add_term(Joined& result, const at::Tensor& term);
  void check_own_results(const Decided& made, const std::vector<at::Tensor>& results);
  void note_count(const at::Tensor& sum, const Decision& decision);

  AxisPass& pass_;
  OperatorCall& call_;
  const Next next_;
  const AxisPass::Meaning& meaning_;
  const Operands operands_;
  at::Tensor first_;  ///< argument 0, as the operator gets it
};

void AxisPass::run_row(OperatorCall& call, Next next, const Meaning& meaning, const PlacedArguments& found) {
  RowRun(*this, call, next, meaning, operands_of(call, found)).run(found);
}

bool AxisPass::run_row_on_whole(OperatorCall& call, Next next, const Meaning& meaning, const PlacedArguments& found) {
  return RowRun(*this, call, next, meaning, operands_of(call, found)).run_on_whole();
}

/// On all elements, as one rank would; the row says how the results are to be cut.
bool RowRun::run_on_whole() {
  const std::shared_ptr<Decided> made = decided();
  const auto lead = std::ranges::find_if(operands_, [](const Operand& one) { return one.found != nullptr; });
  const Held held = lead->found->known->held;
  const bool is_known = !made->results.empty() && made->way != Decided::Way::kWhole &&
                        made->way != Decided::Way::kGathered && made->way != Decided::Way::kRefused;
  if (held == Held::kWithin) {
    const bool keeps = is_known && !made->has_moves && made->decision.joins.empty() &&
                       std::ranges::all_of(made->results, [](const auto& one) { return one != nullptr; });
    if (!keeps) return false;
  }
  next_(call_);
  const std::vector<at::Tensor> results = tensors_among(call_.results());
  for (size_t i = 0; i < results.size(); ++i) {
    const auto placement = is_known ? made->results[std::min(i, made->results.size() - 1)] : nullptr;
    if (placement != nullptr && results[i].defined())
      pass_.table_.add(results[i], {.placement = placement, .held = held});
  }
  return true;
}

/// Into this rank's part of a tensor that all ranks have.
void RowRun::run_within(const Decided& made, PlacedArguments found) {
  const at::Tensor written = operands_[0].tensor;
  const at::Tensor own = next_.run(call_, [&] { return part_of_whole(pass_, written, *made.within); });
  argument(call_, 0) = own;
  found.insert(found.begin(), {0, own, part_by(made.within)});
  pass_.run_row(call_, next_, meaning_, found);
  call_.stack.back() = written;
  pass_.hold_within(written, made.within);
}

void RowRun::run(const PlacedArguments& found) {
  // The decision is kept while the operator runs, which may run others.
  const std::shared_ptr<Decided> made = decided();
  if (made->way == Decided::Way::kWhole) return pass_.run_whole(call_, next_, found);
  if (made->way == Decided::Way::kWithin) return run_within(*made, found);
  if (made->way == Decided::Way::kGathered) return pass_.run_gathered(call_, next_, found);
  if (made->way == Decided::Way::kRefused) {
    const bool can_open = pass_.gives_parts_ && call_.traits.composite && !call_.traits.random && !has_dropout(call_) &&
                          !reads_numbers(call_.op);
    if (can_open) return run_opened(pass_, call_, next_, found);
    if (std::ranges::all_of(found, [](const PlacedArgument& one) { return is_of_numbers(one.tensor); }))
      return pass_.run_gathered(call_, next_, found);
    refuse(*made);
  }
  if (made->way == Decided::Way::kNewSizes)
    pass_.refuse(call_, found[0].tensor, "changes the sizes in place of", "use the operator without _");
  LocalCall here;
  at::Tensor added;
  if (!made->has_moves && made->is_known) {
    for (const auto& [index, value] : made->plain) argument(call_, index) = value;
  } else {
    next_.run(call_, [&] { added = localise(*made, here); });
  }
  if (made->counts_extremes) first_ = argument(call_, 0).toTensor();
  if (call_.traits.random || has_dropout(call_)) {
    uint8_t axes = 0;
    for (const int axis : made->decision.divided) axes |= 1 << axis;
    call_.stream = stream_of_axes(axes);
  }
  const at::Tensor sum = summed_product(made->decision);
  if (sum.defined()) {
    give(call_, {sum});
  } else if (here.run) {
    give(call_, next_.run(call_, [&] {
      const std::vector<at::Tensor> results = here.run(here.arguments);
      if (call_.op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType)
        return std::vector<c10::IValue>{c10::List<at::Tensor>(results)};
      return std::vector<c10::IValue>(results.begin(), results.end());
    }));
  } else {
    next_(call_);
    if (meaning_.own != nullptr)  // it may be a function whose backward is the operator's
      for_each_tensor(call_.results(), [](const at::Tensor& result) {
        if (result.defined() && result.grad_fn() != nullptr && is_function(*result.grad_fn()))
          mark_operators(*result.grad_fn());
      });
  }
  finish(*made, here, /*joins=*/!sum.defined(), added);
}

/// The row, of which every argument has the sizes that the row says; nothing: the operator runs on whole tensors.
/// Refuses a call that joins unlike ones.
std::optional<Row> RowRun::row_for(const RowCall& of_wholes) {
  std::optional<Row> row =
      meaning_.entry != nullptr ? meaning_.entry->row(of_wholes) : (*meaning_.own)(call_, of_wholes, operands_);
  if (!row) return row;
  for (size_t i = row->arguments.size(); i < operands_.size(); ++i) {
    row->arguments.emplace_back();
    for (const int64_t size : of_wholes.sizes(i)) row->arguments[i].push_back(row->dim(size, FactorKind::kWhole));
  }
  for (size_t i = 0; i < operands_.size(); ++i) {
    const at::IntArrayRef sizes = of_wholes.sizes(i);
    const std::vector<int64_t> of_row = row->sizes_of(row->arguments[i]);
    for (size_t dim = 0; of_row.size() == sizes.size() && dim < sizes.size(); ++dim) {
      if (of_row[dim] == sizes[dim]) continue;
      const auto lead = std::ranges::find_if(operands_, [](const Operand& one) { return one.found != nullptr; });
      pass_.refuse(call_, lead->tensor,
                   str("joins ", operands_[i].tensor.sizes(), ", which is ",
                       operands_[i].found != nullptr ? "cut otherwise" : "not cut", ", with a part"),
                   str("make it of the whole's size, ", of_row[dim], " in dim ", dim));
    }
  }
  return row;
}

std::shared_ptr<AxisPass::Decided> RowRun::decided() {
  constexpr size_t kMostDecisions = 4096;
  const bool asks_gradient = at::GradMode::is_enabled() && std::ranges::any_of(operands_, [](const Operand& one) {
                               return one.tensor.defined() && one.tensor.requires_grad();
                             });
  CallKey key(call_);
  key.add(asks_gradient ? 1 : 0);
  key.add(meaning_.own.get());
  for (const Operand& one : operands_) {
    key.add(one.found == nullptr                    ? 0
            : one.found->known->is_parameter        ? 1
            : one.found->known->held == Held::kPart ? 2
                                                    : 3);
    key.add(one.found == nullptr ? nullptr : one.found->known->placement.get());
  }
  if (key.is_complete())
    if (const auto found = pass_.decisions_.find(key); found != pass_.decisions_.end()) return found->second;
  auto made = std::make_shared<Decided>();
  made->own = meaning_.own;
  decide_on(*made, asks_gradient);
  if (!key.is_complete()) return made;
  if (pass_.decisions_.size() >= kMostDecisions) pass_.decisions_.clear();
  return pass_.decisions_.emplace(std::move(key), std::move(made)).first->second;
}

void RowRun::decide_on(Decided& made, bool asks_gradient) {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<Placement> placements;
  std::vector<int> leads;
  for (const Operand& one : operands_) {
    const PlacedTensor* const known = one.found != nullptr ? one.found->known.get() : nullptr;
    sizes.push_back(known != nullptr && known->held == Held::kPart ? pass_.whole_sizes_of(*one.found)
                    : one.tensor.defined()                         ? one.tensor.sizes().vec()
                                                                   : std::vector<int64_t>());
    placements.push_back(known != nullptr ? *known->placement : Placement(pass_.grid_.positions()));
    if (known != nullptr) made.kept.push_back(known->placement);
    leads.push_back(one.is_written ? kWrittenLeads : known != nullptr && known->is_parameter ? kParameterLeads : 0);
  }
  made.of_wholes.emplace(RowCall(call_.op, call_.arguments(), std::move(sizes)).kept());
  const std::optional<Row> row = row_for(*made.of_wholes);
  if (!row) {
    made.way = Decided::Way::kWhole;
    return;
  }
  made.row = *row;
  const auto is_read = [&](size_t i) { return (made.row.unread >> std::min<size_t>(i, 63) & 1) == 0; };
  std::vector<Placement> read = placements;
  for (size_t i = 0; i < read.size(); ++i)
    if (!is_read(i)) read[i] = Placement(pass_.grid_.positions());
  made.decision = decide(made.row, read, pass_.grid_, leads, pass_.undivided_);
  for (size_t i = 0; i < read.size(); ++i)
    if (!is_read(i)) made.decision.arguments[i] = placements[i];
  const Decision& decision = made.decision;
  const bool reads_parts = std::ranges::any_of(std::views::iota(size_t{0}, operands_.size()),
                                               [&](size_t i) { return operands_[i].found != nullptr && is_read(i); });
  const bool needs_counts = asks_gradient && std::ranges::any_of(decision.joins, [](const Decision::Join& join) {
                              return shares_gradient(join.kind);
                            });
  made.counts_extremes = needs_counts && std::ranges::any_of(decision.divided, [this](int axis) {
                           return pass_.undivided_[axis] == Undivided::kMove;
                         });
  if ((decision.divided.empty() && reads_parts) || (needs_counts && !made.counts_extremes))
    made.way = Decided::Way::kGathered;
  if (decision.refusal) made.way = Decided::Way::kRefused;
  for (size_t i = 0; i < operands_.size() && made.way == Decided::Way::kByRow; ++i) {
    const bool writes_statistics = trireme::writes_statistics(*made.of_wholes, i);
    if (!operands_[i].is_written && !writes_statistics) continue;
    if (!(decision.arguments[i] == placements[i])) {
      made.way = Decided::Way::kWhole;
      const bool is_within = i == 0 && writes_first(call_) && operands_[0].found == nullptr &&
                             decision.returned.size() == 1 && decision.returned[0] == decision.arguments[0];
      bool is_in_place = true;  // each part is written where it is
      for (size_t other = 1; other < operands_.size(); ++other)
        is_in_place =
            is_in_place && (operands_[other].found == nullptr || decision.arguments[other] == placements[other]);
      if (!is_within || !is_in_place || !may_hold_within(pass_, decision.arguments[0])) continue;
      made.way = Decided::Way::kWithin;
      made.within = std::make_shared<const Placement>(decision.arguments[0]);
      return;
    }
    if (writes_statistics) continue;
    if (!(decision.returned[0] == placements[i]) ||
        made.row.sizes_of(made.row.results[0]) != made.row.sizes_of(made.row.arguments[i]))
      made.way = Decided::Way::kNewSizes;
  }
  made.term = decision.joins.empty() ? -1 : made.row.term;
  for (size_t i = 0; i < operands_.size(); ++i) {
    std::vector<int>& entered = made.entered.emplace_back();
    made.steps.push_back(steps_between(placements[i], decision.arguments[i], pass_.grid_));
    if (!operands_[i].tensor.defined() || operands_[i].is_written || !is_read(i)) continue;
    const bool is_term = static_cast<int>(i) == made.term;
    for (const int axis : decision.divided)
      if (pass_.exchanges(axis).law() == GradientLaw::kWhole && !decision.arguments[i].is_cut_along(axis) &&
          (!is_term || decision.results[0].is_cut_along(axis)))
        entered.push_back(axis);
    const bool is_moved = !(decision.arguments[i] == placements[i]);
    made.has_moves = made.has_moves || !entered.empty() || is_moved;
    made.copies = made.copies || is_moved;
  }
  const auto shared = [](const Placement& one) {
    return one.at(0).empty() ? nullptr : std::make_shared<const Placement>(one);
  };
  for (size_t i = 0; i < decision.results.size(); ++i) {
    made.results.push_back(shared(decision.results[i]));
    made.returned.push_back(shared(decision.returned[i]));
    made.back.push_back(steps_between(decision.results[i], decision.returned[i], pass_.grid_));
  }
  const bool goes_back = std::ranges::any_of(made.back, [](const std::vector<Step>& steps) { return !steps.empty(); });
  made.copies = (made.copies || goes_back || !decision.joins.empty()) && gives_views(call_);
}

/// The arguments become this rank's. The term that is to be added behind a sum, if there is one.
at::Tensor RowRun::localise(Decided& made, LocalCall& here) {
  const Decision& decision = made.decision;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < operands_.size(); ++i)
    tensors.push_back(operands_[i].is_written ? operands_[i].tensor : placed(made, i));
  const at::Tensor added = made.term >= 0 ? tensors[made.term] : at::Tensor();
  here.arguments = with_tensors(call_.arguments().vec(), tensors);
  if (made.term >= 0) {
    const size_t index = operands_[made.term].index;
    here.arguments[index] = nothing_for(call_.op.schema().arguments()[index], added);
  }
  const std::vector<c10::IValue> before = here.arguments;
  if (meaning_.entry != nullptr && meaning_.entry->localise != nullptr)
    meaning_.entry->localise(*made.of_wholes, decision.local[pass_.position_], here);
  made.is_known = !here.run && !here.mend && made.term < 0;
  made.plain.clear();
  for (size_t i = 0; i < before.size(); ++i) {
    if (!before[i].isSameIdentity(here.arguments[i])) {
      made.plain.emplace_back(i, here.arguments[i]);
      made.is_known = made.is_known && !here.arguments[i].isTensor();
    }
    argument(call_, i) = here.arguments[i];
  }
  return added;
}

/// A sum over ranks that an axis computes in its own way; undefined: it does not.
at::Tensor RowRun::summed_product(const Decision& decision) {
  if (decision.joins.size() != 1 || decision.joins[0].kind != FactorKind::kSum) return {};
  return pass_.axes_[decision.joins[0].axis].policy->summed_product(pass_, call_, next_);
}

/// This rank's results become those of the call: joined over ranks, and known as parts.
void RowRun::finish(Decided& made, const LocalCall& here, bool joins, const at::Tensor& added) {
  const Decision& decision = made.decision;
  std::vector<at::Tensor> results = tensors_among(call_.results());
  if (made.own != nullptr) check_own_results(made, results);
  const auto placement_of = [&](size_t i) { return made.results[std::min(i, made.results.size() - 1)]; };
  const bool gathers_output = operands_.size() > 1 && std::ranges::any_of(operands_, [](const Operand& one) {
                                return one.found != nullptr && one.found->known->gathers_output;
                              });
  const bool is_of_parameter = operands_.size() == 1 && operands_[0].found->known->is_parameter;
  c10::SmallVector<Joined, 2> found;
  for (size_t i = 0; i < results.size(); ++i) found.push_back({results[i], placement_of(i)});
  const auto back_of = [&](size_t i) { return std::min(i, made.back.size() - 1); };
  const bool goes_back = std::ranges::any_of(made.back, [](const std::vector<Step>& steps) { return !steps.empty(); });
  if (here.mend || (joins && !decision.joins.empty()) || added.defined() || gathers_output || goes_back) {
    next_.run(call_, [&] {
      if (here.mend) here.mend(results);
      for (size_t i = 0; i < results.size(); ++i) {
        if (!results[i].defined()) continue;
        found[i].tensor = results[i];
        if (made.counts_extremes) found[i].tensor = extreme(made, results[i]);
        for (auto one = decision.joins.rbegin(); joins && !made.counts_extremes && one != decision.joins.rend(); ++one)
          if (made.results.empty() || !decision.results[std::min(i, made.results.size() - 1)].is_cut_along(one->axis))
            join(found[i], *one);
        if (added.defined()) add_term(found[i], added);
        if (goes_back && !made.back[back_of(i)].empty()) {
          const size_t at = back_of(i);
          found[i].tensor =
              exchanged(found[i].tensor, decision.results[at], decision.returned[at], made.back[at]).contiguous();
          found[i].placement = made.returned[at];
        }
        if (gathers_output && found[i].placement != nullptr) {
          found[i].tensor = pass_.whole({0, found[i].tensor, part_by(found[i].placement)});
          found[i].placement = nullptr;
        }
        results[i] = found[i].tensor;
      }
    });
    put_results(results);
  }
  if (operands_.size() == 1 && pass_.may_read_parts()) note_count(results[0], decision);
  bool has_parts = false;
  for (size_t i = 0; i < found.size(); ++i) {
    const Joined& one = found[i];
    if (!one.tensor.defined() || (one.placement == nullptr && !made.copies)) continue;
    const bool is_written =
        std::ranges::any_of(operands_, [&](const Operand& operand) { return operand.tensor.is_same(one.tensor); });
    if (is_written) continue;
    if (!pass_.gives_parts_ || one.placement == nullptr) {
      pass_.table_.add(one.tensor,
                       {.placement = one.placement, .is_parameter = is_of_parameter, .is_copy = made.copies});
      continue;
    }
    results[i] = PartTensor::wrap(one.tensor, part_of(made, i, one, is_of_parameter));
    has_parts = true;
  }
  if (has_parts) put_results(results);
}

void RowRun::put_results(const std::vector<at::Tensor>& results) {
  const size_t count = call_.op.schema().returns().size();
  if (count == 1 && call_.stack.back().isTensor()) {
    call_.stack.back() = results[0];
    return;
  }
  const std::vector<c10::IValue> put = with_tensors(call_.results().vec(), results);
  for (size_t i = 0; i < count; ++i) call_.stack[call_.stack.size() - count + i] = put[i];
}

/// The facts of a result that is cut: the same object for like calls, so that later decisions are found by it.
const std::shared_ptr<const PartOf>& RowRun::part_of(Decided& made, size_t i, const Joined& one, bool is_of_parameter) {
  if (made.parts.size() <= i) made.parts.resize(i + 1);
  std::vector<int64_t> sizes = pass_.whole_sizes_of({0, one.tensor, part_by(one.placement)});
  std::shared_ptr<const PartOf>& part = made.parts[i];
  if (part == nullptr || part->sizes != sizes || !(part->placement == *one.placement))
    part = std::make_shared<const PartOf>(std::move(sizes), *one.placement, is_of_parameter, made.copies,
                                          pass_.shares_of(*one.placement), pass_.kept().ranks());
  return part;
}

/// A program's own row says of results in which dim they are cut, and no sizes.
void RowRun::check_own_results(const Decided& made, const std::vector<at::Tensor>& results) {
  const auto lead = std::ranges::find_if(operands_, [](const Operand& one) { return one.found != nullptr; });
  const auto refuse_results = [&](const std::string& what) {
    pass_.refuse(call_, lead->tensor, str("gives ", what, ", which its rule does not say"),
                 "name the dim in which each result is cut in PartitionAnswer::results");
  };
  if (results.size() != call_.results().size()) refuse_results("no tensor");
  if (results.size() != made.results.size())
    refuse_results(str(results.size(), results.size() == 1 ? " result" : " results"));
  for (size_t i = 0; i < results.size(); ++i) {
    if (made.results[i] == nullptr || !results[i].defined()) continue;
    for (const Cut& cut : made.results[i]->at(pass_.position_))
      if (cut.dim >= results[i].dim() ||
          results[i].size(cut.dim) != cut.local(pass_.grid_.rank(pass_.position_, cut.axis)))
        refuse_results(str(results[i].sizes()));
  }
}

/// A program that reads sizes of a part may divide a sum of all ranks by the number of its own elements.
void RowRun::note_count(const at::Tensor& sum, const Decision& decision) {
  const bool is_sum = decision.joins.size() == 1 && decision.joins[0].kind == FactorKind::kSum;
  if (!is_sum || !sum.defined()) return;
  const LocalRow& local = decision.local[pass_.position_];
  PlacedTensor known{.local_count = 1, .whole_count = 1};
  for (size_t factor = 0; factor < local.sizes.size(); ++factor) {
    if (local.row->factors[factor].kind != FactorKind::kSum) continue;
    known.local_count *= local.sizes[factor];
    known.whole_count *= local.row->factors[factor].size;
  }
  pass_.table_.add(sum, std::move(known));
}

/// The ranks' sum of their parts, each times its `share`.
at::Tensor RowRun::summed(const at::Tensor& part, int axis, double share) {
  const bool widens = pass_.axes_[axis].policy->sums_in_double() && part.is_floating_point();
  const at::Tensor wide = widens ? part.to(at::kDouble) : part;
  const at::Tensor sum = pass_.exchanges(axis).sum(share == 1 ? wide : wide * share, call_.op.schema().name());
  return widens ? sum.to(part.scalar_type()) : sum;
}

void RowRun::join(Joined& result, const Decision::Join& join) {
  AxisExchanges& axis = pass_.exchanges(join.axis);
  const std::string& name = call_.op.schema().name();
  if (join.kind == FactorKind::kSum || join.kind == FactorKind::kPlaces) {
    const std::optional<Cut> cut = pass_.axes_[join.axis].policy->scattered(pass_, call_, result.tensor);
    if (!cut) {
      result.tensor = summed(result.tensor, join.axis);
      return;
    }
    result.tensor = axis.scatter(result.tensor, *cut, name);
    Cut of_axis = *cut;
    of_axis.axis = join.axis;
    result.placement = pass_.with_cut({.placement = result.placement}, of_axis).placement;
    result.scattered.push_back(join.axis);
  } else if (join.kind == FactorKind::kMean) {
    const double share = join.shares[pass_.position_];
    result.tensor = summed(share > 0 ? result.tensor : result.tensor.nan_to_num(), join.axis, share);
  } else {
    const int ranks = pass_.grid_.ranks(join.axis);
    const Cut by_rank{.axis = join.axis, .ranges = std::make_shared<const Ranges>(Ranges::even(ranks, ranks))};
    result.tensor = joined(join.kind, axis.gather(result.tensor.unsqueeze(0), by_rank, name));
  }
}

/// The term of a sum, in the dtype that autocast has chosen for it. Of a sum that was scattered this rank adds its
/// part.
void RowRun::add_term(Joined& result, const at::Tensor& term) {
  at::Tensor added = term.to(result.tensor.scalar_type());
  for (const int axis : result.scattered) {
    added = pass_.enter(added, axis);
    Cut own = *pass_.cut_of({.placement = result.placement}, axis);
    own.dim += added.dim() - result.tensor.dim();
    if (own.dim >= 0 && added.size(own.dim) != 1) added = slice_of(added, own, pass_.grid_.rank(pass_.position_, axis));
  }
  result.tensor = result.tensor + added;
}

/// The operand as the decision says: exchanged, and entered along axes that divide the rest.
at::Tensor RowRun::placed(const Decided& made, size_t operand) {
  const Operand& one = operands_[operand];
  if (!one.tensor.defined()) return one.tensor;
  const Placement whole(pass_.grid_.positions());
  const Placement& given = one.found != nullptr ? *one.found->known->placement : whole;
  const std::vector<int>& entered = made.entered[operand];
  at::Tensor tensor = exchanged(one.tensor, given, made.decision.arguments[operand], made.steps[operand], entered);
  // A part of what is dense lies between other parts; views and some kernels count on a dense one.
  if (one.tensor.is_contiguous()) tensor = tensor.contiguous();
  // A view of this rank's part of what all ranks have is no view of that.
  if (one.found == nullptr && !made.steps[operand].empty() && gives_views(call_)) tensor = tensor.clone();
  for (const int axis : entered)
    if (!given.is_cut_along(axis)) tensor = pass_.enter(tensor, axis);
  return tensor;
}

at::Tensor RowRun::exchanged(at::Tensor tensor, const Placement& given, const Placement& wanted,
                             const std::vector<Step>& steps, const std::vector<int>& entered) {
  const auto along = [this](const Placement& placement, int axis) -> const Cut* {
    const Placement::Cuts& cuts = placement.at(pass_.position_);
    const auto* const found = std::ranges::find(cuts, axis, &Cut::axis);
    return found != cuts.end() ? found : nullptr;
  };
  std::vector<const Cut*> now;
  for (int axis = 0; axis < pass_.grid_.axes(); ++axis) now.push_back(along(given, axis));
  for (const Step& step : steps) {
    const Cut* const from = now[step.axis];
    const Cut* const end = along(wanted, step.axis);
    const Cut* const to = step.is_to_none ? nullptr : end;
    if (from != nullptr && to != nullptr)
      tensor = recut(tensor, *from, *to);
    else if (from != nullptr)
      tensor = pass_.gather(tensor, *from, /*enters=*/end == nullptr && std::ranges::count(entered, step.axis) > 0);
    else if (to != nullptr)
      tensor = slice_of(pass_.enter(tensor, step.axis), *to, pass_.grid_.rank(pass_.position_, step.axis));
    now[step.axis] = to;
  }
  return tensor;
}

/// This rank's part by `to` of a tensor that it has by `from`.
at::Tensor RowRun::recut(const at::Tensor& part, const Cut& from, const Cut& to) {
  if (pass_.undivided_[from.axis] == Undivided::kMove)
    return pass_.exchanges(from.axis).recut(part, from, to, call_.op.schema().name());
  const int rank = pass_.grid_.rank(pass_.position_, from.axis);
  bool is_inside = from.dim == to.dim && from.outer == to.outer && from.ranges->whole() == to.ranges->whole();
  for (int other = 0; is_inside && other < pass_.grid_.ranks(from.axis); ++other)
    for (const Interval& one : to.ranges->of_rank(other))
      is_inside = is_inside && from.ranges->place_of(other, one).size() == one.size();
  if (!is_inside) return slice_of(pass_.enter(pass_.gather(part, from, /*enters=*/false), from.axis), to, rank);
  std::vector<std::vector<Interval>> local(pass_.grid_.ranks(from.axis));
  for (const Interval& one : to.ranges->of_rank(rank)) local[rank].push_back(from.ranges->place_of(rank, one));
  return slice_of(part,
                  {.dim = from.dim,
                   .outer = to.outer,
                   .ranges = std::make_shared<const Ranges>(from.ranges->local(rank), std::move(local))},
                  rank);
}

void RowRun::refuse(const Decided& made) {
  const Decision::Refusal& why = *made.decision.refusal;
  const Operand& one = operands_[why.argument];
  const Cut& cut = *pass_.cut_of(*one.found->known, why.axis);
  pass_.refuse(
      call_, one.tensor,
      str(verb_of(call_, why.kind), " dim ", cut.dim, " of ", at::IntArrayRef(pass_.whole_sizes_of(*one.found)),
          ", which ", pass_.axes_[why.axis].policy->name(), " cuts"),
      str("use it along another dim, or with at least ", pass_.grid_.ranks(why.axis),
          " samples, heads or channels that it treats apart"),
      why.axis);
}

/// The extreme of all ranks' elements. Those that are equal to it share its gradient as on one rank: their mean has it.
at::Tensor RowRun::extreme(const Decided& made, const at::Tensor& own) {
  const std::string& name = call_.op.schema().name();
  Joined of_all{own.detach(), nullptr};
  const std::vector<Decision::Join>& joins = made.decision.joins;
  for (auto one = joins.rbegin(); one != joins.rend(); ++one) join(of_all, *one);
  const std::vector<int64_t> dims = made.of_wholes->dims_named("dim", first_.dim());
  const bool keeps = of_all.tensor.dim() == first_.dim();
  at::Tensor beside = of_all.tensor;
  for (const int64_t dim : dims)
    if (!keeps) beside = beside.unsqueeze(dim);
  const at::Tensor is_extreme = first_.detach().eq(beside);
  at::Tensor count = is_extreme.sum(dims, keeps), mean = (first_ * is_extreme).sum(dims, keeps);
  for (const Decision::Join& one : joins) count = pass_.exchanges(one.axis).all_reduce(count, name);
  mean = mean / count;
  for (const Decision::Join& one : joins) mean = pass_.exchanges(one.axis).sum(mean, name);
  return InPlaceOf::apply(mean, of_all.tensor);
}

}  // namespace trireme
