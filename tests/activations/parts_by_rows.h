// A pass that gives operators the local tensors of parts, by their rows, on one rank of two along one axis: what needs
// an exchange is an error, except that a reduced result is this rank's share of it. And programs on parts beside the
// same on wholes.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/rand.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/activations/ranks_in_a_loop.h"
#include "trireme/activations/call_arguments.h"
#include "trireme/activations/decide.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"
#include "trireme/operators/row.h"

namespace trireme::testing {

class PartsByRows final : public Pass {
 public:
  static constexpr int kRanks = 2;
  explicit PartsByRows(int rank) : rank_(rank) {}
  PassOrder order() const override { return PassOrder::kTensor; }

  void run(OperatorCall& call, Next next) override {
    if (!has_parts(call)) return next(call);
    const OperatorRow* const entry = row_of(call.op);
    if (entry == nullptr && call.traits.composite) return next.open(call);
    if (entry == nullptr) throw Error(ErrorCode::kUnsupported, str("no row of ", call.op.schema().name()));
    ++operators;
    const std::vector<c10::IValue> given = call.arguments().vec();
    const std::vector<at::Tensor> tensors = tensors_among(given);
    std::vector<std::vector<int64_t>> sizes;
    std::vector<Placement> placements;
    for (const at::Tensor& tensor : tensors) {
      PartTensor* const part = tensor.defined() ? PartTensor::of(tensor) : nullptr;
      sizes.push_back(part != nullptr    ? part->known()->sizes
                      : tensor.defined() ? tensor.sizes().vec()
                                         : std::vector<int64_t>());
      placements.push_back(part != nullptr ? part->known()->placement : Placement(kRanks));
    }
    const RowCall row_call(call.op, given, sizes);
    const Row row = entry->row(row_call);
    const Decision decision = decide(row, placements, AxisGrid({kRanks}));
    std::vector<at::Tensor> local;
    for (size_t i = 0; i < tensors.size(); ++i)
      local.push_back(here(tensors[i], placements[i], decision.arguments[i], call));
    LocalCall on_rank{.arguments = with_tensors(given, local)};
    if (entry->localise != nullptr) entry->localise(row_call, decision.local[rank_], on_rank);
    std::vector<at::Tensor> results = results_of(call, next, on_rank);
    for (const Decision::Join& join : decision.joins)
      for (at::Tensor& result : results) result = share(result, join);
    if (writes_first(call)) {
      PartTensor* const part = PartTensor::of(tensors[0]);
      if (part == nullptr || !(part->known()->placement == decision.results[0]))
        throw Error(ErrorCode::kUnsupported, str("an exchange for what ", call.op.schema().name(), " writes"));
      part->local();
      return give(call, {tensors[0]});
    }
    for (size_t i = 0; i < results.size(); ++i)
      if (decision.results[i].is_cut_along(0))
        results[i] = PartTensor::wrap(
            std::move(results[i]), std::make_shared<const PartOf>(row.sizes_of(row.results[i]), decision.results[i]));
    if (call.op.schema().returns().size() == 1 &&
        call.op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType)
      return give(call, {c10::IValue(results)});
    give(call, {results.begin(), results.end()});
  }

  int operators = 0;

 private:
  at::Tensor here(const at::Tensor& tensor, const Placement& has, const Placement& needed, const OperatorCall& call) {
    if (!tensor.defined()) return tensor;
    if (PartTensor* const part = PartTensor::of(tensor)) {
      if (!(has == needed)) throw Error(ErrorCode::kUnsupported, str("an exchange for ", call.op.schema().name()));
      return part->local();
    }
    at::Tensor taken = tensor;
    for (const Cut& cut : needed.at(rank_)) taken = cut.slice(taken, rank_);
    return taken;
  }

  std::vector<at::Tensor> results_of(OperatorCall& call, const Next& next, const LocalCall& on_rank) {
    std::vector<at::Tensor> results;
    if (on_rank.run) {
      results = on_rank.run(on_rank.arguments);
      torch::jit::drop(call.stack, call.traits.arguments);
    } else {
      for (size_t i = 0; i < on_rank.arguments.size(); ++i) argument(call, i) = on_rank.arguments[i];
      next(call);
      results = tensors_among(call.results().vec());
      torch::jit::drop(call.stack, call.op.schema().returns().size());
    }
    if (on_rank.mend) on_rank.mend(results);
    call.stack.resize(call.stack.size() + call.traits.arguments);  // give() drops them
    return results;
  }

  at::Tensor share(const at::Tensor& result, const Decision::Join& join) const {
    if (join.kind == FactorKind::kSum) return result;
    if (join.kind == FactorKind::kMean) return result * join.shares[rank_];
    throw Error(ErrorCode::kUnsupported, "an exchange for a reduction");
  }

