// Elements that a mask takes: of a part, this rank's own. Which ones other ranks have is counted on the mask, which
// every rank has whole; so what was taken is cut by ranges as anything else.
#pragma once

#include "trireme/activations/axis_pass.h"
#include "trireme/operators/rules.h"

namespace trireme {

/// Runs index(), index_put(), masked_select() or nonzero() on parts; false: it is none of them, or the mask is not one
/// of a single axis's cut, or not the only index.
bool run_selection(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found, OperatorRole role);

/// Whether index() or index_put() goes by a mask, of whose elements its sizes tell nothing.
bool goes_by_mask(const OperatorCall& call);

}  // namespace trireme
