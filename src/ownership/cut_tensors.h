// Tensors of which this rank has a part, beside stages: stages see the whole, as a program does.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "ownership/sizes.h"
#include "trireme/activations/cut_activations.h"

namespace trireme::ownership {

/// A stage's own tensors, where ranks share its layers. What leaves the stage is whole, so that other stages have
/// tensors of the whole's sizes.
///
/// Strides of a view of a part are those of a dense whole, and not those that the same view of the whole has, and how a
/// part is cut its stage alone knows. So the maker of a tensor stands for these where stages compare calls: of a view
/// the call that made it, of a result its sizes and the cut that its stage has told, of what a stage owns its name.
class CutTensors {
 public:
  explicit CutTensors(CutActivations& cuts) : cuts_(cuts) {}

  struct Geometry {
    c10::SmallVector<int64_t, 5> sizes, strides;
  };
  /// As a program sees them.
  Geometry geometry_of(const at::Tensor& tensor) const;
  int64_t numel_of(const at::Tensor& tensor) const;
  /// `tensor` itself where it is no part. Differentiable, collective over the ranks that share layers.
  /// Throws    StateError: it is not known how it is cut.
  at::Tensor whole(const at::Tensor& tensor) const;
  /// A function that makes a gradient of the part `part` whole. Collective, too.
  /// Throws    Error(kUnsupported): ranks share elements, of whose gradient each has a part.
  using Whole = std::function<at::Tensor(const at::Tensor&)>;
  Whole whole_of_gradient(const at::Tensor& part) const;
  bool is_part(const at::Tensor& tensor) const { return cuts_.is_part(tensor); }
  /// A micro-batch begins.
  void begin_forward() { cuts_.begin_forward(); }

  /// The cut of a part as a number, the same on all stages of a pipeline; 0: it is none.
  uint64_t cut_of(const at::Tensor& tensor) const;
  /// maker_of() each tensor among the arguments of a call; empty where none is known.
  using Makers = c10::SmallVector<std::optional<uint64_t>, 4>;
  Makers makers_of(c10::ArrayRef<c10::IValue> arguments) const;
  /// The tensors that a call of this key gave, as they were told.
  void note_results(const std::vector<at::Tensor>& results, const Key& key, const ToldCall& told, const Makers& makers);
  /// The parameter or buffer `name`.
  void note_owned(const at::Tensor& tensor, const std::string& name);
  /// Results of an operator that gives views, which are copies of elements of a part.
  void note_copies(const std::vector<at::Tensor>& copies);
  bool is_copy(const at::Tensor& tensor) const;
  /// The maker of a tensor; of a view that is all of a tensor it is that one's. What was saved is another object by
  /// now, and is known by its place. Nothing: it is of no stage.
  std::optional<uint64_t> maker_of(const at::Tensor& tensor) const;
  /// A number of its memory, offset, sizes, strides and cut.
  uint64_t place_of(const at::Tensor& tensor) const;

 private:
  struct Maker {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    uint64_t hash;
  };
  struct MakerOfPlace {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;
    uint64_t hash;
  };
  void note(const at::Tensor& tensor, uint64_t hash);

  CutActivations& cuts_;
  std::unordered_map<const c10::TensorImpl*, Maker> makers_;
  std::unordered_map<uint64_t, MakerOfPlace> of_places_;  ///< the first at each
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> copies_;
  size_t most_ = 1024;  ///< entries, until dead ones are dropped
};

}  // namespace trireme::ownership
