// Stages of parts of sequences train as one process that has whole sequences.
#include "tests/parity/pipeline_sequence.h"

namespace trireme::pipeline_sequence {
namespace {

TEST(PipelineSequence, TrainsAsOneProcessAtEveryZeroStage) {
  for (const SequenceAttention attention : {SequenceAttention::kUlysses, SequenceAttention::kRing})
    for (int zero = 0; zero <= 3; ++zero) {
      SCOPED_TRACE(str("ZeRO ", zero, attention == SequenceAttention::kRing ? ", ring" : ", Ulysses"));
      Recipe recipe = recipe_of_blocks();
      recipe.attention = attention;
      recipe.configure = [zero](Config& config) { config.pager.stage = zero; };
      expect_parity(recipe);
    }
}

}  // namespace
}  // namespace trireme::pipeline_sequence
