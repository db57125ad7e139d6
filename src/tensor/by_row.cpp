// Operators by their rows: what each rank computes of its slices, and what it needs of others.
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/all.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <utility>

#include "tensor/tensor_pass.h"
#include "trireme/activations/decide.h"
#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

constexpr int kAxis = 0;  // the only one of this pass's grid
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
      throw Error(ErrorCode::kInternal, "tensor: no such join");
  }
}

/// Where equal elements share a gradient, ranks would have to count them.
bool shares_gradient(FactorKind kind) { return kind == FactorKind::kMaximum || kind == FactorKind::kMinimum; }

/// Rows of a product of `left` [.., n] and a matrix whose sum over ranks is worth starting before the product is whole;
/// 0: none. From shapes alone, which are alike on all ranks but for n.
int64_t piece_rows_of(const at::Tensor& left, const at::Tensor& right, bool is_weight) {
  constexpr int64_t kPieces = 4, kFewestBytes = 256 << 10;
  if (right.dim() != 2 || left.dim() < 2 || left.size(-1) == 0) return 0;
  const int64_t rows = left.numel() / left.size(-1);
  const int64_t row_bytes = right.size(is_weight ? 0 : 1) * left.element_size();
  const int64_t pieces = std::min(kPieces, rows * row_bytes / kFewestBytes);
  return pieces < 2 ? 0 : (rows + pieces - 1) / pieces;
}

/// Attention draws, too, and its schema does not say so.
bool has_dropout(const OperatorCall& call) {
  const c10::IValue share = value_of(call, "dropout_p");
  return share.isDouble() && share.toDouble() > 0;
}

/// The argument that is added behind a sum, left out before it.
c10::IValue nothing_for(const c10::Argument& argument, const at::Tensor& term) {
  if (argument.type()->kind() == c10::TypeKind::OptionalType) return {};
  return at::zeros({1}, term.options());
}

}  // namespace

