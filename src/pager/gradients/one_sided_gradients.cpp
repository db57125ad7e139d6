// Gradients are computed in shared memory and stay there until every rank has folded its shard of them in.
//
// A rank that finishes a gradient stamps its slot on its board. A rank that owns a part of the parameter waits, never
// inside of backward, until all ranks have stamped the same round, and then folds its part: sum in rank order, fp32,
// one pass. At the end of the window every rank announces how many gradients it had, so that a parameter which is
// unused on some ranks, or on all, is known as such. A rank that waits goes on publishing and folding, and publishing
// never waits for memory: whatever ranks do differently, nobody waits for something that only a waiting rank could do.
#include <algorithm>
#include <deque>
#include <utility>

#include "pager/gradients/gradient_board.h"
#include "pager/gradients/store.h"
#include "pager/storage/kernels.h"

namespace trireme {

namespace {

struct ParameterGradients {
  int first_owner = 0;  // ranks whose shards hold a part
  int last_owner = -1;
  Overlap mine;           // this rank's part, in elements of the unit
  uint32_t produced = 0;  // in this window
  uint32_t published = 0;
  uint32_t folded = 0;
  bool has_sum = false;            // the shard holds something of this window
  std::deque<at::Tensor> waiting;  // produced, not yet published
  at::Tensor in_flight;            // published, not yet folded by everybody
};

class OneSidedGradients final : public GradientStore {
 public:
  OneSidedGradients(const StoreContext& context, int mesh)
      : GradientStore(context, mesh), board_(context_), states_(context.parameters.size()) {
    scale_.predivide = 1;  // sums are fp32
    home_.keep(GradientHome::Room::kShards, context_.ranks.shards);
    for (size_t i = 0; i < states_.size(); ++i)
      if (context.parameters[i].numel > 0 && context_.has(context.parameters[i].unit))
        find_owners(context.parameters[i], states_[i]);
  }

  void accept(int index, at::Tensor gradient) override {
    begin_rounds();
    // The sum of the passes before, in the accumulation dtype, is rounded once.
    gradient = gradient.to(board_.dtype(index));
    ParameterGradients& state = states_[index];
    ++state.produced;
    touched_[index] = 1;
    home_.add_in_flight(static_cast<int64_t>(gradient.nbytes()));
    state.waiting.push_back(std::move(gradient));
    publish_next(index);
    to_fold_.push_back(index);
    progress();
  }

  void end_backward() override { progress(); }

  void finish() override {
    begin_rounds();
    std::vector<uint32_t> produced;
    for (const ParameterGradients& state : states_) produced.push_back(state.produced);
    board_.announce(produced);
    const Group& group = context_.ranks.shards;
    if (!settle())
      context_.ranks.shards.memory_sharing()->wait_until(
          [this] { return settle(); }, {.peer = board_.awaited().value_or((group.rank() + 1) % group.size()),
                                        .operation = "reduction of gradients",
                                        .seq = static_cast<int64_t>(board_.window()),
                                        .detail = [this] { return first_open(); }});
    to_fold_.clear();
    published_.clear();
    for (size_t i = 0; i < states_.size(); ++i) touched_[i] |= board_.rounds(static_cast<int>(i)) > 0;
    if (context_.has_replicas()) add_replicas();
    context_.agree(touched_, nullptr);
    is_finished_ = true;
  }

  void clear() override {
    is_finished_ = true;
    begin_rounds();
    for (ParameterGradients& state : states_) state.has_sum = false;
    GradientStore::clear();
  }

 private:
  // After finish() all ranks have said and folded what they had: stamps and counts begin anew.
  void begin_rounds() {
    if (!std::exchange(is_finished_, false)) return;
    for (ParameterGradients& state : states_) state.produced = state.published = state.folded = 0;
    board_.begin_window();
  }

  void add_replicas() {
    for (size_t i = 0; i < states_.size(); ++i) {
      const int unit = context_.parameters[i].unit;
      // A sum that another window left there is no addend: other replicas may have a gradient of it.
      const Overlap& mine = states_[i].mine;
      if (!states_[i].has_sum && !mine.empty() && !home_.at(unit).is_closed)
        home_.at(unit).shard.narrow(0, mine.begin - context_.shard_begin(unit), mine.numel()).zero_();
    }
    for (int i = 0; i < context_.units(); ++i)
      if (context_.has(i)) home_.close(i);
  }

  void find_owners(const ManagedParameter& managed, ParameterGradients& state) const {
    const int64_t shard_numel = context_.unit(managed.unit).shard_numel;
    const int64_t begin = context_.shard_begin(managed.unit);
    state.mine = overlap(managed, begin, begin + shard_numel);
    state.first_owner = static_cast<int>(managed.begin / shard_numel);
    state.last_owner = static_cast<int>((managed.begin + managed.numel - 1) / shard_numel);
  }

