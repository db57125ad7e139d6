// ZeRO stage 3 where ranks share memory: the shards of all ranks stand side by side in one segment that everybody maps,
// so a unit is always whole and a gather moves no byte. The host holds one copy of the weights.
//
// Writers and times: a rank writes only its own shard, and only between close_window() (after which no peer reads) and
// open_window() (before which none reads again). A user's write in between goes to a private copy of the parameter.
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "pager/weights/store.h"

namespace trireme {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t value, size_t multiple) { return (value + multiple - 1) / multiple * multiple; }

class MappedWeights final : public WeightStore {
 public:
  explicit MappedWeights(const StoreContext& context) : WeightStore(context) {
    std::vector<size_t> bytes(meshes().size());
    for (int i = 0; i < units(); ++i) {
      size_t& end = bytes[unit(i).mesh];
      const size_t size = unit_bytes(i);
      end = round_up(end, size >= 2 * kHugePage ? kHugePage : 64);
      begins_.push_back(end);
      end += size;
    }
    for (size_t mesh = 0; mesh < bytes.size(); ++mesh)
      segments_.push_back(
          meshes()[mesh].shards.memory_sharing()->share(std::max<size_t>(bytes[mesh], 1), MemorySharing::Share::kOne));
    for (int i = 0; i < units(); ++i) fill(i);
    await_peers();  // values are complete
    for (int i = 0; i < units(); ++i)
      if (mesh(i).replica_count() > 1) mesh(i).replicas->broadcast(shard_of(i), 0).wait();
    for (const ShardMesh& mesh : meshes())
      if (mesh.replica_count() > 1) barrier_over(mesh);
    for (ManagedParameter& managed : parameters()) {
      managed.owner->memory = segment_of(managed.unit);
      point_at_segment(managed);
    }
  }

  ~MappedWeights() override {
    // A user's write that no step has applied stays as it is.
    for (Private& copy : privates_)
      parameter(copy.parameter).owner->memory = std::make_shared<c10::DataPtr>(std::move(copy.data));
  }

  void before_access(int index, Access access) override {
    if (access == Access::kRead || is_private(parameter(index))) return;
    // The first write since the step: peers may still read the shared bytes.
    ManagedParameter& managed = parameter(index);
    c10::DataPtr copy = c10::GetCPUAllocator()->allocate(managed.bytes());
    // Also where all will be overwritten: the operator may throw before it does.
    if (managed.numel > 0) std::memcpy(copy.get(), managed.storage().data(), managed.bytes());
    void* data = copy.get();
    privates_.push_back({index, std::move(copy)});
    StorageHandle::point(managed.storage(), data, managed.bytes(), managed.owner);
  }

  void after_write(int index) override { parameter(index).written = true; }

  OwnedSlice owned(int index) override { return {index, piece_begin(index), piece_of(index, shard_of(index)), {}}; }

  void apply_writes() override {
    for (const Private& copy : privates_) {
      const ManagedParameter& managed = parameter(copy.parameter);
      const int64_t begin = shard_begin(managed.unit);
      const Overlap mine = overlap(managed, begin, begin + unit(managed.unit).shard_numel);
      if (mine.empty()) continue;
      std::memcpy(element(unit_data(managed.unit), mine.begin, managed.itemsize()),
                  element(copy.data.get(), mine.begin - managed.begin, managed.itemsize()),
                  mine.numel() * managed.itemsize());
    }
  }

  void publish(int index) override { join_pieces(index, shard_of(index)); }  // else it is written in place

  void settle_writes() override {
    await_peers();
    for (const Private& copy : privates_) point_at_segment(parameter(copy.parameter));
    privates_.clear();
  }

  void open_window() override { settle_writes(); }

  void add_to(PagerMemory& memory) const override {
    for (int i = 0; i < units(); ++i) {
      const int64_t itemsize = static_cast<int64_t>(c10::elementSize(unit(i).dtype));
      memory.weight_bytes += unit(i).shard_numel * itemsize;
      memory.padding_bytes += unit(i).padding() * itemsize / unit(i).shards;
    }
    for (const Private& copy : privates_) memory.live_bytes += static_cast<int64_t>(parameter(copy.parameter).bytes());
  }

 private:
  struct Private {
    int parameter;
    c10::DataPtr data;
  };

  size_t unit_bytes(int index) const { return unit(index).numel() * c10::elementSize(unit(index).dtype); }
  const std::shared_ptr<SharedMemory>& segment_of(int index) const { return segments_[unit(index).mesh]; }
  std::byte* unit_data(int index) const { return segment_of(index)->of(0) + begins_[index]; }
  at::Tensor shard_of(int index) const {
    void* data = element(unit_data(index), shard_begin(index), c10::elementSize(unit(index).dtype));
    return flat_view(data, unit(index).shard_numel, unit(index).dtype, segment_of(index));
  }

  std::byte* shared_data(const ManagedParameter& managed) const {
    return element(unit_data(managed.unit), managed.begin, managed.itemsize());
  }
  bool is_private(const ManagedParameter& managed) const { return managed.storage().data() != shared_data(managed); }
  void point_at_segment(ManagedParameter& managed) {
    StorageHandle::point(managed.storage(), shared_data(managed), managed.bytes(), managed.owner);
  }

  // Rank 0's values count. Values under an Init scope are the same everywhere and gathered by all, but rank 0 of each
  // replica writes them too.
  void fill(int index) {
    for (const ParameterPlace& placement : unit(index).parameters) {
      const ManagedParameter& managed = parameter(placement.index);
      if (ManagedStorage* owner = StorageHandle::owner_of(managed.storage())) owner->before_access(Access::kRead);
      if (shards(index).rank() == 0)
        copy_values(managed, flat_view(shared_data(managed), managed.numel, unit(index).dtype, segment_of(index)));
      // The memory that the model held until now is needed no more.
      StorageHandle::give(managed.storage(), c10::GetCPUAllocator()->allocate(0), 0);
    }
  }

  std::vector<std::shared_ptr<SharedMemory>> segments_;  // by mesh
  std::vector<size_t> begins_;                           // by unit, in its mesh's segment
  std::vector<Private> privates_;
};

}  // namespace

std::unique_ptr<WeightStore> make_mapped_weights(const StoreContext& context) {
  return std::make_unique<MappedWeights>(context);
}

}  // namespace trireme