  const int rank_;
};

inline std::shared_ptr<const PartOf> rows_of(at::IntArrayRef sizes, int64_t dim = 0) {
  Placement placement(PartsByRows::kRanks);
  const auto ranges = std::make_shared<const Ranges>(Ranges::even(sizes[dim], PartsByRows::kRanks));
  for (int rank = 0; rank < PartsByRows::kRanks; ++rank) placement.at(rank).push_back({0, dim, 1, ranges});
  return std::make_shared<const PartOf>(PartOf{sizes.vec(), placement});
}

inline at::Tensor slice_of(const at::Tensor& whole, const PartOf& of, int rank) {
  at::Tensor part = whole;
  for (const Cut& cut : of.placement.at(rank)) part = cut.slice(part, rank);
  return part;
}

/// A leaf of which this rank has rows.
inline at::Tensor part_of(const at::Tensor& whole, int rank, int64_t dim = 0) {
  const auto of = rows_of(whole.sizes(), dim);
  at::Tensor local;
  {
    const WithoutInterception as_local;
    local = slice_of(whole.detach(), *of, rank).clone();
  }
  return PartTensor::wrap(local, of);
}

inline at::Tensor local_of(const at::Tensor& tensor) {
  PartTensor* const part = PartTensor::of(tensor);
  if (part == nullptr) throw Error(ErrorCode::kInternal, "no part");
  return part->local();
}

/// A loss of leaves that are cut and leaves that are whole.
using Program = std::function<at::Tensor(std::vector<at::Tensor>& cut, std::vector<at::Tensor>& whole)>;

inline at::Tensor drawn(at::IntArrayRef sizes) { return at::rand(sizes, at::kDouble) + 0.5; }

/// Runs `program` on wholes, then on each rank, and compares losses and gradients. Rows: an uneven number, and one for
/// each rank, so that what is not cut can be broadcast in silence.
inline void expect_as_plain(const Program& program, const std::vector<std::vector<int64_t>>& weights = {{4, 4}},
                            size_t cut_leaves = 1) {
  for (const int64_t rows : {5, 2}) {
    SCOPED_TRACE(str(rows, " rows"));
    std::vector<at::Tensor> cut, whole;
    for (size_t i = 0; i < cut_leaves; ++i) cut.push_back(drawn({rows, 4}).requires_grad_());
    for (const std::vector<int64_t>& sizes : weights) whole.push_back(drawn(sizes).requires_grad_());
    std::vector<at::Tensor> plain_cut = cut, plain_whole = whole;
    const at::Tensor loss = program(plain_cut, plain_whole);
    loss.backward();
    double sum = 0;
    std::vector<at::Tensor> summed(whole.size());
    for (int rank = 0; rank < PartsByRows::kRanks; ++rank) {
      SCOPED_TRACE(str("rank ", rank));
      PartsByRows pass(rank);
      const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
      std::vector<at::Tensor> parts, own;
      for (const at::Tensor& one : cut) parts.push_back(part_of(one, rank).requires_grad_());
      for (const at::Tensor& one : whole) own.push_back(one.detach().clone().requires_grad_());
      const std::vector<at::Tensor> leaves = parts, own_leaves = own;
      const at::Tensor share = program(parts, own);
      ASSERT_EQ(PartTensor::of(share), nullptr);
      share.backward();
      EXPECT_GT(pass.operators, 0);
      sum += share.item<double>();
      for (size_t i = 0; i < cut.size(); ++i) {
        const at::Tensor gradient = leaves[i].grad();
        ASSERT_EQ(gradient.defined(), cut[i].grad().defined());
        if (!gradient.defined()) continue;
        EXPECT_EQ(gradient.sizes(), cut[i].sizes());
        ASSERT_NE(PartTensor::of(gradient), nullptr);
        EXPECT_TRUE(at::allclose(local_of(gradient), slice_of(cut[i].grad(), *PartTensor::of(leaves[i])->known(), rank),
                                 1e-9, 0))
            << local_of(gradient) << cut[i].grad();
      }
      for (size_t i = 0; i < whole.size(); ++i)
        if (own_leaves[i].grad().defined())
          summed[i] = summed[i].defined() ? summed[i] + own_leaves[i].grad() : own_leaves[i].grad();
    }
    EXPECT_NEAR(sum / loss.item<double>(), 1, 1e-12);
    for (size_t i = 0; i < whole.size(); ++i) {
      ASSERT_EQ(summed[i].defined(), whole[i].grad().defined());
      if (summed[i].defined()) {
        EXPECT_TRUE(at::allclose(summed[i], whole[i].grad(), 1e-9, 0)) << summed[i] << whole[i].grad();
      }
    }
  }
}

}  // namespace trireme::testing
