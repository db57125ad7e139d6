#include "trireme/recompute/tiled.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>

#include "recompute/tiled_loss.h"

namespace trireme {

at::Tensor tiled(const TileOptions& options, const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                 const std::vector<at::Tensor>& inputs) {
  if (options.tokens < 1)
    throw ShapeError(str(options.recompute.name, ": tiles of ", options.tokens, " tokens; use at least 1"));
  if (inputs.empty()) throw ShapeError(str(options.recompute.name, ": no input to cut into tiles"));
  std::vector<std::vector<at::Tensor>> tiles;  // of each input
  for (const at::Tensor& input : inputs) {
    if (input.size(options.dim) != inputs[0].size(options.dim))
      throw ShapeError(str(options.recompute.name, ": inputs ", inputs[0].sizes(), " and ", input.sizes(),
                           " differ in dim ", options.dim, ", along which they are cut"));
    tiles.push_back(input.split(options.tokens, options.dim));
  }
  std::vector<at::Tensor> results;
  for (size_t tile = 0; tile < tiles[0].size(); ++tile) {
    std::vector<at::Tensor> parts;
    for (const auto& of_input : tiles) parts.push_back(of_input[tile]);
    results.push_back(recompute(options.recompute, function, parts));
  }
  return results.size() == 1 ? results[0] : at::cat(results, options.dim);
}

at::Tensor tiled_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                               const TiledLossOptions& options) {
  const auto losses = [weight, options](const std::vector<at::Tensor>& tile) {
    return at::cross_entropy_loss(at::linear(tile[0], weight, options.bias), tile[1], options.class_weight,
                                  at::Reduction::None, options.ignore_index, options.label_smoothing);
  };
  const TileOptions tiles{.tokens = options.tokens,
                          .recompute = {.preserve_rng_state = false, .name = "tiled_cross_entropy"}};
  return detail::reduce_losses(tiled(tiles, losses, {hidden, target}), target, options);
}

at::Tensor loss_weight(const at::Tensor& target, const at::Tensor& class_weight, int64_t ignore_index) {
  const at::Tensor counts = target.ne(ignore_index);
  if (!class_weight.defined()) return counts.sum();
  const at::Tensor classes = target.masked_fill(counts.logical_not(), 0).flatten();
  return class_weight.index_select(0, classes).mul(counts.flatten()).sum();
}

at::Tensor detail::reduce_losses(const at::Tensor& losses, const at::Tensor& target, const TiledLossOptions& options) {
  if (options.reduction == at::Reduction::None) return losses;
  const bool is_16_bit = losses.scalar_type() == at::kHalf || losses.scalar_type() == at::kBFloat16;
  const at::ScalarType sum_dtype = is_16_bit ? at::kFloat : losses.scalar_type();
  at::Tensor sum = losses.sum(sum_dtype);
  if (options.reduction == at::Reduction::Mean)
    sum = sum / loss_weight(target, options.class_weight, options.ignore_index).to(sum_dtype);
  return sum.to(losses.scalar_type());
}

}  // namespace trireme
