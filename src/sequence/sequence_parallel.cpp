#include "trireme/sequence/sequence_parallel.h"

#include <utility>

#include "sequence/stages.h"
#include "sequence/token_pass.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme {

ShardRange sequence_range(int64_t tokens, int size, int rank) {
  return {.begin = tokens * rank / size, .end = tokens * (rank + 1) / size};
}

class SequenceParallel::Impl final : public sequence::TokenPass {
 public:
  Impl(Group& group, SequenceAttention attention) : TokenPass(group, attention), group_(group) {}
  Group& group() const { return group_; }

  void check_loss(const at::Tensor& loss) {
    if (const auto sharding = find(loss); sharding && sharding->is_sharded())
      throw StateError(
          "backward: the loss is of this rank's tokens alone; take the sum() or mean() of all tokens' losses");
    if (!has_cut() && !std::exchange(told_uncut_, true) && group_.world_rank(group_.rank()) == 0)
      log(LogLevel::kWarning,
          str("sequence_parallel_size=", group_.size(),
              ", and the program has cut no batch: each rank trains on all tokens of its own batch, which saves "
              "nothing, and the ranks' gradients are averaged; pass batches through engine.cut()"));
  }

 private:
  Group& group_;
  bool told_uncut_ = false;
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
void SequenceParallel::check_loss(const at::Tensor& loss) { impl_->check_loss(loss); }
SentTensor SequenceParallel::sent(const at::Tensor& tensor) { return sequence::sent(tensor, impl_->find(tensor)); }
at::Tensor SequenceParallel::taken(const at::Tensor& tensor, const std::string& cut) {
  const sequence::TakenTensor taken = sequence::taken(tensor, cut, impl_->group());
  impl_->mark(taken.part, taken.sharding);
  return taken.part;
}
at::Tensor SequenceParallel::whole(const at::Tensor& tensor) {
  return sequence::whole(tensor, impl_->find(tensor), impl_->group());
}

}  // namespace trireme
