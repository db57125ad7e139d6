// Parts that go from one stage of a pipeline to the next, and wholes of those that leave the last one: as
// CutActivations says, for any axes.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "trireme/activations/axis_pass.h"
#include "trireme/activations/cut_activations.h"

namespace trireme {

/// Throws    StateError: a tensor of the program's into which a part was written, or a view that no operator has made.
SentTensor sent(AxisPass& pass, const at::Tensor& tensor);
/// Throws    CommError: `cut` is not what sent() says of a tensor of these sizes.
at::Tensor taken(AxisPass& pass, const at::Tensor& tensor, const std::string& cut);
/// The whole of a part, detached; a tensor that is none. Collective.
at::Tensor whole_tensor(AxisPass& pass, const at::Tensor& tensor);

}  // namespace trireme
