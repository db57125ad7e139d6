#include "pager/weights/shard_home.h"

#include "pager/offload/host_slice.h"

namespace trireme {
namespace {

/// In the memory of the parameters' device, which updates it.
class DeviceHome final : public ShardHome {
 public:
  DeviceHome(const UnitLayout& unit, FlatBuffers& buffers) : shard_(buffers.zeros(unit.shard_numel, unit.dtype)) {}

  at::Tensor read_into(const at::Tensor& part) override {
    return part.scalar_type() == shard_.scalar_type() ? shard_ : at::Tensor(part).copy_(shard_);
  }
  void write(const at::Tensor& part, int64_t begin, int64_t numel) override {
    shard_.narrow(0, begin, numel).copy_(part.narrow(0, begin, numel));
  }
  at::Tensor owned() const override { return shard_; }
  int64_t weight_bytes() const override { return static_cast<int64_t>(shard_.nbytes()); }

 private:
  at::Tensor shard_;
};

/// On the host, which updates it, with a copy on the device, which is read.
class MirroredHome final : public ShardHome {
 public:
  MirroredHome(const UnitLayout& unit, FlatBuffers& buffers, PinnedArena& memory, const SideStream& returns)
      : copy_(unit, buffers), slice_(copy_.owned(), memory), returns_(returns) {}

  at::Tensor read_into(const at::Tensor& part) override {
    slice_.begin_use();
    return copy_.read_into(part);
  }
  void write(const at::Tensor& part, int64_t begin, int64_t numel) override { copy_.write(part, begin, numel); }
  void begin_update(bool written) override {
    if (written) slice_.fetch();
    slice_.end_use();
  }
  at::Tensor owned() const override { return slice_.on_host(); }
  void await_owned() override { slice_.await_sent(); }
  bool is_owned_there() const override { return slice_.is_sent(); }
  void publish() override { slice_.send(returns_); }
  int64_t weight_bytes() const override { return copy_.weight_bytes(); }

 private:
  DeviceHome copy_;
  HostSlice slice_;
  const SideStream& returns_;
};

/// On the host alone, which updates it; the parameters are on a device.
class HostHome final : public ShardHome {
 public:
  HostHome(const UnitLayout& unit, PinnedArena& memory) : shard_(memory.take(unit.shard_numel, unit.dtype)) {}

  at::Tensor read_into(const at::Tensor& part) override {
    at::Tensor(part).copy_(shard_, /*non_blocking=*/true);
    left_ = Event::record(part.device());
    return part;
  }
  void write(const at::Tensor& part, int64_t begin, int64_t numel) override {
    shard_.narrow(0, begin, numel).copy_(part.narrow(0, begin, numel));
  }
  at::Tensor owned() const override { return shard_; }
  void await_owned() override { left_.synchronize(); }
  bool is_owned_there() const override { return left_.is_complete(); }

 private:
  at::Tensor shard_;
  Event left_;  // behind the last copy from here
};

}  // namespace

bool is_shard_on_device(const StoreContext& context, int unit) {
  return context.extents == nullptr && !context.offload.keeps_shard(unit);
}

std::unique_ptr<ShardHome> make_shard_home(const StoreContext& context, int unit, FlatBuffers& buffers,
                                           const SideStream& returns) {
  if (context.extents != nullptr) return make_disk_home(context, unit);
  PinnedArena& memory = context.offload.memory();
  const UnitLayout& layout = context.unit(unit);
  if (context.offload.keeps_shard(unit)) return std::make_unique<HostHome>(layout, memory);
  if (context.offload.owns(unit)) return std::make_unique<MirroredHome>(layout, buffers, memory, returns);
  return std::make_unique<DeviceHome>(layout, buffers);
}

}  // namespace trireme
