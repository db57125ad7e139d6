// Gradients that are reduced in each backward pass, of which this rank keeps its shards: ZeRO stages 2 and 3, and at
// every stage what is offloaded or summed in the deterministic order.
//
// Each unit's bucket is sent as soon as backward has filled it. The order of collectives is fixed, last unit first,
// whatever order backward produced the gradients in: ranks on which a parameter is unused stay in step with the others.
// A pass that reaches only some units, as all ranks know, sends these alone. What arrives after its unit was sent (a
// parameter that backward reaches twice), or of a unit that was not expected, is sent at the end of the pass, by
// agreement.
#include <algorithm>
#include <chrono>
#include <deque>
#include <thread>
#include <utility>

#include "pager/gradients/buckets.h"
#include "pager/gradients/reducer.h"
#include "pager/gradients/store.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/pager/layout/refusals.h"

namespace trireme {
namespace {

constexpr size_t kReductionsInFlight = 2;  // one being reduced while the next is filled
constexpr std::chrono::milliseconds kPatience{20};

class BackwardGradients final : public GradientStore {
 public:
  BackwardGradients(const StoreContext& context, int mesh)
      : GradientStore(context, mesh),
        messages_(context_, /*sums_stay=*/false),
        reducer_((context.policy.deterministic ? make_folding : make_summing)(context_, scale_, messages_, home_)),
        sent_(context_.units()),
        next_(context_.units() - 1) {
    home_.add_registered(messages_.registered_bytes());
  }

  void accept(int parameter, at::Tensor gradient) override {
    if (is_folded_) throw StateError(filled(kReducedOnce, {context_.parameters[parameter].name}));
    touched_[parameter] = 1;
    const int to = context_.parameters[parameter].unit;
    const bool is_late = to > next_ || !is_expected(to);
    (is_late ? late_ : buckets_).add(parameter, gradient);
    if (is_late) return;
    while (next_ >= 0 && is_complete(next_)) send_next();
  }

  void expect(const std::vector<bool>& units) override { expected_ = units; }

  void end_backward() override {
    while (next_ >= 0) send_next();
    next_ = context_.units() - 1;
    expected_.clear();
    const std::vector<uint8_t> more = late_.filled_somewhere();
    for (int i = context_.units() - 1; i >= 0; --i)
      if (more[i]) send(i, late_);
  }

  void finish() override {
    if (is_backward_open_somewhere()) end_backward();
    while (!under_way_.empty()) complete_oldest();
    if (!is_folded_) reducer_->finish(sent_);
    is_folded_ = context_.policy.deterministic;
    context_.agree(touched_, &messages_.group());
  }

  void clear() override {
    GradientStore::clear();
    is_folded_ = false;
    std::fill(sent_.begin(), sent_.end(), 0);
    for (int i = 0; i < context_.units(); ++i) buckets_.begin(i);
  }

 private:
  bool is_expected(int unit) const { return expected_.empty() || expected_[unit]; }

  bool is_complete(int unit) const {
    return !context_.has(unit) || !is_expected(unit) ||
           buckets_.arrived(unit) == static_cast<int>(context_.unit(unit).parameters.size());
  }

  // A rank whose micro-batch reached no parameter must join in all the same. Asked in the mesh's own group: on other
  // ranks reductions may be under way.
  bool is_backward_open_somewhere() {
    const SubjectScope subject("the end of a window");
    std::vector<uint8_t> open{next_ < context_.units() - 1 || !buckets_.are_empty() || !late_.are_empty()};
    context_.agree(open, &context_.ranks.shards);
    return open.front() != 0;
  }

  void send_next() {
    const int unit = next_--;
    if (is_expected(unit)) send(unit, buckets_);
  }

  // Starts the reduction of a unit's bucket; missing gradients count as zero.
  void send(int unit, Buckets& buckets) {
    if (!context_.has(unit)) return;
    at::Tensor sums = buckets.take(unit);
    make_way();
    const SubjectScope subject(context_.unit(unit).name);
    multiply(sums, scale_.before_reduce());
    Reduction reduction{.unit = unit, .is_first = !sent_[unit], .input = messages_.of(unit, sums)};
    sent_[unit] = 1;
    home_.add_in_flight(static_cast<int64_t>(reduction.input.nbytes()) - static_cast<int64_t>(sums.nbytes()));
    sums.reset();  // its memory is for the reduction
    reducer_->start(reduction);
    count(reduction.input);
    under_way_.push_back(std::move(reduction));
    if (context_.is_alone_on_device()) complete_oldest();  // there is nobody to wait for
  }

  // Keeps reductions under way to a few, to save memory. Waits for a peer only so long: one that got no gradient for a
  // unit sends it no earlier than at the end of its own pass, and may need this rank in a gather before that. On a
  // device it is the stream that waits, which holds up no call of this rank.
  void make_way() {
    while (!is_host(context_.device) && under_way_.size() >= kReductionsInFlight) complete_oldest();
    const auto end = std::chrono::steady_clock::now() + kPatience;
    while (under_way_.size() >= kReductionsInFlight) {
      while (!under_way_.front().pending.done()) {
        if (std::chrono::steady_clock::now() > end) return;
        std::this_thread::yield();
      }
      complete_oldest();
    }
  }

  void complete_oldest() {
    Reduction reduction = std::move(under_way_.front());
    under_way_.pop_front();
    reduction.pending.wait();
    home_.add_in_flight(-static_cast<int64_t>(reduction.input.nbytes()));
    reducer_->complete(reduction);
  }

  GradientMessages messages_;
  const std::unique_ptr<GradientReducer> reducer_;
  Buckets buckets_{context_, home_};  // of this pass
  Buckets late_{context_, home_};     // what came after its bucket was sent, or unexpected
  std::vector<uint8_t> sent_;         // by unit: something of this window was
  std::deque<Reduction> under_way_;
  int next_;                    // units above it have been sent in this pass, as far as they are expected
  std::vector<bool> expected_;  // by unit, in this pass; empty: all
  bool is_folded_ = false;      // the deterministic order has come to its end: nothing can be added to it
};

}  // namespace

std::unique_ptr<GradientStore> make_backward_gradients(const StoreContext& context, int mesh) {
  return std::make_unique<BackwardGradients>(context, mesh);
}

}  // namespace trireme
