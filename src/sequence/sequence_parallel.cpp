#include "trireme/sequence/sequence_parallel.h"

#include "sequence/token_pass.h"

namespace trireme {

ShardRange sequence_range(int64_t tokens, int size, int rank) {
  return {.begin = tokens * rank / size, .end = tokens * (rank + 1) / size};
}

class SequenceParallel::Impl final : public sequence::TokenPass {
 public:
  using TokenPass::TokenPass;
};

SequenceParallel::SequenceParallel(Group& group, SequenceAttention attention)
    : impl_(std::make_unique<Impl>(group, attention)) {}

SequenceParallel::~SequenceParallel() = default;

at::Tensor SequenceParallel::cut(const at::Tensor& whole, int64_t dim) { return impl_->cut(whole, dim); }

SequenceInputs SequenceParallel::cut(const SequenceInputs& whole) {
  SequenceInputs result{.dim = whole.dim};
  const auto part = [&](const at::Tensor& tensor) { return tensor.defined() ? impl_->cut(tensor, whole.dim) : tensor; };
  impl_->check_same_batch(whole);
  result.input_ids = part(whole.input_ids);
  result.labels = part(whole.labels);
  result.position_ids = part(whole.position_ids);
  result.attention_mask = part(whole.attention_mask);
  return result;
}

bool SequenceParallel::is_part(const at::Tensor& tensor) {
  const auto sharding = impl_->find(tensor);
  return sharding && sharding->is_sharded();
}

at::Tensor SequenceParallel::whole_of(const at::Tensor& part) {
  const auto sharding = impl_->find(part);
  return sharding ? sharding->whole : at::Tensor();
}

std::optional<std::vector<int64_t>> SequenceParallel::whole_sizes(const at::Tensor& tensor) {
  return impl_->whole_sizes(tensor);
}
void SequenceParallel::speak_of_wholes() { impl_->speak_of_wholes(); }
bool SequenceParallel::has_cut() const { return impl_->has_cut(); }

}  // namespace trireme
