// Tiled computation: a function of tokens is computed a tile of tokens at a time, in forward and again in backward, so
// that its inner activations never exist whole.
//
//   const trireme::TiledComputation scope({.loss_tokens = 1024, .mlp_tokens = 4096});  // any model with a loss
//
//   auto y = trireme::tiled({.tokens = 4096, .dim = 1}, [mlp](const auto& x) { return mlp->forward(x[0]); }, {x_BSH});
//
// The main idea of the scope: the result of a product that widens its input is a tensor without memory. Operators on
// rows (an activation, a cast, a gate) are noted down with it. The product or the cross entropy that narrows the rows
// again computes the noted operators tile by tile; any other operator gets the whole tensor, computed then.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "trireme/recompute/recompute.h"

namespace trireme {

/// Options of tiled().
struct TileOptions {
  int64_t tokens = 1024;  ///< of a tile; the last one may have fewer
  int64_t dim = 0;        ///< along which inputs are cut and results are joined
  RecomputeOptions recompute = {.name = "tiled"};
};

/// Returns function(inputs), computed tile by tile; backward computes each tile again.
///
/// Shapes    inputs [..., N at dim, ...], all with the same N -> the results of tiles, joined along dim.
/// Requires  as recompute(); rows do not depend on one another.
/// Cost      one more forward; beside inputs and result, the memory of one tile. A 16-bit weight's gradient is summed
///           over tiles in 16 bits, as over micro-batches.
/// Throws    ShapeError: no input, tokens below 1, inputs of other lengths. From backward: as recompute().
/// Source    arXiv:2506.13996 (sequence tiling). Test: tiled_test.cpp.
at::Tensor tiled(const TileOptions& options, const std::function<at::Tensor(const std::vector<at::Tensor>&)>& function,
                 const std::vector<at::Tensor>& inputs);

/// Options of tiled_cross_entropy(), as torch's cross_entropy has them.
struct TiledLossOptions {
  int64_t tokens = 1024;         ///< of a tile
  at::Tensor bias = {};          ///< [V] or undefined
  at::Tensor class_weight = {};  ///< [V] or undefined
  int64_t reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
};

/// cross_entropy(linear(hidden, weight, bias), target) without the logits: the sum over tokens is in fp32 at least.
///
/// Shapes    hidden [N, H], weight [V, H], target [N] int64 -> scalar; [N] with Reduction::None.
/// Throws    as tiled(), and what libtorch throws for such logits and targets.
/// Test      tiled_test.cpp.
at::Tensor tiled_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
                               const TiledLossOptions& options = {});

/// The divisor of a mean loss: the number of targets that are not ignored, or the sum of the weights of their classes
/// (`class_weight` [V]; undefined: all 1). A scalar in the weights' dtype, or int64.
at::Tensor loss_weight(const at::Tensor& target, const at::Tensor& class_weight, int64_t ignore_index);

/// Tokens per tile; 0: such products are not tiled.
struct TilePolicy {
  int64_t loss_tokens = 0;  ///< logits and their cross entropy
  int64_t mlp_tokens = 0;   ///< two products, the first of which widens its input, and operators on rows between them

  bool is_on() const { return loss_tokens > 0 || mlp_tokens > 0; }
  bool operator==(const TilePolicy&) const = default;
};

/// Throws ConfigError: negative tokens.
void check(const TilePolicy& policy);

/// Tiles what models of this thread compute while it lives, unmodified. Construct and destroy on the same thread;
/// graphs with recompute() around such products run backward meanwhile.
///
/// Logits are the product of more than `loss_tokens` rows with a weight of the shape of an embedding table that the
/// thread has read. An MLP's inner activations are products of more than `mlp_tokens` rows that are wider than these.
/// With `is_parameter` only products with such weights are tiled; else those with any leaf that requires gradients. If
/// the program reads a tiled tensor in another way, it gets the whole one, with the bits and gradients of an untiled
/// one.
///
/// Cost      one more forward of what is tiled; some microseconds per product that proves to be something else.
/// Throws    ConfigError: negative tokens. StateError from the operator that reads logits whose weights have been
///           updated since, and from direct access to the data of a tensor that was not computed yet.
/// Test      tiled_test.cpp, tests/compose.
class [[nodiscard]] TiledComputation {
 public:
  using IsParameter = std::function<bool(const at::Tensor&)>;
  explicit TiledComputation(const TilePolicy& policy, IsParameter is_parameter = nullptr);
  ~TiledComputation();
  TiledComputation(const TiledComputation&) = delete;
  TiledComputation& operator=(const TiledComputation&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