  // The newest gradient that was published has been folded by all owners.
  bool is_slot_free(int index) const {
    const ParameterGradients& state = states_[index];
    if (state.published == 0) return true;
    for (int rank = state.first_owner; rank <= state.last_owner; ++rank)
      if (!board_.has_folded(rank, index, state.published)) return false;
    return true;
  }

  void publish_next(int index) {
    ParameterGradients& state = states_[index];
    if (state.waiting.empty() || !is_slot_free(index)) return;
    release_published(state);
    state.in_flight = std::move(state.waiting.front());
    reduced_bytes_ += static_cast<int64_t>(state.in_flight.nbytes());
    state.waiting.pop_front();
    published_.push_back(index);
    board_.publish(index, ++state.published, state.in_flight);
  }

  void release_published(ParameterGradients& state) {
    if (!state.in_flight.defined()) return;
    home_.add_in_flight(-static_cast<int64_t>(state.in_flight.nbytes()));
    state.in_flight.reset();
  }

  // Folds the next round of this rank's part of `index` if every rank's gradient is there (or will never be).
  bool fold_next(int index) {
    ParameterGradients& state = states_[index];
    if (state.mine.empty()) return false;
    const uint32_t round = state.folded + 1;
    const ManagedParameter& managed = context_.parameters[index];
    ReduceTask task;
    task.source_dtype = board_.dtype(index);
    for (int rank = 0; rank < context_.ranks.shards.size(); ++rank) {
      void* gradient = board_.gradient(rank, index, round);
      if (gradient == nullptr && board_.may_come(rank, index, round)) return false;
      if (gradient != nullptr)
        task.sources.push_back(
            element(gradient, state.mine.begin - managed.begin, c10::elementSize(task.source_dtype)));
    }
    if (task.sources.empty()) return false;  // no rank has this round
    const at::Tensor& sums = home_.sums(managed.unit);
    const int64_t begin = state.mine.begin - context_.shard_begin(managed.unit);
    task.target = element(sums.data_ptr(), begin, sums.element_size());
    task.target_dtype = sums.scalar_type();
    task.numel = state.mine.numel();
    task.factor = scale_.after_reduce();
    task.accumulate = std::exchange(state.has_sum, true);
    home_.note_squares(index, reduce(task));
    ++reductions_;
    board_.tell_folded(index, ++state.folded);
    return true;
  }

  // Folds all that needs no waiting, oldest first. Called from backward: constant work beyond the folding itself.
  void progress() {
    while (!to_fold_.empty()) {
      const int index = to_fold_.front();
      if (!states_[index].mine.empty() && !fold_next(index)) break;
      to_fold_.pop_front();
    }
    while (!published_.empty()) {
      const int index = published_.front();
      if (!is_slot_free(index)) break;
      published_.pop_front();
      release_published(states_[index]);
      publish_next(index);
    }
  }

  // One round over everything that is open. True when all is published, folded here, and folded by the owners of what
  // is ours.
  bool settle() {
    bool settled = !board_.awaited();
    for (size_t i = 0; i < states_.size(); ++i) {
      const int index = static_cast<int>(i);
      ParameterGradients& state = states_[i];
      publish_next(index);
      while (fold_next(index)) publish_next(index);
      if (!state.waiting.empty() || !is_slot_free(index)) {
        settled = false;
      } else {
        release_published(state);
      }
      if (settled && !state.mine.empty()) settled = state.folded == board_.rounds(index);
    }
    return settled;
  }

  // The first parameter that is still open, for an error that says how far this rank has come.
  std::string first_open() const {
    // Backward goes from the last parameter to the first.
    for (int i = static_cast<int>(states_.size()) - 1; i >= 0; --i) {
      const ParameterGradients& state = states_[i];
      const bool folds = !state.mine.empty() && state.folded < std::max(state.produced, board_.rounds(i));
      if (folds || !state.waiting.empty() || !is_slot_free(i))
        return str("open from '", context_.parameters[i].name, "' of unit '",
                   context_.unit(context_.parameters[i].unit).name, "' on");
    }
    return "all gradients of this rank are in";
  }

  GradientBoard board_;
  std::vector<ParameterGradients> states_;
  std::deque<int> to_fold_;
  std::deque<int> published_;
  bool is_finished_ = false;
};

}  // namespace

std::unique_ptr<GradientStore> make_one_sided_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<OneSidedGradients>(context, mesh);
}

}  // namespace trireme
