// Buffers that are cut from one allocation.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "trireme/pager/layout/layout.h"

namespace trireme {

/// Bytes of one buffer in an allocation of several.
int64_t bytes_in_slab(int64_t numel, at::ScalarType dtype);
/// Bytes of the units of `layout` that may be whole at a time: `limit_bytes` together, or all.
int64_t bytes_of_units_in_slab(const Layout& layout, int64_t limit_bytes);
/// [numel] of `dtype`, which begin at byte `begin` of `slab` [bytes].
at::Tensor buffer_in_slab(const at::Tensor& slab, int64_t begin, int64_t numel, at::ScalarType dtype);

}  // namespace trireme
