// Gradients are summed in flat buffers, one per unit, and reduced by collectives.
//
// Stages 0 and 1 keep whole buffers over the window and reduce once at its end. Stages 2 and 3 reduce each unit's
// buffer as soon as backward has filled it and keep only this rank's shard. The order of collectives is fixed, last
// unit first, whatever order backward produced the gradients in: ranks on which a parameter is unused stay in step with
// the others. What arrives after its unit was sent (a parameter that backward reaches twice) is sent at the end of the
// pass, by agreement.
//
// The deterministic order works as stage 2 does, whatever the stage: each micro-step's gradients are exchanged, and
// each rank adds those of rank 0, 1, 2, … to its shard. The factor comes last, and at stage 0 the shards are gathered.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "pager/flat_buffers.h"
#include "pager/gradient_bucket.h"
#include "pager/gradient_messages.h"
#include "pager/gradient_store.h"
#include "pager/kernels.h"
#include "pager/leaving_gradients.h"
#include "pager/ordered_fold.h"
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

constexpr size_t kReductionsInFlight = 2;  // one being reduced while the next is filled
constexpr std::chrono::milliseconds kPatience{20};

struct Reduction {
  int unit;
  bool first;  // of its unit in this window
  at::Tensor input;
  at::Tensor output;
  Pending<void> pending;
};

class BucketedGradients final : public GradientStore {
 public:
  BucketedGradients(const StoreContext& context, int mesh)
      : GradientStore(context, mesh),
        leaving_(context, mesh),
        leaves_(!context.offload.is_empty()),
        kept_(context.device),
        buckets_(units()),
        late_(units()),
        shards_(units()),
        wholes_(units()),
        has_shard_(units()),
        next_(units() - 1) {
    // A group of its own: gathers of weights that backward issues in between do not share a sequence with reductions.
    std::vector<int> everybody(group().size());
    for (int rank = 0; rank < group().size(); ++rank) everybody[rank] = rank;
    reductions_group_ = group().split(everybody, group().name() + "/gradients");
    messages_ = std::make_unique<GradientMessages>(*reductions_group_, context, reduces_at_boundary());
    if (!policy().deterministic) kept_ = FlatBuffers(context, kept_bytes(), *reductions_group_);
    for (int i = 0; i < units(); ++i) {
      if (!has(i)) continue;
      if (reduces_at_boundary()) buckets_[i].sum = kept_.zeros(unit(i).numel(), accumulation_dtype(i));
      if (!reduces_at_boundary() && (!leaving_.takes(i) || policy().deterministic))
        shards_[i] = kept_.zeros(unit(i).shard_numel, accumulation_dtype(i));
      if (!reduces_at_boundary() && policy().stage == 0) wholes_[i] = make_buffer(i, unit(i).numel());
    }
  }

  ~BucketedGradients() override { in_flight_.clear(); }

  void accept(int index, at::Tensor gradient) override {
    const int touched_unit = parameter(index).unit;
    if (policy().deterministic && reduced_)
      throw StateError(
          str("backward: with \"deterministic\" the gradients of a window can be read or reduced once, after its last "
              "backward; '",
              parameter(index).name, "' got another one"));
    touched_[index] = 1;
    const bool sent = reduces_at_boundary() ? reduced_ : touched_unit > next_;
    Bucket& bucket = sent ? late_[touched_unit] : buckets_[touched_unit];
    add(bucket, index, gradient);
    if (reduces_at_boundary() || sent) return;
    while (next_ >= 0 && is_complete(next_)) send(next_--, buckets_);
  }

  // Offloaded gradients leave during backward, at every stage.
  bool reduces_at_boundary() const override {
    return (policy().stage <= 1 || is_alone_on_device()) && !policy().deterministic && !leaves_;
  }

  at::Tensor unreduced(int index) const override {
    const int in_unit = parameter(index).unit;
    const Bucket& bucket = reduced_ ? late_[in_unit] : buckets_[in_unit];
    return bucket.sum_of(unit(in_unit), position_in_unit(index));
  }

  void end_backward() override {
    if (reduces_at_boundary()) return;
    for (; next_ >= 0; --next_) send(next_, buckets_);
    next_ = units() - 1;
    send_late();
  }

