#include "trireme/tensor/tensor_parallel.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <utility>

#include "tensor/exchanges.h"
#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme {

class TensorParallel::Impl final : public tensor::TensorPass {
 public:
  explicit Impl(Group& group) : TensorPass(group), group_(group) {}
  Group& group() const { return group_; }

 private:
  Group& group_;
};

TensorParallel::TensorParallel(Group& group) : impl_(std::make_unique<Impl>(group)) {}
TensorParallel::~TensorParallel() = default;

void TensorParallel::add(const at::Tensor& parameter, const std::vector<TensorPart>& parts, bool gathers_output) {
  Group& group = impl_->group();
  const TensorPart& own = parts.at(static_cast<size_t>(group.rank()));
  if (own.dim < 0) return;
  if (parameter.sizes() != at::IntArrayRef(local_shape(own)))
    throw ShapeError(str("add: ", parameter.sizes(), " is not ", part_text(own), " of ", shape_text(own.shape)));
  auto slices = std::make_shared<tensor::RankSlices>();
  slices->whole = own.shape[static_cast<size_t>(own.dim)];
  for (const TensorPart& part : parts) slices->of_rank.push_back(part.intervals);
  impl_->add(parameter, {.cut = {.dim = own.dim, .slices = std::move(slices)}, .gathers_output = gathers_output});
}

void TensorParallel::speak_of_wholes() { impl_->speak_of_wholes(); }

bool TensorParallel::is_part(const at::Tensor& tensor) {
  const auto known = impl_->find(tensor);
  return known && !known->is_copy;
}

std::optional<std::vector<int64_t>> TensorParallel::whole_sizes(const at::Tensor& tensor) {
  return impl_->whole_sizes(tensor);
}

at::Tensor TensorParallel::gather(const at::Tensor& tensor) {
  const auto known = impl_->find(tensor);
  if (!known || known->is_copy || known->is_unknown) return tensor;
  return tensor::gathered(tensor, known->cut, impl_->group());
}

std::optional<size_t> TensorParallel::first_difference(const std::vector<int64_t>& values) {
  const WithoutInterception own_operators;
  Group& group = impl_->group();
  const auto count = static_cast<int64_t>(values.size());
  const at::Tensor counts = at::empty({group.size()}, at::kLong);
  group.all_gather(counts, at::tensor({count}, at::kLong)).wait();
  const int64_t fewest = counts.min().item<int64_t>();
  if (fewest > 0) {
    const at::Tensor own = at::tensor(values, at::kLong).narrow(0, 0, fewest);
    const at::Tensor all = at::empty({group.size(), fewest}, at::kLong);
    group.all_gather(all.flatten(), own.contiguous()).wait();
    const at::Tensor differs = all.ne(all[0]).any(0);
    for (int64_t i = 0; i < fewest; ++i)
      if (differs[i].item<bool>()) return static_cast<size_t>(i);
  }
  if (counts.max().item<int64_t>() != fewest) return static_cast<size_t>(fewest);
  return {};
}

void TensorParallel::check_loss(const at::Tensor& loss) {
  impl_->forget_entered();
  if (is_part(loss))
    throw StateError("backward: the loss is a slice of a tensor; take the sum() or mean() of all of it");
}

}  // namespace trireme
