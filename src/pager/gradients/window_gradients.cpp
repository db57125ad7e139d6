// Whole sums of all gradients over the window, reduced once at its end, last unit first.
#include <utility>

#include "pager/gradients/buckets.h"
#include "pager/gradients/gradient_arena.h"
#include "pager/gradients/messages.h"
#include "pager/gradients/store.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {
namespace {

class WindowGradients final : public GradientStore {
 public:
  WindowGradients(const StoreContext& context, int mesh)
      : GradientStore(context, mesh), messages_(context_, /*sums_stay=*/true) {
    home_.keep(GradientHome::Room::kWholes, messages_.group());
    home_.add_registered(messages_.registered_bytes());
    for (int i = 0; i < context_.units(); ++i) sums_.begin(i, home_.at(i).whole);
    if (context_.is_alone_on_device()) scale_.predivide = 1;
    if (is_host(context_.device)) serve_gradients();
  }

  bool reduces_at_boundary() const override { return true; }

  void accept(int parameter, at::Tensor gradient) override {
    touched_[parameter] = 1;
    (is_reduced_ ? late_ : sums_).add(parameter, gradient);
  }

  at::Tensor unreduced(int parameter) const override { return (is_reduced_ ? late_ : sums_).sum_of(parameter); }

  void end_backward() override {}

  void finish() override {
    is_reduced_ ? reduce_what_came_since() : reduce_all();
    context_.agree(touched_, &messages_.group());
  }

  void clear() override {
    GradientStore::clear();
    is_reduced_ = false;
    for (int i = 0; i < context_.units(); ++i) sums_.begin(i, home_.at(i).whole);
  }

 private:
  // Each gradient is added to its sum and freed before the next one of its size is born.
  void serve_gradients() {
    std::vector<size_t> sizes;
    for (const ManagedParameter& parameter : context_.parameters)
      if (context_.has(parameter.unit)) sizes.push_back(parameter.bytes());
    if (auto arena = make_private_arena(sizes)) arena_scope_ = std::make_unique<ArenaScope>(std::move(arena));
  }

  // The part of `sum`, of a unit, that this rank keeps: all of it at ZeRO stage 0, else its own shard.
  at::Tensor mine_of(int index, const at::Tensor& sum) const {
    return context_.policy.stage == 0 ? sum : context_.shard_of(index, sum);
  }

  void reduce_all() {
    for (int i = context_.units() - 1; i >= 0; --i)
      if (context_.has(i)) reduce(i, sums_.take(i));
    is_reduced_ = true;
  }

  // Only where the window was reduced before its end.
  void reduce_what_came_since() {
    const std::vector<uint8_t> more = late_.filled_somewhere();
    for (int i = context_.units() - 1; i >= 0; --i) {
      if (!more[i]) continue;
      const at::Tensor late = late_.take(i);
      reduce(i, late);
      const at::Tensor mine = mine_of(i, late);
      home_.owned(i).add_(context_.policy.stage == 0 ? mine : context_.piece_of(i, mine));
      home_.add_in_flight(-static_cast<int64_t>(late.nbytes()));
    }
  }

  // The part of `sum` that this rank keeps becomes the ranks' sum.
  void reduce(int index, const at::Tensor& sum) {
    const SubjectScope subject(context_.unit(index).name);
    const at::Tensor mine = mine_of(index, sum);
    if (context_.is_alone_on_device()) return multiply(mine, scale_.after_reduce());
    multiply(sum, scale_.before_reduce());
    const at::Tensor message = messages_.of(index, sum);
    if (context_.policy.stage == 0) {
      messages_.group().all_reduce(message, ReduceOp::kSum).wait();
      if (!message.is_same(mine)) mine.copy_(message);
    } else {
      messages_.group().reduce_scatter(mine, message, ReduceOp::kSum).wait();
    }
    multiply(mine, scale_.after_reduce());
    home_.add_up(index, mine);
    count(message);
  }

  GradientMessages messages_;
  Buckets sums_{context_, home_};
  Buckets late_{context_, home_};            // what came after finish()
  std::unique_ptr<ArenaScope> arena_scope_;  // null: no gradient is large, or all are a device's
  bool is_reduced_ = false;                  // what comes now is late
};

}  // namespace

std::unique_ptr<GradientStore> make_window_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<WindowGradients>(context, mesh);
}

}  // namespace trireme
