// Whole sums of all gradients over the window, reduced once at its end, last unit first.
#include <algorithm>

#include "pager/gradients/bucketed.h"
#include "pager/gradients/gradient_arena.h"
#include "pager/weights/flat_buffers.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

class WindowGradients final : public BucketedGradients {
 public:
  WindowGradients(const StoreContext& context, int mesh)
      : BucketedGradients(context, mesh, /*sums_stay=*/true), sums_(context, sum_bytes(), *reductions_group_) {
    for (int i = 0; i < units(); ++i)
      if (has(i)) buckets_[i].sum = sums_.zeros(unit(i).numel(), accumulation_dtype(i));
    if (is_host(device())) serve_gradients();
  }

  bool reduces_at_boundary() const override { return true; }

  void accept(int index, at::Tensor gradient) override {
    touched_[index] = 1;
    const int to = parameter(index).unit;
    add(is_reduced_ ? late_[to] : buckets_[to], index, gradient);
  }

  at::Tensor unreduced(int index) const override {
    const int in_unit = parameter(index).unit;
    const Bucket& bucket = is_reduced_ ? late_[in_unit] : buckets_[in_unit];
    return bucket.sum_of(unit(in_unit), position_in_unit(index));
  }

  void end_backward() override {}

  void finish() override {
    is_reduced_ ? reduce_what_came_since() : reduce_all();
    agree(touched_, *reductions_group_);
  }

  void add_squares(int index, ExactSum& sum) const override {
    add_squares_of(index, buckets_[parameter(index).unit].sum, 0, sum);
  }

  at::Tensor owned(int index) override { return owned_of(index, buckets_[index].sum); }

  void clear() override {
    std::fill(touched_.begin(), touched_.end(), 0);
    is_reduced_ = false;
    for (Bucket& bucket : buckets_) {
      bucket.seen.clear();
      bucket.arrived = 0;
    }
  }

  void add_to(PagerMemory& memory) const override {
    BucketedGradients::add_to(memory);
    memory.registered_bytes += sums_.registered_bytes();
    for (int i = 0; i < units(); ++i) add_kept(memory, i, buckets_[i].sum, 1);
  }

 private:
  // Each gradient is added to its sum and freed before the next one of its size is born.
  void serve_gradients() {
    std::vector<size_t> sizes;
    for (int i = 0; i < parameters(); ++i)
      if (has(parameter(i).unit)) sizes.push_back(static_cast<size_t>(parameter(i).bytes()));
    if (auto arena = make_private_arena(sizes)) arena_scope_ = std::make_unique<ArenaScope>(std::move(arena));
  }

  int64_t sum_bytes() const {
    int64_t bytes = 0;
    for (int i = 0; i < units(); ++i)
      if (has(i)) bytes += bytes_in_slab(unit(i).numel(), accumulation_dtype(i));
    return bytes;
  }

  at::Tensor owned_of(int index, const at::Tensor& sum) const {
    return policy().stage == 0 ? sum : piece_of(index, shard_of(index, sum));
  }

  void reduce_all() {
    for (int i = units() - 1; i >= 0; --i) {
      if (!has(i)) continue;
      Bucket& bucket = buckets_[i];
      if (bucket.seen.empty()) bucket.sum.zero_();
      bucket.zero_what_is_missing(unit(i));
      reduce(i, bucket.sum);
    }
    is_reduced_ = true;
  }

  // Only where the window was reduced before its end.
  void reduce_what_came_since() {
    const std::vector<uint8_t> more = agree_on_late();
    for (int i = units() - 1; i >= 0; --i) {
      if (!more[i]) continue;
      Bucket& late = late_[i];
      if (late.seen.empty()) open(late, i);
      reduce(i, late.sum);
      owned(i).add_(owned_of(i, late.sum));
      add_in_flight(-static_cast<int64_t>(late.sum.nbytes()));
      late = Bucket{};
    }
  }

  // The part of `sum` that this rank keeps becomes the ranks' sum: all of it at ZeRO stage 0, else its own shard.
  void reduce(int index, const at::Tensor& sum) {
    const SubjectScope subject(unit(index).name);
    const at::Tensor mine = policy().stage == 0 ? sum : shard_of(index, sum);
    if (is_alone_on_device()) return multiply(mine, scale_.at_once());
    multiply(sum, scale_.before_reduce());
    const at::Tensor message = messages_.of(unit(index), sum);
    if (policy().stage == 0) {
      reductions_group_->all_reduce(message, ReduceOp::kSum).wait();
      if (!message.is_same(mine)) mine.copy_(message);
    } else {
      reductions_group_->reduce_scatter(mine, message, ReduceOp::kSum).wait();
    }
    multiply(mine, scale_.after_reduce());
    if (policy().stage > 0)
      replica_sums_.add_up(index, mine);
    else if (replica_sums_.are_there())
      mesh().replicas->all_reduce(mine).wait();
    count(message);
  }

  FlatBuffers sums_;
  std::unique_ptr<ArenaScope> arena_scope_;  // null: no gradient is large, or all are a device's
  bool is_reduced_ = false;                  // what comes now is late
};

}  // namespace

std::unique_ptr<GradientStore> make_window_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<WindowGradients>(context, mesh);
}

}  // namespace trireme
