// A value for each storage, whichever view of it an operator gets.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace trireme {

/// Values by storage. The key is the storage's address; an entry keeps the address from being used again, but not the
/// storage's bytes. sweep() drops the values of storages that are gone; set() calls it now and then. References to
/// values stay valid until then.
template <class T>
class StorageTable {
 public:
  /// The value of `storage`; null if it has none or `storage` is null.
  T* find(const c10::StorageImpl* storage) {
    const auto found = entries_.find(storage);
    return found != entries_.end() ? &found->second.value : nullptr;
  }

  T& set(const c10::Storage& storage, T value) {
    if (entries_.size() >= sweep_at_) sweep();
    Entry entry{Weak(storage.getWeakStorageImpl()), std::move(value)};
    return entries_.insert_or_assign(storage.unsafeGetStorageImpl(), std::move(entry)).first->second.value;
  }

  void erase(const c10::StorageImpl* storage) { entries_.erase(storage); }

  void sweep() {
    std::erase_if(entries_, [](const auto& item) { return item.second.storage.expired(); });
    sweep_at_ = entries_.size() + std::max<size_t>(8, entries_.size() / 8);
  }

  /// Whether `test` is true for the value of any storage that still exists.
  template <class Test>
  bool any_of(const Test& test) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&](const auto& item) { return !item.second.storage.expired() && test(item.second.value); });
  }

  /// Entries, including those of dead storages that are not swept yet.
  size_t size() const { return entries_.size(); }

 private:
  using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  struct Entry {
    Weak storage;
    T value;
  };
  std::unordered_map<const c10::StorageImpl*, Entry> entries_;
  size_t sweep_at_ = 8;
};

}  // namespace trireme
