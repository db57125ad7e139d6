// The layouts that sequence_parity_test.cpp leaves out.
#include "tests/parity/sequence_parity.h"

namespace trireme::sequence_parity {
namespace {

INSTANTIATE_TEST_SUITE_P(MoreLayouts, SequenceParity,
                         ::testing::Values(Layout{"Ulysses4", 1, 4, "ulysses"}, Layout{"Ring2", 1, 2, "ring"},
                                           Layout{"Ring4", 1, 4, "ring"}, Layout{"Data2Ulysses2", 2, 2, "ulysses"}),
                         name_of_layout);

TEST_P(SequenceParity, TrainsAsOneRankWithRecomputation) { expect_parity_with_recomputation(); }
TEST_P(SequenceParity, TrainsAsOneRankIn16Bits) { expect_parity_in_16_bits(); }

}  // namespace
}  // namespace trireme::sequence_parity
