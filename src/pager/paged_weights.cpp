// Stage 3 everywhere else: every rank holds its shard of each unit; a touched unit is all-gathered into a buffer, and
// released when the room is needed for another one.
//
// What is only read under autocast, by modules whose weights it casts anyway (UnitLayout::communication_dtype), travels
// in that 16-bit dtype and is rounded. An access that needs the weights' own bits gathers the unit again.
//
// On a device gathers have a stream of their own. What may run when is said by marks: a gather starts behind the last
// write of its shard and the last use of its buffer, and who touches a unit goes on behind its gather.
//
// Where a unit is offloaded its shard is updated on the host: the device has a copy of it, or none (HostSlice, and
// PagedUnit::shard on the host), from where a gather brings it.
//
// Every decision follows from the touches, autocast's state at them and sizes, never from timing, so ranks that run the
// same program issue the same collectives in the same order.
#include <ATen/autocast_mode.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <span>

#include "pager/buffer_arena.h"
#include "pager/flat_buffers.h"
#include "pager/host_slice.h"
#include "pager/kernels.h"
#include "pager/trace.h"
#include "pager/weight_store.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

/// Memory on this rank: kReleased the shard; kGathering and kWhole the shard and a buffer of the whole unit.
enum class UnitState { kReleased, kGathering, kWhole };

struct PagedUnit {
  UnitState state = UnitState::kReleased;
  at::Tensor shard;
  Mark written;             // behind the shard's last write
  HostSlice updated_there;  // where the device's shard is a copy
  Mark left;                // behind the last copy from a shard on the host
  ArenaBuffer buffer;       // undefined while released
  bool is_rounded = false;  // what is in the buffer, or will be
  Pending<void> gather;
  Mark brought;              // the same where no peer takes part
  uint64_t last_serial = 0;  // of the operator that touched it last: an operator's own units are never released
  int64_t last_touch = 0;
  int holds = 0;  // parameters of it that are held whole
};

class PagedWeights final : public WeightStore {
 public:
  explicit PagedWeights(const StoreContext& context)
      : WeightStore(context),
        shards_(context.group, context, shard_bytes()),
        paged_(units()),
        trace_(units()),
        gathers_stream_(context.device),
        returns_stream_(offload().is_empty() ? c10::kCPU : context.device) {
    int64_t largest = 0;
    for (int i = 0; i < units(); ++i) largest = std::max(largest, unit_bytes(i));
    // An operator may need two units at once (an embedding tied to a head beside a block).
    limit_bytes_ = std::max(policy().live_bytes, 2 * largest);
    if (registers_buffers(context))
      arena_ = BufferArena(group().registered_zeros(bytes_of_units_in_slab(context.layout, limit_bytes_), device()));
    for (int i = 0; i < units(); ++i) take_over(i);
  }

  ~PagedWeights() override {
    for (int i = 0; i < units(); ++i) {
      paged_[i].gather = {};
      paged_[i].brought.pass_quietly();
      // What is whole stays readable.
      if (paged_[i].state == UnitState::kWhole && paged_[i].is_rounded) release_if_whole(i);
      if (paged_[i].state != UnitState::kWhole) continue;
      leave_whole(i);
    }
  }

  bool pages() const override { return true; }

  void before_access(int index, Access access) override {
    const int touched = parameter(index).unit;
    const std::span<const int> leaf = leaf_mates(touched), mates = leaf.empty() ? std::span(&touched, 1) : leaf;
    // In a scope that holds them one rank alone may touch them, so that must lead to no gather.
    if (std::all_of(mates.begin(), mates.end(), [&](int mate) { return paged_[mate].holds > 0; })) return;
    running_serial_ = next_serial();
    // One entry in the trace for a leaf, whichever of its units a rank has touched.
    trace_.touch(mates.front());
    for (const int mate : mates) make_whole(mate, access);
    if (touched != last_prefetched_from_) prefetch(touched);
  }

