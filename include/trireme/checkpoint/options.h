// Options of checkpoints.
#pragma once

namespace trireme {

/// The answer to ranks that save under different tags: use rank 0's, silently or with a warning, or throw
/// CheckpointError.
enum class TagValidation { kIgnore, kWarn, kFail };

/// When a load compares checksums.
enum class Verify {
  kWhileReading,  ///< checksums are computed as the data streams in: no second pass, but a mismatch leaves the
                  ///< destination mixed
  kFirst,         ///< everything that will be read is checked before anything in memory changes: reads twice
};

/// The section `checkpoint` of a configuration.
struct CheckpointOptions {
  TagValidation tag_validation = TagValidation::kWarn;
  int keep_last = 0;        ///< complete checkpoints that stay in the directory; 0: all
  bool async_save = false;  ///< training continues while files are written; see AsyncSaver
  Verify verify = Verify::kWhileReading;
  bool operator==(const CheckpointOptions&) const = default;
};

}  // namespace trireme
