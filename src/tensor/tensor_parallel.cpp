#include "trireme/tensor/tensor_parallel.h"

#include <utility>

#include "tensor/exchanges.h"
#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"

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

void TensorParallel::check_loss(const at::Tensor& loss) {
  impl_->forget_entered();
  if (is_part(loss))
    throw StateError("backward: the loss is a slice of a tensor; take the sum() or mean() of all of it");
}

}  // namespace trireme
