// The contents of a checkpoint, and whether every byte of it is the one that was saved.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/checkpoint/source.h"

namespace trireme {

/// A part of a checkpoint that is not what was saved.
struct DamagedPlace {
  std::string file;    ///< in the checkpoint's folder
  std::string tensor;  ///< empty: the file itself, or its header
  int64_t begin = 0;   ///< elements [begin, end) of `tensor`
  int64_t end = 0;
  std::string problem;
};

/// Options of inspect_checkpoint().
struct InspectOptions {
  bool verify = true;  ///< false: only what the manifest and the files' sizes tell
  int threads = 0;     ///< 0: one per core
};

/// Tensors of one kind and dtype.
struct TensorKind {
  std::string name;  ///< "weights" (buffers included), "masters", "optimizer exp_avg", …, "other"
  std::string dtype;
  int64_t tensors = 0;
  int64_t elements = 0;
  int64_t bytes = 0;
};

/// The result of inspect_checkpoint().
struct CheckpointReport {
  CheckpointSource source;            ///< without tensors where the manifest cannot be read
  std::vector<std::string> tags;      ///< of the folder that it is in, oldest first; empty for layouts that have none
  std::optional<std::string> latest;  ///< the tag that `latest` names
  std::vector<TensorKind> kinds;      ///< in the order in which they are saved
  int64_t file_bytes = 0;             ///< of all files, as they should be

  bool verified = false;              ///< contents too, not only sizes
  int64_t checksums = 0;              ///< that were compared
  int64_t verified_bytes = 0;         ///< that they cover
  double seconds = 0;                 ///< that it took
  std::vector<DamagedPlace> damages;  ///< by file and offset
  bool healthy() const { return damages.empty(); }
};

/// Looks at the checkpoint that open_checkpoint(path, tag) opens, and finds every place that is missing, truncated or
/// damaged. If the manifest itself is damaged, it is the only place reported.
///
/// Cost      reads every byte once (`verify`), in blocks of 1 MiB per thread; otherwise the manifest.
/// Throws    CheckpointError: there is no checkpoint; IoError.
CheckpointReport inspect_checkpoint(const std::filesystem::path& path, const std::string& tag = {},
                                    const InspectOptions& options = {});

enum class ListTensors { kLargest, kAll };

/// For people, several lines.
std::string to_text(const CheckpointReport& report, ListTensors list = ListTensors::kLargest);
/// For programs: docs/checkpoint.md tells the keys.
Json to_json(const CheckpointReport& report, ListTensors list = ListTensors::kLargest);

}  // namespace trireme
