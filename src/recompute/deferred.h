// Tensors that are not computed yet.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "recompute/row_expression.h"
#include "recompute/save_hooks.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"

namespace trireme::detail {

/// The storage of a tensor [..., width] that is to be an expression of rows. Views of the tensor are views without
/// data; materialize() computes the data and joins the tensor to the graph of the expression's operators, as if they
/// had been called one by one.
class Deferred final : public ManagedStorage, public std::enable_shared_from_this<Deferred> {
 public:
  struct Parts {
    Rows expression;
    at::Tensor rows;    ///< [N, K], the expression's leaf
    at::Tensor source;  ///< the program's tensor that `rows` is a view of
  };

  /// A tensor of `sizes` with such a storage; `sample` is the expression of no rows.
  static at::Tensor make(Parts parts, at::IntArrayRef sizes, const at::Tensor& sample);
  /// That of `tensor`, or null.
  static std::shared_ptr<Deferred> of(const at::Tensor& tensor);

  /// The data, and the graph. Throws StateError when the weights have been written since.
  void materialize();
  void before_access(Access) override { materialize(); }

  const Parts& parts() const { return parts_; }
  int64_t width() const { return width_; }
  at::ScalarType dtype() const { return dtype_; }
  bool starts_from(const c10::StorageImpl* storage) const;
  /// Whether a layer that is recomputed has begun since it was made: when it runs again, this one is whole.
  bool is_from_outside() const { return moment_.has_later(); }
  /// Throws StateError when the weights have been written since.
  void check_versions() const;
  /// Whether autograd takes the same way from `tensor` to this one as from the operators themselves: views alone stand
  /// between them, and no hook waits for the gradient.
  bool is_plain_view(const at::Tensor& tensor) const;

 private:
  class Join;
  struct Version {
    at::Tensor tensor;
    uint32_t version;
  };

  Parts parts_;
  std::vector<int64_t> sizes_;
  int64_t width_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  std::vector<Version> versions_;
  SaveMoment moment_;  ///< at which the program called the product
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  NodePtr join_;  ///< a Join
};

/// A tensor as rows of a deferred one.
struct DeferredRows {
  std::shared_ptr<Deferred> deferred;
  Rows expression;         ///< with the tensor's columns alone
  at::Tensor row_numbers;  ///< undefined: all rows in order

  /// The expression's leaf for these rows.
  at::Tensor leaf() const;
};

/// Nothing where `tensor` is not deferred, or is no selection of rows and a range of columns.
std::optional<DeferredRows> deferred_rows(const at::Tensor& tensor);

}  // namespace trireme::detail
