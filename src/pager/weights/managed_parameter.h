// A parameter as the pager's parts see it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include <memory>
#include <string>
#include <vector>

#include "pager/storage/held_storage.h"
#include "trireme/base/error.h"
#include "trireme/base/tensor_part.h"
#include "trireme/intercept.h"
#include "trireme/pager/layout/layout.h"
#include "trireme/pager/layout/shard_mesh.h"

namespace trireme {

class WeightStore;

/// Hangs in each storage of a pager's parameters, so that find_managed() is led from a parameter alone to its pager.
class PagerHandle {
 public:
  virtual ~PagerHandle() = default;
};

/// Hangs in a parameter's storage. Outlives the store where the model does.
class ParameterStorage final : public HeldStorage {
 public:
  ParameterStorage(WeightStore& store, int parameter) : store_(&store), parameter_(parameter) {}
  void before_access(Access access) override;
  void after_write() override;
  /// The pager is gone: what is whole stays as it is, what is released throws when it is read.
  void forget() { store_ = nullptr; }
  bool is_managed() const { return store_ != nullptr; }
  int parameter() const { return parameter_; }
  std::string label() const override;
  const ShardMesh* mesh() const override;
  bool is_of_cut_layers() const override;
  const void* manager() const override { return store_; }
  void settle() override;
  /// Memory that must live as long as the storage points into it.
  std::shared_ptr<void> memory;
  PagerHandle* pager = nullptr;

 private:
  void make_whole(Hold hold) override;
  void release() noexcept override;
  c10::StorageImpl& bytes() override;

  WeightStore* store_;
  int parameter_;
};

struct ManagedParameter {
  std::string name;
  at::Tensor tensor;  ///< keeps the storage alive
  int unit = 0;
  int64_t begin = 0;  ///< in elements of the unit's flat buffer
  int64_t numel = 0;
  std::shared_ptr<ParameterStorage> owner;
  bool written = false;  ///< by the user, since the window opened
  /// The elements of its flattening that norms of the whole model count here; ascending.
  std::vector<Interval> counted;
  bool is_of_cut_layers = false;

  c10::StorageImpl& storage() const { return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(); }
  size_t itemsize() const { return tensor.element_size(); }
  size_t bytes() const { return static_cast<size_t>(numel) * itemsize(); }
  bool is_all_counted() const { return counted.size() == 1 && counted.front().size() == numel; }
  /// [numel], its bytes as they stand in memory, which must be there.
  at::Tensor flat() const { return tensor.detach().as_strided({numel}, {1}, 0); }
};

/// Elements of `parameter` that lie in [begin, end) of its unit's flat buffer.
struct Overlap {
  int64_t begin = 0;  ///< in the unit
  int64_t end = 0;
  bool empty() const { return begin >= end; }
  int64_t numel() const { return end - begin; }
};
inline Overlap overlap(const ManagedParameter& parameter, int64_t begin, int64_t end) {
  return {std::max(parameter.begin, begin), std::min(parameter.begin + parameter.numel, end)};
}

/// The ranges of `part`, elements of `parameter`, that norms count here.
inline std::vector<Overlap> counted_within(const ManagedParameter& parameter, const Overlap& part) {
  std::vector<Overlap> counted;
  for (const Interval& one : parameter.counted) {
    const Overlap both{std::max(parameter.begin + one.begin, part.begin),
                       std::min(parameter.begin + one.end, part.end)};
    if (!both.empty()) counted.push_back(both);
  }
  return counted;
}

/// A flat tensor over memory that `keep` keeps alive.
at::Tensor flat_view(void* data, int64_t numel, at::ScalarType dtype, std::shared_ptr<void> keep);

inline std::byte* element(void* data, int64_t index, size_t itemsize) {
  return static_cast<std::byte*>(data) + index * static_cast<int64_t>(itemsize);
}

}  // namespace trireme
