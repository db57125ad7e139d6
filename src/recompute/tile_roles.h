// Which part an operator can have in tiled computation.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>

namespace trireme::detail {

enum class TileRole : uint8_t {
  kOther,      ///< reads whole tensors
  kProduct,    ///< rows times a weight
  kPointwise,  ///< of one shape, element by element
  kCast,       ///< pointwise, or gives its argument itself
  kDropout,    ///< gives its argument itself where nothing is dropped
  kView,       ///< reads no data
  kCopy,       ///< a view where that is possible, else a copy
  kLoss,       ///< cross entropy
  kLookup,     ///< reads rows of a table
};

TileRole tile_role_of(const c10::OperatorHandle& op);

/// Where a product has its rows and its weight among the arguments, and how the weight lies.
struct ProductShape {
  size_t rows = 0, weight = 1;
  bool is_transposed = false;  ///< the weight is [K, width]; else [width, K]
};
ProductShape product_shape_of(const c10::OperatorHandle& op);

}  // namespace trireme::detail