TensorPass::Operands TensorPass::operands_of(const OperatorCall& call, const CutArguments& found) const {
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

/// The row, of which every argument has the sizes that the row says; nothing: the operator runs on whole tensors.
/// Refuses a call that joins unlike ones.
std::optional<Row> TensorPass::row_for(const OperatorCall& call, const Meaning& meaning, const RowCall& of_wholes,
                                       const Operands& operands, const CutArgument& lead) {
  std::optional<Row> row = meaning.entry != nullptr
                               ? meaning.entry->row(of_wholes)
                               : registered_row(call, *meaning.registered, of_wholes, operands, lead);
  if (!row) return row;
  for (size_t i = row->arguments.size(); i < operands.size(); ++i) {
    row->arguments.emplace_back();
    for (const int64_t size : of_wholes.sizes(i)) row->arguments[i].push_back(row->dim(size, FactorKind::kWhole));
  }
  for (size_t i = 0; i < operands.size(); ++i) {
    const at::IntArrayRef sizes = of_wholes.sizes(i);
    const std::vector<int64_t> of_row = row->sizes_of(row->arguments[i]);
    for (size_t dim = 0; of_row.size() == sizes.size() && dim < sizes.size(); ++dim) {
      if (of_row[dim] == sizes[dim]) continue;
      refuse(call, lead.tensor,
             str("joins ", operands[i].tensor.sizes(), ", which is ",
                 operands[i].found != nullptr ? "cut otherwise" : "not cut", ", with a part"),
             str("make it of the whole's size, ", of_row[dim], " in dim ", dim));
    }
  }
  return row;
}

/// The answer of a program's rule, as a row with one factor; nothing: it has none, or the cut tensor is in a list.
std::optional<Row> TensorPass::registered_row(const OperatorCall& call, const PartitionRule& rule,
                                              const RowCall& of_wholes, const Operands& operands,
                                              const CutArgument& lead) {
  std::vector<PartitionCall::Cut> cuts(call.traits.arguments);
  for (const Operand& one : operands) {
    if (one.found == nullptr) continue;
    if (!call.arguments()[one.index].isTensor()) return std::nullopt;
    cuts[one.index] = {.dim = one.found->cut.dim, .size = one.found->cut.whole()};
  }
  const std::optional<PartitionAnswer> answer = rule(PartitionCall(call, cuts));
  if (!answer) return std::nullopt;
  const auto dim_of = [&](const Operand& one) {
    const auto named = answer->arguments.find(one.index);
    return named != answer->arguments.end() ? named->second : -1;
  };
  const auto led = std::ranges::find_if(
      operands, [&](const Operand& one) { return one.found != nullptr && dim_of(one) == one.found->cut.dim; });
  const bool overwrites = writes_first(call);
  if (led == operands.end() || (overwrites && led->index != 0))
    refuse(call, lead.tensor, "has a rule that does not name the dim which is cut",
           "name it in PartitionAnswer::arguments");
  const bool sums = std::ranges::count(answer->results, kSumOfRanks) > 0;
  Row row;
  const uint8_t cut = row.add(led->found->cut.whole(), sums ? FactorKind::kSum : FactorKind::kEach);
  for (size_t i = 0; i < operands.size(); ++i) {
    const int64_t dim = dim_of(operands[i]);
    if (dim >= of_wholes.dims(i))
      refuse(call, lead.tensor, str("has a rule that names dim ", dim, " of ", operands[i].tensor.sizes()),
             "name a dim that there is");
    row.arguments.emplace_back();
    for (int64_t d = 0; d < of_wholes.dims(i); ++d)
      row.arguments[i].push_back(d == dim ? DimFactors{cut} : row.dim(of_wholes.sizes(i)[d], FactorKind::kWhole));
  }
  if (overwrites) {
    row.results = {row.arguments[0]};
    return row;
  }
  const size_t count = call.op.schema().returns().size();
  if (answer->results.size() != count)
    refuse_results(call, lead.tensor, str(count, count == 1 ? " result" : " results"));
  for (const int64_t dim : answer->results) {  // sizes of other dims are the operator's
    row.results.emplace_back(std::max<int64_t>(dim, 0));
    if (dim >= 0) row.results.back().push_back({cut});
  }
  return row;
}

void TensorPass::refuse_results(const OperatorCall& call, const at::Tensor& lead, const std::string& what) {
  refuse(call, lead, str("gives ", what, ", which its rule does not say"),
         "name the dim in which each result is cut in PartitionAnswer::results");
}

/// What is decided of a call, alike for all that differ in their tensors' values alone.
struct TensorPass::Decided {
  enum class Way : uint8_t { kByRow, kWhole, kNewSizes };
  Row row = {};
  Decision decision = {};
  std::optional<RowCall> of_wholes = {};
  Way way = Way::kByRow;
  size_t lead = 0;         ///< the first operand that is cut
  int term = -1;           ///< the operand that is left out and added behind the join
  bool has_moves = false;  ///< an operand has to be exchanged, or entered
  bool is_known = false;   ///< `plain` is: arguments that are no tensors mean the same in each such call
  std::vector<std::pair<size_t, c10::IValue>> plain = {};  ///< arguments that mean something else here
  std::vector<std::shared_ptr<const Ranges>> kept = {};    ///< what the key names by address; so the next one
  std::shared_ptr<const PartitionRule> registered = {};
};

CallKey TensorPass::key_of(const OperatorCall& call, const Operands& operands, bool asks_gradient) const {
  CallKey key(call);
  key.add(asks_gradient ? 1 : 0);
  for (const Operand& one : operands) {
    key.add(one.found == nullptr ? 0 : one.found->is_parameter ? 1 : 2);
    if (one.found == nullptr) continue;
    key.add(one.found->cut.dim);
    key.add(one.found->cut.outer);
    key.add(one.found->cut.ranges.get());
  }
  return key;
}

std::shared_ptr<TensorPass::Decided> TensorPass::decided(const OperatorCall& call, const Meaning& meaning,
                                                         const Operands& operands, const CutArgument& lead) {
  constexpr size_t kMostDecisions = 4096;
  const bool asks_gradient = at::GradMode::is_enabled() && std::ranges::any_of(operands, [](const Operand& one) {
                               return one.tensor.defined() && one.tensor.requires_grad();
                             });
  CallKey key = key_of(call, operands, asks_gradient);
  key.add(meaning.registered.get());
  if (key.is_complete())
    if (const auto found = decisions_.find(key); found != decisions_.end()) return found->second;
  auto made = std::make_shared<Decided>();
  made->registered = meaning.registered;
  decide_on(*made, call, meaning, operands, lead, asks_gradient);
  if (!key.is_complete()) return made;
  if (decisions_.size() >= kMostDecisions) decisions_.clear();
  return decisions_.emplace(std::move(key), std::move(made)).first->second;
}

void TensorPass::decide_on(Decided& made, const OperatorCall& call, const Meaning& meaning, const Operands& operands,
                           const CutArgument& lead, bool asks_gradient) {
  std::vector<std::vector<int64_t>> sizes;
  std::vector<Placement> placements;
  std::vector<int> leads;
  for (const Operand& one : operands) {
    sizes.push_back(one.found != nullptr   ? whole_sizes_of(*one.found)
                    : one.tensor.defined() ? one.tensor.sizes().vec()
                                           : std::vector<int64_t>());
    placements.emplace_back(grid_.positions());
    for (int position = 0; one.found != nullptr && position < grid_.positions(); ++position)
      placements.back().at(position) = {one.found->cut};
    if (one.found != nullptr) made.kept.push_back(one.found->cut.ranges);
    leads.push_back(one.is_written                                    ? kWrittenLeads
                    : one.found != nullptr && one.found->is_parameter ? kParameterLeads
                                                                      : 0);
  }
  made.of_wholes.emplace(RowCall(call.op, call.arguments(), std::move(sizes)).kept());
  const std::optional<Row> row = row_for(call, meaning, *made.of_wholes, operands, lead);
  if (!row) {
    made.way = Decided::Way::kWhole;
    return;
  }
  made.row = *row;
  made.decision = decide(made.row, placements, grid_, leads);
  const Decision& decision = made.decision;
  const bool needs_counts = asks_gradient && std::ranges::any_of(decision.joins, [](const Decision::Join& join) {
                              return shares_gradient(join.kind);
                            });
  if (decision.divided.empty() || needs_counts) made.way = Decided::Way::kWhole;
  for (size_t i = 0; i < operands.size() && made.way == Decided::Way::kByRow; ++i) {
    if (!operands[i].is_written) continue;
    if (!(decision.arguments[i] == placements[i]))
      made.way = Decided::Way::kWhole;
    else if (!(decision.results[0] == placements[i]) ||
             made.row.sizes_of(made.row.results[0]) != made.row.sizes_of(made.row.arguments[i]))
      made.way = Decided::Way::kNewSizes;
  }
  made.lead =
      std::ranges::find_if(operands, [](const Operand& one) { return one.found != nullptr; }) - operands.begin();
  made.term = decision.joins.empty() ? -1 : made.row.term;
  for (size_t i = 0; i < operands.size(); ++i)
    made.has_moves = made.has_moves || !(decision.arguments[i] == placements[i]) ||
                     (operands[i].tensor.defined() && !decision.arguments[i].is_cut_along(kAxis));
}

void TensorPass::run_row(OperatorCall& call, Next next, const Meaning& meaning, const CutArguments& found) {
  const Operands operands = operands_of(call, found);
  // The decision is kept while the operator runs, which may run others.
  const std::shared_ptr<Decided> made = decided(call, meaning, operands, found[0]);
  if (made->way == Decided::Way::kWhole) return run_whole(call, next, found);
  if (made->way == Decided::Way::kNewSizes)
    refuse(call, found[0].tensor, "changes the sizes in place of", "use the operator without _");
  LocalCall here;
  at::Tensor added;
  if (!made->has_moves && made->is_known) {
    for (const auto& [index, value] : made->plain) argument(call, index) = value;
  } else {
    next.run(call, [&] { added = localise(call, meaning, operands, *made, here); });
  }
  if (call.traits.random || has_dropout(call)) call.stream = RandomStream::kSlice;
  bool is_summed = false;
  if (const at::Tensor sum = summed_by_pieces(call, next, made->decision); sum.defined()) {
    is_summed = true;
    give(call, {sum});
  } else if (here.run) {
    give(call, next.run(call, [&] {
      const std::vector<at::Tensor> results = here.run(here.arguments);
      if (call.op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType)
        return std::vector<c10::IValue>{c10::List<at::Tensor>(results)};
      return std::vector<c10::IValue>(results.begin(), results.end());
    }));
  } else {
    next(call);
  }
  finish(call, next, here, operands, *made, !is_summed, added);
}

/// The arguments become this rank's. The term that is to be added behind a sum, if there is one.
at::Tensor TensorPass::localise(OperatorCall& call, const Meaning& meaning, const Operands& operands, Decided& made,
                                LocalCall& here) {
  const Decision& decision = made.decision;
  std::vector<at::Tensor> tensors;
  for (size_t i = 0; i < operands.size(); ++i) {
    const bool is_term = static_cast<int>(i) == made.term;
    const bool enters = !is_term || decision.results[0].is_cut_along(kAxis);
    tensors.push_back(operands[i].is_written ? operands[i].tensor
                                             : placed(operands[i], decision.arguments[i].at(group_.rank()), enters));
  }
  const at::Tensor added = made.term >= 0 ? tensors[made.term] : at::Tensor();
  here.arguments = with_tensors(call.arguments().vec(), tensors);
  if (made.term >= 0) {
    const size_t index = operands[made.term].index;
    here.arguments[index] = nothing_for(call.op.schema().arguments()[index], added);
  }
  const std::vector<c10::IValue> before = here.arguments;
  if (meaning.entry != nullptr && meaning.entry->localise != nullptr)
    meaning.entry->localise(*made.of_wholes, decision.local[group_.rank()], here);
  made.is_known = !here.run && !here.mend && made.term < 0;
  made.plain.clear();
  for (size_t i = 0; i < before.size(); ++i) {
    if (!before[i].isSameIdentity(here.arguments[i])) {
      made.plain.emplace_back(i, here.arguments[i]);
      made.is_known = made.is_known && !here.arguments[i].isTensor();
    }
    argument(call, i) = here.arguments[i];
  }
  return added;
}

/// The sum of the ranks' products, each piece of which is exchanged while the next one is computed; undefined where it
/// is not worth that.
at::Tensor TensorPass::summed_by_pieces(const OperatorCall& call, Next next, const Decision& decision) {
  const OperatorRule* const rule = rules_(call.op);
  if (!overlaps_sums_ || shards_tokens_ || rule == nullptr || rule->role != OperatorRole::kProduct) return {};
  if (decision.joins.size() != 1 || decision.joins[0].kind != FactorKind::kSum) return {};
  const size_t first = left_factor_index(call.op);
  const at::Tensor left = call.arguments()[first].toTensor(), right = call.arguments()[first + 1].toTensor();
  const bool is_weight = first == 0 && value_of(call, "weight").isTensor();
  const int64_t rows = piece_rows_of(left, right, is_weight);
  if (rows == 0) return {};
  return next.run(call, [&] { return sum_by_pieces(left, right, is_weight, rows, call); });
}

/// This rank's results become those of the call: joined over ranks, and known as parts.
void TensorPass::finish(OperatorCall& call, Next next, const LocalCall& here, const Operands& operands,
                        const Decided& made, bool joins, const at::Tensor& added) {
  const Decision& decision = made.decision;
  const at::Tensor& lead = operands[made.lead].tensor;
  std::vector<at::Tensor> results = tensors_among(call.results());
  const bool is_registered = made.registered != nullptr;
  if (is_registered && results.size() != call.results().size()) refuse_results(call, lead, "no tensor");
  c10::SmallVector<std::optional<Cut>, 2> cuts(results.size());
  for (size_t i = 0; i < results.size(); ++i) {
    const size_t of_row = std::min(i, decision.results.size() - 1);
    if (const Placement::Cuts& own = decision.results[of_row].at(group_.rank()); !own.empty()) cuts[i] = own.front();
    if (!is_registered || !cuts[i] || !results[i].defined()) continue;
    const int64_t dim = cuts[i]->dim;
    if (dim >= results[i].dim() || results[i].size(dim) != cuts[i]->local(group_.rank()))
      refuse_results(call, lead, str(results[i].sizes()));
  }
  const bool gathers_output = operands.size() > 1 && std::ranges::any_of(operands, [](const Operand& one) {
                                return one.found != nullptr && one.found->gathers_output;
                              });
  if (here.mend || (joins && !decision.joins.empty()) || added.defined() || gathers_output) {
    next.run(call, [&] {
      if (here.mend) here.mend(results);
      for (size_t i = 0; i < results.size(); ++i) {
        if (!results[i].defined()) continue;
        for (const Decision::Join& join : decision.joins) {
          if (!joins || cuts[i]) break;
          Sum sum = join_ranks(results[i], join, call);
          results[i] = sum.tensor;
          if (sum.cut) cuts[i] = sum.cut;
        }
        if (added.defined()) results[i] = results[i] + term_beside(call, added, results[i], cuts[i]);
        if (gathers_output && cuts[i]) {
          results[i] = exchanges_->gather(results[i], *cuts[i], name_of(call));
          cuts[i].reset();
        }
      }
    });
    const size_t count = call.op.schema().returns().size();
    const std::vector<c10::IValue> joined = with_tensors(call.results().vec(), results);
    for (size_t i = 0; i < count; ++i) call.stack[call.stack.size() - count + i] = joined[i];
  }
  if (operands.size() == 1 && !takes_wholes()) note_count(results[0], decision);
  const bool is_of_parameter = operands.size() == 1 && operands[0].found->is_parameter;
  for (size_t i = 0; i < results.size(); ++i) {
    if (!cuts[i] || !results[i].defined()) continue;
    const bool is_written =
        std::ranges::any_of(operands, [&](const Operand& one) { return one.tensor.is_same(results[i]); });
    if (!is_written) table_.add(results[i], {.cut = *cuts[i], .is_parameter = is_of_parameter});
  }
}

/// A program that reads sizes of a part may divide a sum of all ranks by the number of its own elements.
void TensorPass::note_count(const at::Tensor& sum, const Decision& decision) {
  const bool is_sum = decision.joins.size() == 1 && decision.joins[0].kind == FactorKind::kSum;
  if (!is_sum || !sum.defined()) return;
  const LocalRow& local = decision.local[group_.rank()];
  CutTensor known{.local_count = 1, .whole_count = 1};
  for (size_t factor = 0; factor < local.sizes.size(); ++factor) {
    if (local.row->factors[factor].kind != FactorKind::kSum) continue;
    known.local_count *= local.sizes[factor];
    known.whole_count *= local.row->factors[factor].size;
  }
  table_.add(sum, std::move(known));
}

TensorPass::Sum TensorPass::join_ranks(const at::Tensor& part, const Decision::Join& join, const OperatorCall& call) {
  if (join.kind == FactorKind::kSum || join.kind == FactorKind::kPlaces) return sum(part, call);
  if (join.kind == FactorKind::kMean) return {exchanges_->sum(part * join.shares[group_.rank()], name_of(call)), {}};
  const Cut by_rank{.ranges = std::make_shared<const Ranges>(Ranges::even(group_.size(), group_.size()))};
  return {joined(join.kind, exchanges_->gather(part.unsqueeze(0), by_rank, name_of(call))), {}};
}

/// The term of a sum, in the dtype that autocast has chosen for it.
at::Tensor TensorPass::term_beside(const OperatorCall& call, const at::Tensor& term, const at::Tensor& sum,
                                   const std::optional<Cut>& cut) {
  const at::Tensor added = term.to(sum.scalar_type());
  if (!cut) return added;
  const CutArgument lead{.index = 0, .tensor = sum, .cut = *cut};
  return beside(call, added, lead.from_right(), lead);
}

/// The operand as the decision has it here.
at::Tensor TensorPass::placed(const Operand& one, const Placement::Cuts& wanted, bool enters) {
  if (!one.tensor.defined()) return one.tensor;
  if (one.found == nullptr) {
    if (!wanted.empty()) return take(one.tensor, wanted.front());
    return enters ? enter(one.tensor) : one.tensor;
  }
  if (wanted.empty()) return enters ? enter_whole(*one.found) : whole(*one.found);
  if (one.found->cut.dim == wanted.front().dim) return recut(*one.found, wanted.front());
  return take(whole(*one.found), wanted.front());
}

}  // namespace trireme::tensor
