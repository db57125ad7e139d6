#include "trireme/activations/placement_table.h"

#include <algorithm>
#include <utility>

namespace trireme {
namespace {

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

const std::shared_ptr<const PlacedTensor>& unknown() {
  static const auto known = std::make_shared<const PlacedTensor>(PlacedTensor{.is_unknown = true});
  return known;
}

bool is_same(const PlacedTensor& one, const PlacedTensor& other) {
  if (!one.is_cut() || !other.is_cut() || one.held != other.held) return one.is_cut() == other.is_cut();
  return one.placement == other.placement || *one.placement == *other.placement;
}

}  // namespace

std::shared_ptr<const PlacedTensor> part_by(std::shared_ptr<const Placement> placement) {
  return std::make_shared<const PlacedTensor>(PlacedTensor{.placement = std::move(placement)});
}

bool PlacementTable::View::looks_like(const at::Tensor& other) const {
  return other.storage_offset() == offset && other.sizes() == at::IntArrayRef(sizes) &&
         other.strides() == at::IntArrayRef(strides);
}

bool PlacementTable::View::is(const at::Tensor& other) const {
  return tensor._unsafe_get_target() == other.unsafeGetTensorImpl() && !tensor.expired();
}

std::shared_ptr<const PlacedTensor> PlacementTable::find(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  c10::StorageImpl* const storage = storage_of(tensor);
  const std::vector<View>* const views = storage != nullptr ? storages_.find(storage) : nullptr;
  if (views == nullptr) return {};
  const View* found = nullptr;
  bool is_unique = true;
  for (const View& view : *views) {
    if (!view.looks_like(tensor)) continue;
    if (view.is(tensor)) return view.known;
    is_unique = is_unique && (found == nullptr || is_same(*found->known, *view.known));
    found = &view;
  }
  if (found != nullptr && is_unique) return found->known;
  if (!views->empty() && !views->front().known->is_cut()) return views->front().known;
  if (!views->empty() && views->front().known->held == Held::kWhole) return {};  // as whole as any other tensor
  if (!views->empty() && views->front().known->held == Held::kWithin) return views->front().derived(tensor);
  return unknown();
}

/// Another view of a storage that is right within a part: it has the dim that is cut, or is not known.
std::shared_ptr<const PlacedTensor> PlacementTable::View::derived(const at::Tensor& other) const {
  Placement placement = *known->placement;
  for (Placement::Cuts& cuts : placement)
    for (Cut& cut : cuts) {
      const int64_t stride = strides[static_cast<size_t>(cut.dim)];
      int64_t dim = 0;
      while (dim < other.dim() && (other.stride(dim) != stride || other.size(dim) != cut.whole())) ++dim;
      if (dim == other.dim()) return unknown();
      cut.dim = dim;
    }
  return std::make_shared<const PlacedTensor>(
      PlacedTensor{.placement = std::make_shared<const Placement>(std::move(placement)), .held = Held::kWithin});
}

void PlacementTable::hold_within(const at::Tensor& tensor, std::shared_ptr<const Placement> placement) {
  if (std::vector<View>* const views = storages_.find(storage_of(tensor))) views->clear();
  add(tensor, {.placement = std::move(placement), .held = Held::kWithin});
}

void PlacementTable::add(const at::Tensor& tensor, PlacedTensor known) {
  using Weak = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  View made{.offset = tensor.storage_offset(),
            .sizes = tensor.sizes().vec(),
            .strides = tensor.strides().vec(),
            .known = std::make_shared<const PlacedTensor>(std::move(known)),
            .tensor = Weak(tensor.getIntrusivePtr())};
  c10::StorageImpl* const storage = storage_of(tensor);
  std::vector<View>* const views = storages_.find(storage);
  if (views == nullptr || tensor.storage().use_count() == 1) {
    storages_.set(tensor.storage(), {std::move(made)});
    return;
  }
  std::erase_if(
      *views, [&](const View& view) { return view.looks_like(tensor) && (view.tensor.expired() || view.is(tensor)); });
  views->push_back(std::move(made));
}

}  // namespace trireme
