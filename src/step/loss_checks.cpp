#include "trireme/step/loss_checks.h"

#include "trireme/base/error.h"
#include "trireme/precision/precision.h"

namespace trireme {

void check_has_graph(const at::Tensor& output, const char* call) {
  if (!output.defined()) throw ShapeError(str(call, ": expected a loss or an output, got an undefined tensor"));
  if (!at::isFloatingType(output.scalar_type()))
    throw ShapeError(str(call, ": expected a floating tensor, got ", short_name(output.scalar_type()), "; convert it"));
  if (!output.requires_grad())
    throw ShapeError(
        str(call,
            ": expected a loss with a graph, got one without grad_fn; compute it from the model's output with "
            "gradients enabled, and do not detach() it"));
}

void check_loss(const at::Tensor& loss, const char* call) {
  if (!loss.defined()) throw ShapeError(str(call, ": expected a scalar loss, got an undefined tensor"));
  if (loss.numel() != 1 || !at::isFloatingType(loss.scalar_type()))
    throw ShapeError(str(call, ": expected a floating scalar loss, got ", short_name(loss.scalar_type()), " of shape ",
                         loss.sizes(), "; take its mean() or sum()"));
  check_has_graph(loss, call);
}

}  // namespace trireme
