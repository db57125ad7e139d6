// Stages 0-2, and a world of one on a device: every rank holds every weight, whole, in one flat buffer per unit.
#include <ATen/ops/zeros.h>

#include "pager/weight_store.h"

namespace trireme {
namespace {

class ResidentWeights final : public WeightStore {
 public:
  explicit ResidentWeights(const StoreContext& context) : WeightStore(context) {
    for (int i = 0; i < units(); ++i) buffers_.push_back(take_over(i));
  }

  void before_access(int, Access) override {}
  void after_write(int index) override { parameter(index).written = true; }

  OwnedSlice owned(int index) override {
    if (policy().stage == 0) return {index, 0, buffers_[index], {}};
    const int64_t begin = shard_begin(index);
    return {index, begin, buffers_[index].narrow(0, begin, unit(index).shard_numel), {}};
  }

  void publish(int index) override {
    if (policy().stage == 0 || group().size() == 1) return;  // every rank computed the same update
    gathers_.push_back(group().all_gather(buffers_[index], owned(index).weights));
  }

  void open_window() override {
    for (Pending<void>& gather : gathers_) gather.wait();
    gathers_.clear();
  }

  void add_to(PagerMemory& memory) const override {
    for (int i = 0; i < units(); ++i) {
      memory.weight_bytes += static_cast<int64_t>(buffers_[i].nbytes());
      memory.padding_bytes += unit(i).padding() * buffers_[i].element_size();
    }
  }

 private:
  at::Tensor take_over(int index) {
    at::Tensor buffer = at::zeros({unit(index).numel()}, options(index));
    for (const Placement& placement : unit(index).parameters) {
      ManagedParameter& managed = parameter(placement.index);
      copy_values(managed, buffer.narrow(0, placement.begin, placement.numel));
      managed.owner->memory = std::make_shared<at::Tensor>(buffer);
      StorageHandle::point(managed.storage(), element(buffer.data_ptr(), placement.begin, managed.itemsize()),
                           managed.bytes(), managed.owner);
    }
    if (group().size() > 1) group().broadcast(buffer, 0).wait();
    return buffer;
  }

  std::vector<at::Tensor> buffers_;
  std::vector<Pending<void>> gathers_;
};

}  // namespace

std::unique_ptr<WeightStore> make_resident_weights(const StoreContext& context) {
  return std::make_unique<ResidentWeights>(context);
}

}  // namespace trireme
