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
      .law = GradientLaw::kParts,
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
          {kTensor,
           "axes \"sequence\" of {} and \"tensor\" of {} ranks: layers in slices do not take parts of sequences yet; "
           "make one of the two 1"},
          {.other = kDevice,
           .text = kRingRefusal,
           .option = kRingAttention,
           .at = EngineCall::kForward,
           .code = ErrorCode::kState},
      }};
  return axis;
}

}  // namespace trireme
