// Gradients are computed in shared memory and stay there until every rank has folded its shard of them in.
//
// A rank that finishes a gradient stamps its slot on its board. A rank that owns a part of the parameter waits, never
// inside of backward, until all ranks have stamped the same round, and then folds its part: sum in rank order, fp32,
// one pass. At the end of the window every rank announces how many gradients it had, so that a parameter which is
// unused on some ranks, or on all, is known as such. A rank that waits goes on publishing and folding, and publishing
// never waits for memory: whatever ranks do differently, nobody waits for something that only a waiting rank could do.
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "pager/gradients/gradient_arena.h"
#include "pager/gradients/gradient_board.h"
#include "pager/gradients/store.h"
#include "pager/storage/kernels.h"

namespace trireme {

namespace {

constexpr size_t kSmallGradient = size_t{64} << 10;  // copied to its home instead of being born in a block
constexpr size_t kPage = 4096;

struct ParameterGradients {
  int first_owner = 0;  // ranks whose shards hold a part
  int last_owner = -1;
  Overlap mine;           // this rank's part, in elements of the unit
  size_t home = 0;        // offset of a place that only this gradient uses
  uint32_t produced = 0;  // in this window
  uint32_t published = 0;
  uint32_t folded = 0;
  bool has_sum = false;  // the shard holds something of this window
  double sum_of_squares = 0;
  std::deque<at::Tensor> waiting;  // produced, not yet published
  at::Tensor in_flight;            // published, not yet folded by everybody
};

class OneSidedGradients final : public GradientStore {
 public:
  OneSidedGradients(const StoreContext& context, int mesh)
      : GradientStore(context, mesh),
        sharing_(*group().memory_sharing()),
        board_(sharing_, parameters()),
        states_(parameters()) {
    for (int i = 0; i < units(); ++i) {
      shards_.push_back(has(i) ? at::zeros({unit(i).shard_numel}, at::TensorOptions().dtype(accumulation_dtype(i)))
                               : at::Tensor());
    }
    make_arena(place_homes());
    for (int i = 0; i < parameters(); ++i)
      if (is_trainable(i)) find_owners(i);
  }

  void accept(int index, at::Tensor gradient) override {
    begin_rounds();
    // The sum of the passes before, in the accumulation dtype, is rounded once.
    gradient = gradient.to(wire_dtype_of(index));
    ParameterGradients& state = states_[index];
    ++state.produced;
    touched_[index] = 1;
    in_flight_bytes_ += static_cast<int64_t>(gradient.nbytes());
    peak_in_flight_bytes_ = std::max(peak_in_flight_bytes_, in_flight_bytes_);
    state.waiting.push_back(std::move(gradient));
    publish_next(index);
    to_fold_.push_back(index);
    progress();
  }

  void end_backward() override { progress(); }

  void finish() override {
    begin_rounds();
    for (int i = 0; i < parameters(); ++i)
      board_.announced(group().rank(), i).store(states_[i].produced, std::memory_order_relaxed);
    board_.announced_window(group().rank()).store(window_, std::memory_order_release);
    sharing_.notify();
    if (!settle())
      sharing_.wait_until([this] { return settle(); }, {.peer = slowest(),
                                                        .operation = "reduction of gradients",
                                                        .seq = static_cast<int64_t>(window_),
                                                        .detail = [this] { return first_open(); }});
    to_fold_.clear();
    in_flight_.clear();
    for (int i = 0; i < parameters(); ++i) touched_[i] |= rounds(i) > 0;
    if (replica_sums_.are_there()) add_replicas();
    finished_ = true;
  }

  void rewritten(int index) override { states_[index].sum_of_squares = squares_of(index, states_[index].mine); }

  void add_squares(int index, ExactSum& sum) const override {
    // The squares of the gradients that were folded last; replicas have added to them.
    if (!replica_sums_.are_there() && mesh().counts_in_norm && parameter(index).is_all_counted())
      return sum.add(states_[index].sum_of_squares);
    for (const Overlap& mine : counted(parameter(index))) sum.add(squares_of(index, mine));
  }
  at::Tensor owned(int index) override { return piece_of(index, shards_[index]); }