  void after_write(int index) override {
    ManagedParameter& managed = parameter(index);
    managed.written = true;
    const int64_t begin = shard_begin(managed.unit);
    const Overlap mine = overlap(managed, begin, begin + unit(managed.unit).shard_numel);
    if (mine.empty()) return;
    PagedUnit& paged = paged_[managed.unit];
    // What is whole has come from there, so the shard, wherever it is, is read by nobody.
    paged.shard.narrow(0, mine.begin - begin, mine.numel())
        .copy_(paged.buffer.memory().narrow(0, mine.begin, mine.numel()));
    paged.written = Mark::here(device());
  }

  void apply_writes() override {
    for (int i = 0; i < units(); ++i) {
      // One that nobody waited for (the step took another way than the last one) reads what may be written now.
      if (paged_[i].state == UnitState::kGathering) finish_gather(i);
      offload().await(i);
      if (!has_copy(i)) continue;
      if (is_written(i)) paged_[i].updated_there.fetch();
      paged_[i].updated_there.end_use();
    }
  }

  // Not a touch of the trace: what is looked at now and then is not gathered ahead.
  void hold(int index, bool) override {
    const int held = parameter(index).unit;
    PagedUnit& paged = paged_[held];
    running_serial_ = next_serial();
    paged.last_touch = ++touches_;
    ++paged.holds;
    gather(held, /*rounded=*/false);
  }

  void let_go(int index) noexcept override {
    --paged_[parameter(index).unit].holds;
    while (live_bytes_ > limit_bytes_) {
      const int victim = choose_victim();
      if (victim < 0 || paged_[victim].state != UnitState::kWhole) return;  // waiting for a gather is not local
      release_if_whole(victim);
    }
  }

  void release_gathered() override {
    for (int i = 0; i < units(); ++i)
      if (paged_[i].holds == 0) release_if_whole(i);
    arena_.trim(0);
  }

  OwnedSlice owned(int index) override {
    const PagedUnit& paged = paged_[index];
    return {index, shard_begin(index), has_copy(index) ? paged.updated_there.on_host() : paged.shard, {}};
  }
  void await_owned(int index) override {
    has_copy(index) ? paged_[index].updated_there.await_sent() : paged_[index].left.wait();
  }
  bool is_owned_there(int index) const override {
    return has_copy(index) ? paged_[index].updated_there.is_sent() : paged_[index].left.is_reached();
  }

  void outdate(int index) override { release_if_whole(index); }
  void publish(int index) override {
    if (has_copy(index)) paged_[index].updated_there.send(returns_stream_);
  }

  void open_window() override {
    const Mark updated = Mark::here(device());
    for (PagedUnit& paged : paged_) paged.written = updated;
    trace_.end_step();
    last_prefetched_from_ = -1;
  }

