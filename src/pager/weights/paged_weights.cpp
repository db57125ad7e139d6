// ZeRO stage 3 everywhere else: every rank holds its shard of each unit; a touched unit is all-gathered into a buffer,
// and released when the room is needed for another one.
//
// Units that are only read under autocast, by modules whose weights it casts (UnitLayout::communication_dtype), travel
// in that 16-bit dtype and are rounded. An access that needs the weights' own bits gathers the unit again.
//
// On a device gathers have a stream of their own. What may run when is said by events: a gather starts behind the last
// write of its shard and the last use of its buffer, and who touches a unit goes on behind its gather.
//
// Where a shard is kept its home knows (ShardHome). One that reads beside the program does so into the buffer, and what
// peers have follows when the unit is needed: so all ranks exchange units in the order in which they touch them.
//
// Residency decides which units are whole; this file executes its actions.
#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <span>

#include "pager/storage/buffer_arena.h"
#include "pager/storage/kernels.h"
#include "pager/weights/flat_buffers.h"
#include "pager/weights/residency.h"
#include "pager/weights/shard_home.h"
#include "pager/weights/store.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/extents.h"
#include "trireme/pager/storage/written_values.h"

namespace trireme {
namespace {

/// Memory on this rank: kReleased the shard; kGathering and kWhole the shard and a buffer of the whole unit.
enum class UnitState { kReleased, kGathering, kWhole };

struct PagedUnit {
  UnitState state = UnitState::kReleased;
  Event written;            // behind the shard's last write
  ArenaBuffer buffer;       // undefined while released
  bool is_rounded = false;  // what is in the buffer, or will be
  bool is_unseen = false;   // the program has written into it, and ranks have not compared that
  at::Tensor own;           // this rank's shard, while it is gathered: in the buffer or at home
  Pending<void> gather;
  Event brought;  // behind a gather in which no peer takes part
};

class PagedWeights final : public WeightStore {
 public:
  explicit PagedWeights(const StoreContext& context)
      : WeightStore(context),
        shards_(context, shard_bytes()),
        paged_(units()),
        digests_(context.parameters.size()),
        residency_(make_residency(context)),
        gathers_stream_(context.device),
        returns_stream_(offload().is_empty() ? c10::kCPU : context.device) {
    if (registers_buffers(context))
      arena_ = BufferArena(meshes().front().shards.buffer_registration(device())->zeros(
          bytes_of_units_in_slab(context.layout, residency_.limit_bytes())));
    if (context.extents != nullptr) arena_ = BufferArena(&Extents::memory);
    // All before the first values: small objects between those would keep the memory that the model gives back.
    for (int i = 0; i < units(); ++i) homes_.push_back(make_shard_home(context, i, shards_, returns_stream_));
    for (int i = 0; i < units(); ++i) take_over(i);
  }

  ~PagedWeights() override {
    for (int i = 0; i < units(); ++i) {
      paged_[i].gather = {};
      paged_[i].brought.stream_wait_quietly();
      // A unit that is whole stays readable.
      if (paged_[i].state == UnitState::kWhole && paged_[i].is_rounded) release(i);
      if (paged_[i].state != UnitState::kWhole) continue;
      leave_whole(i);
    }
  }

  bool pages() const override { return true; }

  void before_access(int index, Access access) override {
    const int touched = parameter(index).unit;
    const std::span<const int> leaf = leaf_mates(touched), mates = leaf.empty() ? std::span(&touched, 1) : leaf;
    // In a scope that holds its units, one rank may touch them without the others: that must start no gather.
    if (std::all_of(mates.begin(), mates.end(), [&](int mate) { return residency_.is_held(mate); })) return;
    const Residency::Touch touch{next_serial(), access == Access::kWrite, is_autocast_on()};
    execute(residency_.touch(mates, touch));
    for (const int mate : mates) await_gather(mate);
    prefetches_ += execute(residency_.look_ahead(touched, touch));
  }

  void after_write(int index) override {
    ManagedParameter& managed = parameter(index);
    managed.written = true;
    paged_[managed.unit].is_unseen = true;
    const int64_t begin = shard_begin(managed.unit);
    const Overlap mine = overlap(managed, begin, begin + unit(managed.unit).shard_numel);
    if (mine.empty()) return;
    homes_[managed.unit]->write(own_part(managed.unit), mine.begin - begin, mine.numel());
    paged_[managed.unit].written = Event::record(device());
  }

