// A managed storage that writes down who touches it.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "trireme/intercept.h"

namespace trireme::testing {

/// Counts the accesses to the storage of one tensor.
class CountingStorage final : public ManagedStorage {
 public:
  /// Takes the storage of `tensor` over.
  static std::shared_ptr<CountingStorage> manage(const at::Tensor& tensor) {
    auto owner = std::make_shared<CountingStorage>();
    c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
    owner->data_ = std::move(storage._mutable_data_ptr_no_checks());
    StorageHandle::point(storage, owner->data_.get(), storage.nbytes(), owner);
    return owner;
  }
  void before_access(Access access) override {
    if (fails) throw std::runtime_error("cannot be made whole");
    accesses.push_back(access);
    if (released_ == nullptr) return;
    c10::StorageImpl& storage = *std::exchange(released_, nullptr);
    StorageHandle::point(storage, data_.get(), storage.nbytes(), StorageHandle::share_owner_of(storage));
  }
  void after_write() override { ++writes; }
  /// Takes the bytes away until the next access.
  void release(c10::StorageImpl& storage) {
    released_ = &storage;
    StorageHandle::release(storage, StorageHandle::share_owner_of(storage), "released");
  }

  std::vector<Access> accesses;
  int writes = 0;
  bool fails = false;

 private:
  c10::DataPtr data_;
  c10::StorageImpl* released_ = nullptr;
};

}  // namespace trireme::testing
