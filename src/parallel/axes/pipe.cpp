// Stages of layers: one rank of each stage is a pipeline.
#include "trireme/pager/layout/refusals.h"
#include "trireme/parallel/axis.h"
#include "trireme/parallel/plan.h"

namespace trireme {

const AxisPart& pipe_axis() {
  using enum Feature;
  static const AxisPart axis = {
      .name = "pipe",
      .shares_samples = true,
      .shares_layers = false,
      .shards_states = false,
      .law = std::nullopt,
      .together = "are a pipeline",
      .degree = &Degrees::pipe,
      .member = "degrees.pipe",
      .described = "{} pipeline stages",
      .mismatch =
          "degrees.pipe={}, and this engine's ranks have {} on the axis \"pipe\"; train a PipelineModule, which "
          "cuts a model into stages, or leave it 1",
      .feature = kPipeline,
      .pass = [](const ParallelOptions& options) -> std::optional<PlannedPass> {
        if (!options.has_ownership) return std::nullopt;
        return PlannedPass{PassOrder::kOwnership, "ownership"};
      },
      .exclusions = {
          {.other = kSequence,
           .text = "axes \"pipe\" of {} and \"sequence\" of {} ranks: stages of a step function do not take parts of "
                   "sequences yet; make one of the two 1, or train a PipelineModule",
           .option = kOwnership},
          {.other = kShardedTokens,
           .text =
               "tensor_parallel.sequence_parallel: a stage hands on some tokens of each rank, of which a layer that "
               "reads sizes of its inputs sees its own alone; set InitializeOptions::takes_sizes_from_inputs where "
               "layers read none but those, remove the key, or make stages 1",
           .option = kAnySizes},
          {.other = kTensor,
           .text = "axes \"pipe\" of {} and \"tensor\" of {} ranks: stages of a step function take the sizes of whole "
                   "layers; set InitializeOptions::takes_sizes_from_inputs where the model reads none of its "
                   "parameters', make one of the two 1, or train a PipelineModule",
           .option = kOwnershipOfAnySizes},
          {.other = kProgramSlices,
           .text =
               "axes \"pipe\" of {} and \"model\" of {} ranks: stages of a step function do not own layers that the "
               "program has cut yet; make one of the two 1, or train a PipelineModule",
           .option = kOwnership},
          {.other = kPipeline,
           .text = "{} is a PipelineModule, which is cut into stages already; give the step function the model that it "
                   "was made of",
           .option = kOwnership,
           .at = EngineCall::kInitialize},
          {.other = kRecomputeLayers, .text = kNoLayers, .at = EngineCall::kInitialize, .code = ErrorCode::kConfig},
          {.other = kLeafModules, .text = kNoLeafModule, .at = EngineCall::kInitialize, .code = ErrorCode::kConfig},
          {.other = kNoSync, .text = kNoScope, .at = EngineCall::kForward, .code = ErrorCode::kState},
          {.other = kCoalesced, .text = kNoScope, .at = EngineCall::kForward, .code = ErrorCode::kState},
      }};
  return axis;
}

}  // namespace trireme
