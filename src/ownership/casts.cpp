#include "ownership/casts.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace trireme::ownership {
namespace {

/// Operators that autocast gives 16-bit arguments on every kind of device for which it knows them.
constexpr std::array<std::string_view, 14> kLower{
    "aten::linear",
    "aten::matmul",
    "aten::mm",
    "aten::bmm",
    "aten::addmm",
    "aten::baddbmm",
    "aten::prelu",
    "aten::conv1d",
    "aten::conv2d",
    "aten::conv3d",
    "aten::addbmm",
    "aten::conv_transpose1d",
    "aten::conv_transpose2d",
    "aten::conv_transpose3d",
};

}  // namespace

bool Casts::has(const OperatorCall& call, const at::Tensor& weight) {
  if (weight.scalar_type() != at::kFloat || !weight.is_leaf() || weight.is_view() || !needs_gradient(weight))
    return false;
  const c10::DeviceType device = weight.device().type();
  if (c10::impl::tls_local_dispatch_key_set().excluded_.has_all(c10::autocast_dispatch_keyset)) return false;
  return at::autocast::is_autocast_available(device) && at::autocast::is_autocast_enabled(device) &&
         at::autocast::is_autocast_cache_enabled() &&
         std::ranges::find(kLower, std::string_view(call.op.operator_name().name)) != kLower.end() &&
         call.op.hasKernelForDispatchKey(at::autocast::get_autocast_dispatch_key_from_device_type(device));
}

at::Tensor Casts::of(const OperatorCall& call, const at::Tensor& weight, Pieces& pieces, const Next& next) {
  if (!has(call, weight)) return {};
  const at::ScalarType type = at::autocast::get_autocast_dtype(weight.device().type());
  Cast& cast = casts_[weight.unsafeGetTensorImpl()];
  if (!cast.lower.defined() || cast.lower.scalar_type() != type) {
    const at::Tensor here = pieces.is_here(weight) ? weight : pieces.cross(weight);
    cast = {weight, next.run(call, [&] { return here.to(type); })};
  }
  return cast.lower;
}

}  // namespace trireme::ownership
