// The own ways of sequence parallelism, beside rows: attention over tokens, losses whose mean counts targets.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "trireme/activations/axis_pass.h"
#include "trireme/sequence/sequence_parallel.h"

namespace trireme::sequence {

class TokenPolicy final : public AxisPolicy {
 public:
  /// `axis`: its number in the pass's grid.
  TokenPolicy(int axis, SequenceAttention attention) : axis_(axis), attention_(attention) {}

  bool run(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found) override;
  Undivided undivided() const override { return Undivided::kMove; }
  bool writes_within() const override { return true; }
  bool sums_in_double() const override { return true; }
  std::string name() const override { return "sequence parallelism"; }
  std::string fix_for_unknown(const c10::OperatorHandle&) const override;

 private:
  bool run_attention(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found);
  bool take_queries(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found);
  bool run_class_loss(AxisPass& pass, OperatorCall& call, Next next, PlacedArguments& found);
  at::Tensor own_target(AxisPass& pass, const OperatorCall& call, const PlacedArguments& found, const Cut& cut);
  const Cut* cut_of(const AxisPass& pass, const PlacedArguments& found, size_t index) const;

  const int axis_;
  const SequenceAttention attention_;
  OperatorRules rules_;
};

}  // namespace trireme::sequence
