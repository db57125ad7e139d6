#include <ATen/ops/empty_like.h>

#include <utility>

#include "pager/gradients/backward_gradients.h"
#include "pager/gradients/ordered_fold.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/pager/layout/refusals.h"

namespace trireme {
namespace {

class OrderedGradients final : public BackwardGradients {
 public:
  OrderedGradients(const StoreContext& context, int mesh) : BackwardGradients(context, mesh), wholes_(units()) {
    for (int i = 0; i < units(); ++i) {
      if (!has(i)) continue;
      shards_[i] = zeros(i, unit(i).shard_numel);
      if (policy().stage == 0) wholes_[i] = zeros(i, unit(i).numel());
    }
  }

  void accept(int index, at::Tensor gradient) override {
    if (is_finished_) throw StateError(filled(kReducedOnce, {parameter(index).name}));
    BackwardGradients::accept(index, std::move(gradient));
  }

  at::Tensor owned(int index) override {
    return wholes_[index].defined() ? wholes_[index] : BackwardGradients::owned(index);
  }

  void clear() override {
    BackwardGradients::clear();
    is_finished_ = false;
  }

  void add_to(PagerMemory& memory) const override {
    BackwardGradients::add_to(memory);
    for (int i = 0; i < units(); ++i) add_kept(memory, i, wholes_[i], 1);
  }

 private:
  void start(Reduction& reduction) override {
    if (group().size() == 1) {
      reduction.output = reduction.input;
      return;
    }
    reduction.output = at::empty_like(reduction.input);
    reduction.pending = reductions_group_->all_to_all(reduction.output, reduction.input);
  }

  void complete(Reduction& reduction) override {
    fold_in_order(shards_[reduction.unit], reduction.output, reduction.is_first);
  }

  // The sums get their factor once; nothing can be added to them in order afterwards.
  void finish_shards() override {
    if (std::exchange(is_finished_, true)) return;
    for (int i = 0; i < units(); ++i) {
      if (!has_shard_[i]) continue;
      multiply(shards_[i], scale_.after_reduce());
      if (wholes_[i].defined() && is_alone_on_device())
        wholes_[i].copy_(shards_[i]);
      else if (wholes_[i].defined())
        reductions_group_->all_gather(wholes_[i], shards_[i]).wait();
      if (leaving_.takes(i)) leaving_.leave(i, shards_[i], /*replaces=*/true);
    }
  }

  std::vector<at::Tensor> wholes_;  // by unit, at ZeRO stage 0
  bool is_finished_ = false;
};

}  // namespace

std::unique_ptr<GradientStore> make_ordered_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<OrderedGradients>(context, mesh);
}

}  // namespace trireme
