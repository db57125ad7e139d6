#include "engine/loss_checks.h"

#include <bit>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
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

void warn_of_skipped_step(int64_t step, int64_t skipped) {
  if (!std::has_single_bit(static_cast<uint64_t>(skipped))) return;
  log(LogLevel::kWarning, str("step ", step, " changed nothing: a gradient is not finite (", skipped,
                              " such so far); lower the learning rate, or look for what makes the loss overflow"));
}

}  // namespace trireme
