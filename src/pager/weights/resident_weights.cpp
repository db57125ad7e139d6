// ZeRO stages 0-2, and a world of one on a device: every rank holds every weight, whole, in one flat buffer per unit.
#include <ATen/ops/zeros.h>

#include <utility>

#include "pager/offload/host_slice.h"
#include "pager/weights/flat_buffers.h"
#include "pager/weights/store.h"

namespace trireme {
namespace {

class ResidentWeights final : public WeightStore {
 public:
  explicit ResidentWeights(const StoreContext& context)
      : WeightStore(context),
        flats_(context, gathered_bytes()),
        slices_(units()),
        returns_stream_(offload().is_empty() ? c10::kCPU : context.device) {
    for (int i = 0; i < units(); ++i) {
      buffers_.push_back(take_over(i));
      if (offload().owns(i)) slices_[i] = HostSlice(device_slice(i), offload().memory());
    }
  }

  bool pages() const override { return !offload().is_empty(); }

  void before_access(int index, Access) override {
    const int touched = parameter(index).unit;
    if (!offload().owns(touched)) return;
    offload().await(touched);
    slices_[touched].begin_use();
  }
  void after_write(int index) override { parameter(index).written = true; }

  OwnedSlice owned(int index) override {
    if (policy().stage == 0) return {index, 0, buffers_[index], {}};
    if (offload().owns(index)) return {index, shard_begin(index), slices_[index].on_host(), {}};
    return {index, piece_begin(index), piece_of(index, device_slice(index)), {}};
  }
  void await_owned(int index) override { slices_[index].await_sent(); }
  bool is_owned_there(int index) const override { return slices_[index].is_sent(); }

  void apply_writes() override {
    for (int i = 0; i < units(); ++i) {
      if (!offload().owns(i)) continue;
      offload().await(i);
      if (is_written(i)) slices_[i].fetch();
      slices_[i].end_use();
    }
  }

  void publish(int index) override {
    if (offload().owns(index)) return slices_[index].send(returns_stream_);
    if (policy().stage == 0) return;  // every rank computed the same update
    join_pieces(index, device_slice(index));
    if (shards(index).size() == 1) return;
    // The host gathers while the next unit is updated; a device has all updates before it, and gathers in one launch.
    if (is_host(device()))
      gathers_.push_back(shards(index).all_gather(buffers_[index], device_slice(index)));
    else
      published_.push_back(index);
  }

  void open_window() override {
    gather_together(std::exchange(published_, {}));
    for (int i = 0; i < units(); ++i) {
      if (!offload().owns(i) || shards(i).size() == 1) continue;
      offload().await(i);
      slices_[i].begin_use();
      gather_together({i});  // while the next ones are updated
    }
    for (Pending<void>& gather : gathers_) gather.wait();
    gathers_.clear();
  }

  void add_to(PagerMemory& memory) const override {
    memory.registered_bytes += flats_.registered_bytes();
    for (int i = 0; i < units(); ++i) {
      memory.weight_bytes += static_cast<int64_t>(buffers_[i].nbytes());
      memory.padding_bytes += unit(i).padding() * buffers_[i].element_size();
    }
  }

 private:
  // Frozen weights stay what they are.
  bool is_gathered(int index) const { return policy().stage > 0 && unit(index).trainable; }
  int64_t gathered_bytes() const {
    int64_t bytes = 0;
    for (int i = 0; i < units(); ++i)
      if (is_gathered(i)) bytes += bytes_in_slab(unit(i).numel(), unit(i).dtype);
    return bytes;
  }

  at::Tensor take_over(int index) {
    const int64_t numel = unit(index).numel();
    at::Tensor buffer =
        is_gathered(index) ? flats_.zeros(numel, unit(index).dtype) : at::zeros({numel}, options(index));
    for (const ParameterPlace& placement : unit(index).parameters) {
      ManagedParameter& managed = parameter(placement.index);
      copy_values(managed, buffer.narrow(0, placement.begin, placement.numel));
      managed.owner->memory = std::make_shared<at::Tensor>(buffer);
      StorageHandle::point(managed.storage(), element(buffer.data_ptr(), placement.begin, managed.itemsize()),
                           managed.bytes(), managed.owner);
    }
    broadcast_over(mesh(index), buffer);
    return buffer;
  }

  at::Tensor device_slice(int index) const {
    if (policy().stage == 0) return buffers_[index];
    return buffers_[index].narrow(0, shard_begin(index), unit(index).shard_numel);
  }

  void gather_together(const std::vector<int>& chosen) {
    for (size_t mesh = 0; mesh < meshes().size(); ++mesh) {
      std::vector<at::Tensor> wholes, slices;
      for (const int index : chosen) {
        if (unit(index).mesh != static_cast<int>(mesh)) continue;
        wholes.push_back(buffers_[index]);
        slices.push_back(device_slice(index));
      }
      if (wholes.empty()) continue;
      for (Pending<void>& gather : meshes()[mesh].shards.all_gather_coalesced(wholes, slices))
        gathers_.push_back(std::move(gather));
    }
  }

  FlatBuffers flats_;
  std::vector<at::Tensor> buffers_;
  std::vector<int> published_;     // on a device, and not gathered yet
  std::vector<HostSlice> slices_;  // of what is offloaded
  SideStream returns_stream_;
  std::vector<Pending<void>> gathers_;
};

}  // namespace

std::unique_ptr<WeightStore> make_resident_weights(const StoreContext& context) {
  return std::make_unique<ResidentWeights>(context);
}

}  // namespace trireme