  int64_t written_digest(int index) const override {
    const PagedUnit& paged = paged_[parameter(index).unit];
    return paged.is_unseen && paged.state == UnitState::kWhole ? WeightStore::written_digest(index) : digests_[index];
  }

  void apply_writes() override {
    digests_.assign(digests_.size(), 0);
    for (int i = 0; i < units(); ++i) {
      paged_[i].is_unseen = false;
      // One that nobody waited for (the step took another way than the last one) reads what may be written now.
      if (paged_[i].state == UnitState::kGathering) finish_demanded(i);
      homes_[i]->keep_written();
      offload().await(i);
      homes_[i]->begin_update(is_written(i));
    }
  }

  void hold(int index, bool) override {
    const int held = parameter(index).unit;
    execute(residency_.hold(held, next_serial()));
    await_gather(held);
  }

  void let_go(int index) noexcept override {
    const Residency::Actions releases = residency_.let_go(parameter(index).unit);
    // Waiting for a gather is not local: one that is under way stays.
    const auto first_under_way = std::find_if(releases.begin(), releases.end(), [&](const Residency::Action& action) {
      return paged_[action.unit].state == UnitState::kGathering;
    });
    const auto local = static_cast<size_t>(first_under_way - releases.begin());
    residency_.cancel(releases.subspan(local));
    execute(releases.first(local));
  }

  void release_gathered() override {
    execute(residency_.release_all());
    arena_.trim(0);
  }

  OwnedSlice owned(int index) override {
    return {.unit = index,
            .begin = piece_begin(index),
            .weights = piece_of(index, homes_[index]->owned()),
            .gradients = {},
            .home = homes_[index].get()};
  }
  void await_owned(int index) override { homes_[index]->await_owned(); }
  bool is_owned_there(int index) const override { return homes_[index]->is_owned_there(); }

  void outdate(int index) override { execute(residency_.release(index)); }
  void publish(int index) override {
    homes_[index]->publish();
    join_pieces(index, homes_[index]->owned());
  }

  void open_window() override {
    for (const auto& home : homes_) home->settle();
    const Event updated = Event::record(device());
    for (PagedUnit& paged : paged_) paged.written = updated;
    residency_.end_step();
  }

  void add_to(PagerMemory& memory) const override {
    memory.registered_bytes += shards_.registered_bytes() + arena_.slab_bytes();
    for (int i = 0; i < units(); ++i) {
      const int64_t bytes = homes_[i]->weight_bytes();
      memory.weight_bytes += bytes;
      if (bytes > 0) memory.padding_bytes += bytes_of(unit(i).padding(), unit(i).dtype).count / unit(i).shards;
    }
    memory.live_bytes += live_bytes_;
    memory.peak_live_bytes += peak_live_bytes_;
  }

  void add_to(PagerCounters& counters) const override {
    counters.gathers += gathers_;
    counters.prefetches += prefetches_;
    counters.releases += releases_;
  }

 private:
  int64_t shard_bytes() const {
    int64_t bytes = 0;
    for (int i = 0; i < units(); ++i)
      if (is_shard_on_device(context(), i)) bytes += bytes_in_slab(unit(i).shard_numel, unit(i).dtype);
    return bytes;
  }
  int64_t unit_bytes(int index) const { return bytes_of(unit(index).numel(), unit(index).dtype).count; }
  Residency make_residency(const StoreContext& context) const {
    std::vector<Residency::Unit> sizes;
    int64_t largest = 0;
    for (int i = 0; i < units(); ++i) {
      // A unit that comes from elsewhere saves nothing on its way by being rounded first.
      const bool may_round = unit(i).dtype == at::kFloat && is_shard_on_device(context, i) &&
                             unit(i).communication_dtype != at::ScalarType::Undefined;
      sizes.push_back({unit_bytes(i), may_round});
      largest = std::max(largest, unit_bytes(i));
    }
    // An operator may need two units at once (an embedding tied to a head beside a block).
    return {std::move(sizes), {std::max(policy().live_bytes, 2 * largest), policy().prefetch_bytes}};
  }
  // Without a scope there are no operators: each access stands for itself.
  uint64_t next_serial() {
    const RankContext* context = RankContext::current();
    return context != nullptr ? context->serial() : (uint64_t{1} << 63) + ++accesses_;
  }
  bool is_autocast_on() const { return at::autocast::is_autocast_enabled(device().type()); }

