// One index of a dim that is cut, which each rank has a copy of where a program takes it for a view: what is written
// into the copy goes back.
#pragma once

#include "trireme/activations/axis_pass.h"

namespace trireme {

/// The origin of what `call`, which has not run, selects from a part; null: it does not.
std::shared_ptr<CopyOf> selected_from(const AxisPass& pass, const OperatorCall& call, const PlacedArguments& found);

/// From now on what is written into `result` goes back to where it was selected from, if it is a copy.
void note_origin(AxisPass& pass, const std::shared_ptr<CopyOf>& selected, const at::Tensor& result);

/// Writes `copy`, or what it is a view of, back where it came from, by operators that all ranks run.
///
/// Throws    StateError: what it is a view of is gone.
void write_back(OperatorCall& call, Next next, const at::Tensor& copy, const CopyOf& origin);

}  // namespace trireme
