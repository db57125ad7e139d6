// Operators on the parts of several ranks, run one after another in one process: every exchange with its adjoint.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/all.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/amin.h>
#include <ATen/ops/any.h>
#include <ATen/ops/prod.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trireme/activations/call_arguments.h"
#include "trireme/activations/decide.h"
#include "trireme/activations/exchanges.h"
#include "trireme/activations/placement.h"
#include "trireme/base/error.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/operators/row.h"

namespace trireme::testing {

struct Axes {
  AxisGrid grid;
  std::vector<GradientLaw> laws;
};

using ByRank = std::vector<at::Tensor>;  // by position
/// A tensor, as every rank has it.
struct Parts {
  ByRank local = {};
  Placement placement;
};

struct ExchangeCounts {
  int64_t gathers = 0, joins = 0;
};

namespace ranks_in_a_loop {

using torch::autograd::variable_list;

enum class Kind : uint8_t { kEnter, kTake, kSum, kGather };

struct Facts {
  Kind kind;
  GradientLaw law;
  std::vector<Cut> cuts = {};  ///< by rank of the group; empty: none
};

inline variable_list sum_everywhere(const variable_list& all) {
  at::Tensor sum = all.front();
  for (size_t i = 1; i < all.size(); ++i) sum = sum + all[i];
  return variable_list(all.size(), sum);
}

inline at::Tensor zeros_of_whole(const Cut& cut, const at::Tensor& part) {
  std::vector<int64_t> sizes = part.sizes().vec();
  sizes[cut.dim] = cut.outer * cut.ranges->whole();
  return at::zeros(sizes, part.options());
}

inline variable_list forward_of(const Facts& facts, const variable_list& all) {
  variable_list results;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (facts.kind == Kind::kEnter) results.push_back(all[rank].clone());
    if (facts.kind == Kind::kTake) results.push_back(facts.cuts[rank].slice(all[rank], static_cast<int>(rank)));
  }
  if (facts.kind == Kind::kSum) results = sum_everywhere(all);
  if (facts.kind == Kind::kGather) {
    const at::Tensor whole = zeros_of_whole(facts.cuts.front(), all.front());
    for (size_t rank = 0; rank < all.size(); ++rank)
      whole.index_copy_(facts.cuts[rank].dim, facts.cuts[rank].index_of(static_cast<int>(rank)), all[rank]);
    results.assign(all.size(), whole);
  }
  for (at::Tensor& result : results) result = result.clone();
  return results;
}

/// Backward adds up over the ranks where the law is that of wholes and a whole has entered or been taken, or neither.
struct ExchangeNode final : torch::autograd::Node {
  explicit ExchangeNode(Facts of) : facts(std::move(of)) {}
  variable_list apply(variable_list&& gradients) override {
    for (size_t rank = 0; rank < gradients.size(); ++rank)
      if (!gradients[rank].defined()) gradients[rank] = input_metadata(rank).zeros_like();
    if (facts.kind == Kind::kTake)
      for (size_t rank = 0; rank < gradients.size(); ++rank) {
        const Cut& cut = facts.cuts[rank];
        gradients[rank] = zeros_of_whole(cut, gradients[rank])
                              .index_copy(cut.dim, cut.index_of(static_cast<int>(rank)), gradients[rank]);
      }
    if ((facts.law == GradientLaw::kWhole) == (facts.kind == Kind::kEnter || facts.kind == Kind::kTake))
      gradients = sum_everywhere(gradients);
    if (facts.kind == Kind::kGather)
      for (size_t rank = 0; rank < gradients.size(); ++rank)
        gradients[rank] = facts.cuts[rank].slice(gradients[rank], static_cast<int>(rank));
    return std::move(gradients);
  }
  const Facts facts;
};

inline variable_list exchanged(const Facts& facts, const variable_list& all) {
  variable_list results;
  {
    const at::NoGradGuard forward;
    results = forward_of(facts, all);
  }
  if (std::ranges::none_of(all, [](const at::Tensor& one) { return one.requires_grad(); })) return results;
  const NodePtr node = make_node<ExchangeNode>(facts);
  node->set_next_edges(torch::autograd::collect_next_edges(all));
  torch::autograd::set_history(results, node);
  return results;
}

/// `change` of the tensors of each group of ranks along an axis.
template <class Change>
inline ByRank along_axis(const ByRank& all, int axis, const Axes& axes, const Change& change) {
  ByRank results(all.size());
  for (int position = 0; position < axes.grid.positions(); ++position) {
    if (axes.grid.rank(position, axis) != 0) continue;
    const std::vector<int> group = axes.grid.along(position, axis);
    variable_list own;
    for (const int one : group) own.push_back(all[one]);
    const variable_list made = change(own, group);
    for (size_t rank = 0; rank < group.size(); ++rank) results[group[rank]] = made[rank];
  }
  return results;
}

/// `cuts`: by position, or empty.
inline ByRank exchange(Kind kind, int axis, const ByRank& all, const std::vector<Cut>& cuts, const Axes& axes) {
  return along_axis(all, axis, axes, [&](const variable_list& own, const std::vector<int>& group) {
    Facts facts{.kind = kind, .law = axes.laws[axis]};
    for (const int one : group)
      if (!cuts.empty()) facts.cuts.push_back(cuts[one]);
    return exchanged(facts, own);
  });
}

inline at::Tensor joined(FactorKind kind, const at::Tensor& all) {
  switch (kind) {
    case FactorKind::kMaximum:
      return at::amax(all, 0);
    case FactorKind::kMinimum:
      return at::amin(all, 0);
    case FactorKind::kProduct:
      return at::prod(all, 0);
    case FactorKind::kAny:
      return at::any(all, 0);
    case FactorKind::kAll:
      return at::all(all, 0);
    default:
      throw Error(ErrorCode::kInternal, "no such join");
  }
}

inline ByRank join(const Decision::Join& join, ByRank all, const Axes& axes) {
  const FactorKind kind = join.kind;
  if (kind == FactorKind::kMean)
    for (size_t position = 0; position < all.size(); ++position) all[position] = all[position] * join.shares[position];
  if (kind == FactorKind::kSum || kind == FactorKind::kMean || kind == FactorKind::kPlaces)
    return exchange(Kind::kSum, join.axis, all, {}, axes);
  return along_axis(all, join.axis, axes, [&](const variable_list& own, const std::vector<int>&) {
    return variable_list(own.size(), joined(kind, at::stack(own)));
  });
}

inline std::vector<Cut> at_place(const Placement& placement, size_t place, int positions) {
  std::vector<Cut> cuts;
  for (int position = 0; position < positions; ++position) cuts.push_back(placement.at(position)[place]);
  return cuts;
}

/// An argument in place of the one that is added behind a sum.
inline c10::IValue nothing_for(const c10::OperatorHandle& op, size_t tensor, const std::vector<c10::IValue>& arguments,
                               const at::Tensor& like) {
  size_t seen = 0;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor()) continue;
    if (seen++ == tensor)
      return op.schema().arguments()[i].type()->kind() == c10::TypeKind::OptionalType
                 ? c10::IValue()
                 : c10::IValue(at::zeros({1}, like.options()));
  }
  throw Error(ErrorCode::kInternal, "no such tensor");
}

}  // namespace ranks_in_a_loop

