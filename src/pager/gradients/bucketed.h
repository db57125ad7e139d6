// Gradients that are summed in flat buffers, one per unit, and reduced by collectives: what the two schedules share.
#pragma once

#include <memory>
#include <vector>

#include "pager/gradients/bucket.h"
#include "pager/gradients/messages.h"
#include "pager/gradients/store.h"

namespace trireme {

class BucketedGradients : public GradientStore {
 protected:
  /// `sums_stay`: buckets are where they are from one window to the next. Collective over the mesh.
  BucketedGradients(const StoreContext& context, int mesh, bool sums_stay);

  void open(Bucket& bucket, int unit);
  void add(Bucket& bucket, int parameter, const at::Tensor& gradient);
  at::Tensor zeros(int unit, int64_t numel) const;
  at::Tensor shard_of(int index, const at::Tensor& whole) const {
    return whole.narrow(0, shard_begin(index), unit(index).shard_numel);
  }
  /// The counted squares of `parameter` in `sums`, which begin at element `begin` of its unit.
  void add_squares_of(int parameter, const at::Tensor& sums, int64_t begin, ExactSum& sum) const;
  void count(const at::Tensor& message);

  /// Units of which any rank has more in `late`; usually none. Collective, and asked in the mesh's own group, where a
  /// rank that is in another method is: two ranks that waited for each other in two groups would do so until the
  /// timeout.
  std::vector<uint8_t> agree_on_late() const;

  void add_in_flight(int64_t bytes);
  void add_to(PagerMemory& memory) const override;
  void add_kept(PagerMemory& memory, int unit, const at::Tensor& kept, int64_t sharers) const;

  /// The shards' ranks: gathers of weights that backward issues in between do not share a sequence with reductions.
  const std::unique_ptr<Group> reductions_group_;
  GradientMessages messages_;
  std::vector<Bucket> buckets_;  // by unit, of this window or backward pass
  std::vector<Bucket> late_;     // by unit: what arrived after its bucket was sent, or reduced

 private:
  int64_t in_flight_bytes_ = 0;
  int64_t peak_in_flight_bytes_ = 0;
};

/// Sums over the window, and reduces once at its end: ZeRO stages 0 and 1.
std::unique_ptr<GradientStore> make_window_gradients(const StoreContext& context, int mesh);
/// Reduces in each backward pass, and keeps this rank's shard: ZeRO stages 2 and 3, and at every stage what is
/// offloaded or summed in the deterministic order.
std::unique_ptr<GradientStore> make_backward_gradients(const StoreContext& context, int mesh);

}  // namespace trireme
