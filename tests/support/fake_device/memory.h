// Memory of the fake device, and tensors over it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include "tests/support/fake_device/fake_device.h"

namespace trireme::testing {

c10::Allocator& fake_allocator();

/// The same bytes as a tensor of the host, for the CPU's kernels.
at::Tensor on_host(const at::Tensor& tensor);
/// From the first to the last byte that `tensor` can reach.
FakeBytes bytes_of(const at::Tensor& tensor);
bool is_fake(const at::Tensor& tensor);
c10::Stream current_stream(const at::Tensor& tensor);

}  // namespace trireme::testing
