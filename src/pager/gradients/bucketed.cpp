#include "pager/gradients/bucketed.h"

#include <ATen/ops/zeros.h>

#include <algorithm>

#include "pager/storage/kernels.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {

BucketedGradients::BucketedGradients(const StoreContext& context, int mesh, bool sums_stay)
    : GradientStore(context, mesh),
      reductions_group_(group().clone(group().name() + "/gradients")),
      messages_(*reductions_group_, context, sums_stay),
      buckets_(units()),
      late_(units()) {}

at::Tensor BucketedGradients::zeros(int index, int64_t numel) const {
  return at::zeros({numel}, at::TensorOptions().dtype(accumulation_dtype(index)).device(device()));
}

void BucketedGradients::open(Bucket& bucket, int index) {
  bucket.begin(unit(index));
  if (bucket.sum.defined()) return;
  bucket.sum = zeros(index, unit(index).numel());
  add_in_flight(static_cast<int64_t>(bucket.sum.nbytes()));
}

void BucketedGradients::add(Bucket& bucket, int index, const at::Tensor& gradient) {
  const int to = parameter(index).unit;
  if (bucket.seen.empty()) open(bucket, to);
  bucket.add(unit(to), position_in_unit(index), gradient);
}

void BucketedGradients::add_squares_of(int index, const at::Tensor& sums, int64_t begin, ExactSum& sum) const {
  for (const Overlap& mine : counted(parameter(index))) {
    const void* data = element(sums.data_ptr(), mine.begin - begin, sums.element_size());
    if (policy().deterministic)
      trireme::add_squares(data, sums.scalar_type(), mine.numel(), sum);
    else
      sum.add(sum_of_squares(data, sums.scalar_type(), mine.numel()));
  }
}

void BucketedGradients::count(const at::Tensor& message) {
  reduced_bytes_ += static_cast<int64_t>(message.nbytes());
  ++reductions_;
}

std::vector<uint8_t> BucketedGradients::agree_on_late() const {
  const SubjectScope subject("the end of a backward pass");
  std::vector<uint8_t> more(units());
  for (int i = 0; i < units(); ++i) more[i] = late_[i].arrived > 0;
  agree(more, group());
  return more;
}

void BucketedGradients::add_in_flight(int64_t bytes) {
  in_flight_bytes_ += bytes;
  peak_in_flight_bytes_ = std::max(peak_in_flight_bytes_, in_flight_bytes_);
}

void BucketedGradients::add_to(PagerMemory& memory) const {
  memory.registered_bytes += messages_.registered_bytes();
  memory.in_flight_bytes += in_flight_bytes_;
  memory.peak_in_flight_bytes += peak_in_flight_bytes_;
}

void BucketedGradients::add_kept(PagerMemory& memory, int index, const at::Tensor& kept, int64_t sharers) const {
  if (!kept.defined()) return;
  memory.gradient_bytes += static_cast<int64_t>(kept.nbytes());
  memory.padding_bytes += unit(index).padding() * kept.element_size() / sharers;
}

std::unique_ptr<GradientStore> make_bucketed_gradients(const StoreContext& context, int mesh) {
  const PagerPolicy& policy = context.policy;
  const ShardMesh& ranks = context.meshes[mesh];
  const bool is_alone_on_device = !is_host(context.device) && ranks.shards.size() == 1 && ranks.replica_count() == 1;
  // Offloaded gradients leave during backward, at every stage.
  const bool at_boundary =
      (policy.stage <= 1 || is_alone_on_device) && !policy.deterministic && context.offload.is_empty();
  return at_boundary ? make_window_gradients(context, mesh) : make_backward_gradients(context, mesh);
}

}  // namespace trireme
