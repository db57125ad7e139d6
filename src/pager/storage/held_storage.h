// A storage that zero::GatheredParameters can hold whole: a parameter of a pager, or a tensor of zero::Init.
#pragma once

#include <memory>
#include <string>

#include "trireme/intercept.h"
#include "trireme/pager/layout/shard_mesh.h"

namespace trireme {

class HeldStorage : public ManagedStorage {
 public:
  enum class Hold {
    kRead,    ///< any number at a time; operators that write are refused
    kModify,  ///< alone; what the rank writes stays private until spread()
  };

  /// Throws StateError that names the parameter: a hold that this one cannot share it with.
  void check(Hold hold) const;
  /// Collective: on return the bytes are there, and stay. Throws as check().
  void hold(Hold hold);
  /// Local. A kModify hold that ends without spread() leaves the parameter `unspread`.
  void let_go(Hold hold) noexcept;
  /// The bytes of rank `root` of the shards' ranks (of the first replica) become everybody's. Inside a kModify hold.
  /// Collective.
  void spread(int root);
  bool is_held() const { return readers_ > 0 || modifying_; }
  /// Throw StateError that names `call` and the parameter: it is held; ranks may hold different bytes.
  void require_free(const char* call) const;
  void require_spread(const char* call) const;
  /// Throws StateError: `access` writes what is held for reading.
  void refuse_write(Access access) const;

  /// "parameter 'w'".
  virtual std::string label() const = 0;
  /// The ranks that hold it; null once the manager is gone: the bytes are then what they are.
  virtual const ShardMesh* mesh() const = 0;
  /// Whether ranks of other groups have slices of the same layers, so that what one rank writes is not everybody's.
  virtual bool is_of_cut_layers() const { return false; }
  /// The identity of its manager, the same for all storages of one.
  virtual const void* manager() const = 0;
  /// Bytes that were spread become everybody's authoritative ones; once per manager. Collective.
  virtual void settle() {}

 protected:
  virtual void make_whole(Hold hold) = 0;
  virtual void release() noexcept = 0;
  virtual c10::StorageImpl& bytes() = 0;

 private:
  int readers_ = 0;
  bool modifying_ = false;
  bool unspread_ = false;
};

}  // namespace trireme
