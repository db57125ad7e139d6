#include "training/operator_passes.h"

namespace trireme {

OperatorPasses::OperatorPasses(const Config& config, const Pager& pager, Group* sequence_group) {
  const auto is_own = [&pager](const at::Tensor& tensor) {
    const auto place = find_managed(tensor);
    return place && place->pager == &pager;
  };
  if (config.recompute.mode == RecomputeMode::kSelective)
    recompute = std::make_unique<SelectiveRecompute>(config.recompute.selective, is_own);
  if (config.tiled.is_on()) tiled = std::make_unique<TiledComputation>(config.tiled, is_own);
  if (sequence_group != nullptr)
    sequence = std::make_unique<SequenceParallel>(*sequence_group, config.sequence_attention);
}

}  // namespace trireme