  /// Starts the gathers and does the releases. Returns how many gathers.
  int64_t execute(Residency::Actions actions) {
    int64_t gathers = 0;
    for (size_t i = 0; i < actions.size(); ++i) {
      const auto [kind, index, rounded, was_rounded] = actions[i];
      const bool gathers_now = kind == Residency::Kind::kGather;
      try {
        gathers_now ? start_gather(index, rounded) : release(index);
      } catch (...) {
        // A release that throws has waited for a gather in vain: its unit is released all the same.
        residency_.cancel(actions.subspan(gathers_now ? i : i + 1));
        throw;
      }
      gathers += gathers_now;
    }
    return gathers;
  }

  /// `index` is whole, or will be on the current stream, which may read it from here on.
  void await_gather(int index) {
    if (paged_[index].state == UnitState::kGathering) finish_demanded(index);
    paged_[index].buffer.begin_read();
  }
  void finish_demanded(int index) {
    try {
      finish_gather(index);
    } catch (...) {
      (void)residency_.release(index);
      throw;
    }
  }

  // Rank 0's values, whole in a temporary buffer, of which everybody keeps a shard.
  void take_over(int index) {
    at::Tensor whole = at::zeros({unit(index).numel()}, options(index));
    for (const ParameterPlace& placement : unit(index).parameters) {
      const ManagedParameter& managed = parameter(placement.index);
      copy_values(managed, whole.narrow(0, placement.begin, placement.numel));
      release_parameter(managed);
    }
    broadcast_over(mesh(index), whole);
    ShardHome& home = *homes_[index];
    home.write(part_of(index, whole), 0, unit(index).shard_numel);
    home.keep_written();
    home.begin_update(/*written=*/true);
    paged_[index].written = Event::record(device());
  }

  void release_parameter(const ManagedParameter& managed) {
    StorageHandle::release(managed.storage(), managed.owner,
                           str("parameter '", managed.name, "' is sharded over ", unit(managed.unit).shards,
                               " ranks (ZeRO stage 3) and released: operators make it whole, in the thread that called "
                               "initialize() and in no "
                               "other. Use the model in that thread, read a clone() of it, or wrap the access in "
                               "zero::GatheredParameters"));
  }

  // The parameters stay in the unit's buffer, or in a copy where that would keep a whole slab.
  void leave_whole(int index) noexcept {
    at::Tensor memory = paged_[index].buffer.memory();
    try {
      paged_[index].buffer.begin_read();
      if (arena_.slab_bytes() > 0) memory = memory.clone();
    } catch (const std::exception&) {
      // There is no room for a copy.
    }
    const auto kept = std::make_shared<at::Tensor>(memory);
    for (const ParameterPlace& placement : unit(index).parameters) parameter(placement.index).owner->memory = kept;
    point_at(index, memory);
  }
  void point_at(int index, const at::Tensor& memory) {
    for (const ParameterPlace& placement : unit(index).parameters) {
      ManagedParameter& managed = parameter(placement.index);
      std::byte* data = element(memory.data_ptr(), placement.begin, managed.itemsize());
      StorageHandle::point(managed.storage(), data, managed.bytes(), managed.owner);
    }
  }

  void start_gather(int index, bool rounded) {
    PagedUnit& paged = paged_[index];
    TRIREME_CHECK(paged.state == UnitState::kReleased, "unit ", unit(index).name);
    offload().await(index);
    if (paged.is_unseen) compare_writes(index);
    paged.buffer = arena_.take(unit(index).numel(), options(index), residency_.limit_bytes() - live_bytes_);
    paged.is_rounded = rounded;
    {
      const OnStream on(gathers_stream_);
      paged.written.stream_wait();
      paged.buffer.begin_write();
      paged.own = homes_[index]->read_into(part_of(index, gathered(index)));
      if (!homes_[index]->reads_beside()) exchange(index);
    }
    paged.state = UnitState::kGathering;
    live_bytes_ += unit_bytes(index);
    peak_live_bytes_ = std::max(peak_live_bytes_, live_bytes_);
    ++gathers_;
  }

  // A gather brings a rank's part of what each has written, and nobody's whole.
  void compare_writes(int index) {
    const std::vector<ParameterPlace>& places = unit(index).parameters;
    std::vector<int64_t> digests;
    for (const ParameterPlace& placement : places) digests.push_back(digests_[placement.index]);
    require_same(shards(index), digests, [&](size_t i) { return parameter(places[i].index).name; });
    paged_[index].is_unseen = false;
  }

