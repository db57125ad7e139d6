// Helpers that the tests of checkpoint share: a temporary folder, states with known contents, and files that fail on
// demand (tests/base/faults.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <filesystem>
#include <string>

#include "tests/base/faults.h"
#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/state_tree.h"
#include "trireme/comm/group.h"

namespace trireme::checkpoint_test {

using Folder = testing::TemporaryFolder;
using testing::FaultyFiles;
using testing::named_error_of;

std::string text_of(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);

/// Rank `rank` of `size`'s part of a state whose tensors hold `seed` + index: sharded evenly ("weight", "mask", and
/// "big" of several checksum blocks), the same on all ranks ("bias", "step"), empty ("nothing"), on the last rank only
/// ("owned").
StateTree state_of(int rank, int size, int seed);
/// The same slices, filled with zeros.
StateTree empty_state_of(int rank, int size);
/// True when every slice of `state` has the contents of `state_of(..., seed)`.
bool has_seed(const StateTree& state, int rank, int size, int seed);

}  // namespace trireme::checkpoint_test
