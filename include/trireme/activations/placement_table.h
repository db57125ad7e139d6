// How tensors of a rank are placed: parameters, and what operators compute from them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/activations/placement.h"
#include "trireme/intercept/storage_table.h"

namespace trireme {

/// The memory of a tensor that is cut.
enum class Held : uint8_t {
  kPart,    ///< this rank's elements
  kWhole,   ///< all elements on every rank, until an operator computes with them: inputs of a batch
  kWithin,  ///< memory for all elements, of which this rank's are right: a part was written into a tensor of the
            ///< program
};

/// The place of a copy in a tensor of the program: index `index` of dim `dim` of `of`.
struct CopyOf {
  at::Tensor of;
  int64_t dim, index;
  std::vector<int64_t> sizes = {};  ///< of the copy
  std::optional<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> copy = {};
};

/// The facts that are known of a tensor.
struct PlacedTensor {
  std::shared_ptr<const Placement> placement = nullptr;  ///< null: it is not cut
  Held held = Held::kPart;
  std::string parameter = {};  ///< its name; "": it is computed
  /// A parameter whose layer gives whole outputs.
  bool gathers_output = false;
  /// A parameter, or computed from one alone: others are cut as it is.
  bool is_parameter = false;
  /// A copy of other ranks' elements in place of a view: what is written into it would be lost.
  bool is_copy = false;
  std::shared_ptr<const CopyOf> copy_of = nullptr;  ///< but it goes back there
  /// A view of a tensor that is cut, made where no operator was seen.
  bool is_unknown = false;
  /// Not cut, but the ranks' sum over this many elements of a part, and over so many of the whole; 0: it is none.
  int64_t local_count = 0, whole_count = 0;

  bool is_cut() const { return placement != nullptr; }
};

/// A part that is cut so.
std::shared_ptr<const PlacedTensor> part_by(std::shared_ptr<const Placement> placement);

/// A tensor is known by its storage and its place in it: offset, sizes and strides. Views are added one by one. Two
/// that look alike and mean different dims, such as one head of a batch and the batch of one head, are told apart as
/// objects.
class PlacementTable {
 public:
  bool is_empty() const { return storages_.size() == 0; }
  /// Null: it is not known.
  std::shared_ptr<const PlacedTensor> find(const at::Tensor& tensor);
  void add(const at::Tensor& tensor, PlacedTensor known);
  /// From now on `tensor`, and each view of its storage that has the dim that is cut, is right at this rank's part
  /// alone.
  void hold_within(const at::Tensor& tensor, std::shared_ptr<const Placement> placement);

 private:
  struct View {
    int64_t offset;
    std::vector<int64_t> sizes, strides;
    std::shared_ptr<const PlacedTensor> known;
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;

    bool looks_like(const at::Tensor& other) const;
    bool is(const at::Tensor& other) const;
    std::shared_ptr<const PlacedTensor> derived(const at::Tensor& other) const;
  };
  StorageTable<std::vector<View>> storages_;
};

}  // namespace trireme