  void clear() override {
    finished_ = true;
    begin_rounds();
    for (ParameterGradients& state : states_) {
      state.has_sum = false;
      state.sum_of_squares = 0;
    }
    std::fill(touched_.begin(), touched_.end(), 0);
    replica_sums_.clear();
  }

  void add_to(PagerMemory& memory) const override {
    for (int i = 0; i < units(); ++i) {
      if (!shards_[i].defined()) continue;
      memory.gradient_bytes += static_cast<int64_t>(shards_[i].nbytes());
      memory.padding_bytes += unit(i).padding() * shards_[i].element_size() / unit(i).shards;
    }
    memory.in_flight_bytes += in_flight_bytes_;
    memory.peak_in_flight_bytes += peak_in_flight_bytes_;
  }

 private:
  // After finish() all ranks have said and folded what they had: stamps and counts begin anew.
  void begin_rounds() {
    if (!std::exchange(finished_, false)) return;
    for (ParameterGradients& state : states_) state.produced = state.published = state.folded = 0;
    ++window_;
  }

  /// Elements [part.begin, part.end) of the unit's flat buffer that `index` is in, in this rank's `shard`.
  at::Tensor part_of(int index, const Overlap& part, const at::Tensor& shard) const {
    return shard.narrow(0, part.begin - shard_begin(parameter(index).unit), part.numel());
  }
  double squares_of(int index, const Overlap& part) const {
    if (part.empty()) return 0;
    const at::Tensor& shard = shards_[parameter(index).unit];
    return trireme::sum_of_squares(part_of(index, part, shard).data_ptr(), shard.scalar_type(), part.numel());
  }

  void add_replicas() {
    for (int i = 0; i < parameters(); ++i)
      // A sum that another window left there is no addend: other replicas may have a gradient of it.
      if (!states_[i].has_sum && !states_[i].mine.empty() && !replica_sums_.is_closed(parameter(i).unit))
        part_of(i, states_[i].mine, shards_[parameter(i).unit]).zero_();
    for (int i = 0; i < units(); ++i)
      if (has(i)) replica_sums_.close(i, shards_[i]);
    at::Tensor flags = at::from_blob(touched_.data(), {parameters()}, at::TensorOptions().dtype(at::kByte));
    mesh().replicas->all_reduce(flags, ReduceOp::kMax).wait();
  }

  // Every gradient has a home: small ones are copied there, large ones only when the arena has no block for them (its
  // blocks may be held by the user's graph, or cut for other sizes). So publishing never has to wait for memory.
  // Returns the homes' bytes; only what is used is ever backed by memory.
  size_t place_homes() {
    size_t bytes = 0;
    for (int i = 0; i < parameters(); ++i) {
      if (!is_trainable(i)) continue;
      const size_t alignment = is_small(i) ? 64 : kPage;
      states_[i].home = (bytes + alignment - 1) / alignment * alignment;
      bytes = states_[i].home + wire_bytes(i);
    }
    return (bytes + kPage - 1) / kPage * kPage;
  }

  // Room for every large gradient once: most are folded, and their blocks free again, before backward has come to the
  // end.
  void make_arena(size_t home_bytes) {
    home_bytes_ = home_bytes;
    size_t block_bytes = 0;
    for (int i = 0; i < parameters(); ++i)
      if (is_trainable(i) && !is_small(i)) block_bytes += wire_bytes(i) + (size_t{2} << 20);
    memory_ = sharing_.share(std::max(home_bytes + block_bytes, kPage), MemorySharing::Share::kEach);
    std::byte* base = memory_->of(group().rank());
    arena_ = std::make_shared<GradientArena>(base + home_bytes, block_bytes, memory_);
    for (int i = 0; i < parameters(); ++i)
      if (is_trainable(i) && !is_small(i)) arena_->serve(wire_bytes(i));
    arena_scope_ = std::make_unique<ArenaScope>(arena_);
  }

  void find_owners(int index) {
    const ManagedParameter& managed = parameter(index);
    ParameterGradients& state = states_[index];
    state.mine = in_shard(managed);
    if (managed.numel == 0) return;
    state.first_owner = static_cast<int>(managed.begin / unit(managed.unit).shard_numel);
    state.last_owner = static_cast<int>((managed.begin + managed.numel - 1) / unit(managed.unit).shard_numel);
  }

