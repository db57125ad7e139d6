#include <c10/core/StorageImpl.h>

#include <utility>

#include "trireme/base/torch/storage.h"
#include "trireme/intercept.h"

namespace trireme {
using Owner = std::shared_ptr<ManagedStorage>;

void StorageHandle::drop(void* context) noexcept { delete static_cast<Owner*>(context); }

void StorageHandle::point(c10::StorageImpl& storage, void* data, size_t bytes, Owner owner) {
  c10::DataPtr pointer(data, new Owner(std::move(owner)), &StorageHandle::drop, storage.device());
  replace_data(storage, std::move(pointer));
  storage.set_nbytes(bytes);
}

void StorageHandle::release(c10::StorageImpl& storage, Owner owner, const std::string& message) {
  c10::DataPtr pointer(nullptr, new Owner(std::move(owner)), &StorageHandle::drop, storage.device());
  replace_data(storage, std::move(pointer));
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
}

void StorageHandle::give(c10::StorageImpl& storage, c10::DataPtr data, size_t bytes) {
  replace_data(storage, std::move(data));
  storage.set_nbytes(bytes);
}

ManagedStorage* StorageHandle::owner_of(c10::StorageImpl& storage) noexcept {
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  // The deleter is the mark: it is the same for every managed storage and nobody else's.
  return data.get_deleter() == &StorageHandle::drop ? static_cast<Owner*>(data.get_context())->get() : nullptr;
}

std::shared_ptr<ManagedStorage> StorageHandle::share_owner_of(c10::StorageImpl& storage) {
  if (owner_of(storage) == nullptr) return nullptr;
  return *static_cast<Owner*>(storage._mutable_data_ptr_no_checks().get_context());
}

}  // namespace trireme