  void finish() override {
    if (reduces_at_boundary()) {
      reduced_ ? reduce_what_came_since() : reduce_all();
    } else {
      if (is_backward_open_somewhere()) end_backward();
      while (!in_flight_.empty()) complete_oldest();
      for (int i = 0; i < units(); ++i)
        if (has_shard_[i] && !leaving_.takes(i)) replica_sums_.close(i, shards_[i]);
      if (policy().deterministic) finish_order();
      leaving_.finish();
    }
    agree(touched_, *reductions_group_);
  }

  void add_squares(int index, ExactSum& sum) const override {
    const ManagedParameter& managed = parameter(index);
    const Overlap mine = counted(managed);
    if (mine.empty()) return;
    const at::Tensor& whole = reduces_at_boundary() ? buckets_[managed.unit].sum : wholes_[managed.unit];
    const at::Tensor& gradients = whole.defined() ? whole : shards_[managed.unit];
    const int64_t begin = mine.begin - (whole.defined() ? 0 : shard_begin(managed.unit));
    const void* data = element(gradients.data_ptr(), begin, gradients.element_size());
    if (policy().deterministic) return trireme::add_squares(data, gradients.scalar_type(), mine.numel(), sum);
    sum.add(sum_of_squares(data, gradients.scalar_type(), mine.numel()));
  }

  at::Tensor owned(int index) override {
    if (leaving_.takes(index)) return leaving_.on_host(index);
    const at::Tensor& whole = reduces_at_boundary() ? buckets_[index].sum : wholes_[index];
    if (policy().stage == 0 && whole.defined()) return whole;
    return piece_of(index, whole.defined() ? shard_of(index, whole) : shards_[index]);
  }

  void rewritten(int index) override {
    const int changed = parameter(index).unit;
    if (!leaving_.takes(changed)) return;
    leaving_.rewritten(changed);
    leaving_.finish();
  }
  at::Tensor norm_on_device(int index) const override {
    return leaving_.takes(index) ? leaving_.norm(index) : at::Tensor();
  }
  void await_owned(int index) override { leaving_.await(index); }
  bool is_owned_there(int index) const override { return leaving_.has_arrived(index); }

  void clear() override {
    std::fill(touched_.begin(), touched_.end(), 0);
    std::fill(has_shard_.begin(), has_shard_.end(), 0);
    reduced_ = false;
    replica_sums_.clear();
    for (Bucket& bucket : buckets_) {
      if (!reduces_at_boundary()) bucket.sum.reset();
      bucket.seen.clear();
      bucket.arrived = 0;
    }
  }

  void add_to(PagerMemory& memory) const override {
    memory.registered_bytes += kept_.registered_bytes() + messages_->registered_bytes();
    const auto add = [&](int i, const at::Tensor& kept, int sharers) {
      if (!kept.defined()) return;
      memory.gradient_bytes += static_cast<int64_t>(kept.nbytes());
      memory.padding_bytes += unit(i).padding() * kept.element_size() / sharers;
    };
    for (int i = 0; i < units(); ++i) {
      if (reduces_at_boundary()) add(i, buckets_[i].sum, 1);
      add(i, shards_[i], static_cast<int>(unit(i).shards));
      add(i, wholes_[i], 1);
    }
    memory.peak_in_flight_bytes += peak_in_flight_bytes_;
    memory.in_flight_bytes += in_flight_bytes_;
  }

 private:
  int64_t kept_bytes() const {
    int64_t bytes = 0;
    for (int i = 0; i < units(); ++i)
      if (has(i) && (reduces_at_boundary() || !leaving_.takes(i)))
        bytes += bytes_in_slab(reduces_at_boundary() ? unit(i).numel() : unit(i).shard_numel, accumulation_dtype(i));
    return bytes;
  }

  at::Tensor make_buffer(int index, int64_t numel) const {
    return at::zeros({numel}, at::TensorOptions().dtype(accumulation_dtype(index)).device(device()));
  }

  void open(Bucket& bucket, int index) {
    bucket.begin(unit(index));
    if (bucket.sum.defined()) return;
    bucket.sum = make_buffer(index, unit(index).numel());
    in_flight_bytes_ += static_cast<int64_t>(bucket.sum.nbytes());
    peak_in_flight_bytes_ = std::max(peak_in_flight_bytes_, in_flight_bytes_);
  }

  void add(Bucket& bucket, int index, const at::Tensor& gradient) {
    const int to = parameter(index).unit;
    if (bucket.seen.empty()) open(bucket, to);
    bucket.add(unit(to), position_in_unit(index), gradient);
  }

