// Memory of a group over devices, as the pager asks for it.
#pragma once

#include <ATen/ops/zeros.h>

#include "trireme/comm/group.h"

namespace trireme::testing {

/// [bytes] on `device`: registered where `group` registers memory, else plain.
inline at::Tensor registered_zeros(Group& group, c10::Device device, int64_t bytes) {
  BufferRegistration* const registration = group.buffer_registration(device);
  return registration != nullptr ? registration->zeros(bytes)
                                 : at::zeros({bytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

}  // namespace trireme::testing
