// Parts of a sequence: ranks take the same samples and have some tokens of each.
#include "trireme/parallel/axis.h"
#include "trireme/parallel/plan.h"
#include "trireme/sequence/refusals.h"

namespace trireme {

const AxisPart& sequence_axis() {
  using enum Feature;
  static const AxisPart axis = {
      .name = "sequence",
      .shares_samples = true,
      .shares_layers = true,
      .shards_states = true,
      .law = SharedGradient::kParts,
      .together = "share samples",
      .degree = &Degrees::sequence,
      .member = "degrees.sequence",
      .described = "sequences cut over {} ranks",
      .mismatch =
          "sequence_parallel_size={}, and the grid has {} ranks on the axis \"sequence\"; make the two the same",
      .feature = kSequence,
      .pass = [](const ParallelOptions& options) -> std::optional<PlannedPass> {
        const bool is_ring = options.sequence_attention == SequenceAttention::kRing;
        return PlannedPass{PassOrder::kSequence, is_ring ? "sequence, ring" : "sequence, Ulysses"};
      },
      .exclusions = {
          {.other = kTensor,
           .text =
               "axes \"sequence\" of {} and \"tensor\" of {} ranks: the program may compute with the sizes of a slice "
               "of a parameter, beside activations that say the whole's; where it reads sizes of its inputs alone, "
               "set InitializeOptions::takes_sizes_from_inputs, or make one of the two 1",
           .option = kAnySizes},
          {.other = kDevice,
           .text = kRingRefusal,
           .option = kRingAttention,
           .at = EngineCall::kForward,
           .code = ErrorCode::kState},
      }};
  return axis;
}

}  // namespace trireme
