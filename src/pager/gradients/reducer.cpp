#include "pager/gradients/reducer.h"

#include <ATen/ops/empty_like.h>

#include <algorithm>

#include "pager/storage/kernels.h"

namespace trireme {
namespace {

class SummingReducer final : public GradientReducer {
 public:
  SummingReducer(const MeshContext& context, const GradientScale& scale, GradientMessages& messages, GradientHome& home)
      : GradientReducer(context, scale, messages, home) {
    home.keep(GradientHome::Room::kShards, messages.group());
  }

  void start(Reduction& reduction) override {
    const int unit = reduction.unit;
    if (context_.is_alone_on_device()) {
      reduction.output = reduction.input;
      return;
    }
    if (context_.offload.owns(unit))  // beside the messages after the next
      reduction.output = context_.zeros(unit, context_.unit(unit).shard_numel);
    else
      reduction.output = reduction.is_first ? home_.at(unit).shard : messages_.reduced(unit);
    reduction.pending = messages_.group().reduce_scatter(reduction.output, reduction.input, ReduceOp::kSum);
  }

  void complete(const Reduction& reduction) override {
    multiply(reduction.output, scale_.after_reduce());
    home_.put(reduction.unit, reduction.output, reduction.is_first);
  }

  void finish(const std::vector<uint8_t>& sent) override {
    for (int i = 0; i < context_.units(); ++i)
      if (sent[i] && !context_.offload.owns(i)) home_.close(i);
    home_.finish();
  }
};

constexpr int64_t kFoldedAtOnce = int64_t{1} << 14;  // elements that stay in the cache while all ranks' are added

// shard = ((shard + rank 0's) + rank 1's) + …, or without the first addend where `replaces`, rounded to the dtype of
// the sums after each. `received` [ranks * n] has rank r's part at r * n; shard [n].
void fold_in_order(const at::Tensor& shard, const at::Tensor& received, bool replaces) {
  const int64_t numel = shard.numel();
  const int64_t ranks = numel > 0 ? received.numel() / numel : 0;
  if (!is_host(shard)) {
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const at::Tensor part = received.narrow(0, rank * numel, numel);
      replaces&& rank == 0 ? shard.copy_(part) : shard.add_(part);
    }
    return;
  }
  for (int64_t begin = 0; begin < numel; begin += kFoldedAtOnce)
    for (int64_t rank = 0; rank < ranks; ++rank) {
      ReduceTask task;
      task.sources = {element(received.data_ptr(), rank * numel + begin, received.element_size())};
      task.source_dtype = received.scalar_type();
      task.target = element(shard.data_ptr(), begin, shard.element_size());
      task.target_dtype = shard.scalar_type();
      task.numel = std::min(kFoldedAtOnce, numel - begin);
      task.accumulate = !replaces || rank > 0;
      reduce(task);
    }
}

class FoldingReducer final : public GradientReducer {
 public:
  FoldingReducer(const MeshContext& context, const GradientScale& scale, GradientMessages& messages, GradientHome& home)
      : GradientReducer(context, scale, messages, home) {
    for (int i = 0; i < context.units(); ++i) {
      if (!context.has(i)) continue;
      const UnitLayout& unit = context.unit(i);
      home.at(i).shard = context.zeros(i, unit.shard_numel);
      if (context.policy.stage == 0) home.at(i).whole = context.zeros(i, unit.numel());
    }
  }

  void start(Reduction& reduction) override {
    if (messages_.group().size() == 1) {
      reduction.output = reduction.input;
      return;
    }
    reduction.output = at::empty_like(reduction.input);
    reduction.pending = messages_.group().all_to_all(reduction.output, reduction.input);
  }

  void complete(const Reduction& reduction) override {
    fold_in_order(home_.at(reduction.unit).shard, reduction.output, reduction.is_first);
  }

  // Nothing can be added to the sums in order once they have their factor.
  void finish(const std::vector<uint8_t>& sent) override {
    for (int i = 0; i < context_.units(); ++i) {
      if (!sent[i]) continue;
      const auto& [shard, whole, is_closed, since] = home_.at(i);
      multiply(shard, scale_.after_reduce());
      if (whole.defined() && context_.is_alone_on_device())
        whole.copy_(shard);
      else if (whole.defined())
        messages_.group().all_gather(whole, shard).wait();
      if (context_.offload.owns(i)) home_.put(i, shard, /*replaces=*/true);
    }
    home_.finish();
  }
};

}  // namespace

std::unique_ptr<GradientReducer> make_summing(const MeshContext& context, const GradientScale& scale,
                                              GradientMessages& messages, GradientHome& home) {
  return std::make_unique<SummingReducer>(context, scale, messages, home);
}

std::unique_ptr<GradientReducer> make_folding(const MeshContext& context, const GradientScale& scale,
                                              GradientMessages& messages, GradientHome& home) {
  return std::make_unique<FoldingReducer>(context, scale, messages, home);
}

}  // namespace trireme