/// All tensors among results.
inline std::vector<at::Tensor> called(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  torch::jit::Stack stack = arguments;
  op.callBoxed(stack);
  return tensors_among(stack);
}

/// `whole` cut by `placement`, each part a leaf.
inline Parts distributed(const at::Tensor& whole, const Placement& placement, const Axes& axes) {
  Parts parts{.placement = placement};
  for (int position = 0; position < axes.grid.positions(); ++position) {
    at::Tensor part = whole.defined() ? whole.detach().clone() : whole;
    for (const Cut& cut : placement.at(position)) part = cut.slice(part, axes.grid.rank(position, cut.axis));
    if (part.defined() && whole.requires_grad()) part.requires_grad_();
    parts.local.push_back(std::move(part));
  }
  return parts;
}

/// The same tensor by other cuts: gathered as far as needed, then taken.
inline ByRank replaced(const Parts& parts, const Placement& wanted, const Axes& axes, ExchangeCounts& counts) {
  ByRank tensors = parts.local;
  const int positions = axes.grid.positions();
  size_t left = parts.placement.at(0).size();
  const auto is_kept = [&] {
    for (int position = 0; position < positions; ++position)
      for (size_t i = 0; i < left; ++i)
        if (i >= wanted.at(position).size() || !(wanted.at(position)[i] == parts.placement.at(position)[i]))
          return false;
    return true;
  };
  while (!is_kept()) {
    --left;
    const std::vector<Cut> cuts = ranks_in_a_loop::at_place(parts.placement, left, positions);
    tensors = ranks_in_a_loop::exchange(ranks_in_a_loop::Kind::kGather, cuts.front().axis, tensors, cuts, axes);
    ++counts.gathers;
  }
  for (size_t i = left; i < wanted.at(0).size(); ++i) {
    const std::vector<Cut> cuts = ranks_in_a_loop::at_place(wanted, i, positions);
    tensors = ranks_in_a_loop::exchange(ranks_in_a_loop::Kind::kTake, cuts.front().axis, tensors, cuts, axes);
  }
  return tensors;
}