  bool is_complete(int index) const {
    return !has(index) || buckets_[index].arrived == static_cast<int>(unit(index).parameters.size());
  }
  bool is_backward_open() const {
    const auto filled = [](const Bucket& bucket) { return bucket.arrived > 0; };
    return next_ < units() - 1 || std::any_of(buckets_.begin(), buckets_.end(), filled) ||
           std::any_of(late_.begin(), late_.end(), filled);
  }

  // A rank whose micro-batch reached no parameter must join in all the same. Asked in the group's own sequence: on
  // other ranks reductions may be under way.
  bool is_backward_open_somewhere() {
    const SubjectScope subject("the end of a window");
    std::vector<uint8_t> open{is_backward_open()};
    agree(open, group());
    return open.front() != 0;
  }

  // Starts the reduction of a unit's bucket; missing gradients count as zero.
  void send(int index, std::vector<Bucket>& buckets) {
    if (!has(index)) return;
    Bucket& bucket = buckets[index];
    if (bucket.seen.empty()) open(bucket, index);
    make_way();
    const SubjectScope subject(unit(index).name);
    Reduction reduction{index, !has_shard_[index], messages_->of(unit(index), bucket.sum), {}, {}};
    has_shard_[index] = 1;
    in_flight_bytes_ += static_cast<int64_t>(reduction.input.nbytes()) - static_cast<int64_t>(bucket.sum.nbytes());
    bucket = Bucket{};
    if (is_alone_on_device()) {
      reduction.output = reduction.input;
    } else if (!policy().deterministic) {
      if (leaving_.takes(index))
        reduction.output = make_buffer(index, unit(index).shard_numel);  // leaves beside the messages after the next
      else
        reduction.output = reduction.first ? shards_[index] : messages_->reduced(unit(index));
      reduction.pending = reductions_group_->reduce_scatter(reduction.output, reduction.input, ReduceOp::kSum);
    } else if (group().size() == 1) {
      reduction.output = reduction.input;
    } else {
      reduction.output = at::empty_like(reduction.input);
      reduction.pending = reductions_group_->all_to_all(reduction.output, reduction.input);
    }
    reduced_bytes_ += static_cast<int64_t>(reduction.input.nbytes());
    in_flight_.push_back(std::move(reduction));
    ++reductions_;
    if (is_alone_on_device()) complete_oldest();  // there is nobody to wait for
  }

  void multiply_reduced(const at::Tensor& reduced) const { multiply(reduced, factor_ * policy().predivide_factor); }
  static void multiply(const at::Tensor& reduced, double factor) {
    if (static_cast<float>(factor) != 1) reduced.mul_(static_cast<float>(factor));
  }

  // Keeps reductions in flight to a few, to save memory. Waits for a peer only so long: one that got no gradient for a
  // unit sends it no earlier than at the end of its own pass, and may need this rank in a gather before that. On a
  // device it is the stream that waits, which holds up no call of this rank.
  void make_way() {
    while (!is_host(device()) && in_flight_.size() >= kReductionsInFlight) complete_oldest();
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (in_flight_.size() >= kReductionsInFlight) {
      while (!in_flight_.front().pending.done()) {
        if (std::chrono::steady_clock::now() > end) return;
        std::this_thread::yield();
      }
      complete_oldest();
    }
  }

  void complete_oldest() {
    Reduction reduction = std::move(in_flight_.front());
    in_flight_.pop_front();
    reduction.pending.wait();
    in_flight_bytes_ -= static_cast<int64_t>(reduction.input.nbytes());
    if (policy().deterministic) return fold_in_order(shards_[reduction.unit], reduction.output, reduction.first);
    multiply_reduced(reduction.output);
    if (leaving_.takes(reduction.unit)) {
      replica_sums_.add_up(reduction.unit, reduction.output);
      return leaving_.leave(reduction.unit, reduction.output, reduction.first);
    }
    const at::Tensor& shard = replica_sums_.open(reduction.unit, shards_[reduction.unit]);
    if (!reduction.first)
      shard.add_(reduction.output);
    else if (!reduction.output.is_same(shard))
      shard.copy_(reduction.output);
  }

