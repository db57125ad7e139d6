#include "trireme/base/torch/storage.h"

#include <utility>

namespace trireme {
namespace {

// StorageImpl can be told to throw a message of ours when its data is read, but in torch 2.11 not to stop throwing. A
// released storage comes back, so the flag behind it must be reachable; naming a private member in an explicit
// instantiation is allowed C++.
bool& throws_on_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::*kFlag>
struct ThrowFlag {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*kFlag; }
};
template struct ThrowFlag<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

/// In torch 2.11 the data themselves say that they are copied at the next write; in later versions their storage does.
template <class Storage>
void forget_copy_on_write(Storage& storage) {
  if constexpr (requires { storage.clear_materializer(); }) storage.clear_materializer();
}

}  // namespace

void replace_data(c10::StorageImpl& storage, c10::DataPtr data) {
  throws_on_access(storage) = false;
  forget_copy_on_write(storage);
  storage.set_data_ptr_noswap(std::move(data));
}

}  // namespace trireme
