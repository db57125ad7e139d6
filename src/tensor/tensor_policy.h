// The own ways of tensor parallelism, beside rows: heads that ranks share, cross entropy over a vocabulary
// that is cut, sums in pieces and over tokens, rules of programs, sizes that a C++ program reads of a part.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tensor/rule_table.h"
#include "trireme/activations/axis_pass.h"

namespace trireme::tensor {

class TensorPolicy final : public AxisPolicy {
 public:
  /// `axis`: its number in the pass's grid, of `ranks` ranks.
  TensorPolicy(int axis, int ranks) : axis_(axis), ranks_(ranks) {}

  void shard_tokens() { shards_tokens_ = true; }
  bool shards_tokens() const { return shards_tokens_; }
  void overlap_sums() { overlaps_sums_ = true; }

  std::shared_ptr<const OwnRow> own_row(AxisPass& pass, const c10::OperatorHandle& op) override {
    return registered_(pass, axis_, op);
  }
  bool fit(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) override;
  bool run(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) override;
  at::Tensor summed_product(AxisPass& pass, const OperatorCall& call, Next next) override;
  std::optional<Cut> scattered(const AxisPass& pass, const OperatorCall& call, const at::Tensor& part) override;
  bool may_read_parts() const override { return true; }
  std::string name() const override { return "tensor parallelism"; }
  std::string fix_for_unknown(const c10::OperatorHandle&) const override;

 private:
  at::Tensor heads_by_query(AxisPass& pass, const OperatorCall& call, const at::Tensor& keys,
                            const PlacedArgument* known, const PlacedArgument& query);
  bool fit_heads(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found);
  bool run_class_loss(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found);

  // meant_sizes.cpp
  bool mean_wholes(AxisPass& pass, OperatorCall& call, const PlacedArgument& one) const;
  bool run_part(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found);
  struct Sized {
    std::vector<int64_t> whole;
    Cut cut;
  };
  std::optional<Sized> sized(const AxisPass& pass, const PlacedArgument& one, const std::vector<int64_t>& asked) const;
  Interval piece_of_whole(AxisPass& pass, const OperatorCall& call, const PlacedArgument& one, const Interval& asked);

  /// The part's cut along this axis; null: none.
  const Cut* cut_of(const AxisPass& pass, const PlacedArgument& one) const { return pass.cut_of(*one.known, axis_); }

  const int axis_, ranks_;
  OperatorRules rules_;
  RegisteredRules registered_;
  std::map<int64_t, std::shared_ptr<const Ranges>> token_ranges_;  // by the number of tokens
  bool shards_tokens_ = false;
  bool overlaps_sums_ = false;
};

}  // namespace trireme::tensor
