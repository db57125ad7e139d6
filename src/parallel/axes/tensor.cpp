// Slices of layers: ranks take the same samples and have a slice of each matrix.
#include "trireme/parallel/axis.h"

namespace trireme {

const AxisPart& tensor_axis() {
  using enum Feature;
  static const AxisPart axis = {
      .name = "tensor",
      .shares_samples = true,
      .shares_layers = true,
      .shards_states = false,
      .law = SharedGradient::kWhole,
      .together = "share layers",
      .degree = &Degrees::tensor,
      .member = "degrees.tensor",
      .described = "layers cut over {} ranks",
      .mismatch =
          "tensor_parallel.autotp_size={}, and the grid has {} ranks on the axis \"tensor\"; make the two the same",
      .feature = kTensor,
      .pass = [](const ParallelOptions&) -> std::optional<PlannedPass> {
        return PlannedPass{PassOrder::kTensor, "tensor"};
      },
      .exclusions = {
          {.other = kSequence,
           .text =
               "tensor_parallel.sequence_parallel: on {} ranks along \"tensor\" and {} along \"sequence\" tokens would "
               "be cut twice, which is not there yet; remove the key, or make one of the two 1",
           .option = kShardedTokens},
          {.other = kMatrixOptimizer,
           .text =
               "optimizer {} looks at whole parameters, and with tensor_parallel (autotp_size={}) a rank has slices; "
               "use another optimizer, such as AdamW",
           .at = EngineCall::kInitialize},
      }};
  return axis;
}

}  // namespace trireme
