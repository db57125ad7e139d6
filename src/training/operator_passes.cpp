#include "trireme/training/operator_passes.h"

namespace trireme {

OperatorPasses::OperatorPasses(const Config& config, const Pager& pager, const TrainingGroups& groups) {
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
}

}  // namespace trireme
