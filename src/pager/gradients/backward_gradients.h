// Gradients that are reduced in each backward pass, of which this rank keeps its shards: ZeRO stages 2 and 3, and at
// every stage what is offloaded or summed in the deterministic order.
//
// Each unit's bucket is sent as soon as backward has filled it. The order of collectives is fixed, last unit first,
// whatever order backward produced the gradients in: ranks on which a parameter is unused stay in step with the others.
// A pass that reaches only some units, as all ranks know, sends these alone. What arrives after its unit was sent (a
// parameter that backward reaches twice), or of a unit that was not expected, is sent at the end of the pass, by
// agreement.
#pragma once

#include <deque>
#include <vector>

#include "pager/gradients/bucketed.h"
#include "pager/gradients/leaving_gradients.h"
#include "pager/weights/flat_buffers.h"

namespace trireme {

/// When buckets are sent. How ranks make shards of the sum out of them is a subclass's.
class BackwardGradients : public BucketedGradients {
 public:
  BackwardGradients(const StoreContext& context, int mesh);

  void accept(int parameter, at::Tensor gradient) override;
  void expect(const std::vector<bool>& units) override { expected_ = units; }
  void end_backward() override;
  void finish() override;
  void add_squares(int parameter, ExactSum& sum) const override;
  at::Tensor owned(int unit) override;
  void rewritten(int parameter) override;
  at::Tensor norm_on_device(int unit) const override {
    return leaving_.takes(unit) ? leaving_.norm(unit) : at::Tensor();
  }
  void await_owned(int unit) override { leaving_.await(unit); }
  bool is_owned_there(int unit) const override { return leaving_.has_arrived(unit); }
  void clear() override;
  void add_to(PagerMemory& memory) const override;

 protected:
  /// The reduction of one unit's bucket, under way.
  struct Reduction {
    int unit;
    bool is_first;  ///< of its unit in this window
    at::Tensor input;
    at::Tensor output;
    Pending<void> pending;
  };

  /// Sets output and pending. Collective where there are peers.
  virtual void start(Reduction& reduction) = 0;
  /// `reduction` is over: its output joins this rank's shard, or leaves for the host.
  virtual void complete(Reduction& reduction) = 0;
  /// All reductions so far are complete. Collective.
  virtual void finish_shards() = 0;

  LeavingGradients leaving_;
  std::vector<at::Tensor> shards_;  // by unit, [shard_numel]; undefined where it is kept on the host alone
  std::vector<uint8_t> has_shard_;  // by unit: something of this window was sent

 private:
  bool is_expected(int unit) const { return expected_.empty() || expected_[unit]; }
  bool is_complete(int unit) const;
  bool is_backward_open() const;
  bool is_backward_open_somewhere();
  void send_next();
  void send(int unit, std::vector<Bucket>& buckets);
  void make_way();
  void complete_oldest();

  std::deque<Reduction> in_flight_;
  int next_;                    // units above it have been sent in this pass, as far as they are expected
  std::vector<bool> expected_;  // by unit, in this pass; empty: all
};

/// Ranks' sums are added while they travel; each pass adds to the shard.
std::unique_ptr<GradientStore> make_summed_gradients(const StoreContext& context, int mesh);
/// PagerPolicy::deterministic: each rank adds the gradients of rank 0, 1, 2, … to its shard, micro-batch by
/// micro-batch. The factor comes last, and at ZeRO stage 0 the shards are gathered.
std::unique_ptr<GradientStore> make_ordered_gradients(const StoreContext& context, int mesh);

}  // namespace trireme
