// Which tensors are cut over the ranks of a tensor group: parameters, and what operators compute from them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <optional>
#include <string>
#include <vector>

#include "tensor/slices.h"
#include "trireme/intercept/storage_table.h"

namespace trireme::tensor {

/// The facts that are known of a tensor.
struct CutTensor {
  Cut cut = {};
  std::string parameter = {};  ///< its name; "": it is computed
  /// A parameter whose layer gives whole outputs.
  bool gathers_output = false;
  /// A parameter, or computed from one alone: others are cut as it is.
  bool is_parameter = false;
  /// Not cut, but a copy of other ranks' elements in place of a view: what is written into it would be lost.
  bool is_copy = false;
  /// A view of a tensor that is cut, made where no operator was seen.
  bool is_unknown = false;
  /// Not cut, but the ranks' sum over this many elements of a slice, and over so many of the whole; 0: it is none.
  int64_t local_count = 0, whole_count = 0;

  bool is_cut() const { return cut.ranges != nullptr; }
};

/// A tensor is known by its storage and its place in it: offset, sizes and strides. Views are added one by one. Two
/// that look alike and mean different dims, such as one head of a batch and the batch of one head, are told apart as
/// objects.
class CutTable {
 public:
  bool is_empty() const { return storages_.size() == 0; }
  std::optional<CutTensor> find(const at::Tensor& tensor);
  void add(const at::Tensor& tensor, CutTensor known);

 private:
  struct View {
    int64_t offset;
    std::vector<int64_t> sizes, strides;
    CutTensor known;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;

    bool looks_like(const at::Tensor& other) const;
    bool is(const at::Tensor& other) const;
  };
  StorageTable<std::vector<View>> storages_;
};

}  // namespace trireme::tensor
