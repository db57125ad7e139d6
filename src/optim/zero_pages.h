// Zeroed memory that costs nothing until it is written.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace trireme {

/// A tensor [numel] of zeros. Its pages come from the system at the first write.
///
/// Throws    IoError: the system has no room for that many bytes.
at::Tensor zero_pages(int64_t numel, at::ScalarType dtype = at::kFloat);

}  // namespace trireme
