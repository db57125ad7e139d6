// The fold of fabric/fold.h, made of operators of ATen: the same bits, on any device.
#pragma once

#include <vector>

#include "comm/fabric/fold.h"

namespace trireme::comm {

/// Enqueues output = fold of sources[0], sources[1], … in that order. All are [numel] on one device; `output` may be
/// one of the sources.
void fold_on_device(const FoldKind& kind, const at::Tensor& output, const std::vector<at::Tensor>& sources);

}  // namespace trireme::comm