  // The sums get their factor once; nothing can be added to them in order afterwards.
  void finish_order() {
    if (std::exchange(reduced_, true)) return;
    for (int i = 0; i < units(); ++i) {
      if (!has_shard_[i]) continue;
      multiply_reduced(shards_[i]);
      if (wholes_[i].defined() && is_alone_on_device())
        wholes_[i].copy_(shards_[i]);
      else if (wholes_[i].defined())
        reductions_group_->all_gather(wholes_[i], shards_[i]).wait();
      if (leaving_.takes(i)) leaving_.leave(i, shards_[i], /*replaces=*/true);
    }
  }

  // Units that any rank has more of after they were sent; usually none. Asked in the group's own sequence, where a rank
  // that is in another method is: two ranks that waited for each other in two groups would do so until the timeout.
  std::vector<uint8_t> agree_on_late() {
    const SubjectScope subject("the end of a backward pass");
    std::vector<uint8_t> more(units());
    for (int i = 0; i < units(); ++i) more[i] = late_[i].arrived > 0;
    agree(more, group());
    return more;
  }

  void send_late() {
    const std::vector<uint8_t> more = agree_on_late();
    for (int i = units() - 1; i >= 0; --i)
      if (more[i]) send(i, late_);
  }

  void reduce_all() {
    for (int i = units() - 1; i >= 0; --i)
      if (has(i)) reduce_whole(i);
    reduced_ = true;
  }

  // At stages 0 and 1 only where the window was reduced before its end.
  void reduce_what_came_since() {
    const std::vector<uint8_t> more = agree_on_late();
    for (int i = units() - 1; i >= 0; --i) {
      if (!more[i]) continue;
      Bucket& late = late_[i];
      if (late.seen.empty()) open(late, i);
      reduce(i, late.sum);
      owned(i).add_(policy().stage == 0 ? late.sum : piece_of(i, shard_of(i, late.sum)));
      in_flight_bytes_ -= static_cast<int64_t>(late.sum.nbytes());
      late = Bucket{};
    }
  }

  void reduce_whole(int index) {
    const SubjectScope subject(unit(index).name);
    at::Tensor& sum = buckets_[index].sum;
    if (buckets_[index].seen.empty()) sum.zero_();
    buckets_[index].zero_what_is_missing(unit(index));
    reduce(index, sum);
  }

  at::Tensor shard_of(int index, const at::Tensor& whole) const {
    return whole.narrow(0, shard_begin(index), unit(index).shard_numel);
  }

  // What this rank keeps of `sum` becomes the ranks' sum: all of it at stage 0, its own shard at stage 1.
  void reduce(int index, const at::Tensor& sum) {
    const at::Tensor mine = policy().stage == 0 ? sum : shard_of(index, sum);
    if (is_alone_on_device()) return multiply(mine, factor_);
    const at::Tensor message = messages_->of(unit(index), sum);
    if (policy().stage == 0) {
      reductions_group_->all_reduce(message, ReduceOp::kSum).wait();
      if (!message.is_same(mine)) mine.copy_(message);
    } else {
      reductions_group_->reduce_scatter(mine, message, ReduceOp::kSum).wait();
    }
    multiply_reduced(mine);
    if (policy().stage > 0)
      replica_sums_.add_up(index, mine);
    else if (replica_sums_.are_there())
      mesh().replicas->all_reduce(mine).wait();
    reduced_bytes_ += static_cast<int64_t>(message.nbytes());
    ++reductions_;
  }

  std::unique_ptr<Group> reductions_group_;
  LeavingGradients leaving_;
  const bool leaves_;
  FlatBuffers kept_;  // sums, or shards of them
  std::unique_ptr<GradientMessages> messages_;
  std::vector<Bucket> buckets_;     // by unit, of this pass (of the window at stages 0 and 1)
  std::vector<Bucket> late_;        // what arrived after its unit was sent, or reduced
  std::vector<at::Tensor> shards_;  // unless reduces_at_boundary()
  std::vector<at::Tensor> wholes_;  // stage 0 in the deterministic order
  bool reduced_ = false;            // reduces_at_boundary(): what comes now is late; deterministic: nothing may come
  std::vector<uint8_t> has_shard_;  // the shard holds something of this window
  std::deque<Reduction> in_flight_;
  int next_;  // units above it have been sent in this pass
  int64_t in_flight_bytes_ = 0;
  int64_t peak_in_flight_bytes_ = 0;
};

}  // namespace

std::unique_ptr<GradientStore> make_bucketed_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<BucketedGradients>(context, mesh);
}

}  // namespace trireme
