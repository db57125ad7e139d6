// Gradients for a program that steps its own optimizer: this rank's part of each, reduced.
#include <ATen/core/grad_mode.h>
#include <torch/csrc/Storage.h>

#include "python/engine.h"
#include "trireme/access/parameter_access.h"
#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"

namespace trireme::python {
namespace {

struct Place {
  ParameterAccess& access;
  int parameter;
};

Place place_of(const at::Tensor& parameter, const char* call) {
  const auto place = find_managed(parameter);
  auto* access = place ? dynamic_cast<ParameterAccess*>(place->pager->companion()) : nullptr;
  if (access == nullptr) throw StateError(str(call, ": this tensor is no parameter of a living engine"));
  return {*access, place->parameter};
}

/// After reduce_gradients(): the elements that this rank updates, [n] of the flattened parameter, the memory that the
/// next step reads; nothing where no rank's backward passes gave any.
std::optional<at::Tensor> gradient_part(const at::Tensor& parameter) {
  const auto [access, index] = place_of(parameter, "gradient_part");
  if (!access.spec(index).trainable || !access.pager().has_gradient(index)) return std::nullopt;
  return access.gradient(index).data;
}

/// Whether there is a gradient of `parameter`: before reduce_gradients() of this rank, after it of any. Local.
bool has_gradient(const at::Tensor& parameter) {
  const auto [access, index] = place_of(parameter, "has_gradient");
  return access.spec(index).trainable && access.pager().has_gradient(index);
}

/// Before reduce_gradients(): a copy of what this rank has summed of `parameter` over micro-batches, divided as the
/// engine divides it, [n] in its memory order, fp32; nothing where it has no gradient, or has it no longer by itself.
/// Local.
std::optional<at::Tensor> sum_of_this_rank(const at::Tensor& parameter) {
  const auto [access, index] = place_of(parameter, "sum_of_this_rank");
  if (!access.spec(index).trainable) return std::nullopt;
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  return access.pager().sum_of_this_rank(index);
}

void gradient_written(const at::Tensor& parameter) {
  const auto [access, index] = place_of(parameter, "gradient_written");
  access.pager().gradient_written(index);
}

/// A copy of the elements of a trainable parameter that this rank updates. Collective.
at::Tensor own_weight(const at::Tensor& parameter) {
  const auto [access, index] = place_of(parameter, "own_weight");
  const WithoutInterception own_operators;
  access.settle();
  return access.value(index).data.clone();
}

/// This rank's part of `whole`, shaped as `parameter`: a copy of the elements that it updates, [n], in its own dtype.
/// Local.
at::Tensor own_part(const at::Tensor& parameter, const at::Tensor& whole) {
  const auto [access, index] = place_of(parameter, "own_part");
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const ParameterAccess::Part part = access.gradient(index);
  return access.cut(index, whole.detach().contiguous()).narrow(0, part.begin, part.data.numel()).clone();
}

/// The whole of which ranks have the elements `own` that they update, in the shape of `parameter`, fp32. Collective.
at::Tensor whole_of_parts(const at::Tensor& parameter, const at::Tensor& own) {
  const auto [access, index] = place_of(parameter, "whole_of_parts");
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  return access.join(index, access.gather(index, {access.gradient(index).begin, own}));
}

int64_t owned_numel(const at::Tensor& parameter) {
  const auto [access, index] = place_of(parameter, "owned_numel");
  return access.gradient(index).data.numel();
}

}  // namespace

void bind_gradients(py::module_& module) {
  module.def("is_managed", [](const at::Tensor& tensor) { return find_managed(tensor).has_value(); });
  module.def("is_managed_storage", [](const py::object& storage) {
    return StorageHandle::owner_of(*THPStorage_Unpack(storage.ptr()).unsafeGetStorageImpl()) != nullptr;
  });
  module.def("gradient_part", &gradient_part, WithoutGil());
  module.def("has_gradient", &has_gradient);
  module.def("sum_of_this_rank", &sum_of_this_rank, WithoutGil());
  module.def("gradient_written", &gradient_written, WithoutGil());
  module.def("own_weight", &own_weight, WithoutGil());
  module.def("digest", [](const at::Tensor& tensor) { return digest_of(tensor.detach().contiguous().view(-1)); });
  module.def("digest", [](const std::string& text) { return digest_of(text); });
  module.def("own_part", &own_part, WithoutGil());
  module.def("whole_of_parts", &whole_of_parts, WithoutGil());
  module.def("owned_numel", &owned_numel);
}

}  // namespace trireme::python
