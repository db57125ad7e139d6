#include "training/sequence_tensor_passes.h"

#include <memory>
#include <utility>

#include "training/tensor_slices.h"
#include "trireme/activations/axis_pass.h"
#include "trireme/parallel/axis.h"
#include "trireme/sequence/sequence_parallel.h"
#include "trireme/tensor/tensor_parallel.h"

namespace trireme {

std::vector<CuttingPass> passes_on_whole_layers(const TrainingGroups& groups, const Config& config) {
  std::vector<CuttingPass> passes;
  if (Group* const sequence = groups.along(sequence_axis().name))
    passes.emplace_back().axes.push_back(std::make_unique<SequenceParallel>(*sequence, config.sequence_attention));
  return passes;
}

std::vector<CuttingPass> passes_on_slices(const TrainingGroups& groups, const Config& config,
                                          const TrainingOptions& options, const PartitionPlan& plan,
                                          const std::vector<NamedParameter>& parameters) {
  std::vector<CuttingPass> passes(1);
  std::unique_ptr<TensorParallel> slices;
  if (Group* const sequence = groups.along(sequence_axis().name)) {
    constexpr int kOuter = 0, kInner = 1;
    std::vector<PassAxis> axes;
    axes.push_back(SequenceParallel::axis(*sequence, config.sequence_attention, kOuter));
    axes.push_back(TensorParallel::axis(*groups.slices, kInner));
    const auto pass = std::make_shared<AxisPass>(PassOrder::kSequence, std::move(axes));
    passes[0].axes.push_back(std::make_unique<SequenceParallel>(pass, kOuter));
    slices = std::make_unique<TensorParallel>(pass, kInner);
  } else {
    slices = std::make_unique<TensorParallel>(*groups.slices);
  }
  if (options.takes_sizes_from_inputs) slices->give_parts();
  add_slices(*slices, plan, config.tensor, parameters);
  passes[0].axes.push_back(std::move(slices));
  return passes;
}

}  // namespace trireme