  /// This rank's shard of `whole` [numel of the unit].
  at::Tensor part_of(int index, const at::Tensor& whole) const {
    return whole.narrow(0, shard_begin(index), unit(index).shard_numel);
  }
  at::Tensor own_part(int index) const { return part_of(index, paged_[index].buffer.memory()); }
  /// Where shards come together: the buffer, or its upper half, from where finish_gather() widens them.
  at::Tensor gathered(int index) const {
    return paged_[index].is_rounded ? upper_half(index) : paged_[index].buffer.memory();
  }

  /// Begins to bring what peers have.
  void exchange(int index) {
    PagedUnit& paged = paged_[index];
    const at::Tensor own = std::exchange(paged.own, {}), whole = gathered(index);
    if (shards(index).size() > 1) {
      const SubjectScope subject(unit(index).name);
      paged.gather = shards(index).all_gather(whole, own);
      return;
    }
    if (own.data_ptr() != whole.data_ptr()) at::Tensor(whole).copy_(own, /*non_blocking=*/true);
    paged.brought = Event::record(device());
  }

  at::Tensor upper_half(int index) const {
    const int64_t numel = unit(index).numel();
    return paged_[index].buffer.memory().view(unit(index).communication_dtype).narrow(0, numel, numel);
  }
  void widen(int index) {
    const at::Tensor& buffer = paged_[index].buffer.memory();
    if (!is_host(device())) return (void)buffer.copy_(upper_half(index).clone());
    widen_upper_half(buffer.data_ptr<float>(), unit(index).communication_dtype, unit(index).numel());
  }

  void finish_gather(int index) {
    PagedUnit& paged = paged_[index];
    TRIREME_CHECK(paged.state == UnitState::kGathering, "unit ", unit(index).name);
    try {
      if (homes_[index]->reads_beside()) {
        homes_[index]->await_read();
        exchange(index);
      }
      wait_for(paged.gather);
    } catch (...) {
      forget_buffer(index);  // a later access must not take what never came for the weights
      throw;
    }
    paged.brought.stream_wait();
    if (paged.is_rounded) widen(index);
    paged.buffer.end_write();
    point_at(index, paged.buffer.memory());
    paged.state = UnitState::kWhole;
  }

  void wait_for(Pending<void>& gather) const {
    try {
      gather.wait();
    } catch (const CommError& error) {
      if (error.code() != ErrorCode::kDiverged) throw;
      throw CommError(
          ErrorCode::kDiverged,
          str(error.what(),
              "; with ZeRO stage 3 and gather=\"copy\" every rank must use the same units in the same order: "
              "name the module around them in zero_optimization.leaf_module",
              context().extents == nullptr ? ", or use gather=\"shared\"" : ""));
    }
  }

  void release(int index) {
    PagedUnit& paged = paged_[index];
    if (paged.state == UnitState::kGathering) finish_gather(index);
    homes_[index]->keep_written();
    if (paged.is_unseen)
      for (const ParameterPlace& placement : unit(index).parameters)
        digests_[placement.index] = written_digest(placement.index);
    for (const ParameterPlace& placement : unit(index).parameters) release_parameter(parameter(placement.index));
    if (policy().poison) poison(paged.buffer);
    forget_buffer(index);
    arena_.trim(residency_.limit_bytes() - live_bytes_);
    ++releases_;
  }

  void forget_buffer(int index) {
    PagedUnit& paged = paged_[index];
    arena_.keep(std::exchange(paged.buffer, {}));
    paged.state = UnitState::kReleased;
    paged.is_rounded = false;
    live_bytes_ -= unit_bytes(index);
  }

  static void poison(ArenaBuffer& buffer) {
    const WithoutInterception own_operators;
    buffer.begin_read();                          // behind its gather
    buffer.memory().view(at::kByte).fill_(0xFF);  // NaNs
  }

  FlatBuffers shards_;
  std::vector<PagedUnit> paged_;
  std::vector<int64_t> digests_;  // of parameters that were written, and have been released since
  Residency residency_;
  BufferArena arena_;
  SideStream gathers_stream_;
  SideStream returns_stream_;
  std::vector<std::unique_ptr<ShardHome>> homes_;  // by unit; before the buffers that they read into
  int64_t live_bytes_ = 0;
  int64_t peak_live_bytes_ = 0;
  uint64_t accesses_ = 0;  // outside of operators
  int64_t gathers_ = 0;
  int64_t prefetches_ = 0;
  int64_t releases_ = 0;
};

}  // namespace

std::unique_ptr<WeightStore> make_paged_weights(const StoreContext& context) {
  return std::make_unique<PagedWeights>(context);
}

}  // namespace trireme
