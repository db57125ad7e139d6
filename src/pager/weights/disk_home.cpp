// A shard on disk: a gather reads it, and it is in memory only while it is updated.
#include <ATen/ops/empty.h>

#include <vector>

#include "pager/weights/shard_home.h"
#include "trireme/device/extents.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

/// The owner of a tensor's storage. Views of it may be made at any time.
class LeasedMemory final : public ManagedStorage {
 public:
  void before_access(Access) override {}
};

std::span<std::byte> bytes_in(const at::Tensor& tensor) {
  return {static_cast<std::byte*>(tensor.data_ptr()), tensor.nbytes()};
}

class DiskHome final : public ShardHome {
 public:
  DiskHome(const StoreContext& context, int unit)
      : extents_(*context.extents),
        layout_(context.layout),
        unit_(unit),
        size_(bytes_of(context.unit(unit).shard_numel, context.unit(unit).dtype)) {
    const c10::Storage storage(c10::Storage::use_byte_size_t(), size_.count, at::DataPtr(nullptr, c10::kCPU), nullptr,
                               /*resizable=*/false);
    owned_ = at::empty({0}, at::TensorOptions(context.unit(unit).dtype))
                 .set_(storage, 0, {context.unit(unit).shard_numel}, {1});
    forbid_reading();
  }

  at::Tensor read_into(const at::Tensor& part) override {
    reading_ = extents_.read(unit_, bytes_in(part));
    return part;
  }
  bool reads_beside() const override { return true; }
  void await_read() override { reading_.get(); }

  void write(const at::Tensor& part, int64_t, int64_t) override { newer_ = part; }
  void keep_written() override {
    if (newer_.defined()) extents_.write(unit_, bytes_in(std::exchange(newer_, {})));
  }

  /// Its memory is there while it is leased.
  at::Tensor owned() const override { return owned_; }
  void publish() override { put_back(); }
  void settle() override {
    extents_.settle();
    extents_.free_buffers();
  }

  void lease() override {
    // As many of those that are updated next are read as there are buffers for.
    std::vector<int> next;
    const int units = static_cast<int>(layout_.units.size());
    for (int unit = unit_ + 1; unit < units && static_cast<int>(next.size()) < extents_.ahead(); ++unit)
      if (layout_.units[unit].trainable) next.push_back(unit);
    StorageHandle::point(storage(), extents_.bring(unit_, next).data(), size_.count, memory_);
  }
  void put_back() override {
    forbid_reading();
    extents_.put_back(unit_);
  }
  void drop() noexcept override {
    forbid_reading();
    extents_.drop(unit_);
  }
  SliceStore* store(int64_t begin, int64_t numel) override {
    const at::ScalarType dtype = owned_.scalar_type();
    return extents_.slice(dtype, {{unit_, bytes_of(begin, dtype), bytes_of(numel, dtype)}});
  }

 private:
  at::StorageImpl& storage() const { return *owned_.storage().unsafeGetStorageImpl(); }
  void forbid_reading() noexcept {
    StorageHandle::release(storage(), memory_,
                           str("the owned weights of unit '", layout_.units[unit_].name,
                               "' are on disk (zero_optimization.offload_param): they have memory only in an update"));
  }

  Extents& extents_;
  const Layout& layout_;
  const int unit_;
  const Bytes size_;
  const std::shared_ptr<LeasedMemory> memory_ = std::make_shared<LeasedMemory>();
  at::Tensor owned_;
  at::Tensor newer_;  // the shard in the unit's buffer, into which the program has written
  DiskTransfer reading_;
};

}  // namespace

std::unique_ptr<Extents> make_shard_extents(const Layout& layout, const DiskSpace& space) {
  if (!space.is_on()) return nullptr;
  std::vector<Bytes> sizes;
  for (const UnitLayout& unit : layout.units) sizes.push_back(bytes_of(unit.shard_numel, unit.dtype));
  return std::make_unique<Extents>(std::move(sizes), space,
                                   Extents::Names{"zero_optimization.offload_param.nvme_path", "weights on disk"});
}

std::unique_ptr<ShardHome> make_disk_home(const StoreContext& context, int unit) {
  return std::make_unique<DiskHome>(context, unit);
}

}  // namespace trireme