/// Runs an operator whose wholes have `sizes`, as decided. The results.
inline std::vector<Parts> run_on_ranks(const OperatorRow& entry, const c10::OperatorHandle& op,
                                       const std::vector<c10::IValue>& whole_arguments,
                                       const std::vector<Parts>& arguments, const Axes& axes, ExchangeCounts& counts) {
  const RowCall call(op, whole_arguments);
  const Row row = entry.row(call);
  std::vector<Placement> placements;
  for (const Parts& one : arguments) placements.push_back(one.placement);
  const Decision decision = decide(row, placements, axes.grid);
  const int positions = axes.grid.positions();
  std::vector<ByRank> inputs;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].local.front().defined()) {
      inputs.push_back(arguments[i].local);
      continue;
    }
    ByRank tensors = replaced(arguments[i], decision.arguments[i], axes, counts);
    const bool is_term = static_cast<int>(i) == row.term;
    for (const int axis : decision.divided)
      if (!decision.arguments[i].is_cut_along(axis) && (!is_term || decision.results[0].is_cut_along(axis)))
        tensors = ranks_in_a_loop::exchange(ranks_in_a_loop::Kind::kEnter, axis, tensors, {}, axes);
    inputs.push_back(std::move(tensors));
  }
  std::vector<ByRank> outputs(row.results.size(), ByRank(positions));
  for (int position = 0; position < positions; ++position) {
    std::vector<at::Tensor> own;
    for (const ByRank& input : inputs) own.push_back(input[position]);
    LocalCall here{.arguments = with_tensors(whole_arguments, own)};
    if (row.term >= 0) {
      size_t seen = 0;
      for (c10::IValue& argument : here.arguments)
        if (argument.isTensor() && static_cast<int>(seen++) == row.term)
          argument = ranks_in_a_loop::nothing_for(op, row.term, whole_arguments, own[row.term]);
    }
    if (entry.localise != nullptr) entry.localise(call, decision.local[position], here);
    std::vector<at::Tensor> results = here.run ? here.run(here.arguments) : called(op, here.arguments);
    if (here.mend) here.mend(results);
    for (size_t i = 0; i < outputs.size(); ++i) outputs[i][position] = results.at(i);
  }
  std::vector<Parts> parts;
  for (size_t i = 0; i < outputs.size(); ++i) {
    for (auto one = decision.joins.rbegin(); one != decision.joins.rend(); ++one) {
      outputs[i] = ranks_in_a_loop::join(*one, std::move(outputs[i]), axes);
      ++counts.joins;
    }
    for (int position = 0; row.term >= 0 && position < positions; ++position)
      outputs[i][position] = outputs[i][position] + inputs[row.term][position];
    parts.push_back({std::move(outputs[i]), decision.results[i]});
  }
  return parts;
}

}  // namespace trireme::testing
