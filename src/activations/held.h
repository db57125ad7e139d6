// Tensors of which a rank holds more than its part: inputs that are whole until an operator computes with them, and
// tensors of the program into which a part was written.
#pragma once

#include "trireme/activations/axis_pass.h"

namespace trireme {

/// One operator, by what this rank holds of its arguments.
class HeldRun {
 public:
  HeldRun(AxisPass& pass, OperatorCall& call, Next next) : pass_(pass), call_(call), next_(next) {}

  /// Runs it on parts, or on what is whole as one rank would.
  void run(PlacedArguments found);

 private:
  bool run_within(const PlacedArguments& found);
  bool run_on_whole(const PlacedArguments& found);
  bool makes_activations() const;
  bool realises() const;
  PlacedArguments with_parts(const PlacedArguments& found, Held held);

  AxisPass& pass_;
  OperatorCall& call_;
  const Next next_;
};

/// This rank's part of a tensor that it holds whole.
at::Tensor part_of_whole(const AxisPass& pass, const at::Tensor& whole, const Placement& placement);
/// Whether a rank's part, which is written there, is a view of the whole, and every axis that cuts it has it so.
bool may_hold_within(const AxisPass& pass, const Placement& placement);

}  // namespace trireme
