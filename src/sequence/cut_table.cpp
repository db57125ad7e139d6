#include "sequence/cut_table.h"

#include <numeric>
#include <utility>

namespace trireme::sequence {

int64_t Cut::before(int rank) const { return std::accumulate(lengths.begin(), lengths.begin() + rank, int64_t{0}); }

std::optional<CutTensor> CutTable::find(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return {};
  const CutStorage* storage = storages_.find(tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
  if (storage == nullptr) return {};
  CutTensor result{.storage = storage, .dim = -1};
  if (storage->stride == 0) return result;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1 && tensor.stride(dim) == storage->stride) result.dim = dim;
  return result;
}

void CutTable::add(const at::Tensor& tensor, const std::shared_ptr<const Cut>& cut, int64_t dim) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  if (storages_.find(tensor.storage().unsafeGetStorageImpl()) != nullptr) return;
  add(tensor, {.cut = cut, .stride = dim < 0 ? 0 : tensor.stride(dim), .next_token = {}});
}

void CutTable::add(const at::Tensor& tensor, CutStorage storage) {
  storages_.set(tensor.storage(), std::move(storage));
}

}  // namespace trireme::sequence
