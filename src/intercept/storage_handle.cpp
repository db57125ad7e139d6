#include <c10/core/StorageImpl.h>

#include <utility>

#include "trireme/intercept.h"

namespace trireme {
namespace {

// StorageImpl can be told to throw a message of ours when its data is read, but not to stop throwing. A released storage
// comes back, so the flag behind it must be reachable; naming a private member in an explicit instantiation is allowed C++.
bool& throws_on_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*kFlag>
struct ThrowFlag {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*kFlag; }
};
template struct ThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void StorageHandle::drop(void* context) noexcept {
  auto* owner = static_cast<ManagedStorage*>(context);
  if (owner->references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete owner;
}

void StorageHandle::point(c10::StorageImpl& storage, void* data, size_t bytes, ManagedStorage& owner) {
  owner.references_.fetch_add(1, std::memory_order_relaxed);
  throws_on_access(storage) = false;
  storage.set_data_ptr_noswap(c10::DataPtr(data, &owner, &StorageHandle::drop, c10::Device(c10::kCPU)));
  storage.set_nbytes(bytes);
  // resize_() would reallocate behind our back; libtorch refuses it by name where the storage is not resizable.
  storage.set_resizable(false);
}

void StorageHandle::release(c10::StorageImpl& storage, ManagedStorage& owner, const std::string& message) {
  owner.references_.fetch_add(1, std::memory_order_relaxed);
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(message);
  storage.set_data_ptr_noswap(c10::DataPtr(nullptr, &owner, &StorageHandle::drop, c10::Device(c10::kCPU)));
}

void StorageHandle::give(c10::StorageImpl& storage, c10::DataPtr data, size_t bytes) {
  throws_on_access(storage) = false;
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
  storage.set_resizable(true);
}

ManagedStorage* StorageHandle::owner_of(c10::StorageImpl& storage) noexcept {
  const c10::DataPtr& data = storage._mutable_data_ptr_no_checks();
  // The deleter is the mark: it is the same for every managed storage and nobody else's.
  return data.get_deleter() == &StorageHandle::drop ? static_cast<ManagedStorage*>(data.get_context()) : nullptr;
}

}  // namespace trireme
