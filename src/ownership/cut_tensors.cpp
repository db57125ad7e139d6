#include "ownership/cut_tensors.h"

#include <c10/util/accumulate.h>

#include <algorithm>

#include "ownership/homes.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/base/mix64.h"
#include "trireme/intercept.h"

namespace trireme::ownership {

CutTensors::Geometry CutTensors::geometry_of(const at::Tensor& tensor) const {
  if (const PartTensor* const part = PartTensor::of(tensor)) {
    const c10::IntArrayRef sizes = part->known()->sizes, strides = part->strides_of_whole();
    return {{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}};
  }
  const c10::IntArrayRef sizes = tensor.sizes(), strides = tensor.strides();
  if (const auto whole = cuts_.whole_sizes(tensor))
    return {{whole->begin(), whole->end()}, dense_strides(*whole, strides)};
  return {{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}};
}

int64_t CutTensors::numel_of(const at::Tensor& tensor) const {
  const Geometry geometry = geometry_of(tensor);
  return c10::multiply_integers(geometry.sizes.begin(), geometry.sizes.end());
}

at::Tensor CutTensors::whole(const at::Tensor& tensor) const {
  // A parameter is a plain slice, of which operators make parts, also of views of it. What gathers it reads sizes of
  // what they make.
  at::Tensor part = tensor;
  if (cuts_.is_part(local_of(tensor))) {
    part = tensor.clone();
    TRIREME_CHECK(PartTensor::of(part) != nullptr, "a copy of a slice of sizes ", tensor.sizes(), " is no part");
  }
  at::Tensor whole = cuts_.whole(part);
  if (cuts_.is_part(whole))
    throw StateError(
        str("smp: a tensor of sizes ", geometry_of(tensor).sizes,
            " leaves its stage, and it is not known how the ranks along \"tensor\" have cut it; make views "
            "by libtorch's operators"));
  return whole;
}

CutTensors::Whole CutTensors::whole_of_gradient(const at::Tensor& part) const {
  PartTensor* const own = PartTensor::of(part);
  if (own == nullptr) return [this, part](const at::Tensor& gradient) { return cuts_.whole_like(gradient, part); };
  if (own->known()->placement.overlaps())
    throw Error(
        ErrorCode::kUnsupported,
        str("smp: a stage uses a tensor of sizes ", at::IntArrayRef(own->known()->sizes), " again after another ",
            "stage has, and ranks along \"tensor\" share elements of it, which is not there yet; clone() it for "
            "the other stage"));
  return [this, of = own->known()](const at::Tensor& gradient) {
    return cuts_.whole(PartTensor::wrap(gradient.detach(), of));
  };
}

uint64_t CutTensors::cut_of(const at::Tensor& tensor) const {
  PartTensor* const part = PartTensor::of(tensor);
  if (part == nullptr) return 0;
  uint64_t hash = 1;
  const auto mix = [&](int64_t number) { hash = mix64(hash + static_cast<uint64_t>(number)); };
  for (const int64_t size : part->local().sizes()) mix(size);
  for (const Placement::Cuts& cuts : part->known()->placement)
    for (const Cut& cut : cuts) {
      mix(cut.dim);
      mix(cut.outer);
    }
  return hash;
}

CutTensors::Makers CutTensors::makers_of(c10::ArrayRef<c10::IValue> arguments) const {
  Makers makers;
  for_each_tensor(arguments, [&](const at::Tensor& tensor) {
    makers.push_back(tensor.defined() ? maker_of(tensor) : std::nullopt);
  });
  return makers;
}

void CutTensors::note_results(const std::vector<at::Tensor>& results, const Key& key, const ToldCall& told,
                              const Makers& makers) {
  size_t number = 0;
  for (const ToldCall::Return& result : told.returns)
    for (const ToldTensor& one : result.tensors) {
      const at::Tensor& tensor = results[number++];
      if (!one.is_defined || one.is_argument >= 0) continue;
      uint64_t hash = one.cut;
      if (one.shares_with < 0)
        for (const int64_t stride : one.strides) hash = mix64(hash + static_cast<uint64_t>(stride));
      else if (one.is_all && makers[one.shares_with])
        hash = *makers[one.shares_with];
      else
        hash = mix64(hash ^ mix64(key.first ^ key.second)) + number;
      note(tensor, hash);
    }
}

void CutTensors::note_owned(const at::Tensor& tensor, const std::string& name) {
  uint64_t hash = 0;
  for (const char letter : name) hash = mix64(hash ^ static_cast<unsigned char>(letter));
  note(tensor, hash);
}

void CutTensors::note_copies(const std::vector<at::Tensor>& copies) {
  std::erase_if(copies_, [](const auto& copy) { return copy.expired(); });
  for (const at::Tensor& copy : copies)
    if (copy.defined()) copies_.push_back(local_of(copy).storage().getWeakStorageImpl());
}

bool CutTensors::is_copy(const at::Tensor& tensor) const {
  const c10::StorageImpl* const storage = storage_of(tensor);
  return std::ranges::any_of(copies_, [&](const auto& copy) { return copy._unsafe_get_target() == storage; });
}

void CutTensors::note(const at::Tensor& tensor, uint64_t hash) {
  if (makers_.size() >= most_) {
    std::erase_if(makers_, [](const auto& entry) { return entry.second.tensor.expired(); });
    std::erase_if(of_places_, [](const auto& entry) { return entry.second.storage.expired(); });
    most_ = std::max<size_t>(most_, makers_.size() * 2);
  }
  makers_.insert_or_assign(
      tensor.unsafeGetTensorImpl(),
      Maker{c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(tensor.getIntrusivePtr()), hash});
  const uint64_t place = place_of(tensor);
  const auto found = of_places_.find(place);
  if (found != of_places_.end() && !found->second.storage.expired()) return;
  of_places_.insert_or_assign(place, MakerOfPlace{local_of(tensor).storage().getWeakStorageImpl(), hash});
}

std::optional<uint64_t> CutTensors::maker_of(const at::Tensor& tensor) const {
  if (const auto found = makers_.find(tensor.unsafeGetTensorImpl()); found != makers_.end()) return found->second.hash;
  const auto found = of_places_.find(place_of(tensor));
  const bool is_found = found != of_places_.end() && found->second.storage._unsafe_get_target() == storage_of(tensor);
  return is_found ? std::optional(found->second.hash) : std::nullopt;
}

uint64_t CutTensors::place_of(const at::Tensor& tensor) const {
  const at::Tensor local = local_of(tensor);
  uint64_t hash = mix64(reinterpret_cast<uintptr_t>(storage_of(local)) ^ static_cast<uint64_t>(local.storage_offset()));
  for (const int64_t size : geometry_of(tensor).sizes) hash = mix64(hash + static_cast<uint64_t>(size));
  for (const int64_t stride : local.strides()) hash = mix64(hash + static_cast<uint64_t>(stride));
  return hash ^ cut_of(tensor);  // the same elements of a rank may be cut in two ways
}

}  // namespace trireme::ownership
