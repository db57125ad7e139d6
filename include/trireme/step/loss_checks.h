// Checks that a loss can be differentiated.
#pragma once

#include <ATen/core/Tensor.h>

namespace trireme {

/// Throws    ShapeError naming `call`: undefined, not floating, or without a graph.
void check_has_graph(const at::Tensor& output, const char* call);

/// Throws    as check_has_graph(), and for more or less than one element.
void check_loss(const at::Tensor& loss, const char* call);

}  // namespace trireme
