// This rank's part of the sum of squares over all gradients of a model, after GradientStore::finish(). Local.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "pager/weights/store.h"
#include "trireme/base/exact_sum.h"
#include "trireme/pager/storage/owned_slice.h"

namespace trireme {

class GradientStore;
/// By mesh.
using GradientStores = std::vector<std::unique_ptr<GradientStore>>;

/// Over the touched parameters, on the host. Over all ranks each element counts once.
ExactSum squares_on_host(const StoreContext& context, const GradientStores& gradients);

/// [owned.size()] fp64, by unit, on the device: the host reads nothing. 0 for units that another rank counts.
at::Tensor squares_on_device(const StoreContext& context, const std::vector<OwnedSlice>& owned,
                             const GradientStores& gradients);

/// [] fp64 on the device: the norm of `gradients`, those of the piece of `unit` that this rank updates, without those
/// that another rank counts.
at::Tensor counted_norm(const StoreContext& context, int unit, const at::Tensor& gradients);

}  // namespace trireme
