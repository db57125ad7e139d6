// A value for each storage, whichever view of it an operator gets.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <cstddef>
#include <unordered_map>
#include <utility>

namespace trireme {

/// Values by storage. A storage is known by its address, which an entry keeps from being used again, but not its bytes.
/// Values of storages that are gone are dropped by sweep(), and now and then as the table grows. References to values
/// stay valid until then.
template <class T>
class StorageTable {
 public:
  /// Null where nothing is known of `storage`, or `storage` is null.
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

  /// Asks values of storages that are still there.
  template <class Test>
  bool any_of(const Test& test) const {
    return std::any_of(entries_.begin(), entries_.end(),
                       [&](const auto& item) { return !item.second.storage.expired() && test(item.second.value); });
  }

  /// With those of dead storages that are not swept yet.
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