  bool is_trainable(int index) const { return has(parameter(index).unit); }
  bool is_small(int index) const { return wire_bytes(index) < kSmallGradient; }
  // Peers read a gradient in the parameter's dtype, or in the one that it is to travel in.
  at::ScalarType wire_dtype_of(int index) const {
    return wire_dtype(unit(parameter(index).unit), parameter(index).tensor.scalar_type());
  }
  size_t wire_bytes(int index) const {
    return static_cast<size_t>(parameter(index).numel) * c10::elementSize(wire_dtype_of(index));
  }

  // The stamp of the newest gradient that was published has been folded by all owners.
  bool is_slot_free(int index) const {
    const ParameterGradients& state = states_[index];
    if (state.published == 0) return true;
    const uint64_t newest = stamp(window_, state.published);
    for (int rank = state.first_owner; rank <= state.last_owner; ++rank)
      if (board_.folded(rank, index).load(std::memory_order_acquire) < newest) return false;
    return true;
  }

  void publish_next(int index) {
    ParameterGradients& state = states_[index];
    if (state.waiting.empty() || !is_slot_free(index)) return;
    release_in_flight(state);
    const size_t offset = bring_to_shared_memory(index, state.waiting.front());
    state.in_flight = std::move(state.waiting.front());
    reduced_bytes_ += static_cast<int64_t>(state.in_flight.nbytes());
    state.waiting.pop_front();
    in_flight_.push_back(index);
    GradientBoard::Slot& slot = board_.slot(group().rank(), index);
    slot.offset.store(offset, std::memory_order_relaxed);
    slot.published.store(stamp(window_, ++state.published), std::memory_order_release);
    sharing_.notify();
  }

  // The offset in shared memory where `gradient` stands, moving it there where it was computed elsewhere.
  size_t bring_to_shared_memory(int index, at::Tensor& gradient) {
    const size_t bytes = gradient.nbytes();
    if (arena_->contains(gradient.data_ptr(), bytes)) return home_bytes_ + arena_->offset_of(gradient.data_ptr());
    c10::DataPtr block = is_small(index) ? c10::DataPtr() : arena_->allocate(bytes);
    if (!block) {
      // Free: the slot is, so every owner has folded what stood here.
      std::byte* home = memory_->of(group().rank()) + states_[index].home;
      if (bytes > 0) std::memcpy(home, gradient.data_ptr(), bytes);
      if (!is_small(index)) gradient = flat_view(home, gradient.numel(), gradient.scalar_type(), memory_);
      return states_[index].home;
    }
    std::memcpy(block.get(), gradient.data_ptr(), bytes);
    auto keep = std::make_shared<c10::DataPtr>(std::move(block));
    gradient = flat_view(keep->get(), gradient.numel(), gradient.scalar_type(), keep);
    return home_bytes_ + arena_->offset_of(gradient.data_ptr());
  }

  void release_in_flight(ParameterGradients& state) {
    if (!state.in_flight.defined()) return;
    in_flight_bytes_ -= static_cast<int64_t>(state.in_flight.nbytes());
    state.in_flight.reset();
  }

  // How many rounds `index` has in this window, once every rank has announced.
  uint32_t rounds(int index) const {
    uint32_t most = 0;
    for (int rank = 0; rank < group().size(); ++rank)
      most = std::max(most, board_.announced(rank, index).load(std::memory_order_relaxed));
    return most;
  }

  enum class Presence { kHere, kNotYet, kNever };
  Presence presence(int rank, int index, uint32_t round) const {
    if (board_.slot(rank, index).published.load(std::memory_order_acquire) == stamp(window_, round))
      return Presence::kHere;
    if (board_.announced_window(rank).load(std::memory_order_acquire) < window_) return Presence::kNotYet;
    return board_.announced(rank, index).load(std::memory_order_relaxed) < round ? Presence::kNever : Presence::kNotYet;
  }

