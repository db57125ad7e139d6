// Tensors of a micro-batch that have crossed between this stage and others.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <unordered_map>
#include <vector>

namespace trireme::ownership {

/// The tensors of a micro-batch that stages other than their own have used.
///
/// A tensor's elements cross once to each stage. Its gradient goes the way of its uses: where another stage uses it
/// than the last one that did, the gradient of all uses from then on goes back to that one, and on from there. So sums
/// over uses have the order of one process, whichever stages the uses are on. A view that is made meanwhile follows.
class Transfers {
 public:
  struct Entry {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor;  ///< keeps the address from being used again
    uint32_t version = 0;
    int home = 0;
    int holder = 0;                ///< the stage that used it last
    std::vector<bool> is_at = {};  ///< by stage: its elements have crossed
    at::Tensor data = {};          ///< received
    at::Tensor whole = {};         ///< on its home, where it is a part: what others have got
    at::Tensor used_as = {};  ///< by this stage, in the latest run of its uses: `data`, with a gradient that goes back
  };
  /// The effect of `stage`'s use of a tensor.
  struct Use {
    Entry* entry = nullptr;  ///< null: nothing, it has never left its home
    bool brings_data = false;
    int from = -1;  ///< the stage that used it before, where the gradient goes back to; -1: none
  };
  Use use(const at::Tensor& tensor, int home, int stage, int stages, bool needs_gradient);
  /// The entry of a tensor that another stage than its home used last, as it is now; null: its home did.
  const Entry* away(const at::Tensor& tensor) const;
  /// A view of what is away, where it takes part in the sums of gradients: its next use is from the same stage.
  /// `used_as`: the view of what the stage used, on that stage.
  void follow(const at::Tensor& view, const Entry& of, const at::Tensor& used_as);
  /// Whether a stage other than its own has used it.
  bool has(const at::Tensor& tensor) const { return entries_.contains(tensor.unsafeGetTensorImpl()); }
  bool has_any() const { return !entries_.empty(); }
  void clear() { entries_.clear(); }

 private:
  std::unordered_map<const c10::TensorImpl*, Entry> entries_;
};

}  // namespace trireme::ownership
