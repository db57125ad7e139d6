// What can be differentiated.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme {

/// Throws    ShapeError naming `call`: undefined, not floating, or without a graph.
void check_has_graph(const at::Tensor& output, const char* call);

/// Throws    as check_has_graph(), and for more or less than one element.
void check_loss(const at::Tensor& loss, const char* call);

/// That `step` changed nothing, the `skipped`-th one that did. Told ever more rarely: where no loss scale is sought,
/// whose overflows are meant, something is wrong.
void warn_of_skipped_step(int64_t step, int64_t skipped);

}  // namespace trireme