  // Folds the next round of this rank's part of `index` if every rank's gradient is there (or will never be).
  bool fold_next(int index) {
    ParameterGradients& state = states_[index];
    if (state.mine.empty()) return false;
    const uint32_t round = state.folded + 1;
    const ManagedParameter& managed = parameter(index);
    ReduceTask task;
    for (int rank = 0; rank < group().size(); ++rank) {
      const Presence there = presence(rank, index, round);
      if (there == Presence::kNotYet) return false;
      if (there == Presence::kNever) continue;
      const size_t offset = board_.slot(rank, index).offset.load(std::memory_order_relaxed);
      task.sources.push_back(element(memory_->of(rank) + offset, state.mine.begin - managed.begin,
                                     c10::elementSize(wire_dtype_of(index))));
    }
    if (task.sources.empty()) return false;  // no rank has this round
    task.source_dtype = wire_dtype_of(index);
    const at::Tensor& sums = replica_sums_.open(managed.unit, shards_[managed.unit]);
    task.target = element(sums.data_ptr(), state.mine.begin - shard_begin(managed.unit), sums.element_size());
    task.target_dtype = sums.scalar_type();
    task.numel = state.mine.numel();
    task.factor = scale_.at_once();
    task.accumulate = std::exchange(state.has_sum, true);
    state.sum_of_squares = reduce(task);
    ++reductions_;
    ++state.folded;
    board_.folded(group().rank(), index).store(stamp(window_, state.folded), std::memory_order_release);
    sharing_.notify();
    return true;
  }

  // Folds all that needs no waiting, oldest first. Called from backward: constant work beyond the folding itself.
  void progress() {
    while (!to_fold_.empty()) {
      const int index = to_fold_.front();
      if (!states_[index].mine.empty() && !fold_next(index)) break;
      to_fold_.pop_front();
    }
    while (!in_flight_.empty()) {
      const int index = in_flight_.front();
      if (!is_slot_free(index)) break;
      in_flight_.pop_front();
      release_in_flight(states_[index]);
      publish_next(index);
    }
  }

  // One round over everything that is open. True when all is published, folded here, and folded by the owners of what
  // is ours.
  bool settle() {
    bool settled = true;
    for (int rank = 0; rank < group().size(); ++rank)
      settled &= board_.announced_window(rank).load(std::memory_order_acquire) >= window_;
    for (int i = 0; i < parameters(); ++i) {
      ParameterGradients& state = states_[i];
      publish_next(i);
      while (fold_next(i)) publish_next(i);
      if (!state.waiting.empty() || !is_slot_free(i)) {
        settled = false;
      } else {
        release_in_flight(state);
      }
      if (settled && !state.mine.empty()) settled = state.folded == rounds(i);
    }
    return settled;
  }

  // The rank that an error will name: one that has not announced, else the one after this rank.
  int slowest() const {
    for (int rank = 0; rank < group().size(); ++rank)
      if (board_.announced_window(rank).load(std::memory_order_acquire) < window_) return rank;
    return (group().rank() + 1) % group().size();
  }

  // The first parameter that is still open, for an error that says how far this rank has come.
  std::string first_open() const {
    // Backward goes from the last parameter to the first.
    for (int i = parameters() - 1; i >= 0; --i) {
      const ParameterGradients& state = states_[i];
      const bool folds = !state.mine.empty() && state.folded < std::max(state.produced, rounds(i));
      if (folds || !state.waiting.empty() || !is_slot_free(i))
        return str("open from '", parameter(i).name, "' of unit '", unit(parameter(i).unit).name, "' on");
    }
    return "all gradients of this rank are in";
  }

  MemorySharing& sharing_;
  GradientBoard board_;
  std::vector<ParameterGradients> states_;
  std::vector<at::Tensor> shards_;
  std::shared_ptr<SharedMemory> memory_;  // of each rank: the homes, then the arena
  size_t home_bytes_ = 0;
  std::shared_ptr<GradientArena> arena_;
  std::unique_ptr<ArenaScope> arena_scope_;
  std::deque<int> to_fold_;
  std::deque<int> in_flight_;
  uint64_t window_ = 1;  // of stamps: an accumulation window, or a part of one that ends with a finish()
  bool finished_ = false;
  int64_t in_flight_bytes_ = 0;
  int64_t peak_in_flight_bytes_ = 0;
};

}  // namespace

std::unique_ptr<GradientStore> make_one_sided_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<OneSidedGradients>(context, mesh);
}

}  // namespace trireme
