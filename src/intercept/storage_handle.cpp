#include <c10/core/StorageImpl.h>

#include <utility>

#include "trireme/intercept.h"

namespace trireme {
namespace {

// StorageImpl can be told to throw a message of ours when its data is read, but not to stop throwing. A released
// storage comes back, so the flag behind it must be reachable; naming a private member in an explicit instantiation is
// allowed C++.
bool& throws_on_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*kFlag>
struct ThrowFlag {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*kFlag; }
};
template struct ThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

using Owner = std::shared_ptr<ManagedStorage>;

void StorageHandle::drop(void* context) noexcept { delete static_cast<Owner*>(context); }

void StorageHandle::point(c10::StorageImpl& storage, void* data, size_t bytes, Owner owner) {
  c10::DataPtr pointer(data, new Owner(std::move(owner)), &StorageHandle::drop, storage.device());
  throws_on_access(storage) = false;
  storage.set_data_ptr_noswap(std::move(pointer));
  storage.set_nbytes(bytes);
}

void StorageHandle::release(c10::StorageImpl& storage, Owner owner, const std::string& message) {
  c10::DataPtr pointer(nullptr, new Owner(std::move(owner)), &StorageHandle::drop, storage.device());
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  storage.set_data_ptr_noswap(std::move(pointer));
}

void StorageHandle::give(c10::StorageImpl& storage, c10::DataPtr data, size_t bytes) {
  throws_on_access(storage) = false;
  storage.set_data_ptr_noswap(std::move(data));
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
