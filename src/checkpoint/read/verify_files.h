// Every file of a checkpoint compared with what its manifest says of it.
#pragma once

#include <vector>

#include "trireme/checkpoint/inspect.h"

namespace trireme {

struct VerifiedFiles {
  int64_t checksums = 0;  ///< that were compared
  int64_t bytes = 0;      ///< that they cover
  std::vector<DamagedPlace> damages;
};

/// Presence and sizes of all files; with `options.verify` also the contents, where the manifest has checksums.
/// Never throws for what is on disk: a file that cannot be read is a damaged place.
VerifiedFiles verify_files(const CheckpointSource& source, const InspectOptions& options);

}  // namespace trireme
