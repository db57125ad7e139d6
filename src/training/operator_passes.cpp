#include "trireme/training/operator_passes.h"

#include <utility>

namespace trireme {

OperatorPasses::OperatorPasses(const Config& config, const Pager& pager, const TrainingGroups& groups,
                               std::unique_ptr<TensorParallel> slices)
    : tensor(std::move(slices)) {
  const auto is_own = [&pager](const at::Tensor& tensor) {
    const auto place = find_managed(tensor);
    return place && place->pager == &pager;
  };
  if (config.recompute.mode == RecomputeMode::kSelective)
    recompute = std::make_unique<SelectiveRecompute>(config.recompute.selective, is_own);
  if (config.tiled.is_on()) tiled = std::make_unique<TiledComputation>(config.tiled, is_own);
  if (groups.sequence != nullptr)
    sequence = std::make_unique<SequenceParallel>(*groups.sequence, config.sequence_attention);
}

void OperatorPasses::check_loss(const at::Tensor& loss) const {
  if (sequence) sequence->check_loss(loss);
  if (tensor) tensor->check_loss(loss);
}

void OperatorPasses::speak_of_wholes() const {
  if (sequence) sequence->speak_of_wholes();
  if (tensor) tensor->speak_of_wholes();
}

bool OperatorPasses::is_part(const at::Tensor& tensor) const {
  return (sequence && sequence->is_part(tensor)) || (this->tensor && this->tensor->is_part(tensor));
}

at::Tensor OperatorPasses::whole(const at::Tensor& tensor) const {
  return this->tensor && tensor.defined() ? this->tensor->gather(tensor) : tensor;
}

std::optional<std::vector<int64_t>> OperatorPasses::whole_sizes(const at::Tensor& tensor) const {
  if (sequence)
    if (auto sizes = sequence->whole_sizes(tensor)) return sizes;
  return this->tensor ? this->tensor->whole_sizes(tensor) : std::nullopt;
}

}  // namespace trireme
