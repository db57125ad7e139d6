#include "trireme/tensor/tensor_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "tensor/tensor_policy.h"
#include "trireme/activations/axis_pass.h"
#include "trireme/activations/sent_parts.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

// Ranks compute a loss of the same sums by the same kernels.
constexpr double kOfLoss = 1e-4;

}  // namespace

struct TensorParallel::Impl {
  Group& group() const { return pass->group(axis); }

  const std::shared_ptr<AxisPass> pass;
  const int axis;
  tensor::TensorPolicy& policy = dynamic_cast<tensor::TensorPolicy&>(pass->policy(axis));
  bool has_compared_loss = false;
  bool has_slices = false;
};

PassAxis TensorParallel::axis(Group& group, int number) {
  return {std::make_shared<AxisExchanges>(group, GradientLaw::kWhole, "tensor_parallel"),
          std::make_unique<tensor::TensorPolicy>(number, group.size())};
}

TensorParallel::TensorParallel(Group& group)
    : TensorParallel(
          [&group] {
            std::vector<PassAxis> axes;
            axes.push_back(axis(group, 0));
            return std::make_shared<AxisPass>(PassOrder::kTensor, std::move(axes));
          }(),
          0) {}
TensorParallel::TensorParallel(std::shared_ptr<AxisPass> pass, int axis)
    : impl_(new Impl{.pass = std::move(pass), .axis = axis}) {}
TensorParallel::~TensorParallel() = default;

void TensorParallel::add(const at::Tensor& parameter, const std::vector<TensorPart>& parts, bool gathers_output,
                         const std::string& name) {
  const TensorPart& own = parts.at(static_cast<size_t>(impl_->group().rank()));
  if (own.dim < 0) return;
  if (parameter.sizes() != at::IntArrayRef(local_shape(own)))
    throw ShapeError(str("add: ", parameter.sizes(), " is not ", part_text(own), " of ", shape_text(own.shape)));
  impl_->has_slices = true;
  std::vector<std::vector<Interval>> of_rank;
  for (const TensorPart& part : parts) of_rank.push_back(part.intervals);
  const Cut cut{.axis = impl_->axis,
                .dim = own.dim,
                .ranges = std::make_shared<const Ranges>(own.shape[static_cast<size_t>(own.dim)], std::move(of_rank))};
  PlacedTensor known{.parameter = name, .gathers_output = gathers_output, .is_parameter = true};
  impl_->pass->add(parameter, impl_->pass->with_cut(known, cut));
}

void TensorParallel::give_parts() {
  if (impl_->has_slices) throw StateError("give_parts: parameters have been added; call it before add()");
  impl_->pass->give_parts();
}

void TensorParallel::shard_tokens() { impl_->policy.shard_tokens(); }

void TensorParallel::overlap_sums() { impl_->policy.overlap_sums(); }

void TensorParallel::begin_forward() { impl_->pass->forget_entered(); }

bool TensorParallel::is_part(const at::Tensor& tensor) {
  const auto known = impl_->pass->find(tensor);
  return known && (known->is_cut() || known->is_unknown);
}

std::optional<std::vector<int64_t>> TensorParallel::whole_sizes(const at::Tensor& tensor) {
  return impl_->pass->whole_sizes(tensor);
}

at::Tensor TensorParallel::gather(const at::Tensor& tensor) {
  const auto known = impl_->pass->find(tensor);
  if (!known || !known->is_cut()) return tensor;
  return impl_->pass->whole(placed_argument(tensor, known));
}

at::Tensor TensorParallel::gather_like(const at::Tensor& tensor, const at::Tensor& slice) {
  const auto known = impl_->pass->find(slice);
  if (!known || !known->is_cut() || tensor.sizes() != slice.sizes())
    throw StateError(str("gather: ", tensor.sizes(), " is not cut as ", slice.sizes(), " is"));
  return impl_->pass->whole(placed_argument(tensor, known));
}

Group& TensorParallel::group() const { return impl_->group(); }

std::string TensorParallel::exchange_problem() { return impl_->pass->exchanges(impl_->axis).problem(); }

void TensorParallel::count_exchanges(bool counts) { impl_->pass->exchanges(impl_->axis).count(counts); }
std::vector<ExchangeRow> TensorParallel::exchanges() const {
  return impl_->pass->exchanges(impl_->axis).counted("tensor");
}

SentTensor TensorParallel::sent(const at::Tensor& tensor) {
  return impl_->policy.shards_tokens() ? trireme::sent(*impl_->pass, tensor) : SentTensor{gather(tensor)};
}

at::Tensor TensorParallel::taken(const at::Tensor& tensor, const std::string& cut) {
  return trireme::taken(*impl_->pass, tensor, cut);
}

void TensorParallel::check_loss(const at::Tensor& loss) {
  impl_->pass->forget_entered();
  if (is_part(loss))
    throw StateError("backward: the loss is a slice of a tensor; take the sum() or mean() of all of it");
  if (!loss.defined() || loss.numel() != 1 || (impl_->has_compared_loss && !loss.device().is_cpu())) return;
  const WithoutInterception own_operators;
  Group& group = impl_->group();
  const at::Tensor own = loss.detach().to(at::kDouble).cpu().view({1}), all = at::empty({group.size()}, at::kDouble);
  group.all_gather(all, own).wait();
  const double first = all[0].item<double>();
  for (int rank = 1; rank < group.size(); ++rank) {
    const double other = all[rank].item<double>();
    if (std::isfinite(first) != std::isfinite(other) || std::abs(first - other) > kOfLoss * std::abs(first))
      throw StateError(str("backward: the loss is ", first, " on rank 0 and ", other, " on rank ", rank, " of group '",
                           group.name(),
                           "', on the axis \"tensor\", whose ranks share layers and so have one loss; "
                           "give them the same batches and random numbers, and compute by libtorch's operators"));
  }
  impl_->has_compared_loss = std::isfinite(first);
}

}  // namespace trireme
