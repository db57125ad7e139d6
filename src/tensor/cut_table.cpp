#include "tensor/cut_table.h"

#include <utility>

namespace trireme::tensor {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool is_same(const CutTensor& one, const CutTensor& other) {
  if (one.is_copy || other.is_copy) return one.is_copy == other.is_copy;
  return one.cut.dim == other.cut.dim && one.cut.has_same_slices(other.cut);
}

}  // namespace

std::optional<CutTensor> CutTable::find(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  c10::StorageImpl* const storage = storage_of(tensor);
  const std::vector<View>* const views = storage != nullptr ? storages_.find(storage) : nullptr;
  if (views == nullptr) return {};
  for (const View& view : *views)
    if (tensor.storage_offset() == view.offset && tensor.sizes() == at::IntArrayRef(view.sizes) &&
        tensor.strides() == at::IntArrayRef(view.strides))
      return view.known;
  if (!views->empty() && views->front().known.is_copy) return CutTensor{.is_copy = true};
  return CutTensor{.is_unknown = true};
}

void CutTable::add(const at::Tensor& tensor, CutTensor known) {
  View made{.offset = tensor.storage_offset(),
            .sizes = tensor.sizes().vec(),
            .strides = tensor.strides().vec(),
            .known = std::move(known)};
  c10::StorageImpl* const storage = storage_of(tensor);
  std::vector<View>* const views = storages_.find(storage);
  if (views == nullptr || tensor.storage().use_count() == 1) {
    storages_.set(tensor.storage(), {std::move(made)});
    return;
  }
  for (View& view : *views)
    if (view.offset == made.offset && view.sizes == made.sizes && view.strides == made.strides) {
      // Two views that look alike and mean different dims: a rank has one element of each.
      if (!is_same(view.known, made.known)) view.known = {.is_unknown = true};
      return;
    }
  views->push_back(std::move(made));
}

void CutTable::forget(const at::Tensor& tensor) { storages_.erase(storage_of(tensor)); }

}  // namespace trireme::tensor
