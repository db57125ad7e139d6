// Layers that the program has cut itself, as Megatron's do: ranks take the same samples and have slices that no rule
// here knows.
#include "trireme/parallel/axis.h"

namespace trireme {

const AxisPart& model_axis() {
  using enum Feature;
  static const AxisPart axis = {
      .name = "model",
      .shares_samples = true,
      .shares_layers = true,
      .shards_states = false,
      .law = SharedGradient::kWhole,
      .together = "have the program's slices",
      .degree = &Degrees::model,
      .member = "degrees.model",
      .described = "the program's slices on {} ranks",
      .mismatch = "degrees.model={}, and the grid has {} ranks on the axis \"model\"; make the two the same",
      .feature = kProgramSlices,
      .exclusions = {
          {kTensor,
           "axes \"model\" of {} and \"tensor\" of {} ranks: layers that the program has cut are not cut again; make "
           "one of the two 1"},
          {kSequence,
           "axes \"model\" of {} and \"sequence\" of {} ranks: layers that the program has cut do not take parts of "
           "sequences yet; make one of the two 1"},
          {.other = kMatrixOptimizer,
           .text = "optimizer {} looks at whole parameters, and the program has cut them over {} ranks; use another "
                   "optimizer, such as AdamW",
           .at = EngineCall::kInitialize},
          {.other = kInit,
           .text = "parameter '{}' is sharded by zero::Init, and the program has cut its layers over the axis "
                   "\"model\"; make the model outside of it",
           .at = EngineCall::kInitialize},
      }};
  return axis;
}

}  // namespace trireme
