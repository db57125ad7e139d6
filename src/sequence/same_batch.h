// Ranks that share a sequence get the same batch.
#pragma once

#include "trireme/comm/group.h"
#include "trireme/sequence/sequence_parallel.h"

namespace trireme::sequence {

/// Whether all ranks of the group cut the same batch: a small gather.
///
/// Throws    StateError on every rank: sizes or ids differ.
void check_same_batch(Group& group, const SequenceInputs& whole);

}  // namespace trireme::sequence