  void add_to(PagerMemory& memory) const override {
    memory.registered_bytes += shards_.registered_bytes() + arena_.slab_bytes();
    for (int i = 0; i < units(); ++i) {
      if (is_host(paged_[i].shard) && !is_host(device())) continue;  // counted as offloaded
      memory.weight_bytes += static_cast<int64_t>(paged_[i].shard.nbytes());
      memory.padding_bytes += unit(i).padding() * paged_[i].shard.element_size() / group().size();
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
      if (!offload().keeps_shard(i)) bytes += bytes_in_slab(unit(i).shard_numel, unit(i).dtype);
    return bytes;
  }
  int64_t unit_bytes(int index) const {
    return unit(index).numel() * static_cast<int64_t>(c10::elementSize(unit(index).dtype));
  }
  // Without a scope there are no operators: each access stands for itself.
  uint64_t next_serial() {
    const RankContext* context = RankContext::current();
    return context != nullptr ? context->serial() : (uint64_t{1} << 63) + static_cast<uint64_t>(touches_);
  }

  void make_whole(int index, Access access) {
    PagedUnit& paged = paged_[index];
    paged.last_serial = running_serial_;
    paged.last_touch = ++touches_;
    gather(index, may_round(index, access));
  }

  bool may_round(int index, Access access) const {
    // What comes from the host saves nothing on its way by being rounded first.
    return access == Access::kRead && unit(index).dtype == at::kFloat && !offload().keeps_shard(index) &&
           unit(index).communication_dtype != at::ScalarType::Undefined &&
           at::autocast::is_autocast_enabled(device().type());
  }

  // Own bits serve where rounded ones would do, not the other way round.
  void gather(int index, bool rounded) {
    const PagedUnit& paged = paged_[index];
    if (paged.is_rounded && !rounded) release_if_whole(index);
    if (paged.state == UnitState::kReleased) {
      make_room(unit_bytes(index));
      start_gather(index, rounded);
    }
    if (paged.state == UnitState::kGathering) finish_gather(index);
    paged_[index].buffer.begin_read();
  }

  // Rank 0's values, whole in a temporary buffer, of which everybody keeps a shard.
  void take_over(int index) {
    at::Tensor whole = at::zeros({unit(index).numel()}, options(index));
    for (const Placement& placement : unit(index).parameters) {
      const ManagedParameter& managed = parameter(placement.index);
      copy_values(managed, whole.narrow(0, placement.begin, placement.numel));
      release_parameter(managed);
    }
    if (!is_alone_on_device()) group().broadcast(whole, 0).wait();
    PagedUnit& paged = paged_[index];
    const at::Tensor mine = whole.narrow(0, shard_begin(index), unit(index).shard_numel);
    if (offload().keeps_shard(index))
      paged.shard = offload().memory().take(mine.numel(), mine.scalar_type()).copy_(mine);
    else
      paged.shard = shards_.zeros(mine.numel(), mine.scalar_type()).copy_(mine);
    if (has_copy(index)) paged.updated_there = HostSlice(paged.shard, offload().memory());
    paged.written = Mark::here(device());
  }

  bool is_alone_on_device() const { return !is_host(device()) && group().size() == 1; }
  /// The device has this rank's shard, and the host updates it.
  bool has_copy(int index) const { return offload().owns(index) && !offload().keeps_shard(index); }

  void release_parameter(const ManagedParameter& managed) {
    StorageHandle::release(managed.storage(), managed.owner,
                           str("parameter '", managed.name, "' is sharded over ", group().size(),
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
    for (const Placement& placement : unit(index).parameters) parameter(placement.index).owner->memory = kept;
    point_at(index, memory);
  }
  void point_at(int index, const at::Tensor& memory) {
    for (const Placement& placement : unit(index).parameters) {
      ManagedParameter& managed = parameter(placement.index);
      std::byte* data = element(memory.data_ptr(), placement.begin, managed.itemsize());
      StorageHandle::point(managed.storage(), data, managed.bytes(), managed.owner);
    }
  }

  void start_gather(int index, bool rounded) {
    PagedUnit& paged = paged_[index];
    TRIREME_CHECK(paged.state == UnitState::kReleased, "unit ", unit(index).name);
    offload().await(index);
    paged.buffer = arena_.take(unit(index).numel(), options(index), limit_bytes_ - live_bytes_);
    paged.is_rounded = rounded;
    {
      const OnStream on(gathers_stream_);
      paged.written.pass();
      if (has_copy(index)) paged.updated_there.begin_use();
      paged.buffer.begin_write();
      const SubjectScope subject(unit(index).name);
      paged.gather = rounded ? gather_rounded(index) : gather_exactly(index);
    }
    paged.state = UnitState::kGathering;
    live_bytes_ += unit_bytes(index);
    peak_live_bytes_ = std::max(peak_live_bytes_, live_bytes_);
    ++gathers_;
  }

  Pending<void> gather_exactly(int index) {
    PagedUnit& paged = paged_[index];
    const at::Tensor& whole = paged.buffer.memory();
    if (!is_alone_on_device() && !offload().keeps_shard(index)) return group().all_gather(whole, paged.shard);
    const at::Tensor mine = whole.narrow(0, shard_begin(index), unit(index).shard_numel);
    mine.copy_(paged.shard, /*non_blocking=*/true);
    paged.left = Mark::here(device());
    if (!is_alone_on_device()) return group().all_gather(whole, mine);
    paged.brought = paged.left;
    return {};
  }

  // Into the upper half of the buffer, from where finish_gather() widens it.
  Pending<void> gather_rounded(int index) {
    const PagedUnit& paged = paged_[index];
    const at::Tensor rounded = upper_half(index);
    const at::Tensor own = rounded.narrow(0, shard_begin(index), unit(index).shard_numel);
    own.copy_(paged.shard);
    return group().all_gather(rounded, own);
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
      wait_for(paged.gather);
    } catch (...) {
      forget_buffer(index);  // a later access must not take what never came for the weights
      throw;
    }
    paged.brought.pass();
    if (paged.is_rounded) widen(index);
    paged.buffer.end_write();
    point_at(index, paged.buffer.memory());
    paged.state = UnitState::kWhole;
  }

  static void wait_for(Pending<void>& gather) {
    try {
      gather.wait();
    } catch (const CommError& error) {
      if (error.code() != ErrorCode::kDiverged) throw;
      throw CommError(
          ErrorCode::kDiverged,
          str(error.what(),
              "; with ZeRO stage 3 and gather=\"copy\" every rank must use the same units in the same order: "
              "name the module around them in zero_optimization.leaf_module, or use gather=\"shared\""));
    }
  }

  void release_if_whole(int index) {
    PagedUnit& paged = paged_[index];
    if (paged.state == UnitState::kGathering) finish_gather(index);
    if (paged.state == UnitState::kReleased) return;
    for (const Placement& placement : unit(index).parameters) release_parameter(parameter(placement.index));
    if (policy().poison) poison(paged.buffer);
    forget_buffer(index);
    arena_.trim(limit_bytes_ - live_bytes_);
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

  // Releases what is needed last until `bytes` fit, or until all that is left belongs to the running operator.
  void make_room(int64_t bytes) {
    while (live_bytes_ + bytes > limit_bytes_) {
      const int victim = choose_victim();
      if (victim < 0) return;
      release_if_whole(victim);
    }
  }

  int choose_victim() const {
    int victim = -1;
    for (int i = 0; i < units(); ++i) {
      const PagedUnit& paged = paged_[i];
      if (paged.state == UnitState::kReleased || paged.holds > 0) continue;
      if (paged.last_serial == running_serial_ && paged.last_touch > 0) continue;
      if (victim < 0 || is_needed_later(i, victim)) victim = i;
    }
    return victim;
  }

  // By the trace where it is known, else the least recently used.
  bool is_needed_later(int a, int b) const {
    const int64_t distance_a = trace_.distance_to(a);
    const int64_t distance_b = trace_.distance_to(b);
    if (distance_a != distance_b) return distance_a > distance_b;
    return paged_[a].last_touch < paged_[b].last_touch;
  }

  // Starts the gathers of the next units of the trace, as far as prefetch_bytes and the limit allow.
  void prefetch(int from) {
    last_prefetched_from_ = from;
    int64_t bytes = 0;
    for (int64_t ahead = 1; trace_.upcoming(ahead) >= 0; ++ahead) {
      const int next = trace_.upcoming(ahead);
      if (next == from) continue;
      bytes += unit_bytes(next);
      if (bytes > policy().prefetch_bytes) return;
      if (paged_[next].state != UnitState::kReleased) continue;
      while (live_bytes_ + unit_bytes(next) > limit_bytes_) {
        const int victim = choose_victim();
        if (victim < 0 || trace_.distance_to(victim) <= ahead) return;
        release_if_whole(victim);
      }
      start_gather(next, may_round(next, Access::kRead));
      ++prefetches_;
    }
  }

  FlatBuffers shards_;
  std::vector<PagedUnit> paged_;
  Trace trace_;
  BufferArena arena_;
  SideStream gathers_stream_;
  SideStream returns_stream_;
  int64_t limit_bytes_ = 0;
  int64_t live_bytes_ = 0;
  int64_t peak_live_bytes_ = 0;
  int64_t touches_ = 0;
  int64_t gathers_ = 0;
  int64_t prefetches_ = 0;
  int64_t releases_ = 0;
  // Of the access that is being served. Operators of our own (an empty buffer) count too where the caller is no
  // operator.
  uint64_t running_serial_ = 0;
  int last_prefetched_from_ = -1;
};

}  // namespace

std::unique_ptr<WeightStore> make_paged_weights(const StoreContext& context) {
  return std::make_unique<PagedWeights>(context);
}

}  // namespace trireme
