// A checkpoint opened for reading, whoever wrote it: where the bytes of every tensor stand, under this library's names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "trireme/checkpoint/manifest.h"

namespace trireme {

enum class CheckpointLayout { kTrireme, kDeepSpeed, kTorchDistributed, kSafetensors };

/// As messages and `trireme inspect` say it: "Trireme", "DeepSpeed", "PyTorch DCP", "safetensors".
const char* layout_name(CheckpointLayout layout);

/// Tensors are named as an engine saves them: "model.NAME" (weights and buffers), "master.NAME" (fp32 master of a
/// 16-bit weight), "optimizer.STATE.NAME" ("optimizer.exp_avg.NAME", …).
struct CheckpointSource {
  CheckpointLayout layout = CheckpointLayout::kTrireme;
  std::filesystem::path folder;  ///< that holds the files; names in the manifest are relative to it
  std::string tag;               ///< empty for layouts that have none
  /// Slices of other layouts have no checksums here, and their files no `header_bytes`: checksums of the file format
  /// itself (zip's, for example) are compared when the file is opened. `values` holds what an engine needs to continue.
  Manifest manifest;
  /// Tensors of the manifest that no file holds, so without slices: elements of the tensor it is mapped to, rounded to
  /// the dtype (to nearest, ties to even). DeepSpeed's ZeRO stage 3 keeps no 16-bit weights, only their masters.
  std::map<size_t, size_t> rounded_from = {};
};

/// Opens `path`: a checkpoint's folder, a folder of checkpoints (then `tag`, or the one that its `latest` names), or a
/// .safetensors file, recognised by what is in it. Where `latest` names a checkpoint and model.safetensors stands
/// beside it, as the Trainer of transformers writes them, the checkpoint is opened, with a warning that says so. Reads
/// headers and metadata, no tensor.
///
/// Throws    CheckpointError: no checkpoint of any known layout (says what was looked for), or a damaged one: file,
///           expected, found. IoError.
CheckpointSource open_checkpoint(const std::filesystem::path& path, const std::string& tag = {});

/// Reads parts of tensors of a source, verified where there are checksums. Not for several threads at once.
class TensorReader {
 public:
  explicit TensorReader(const CheckpointSource& source);  ///< `source` outlives the reader
  ~TensorReader();
  TensorReader(const TensorReader&) = delete;
  TensorReader& operator=(const TensorReader&) = delete;

  /// Elements [begin, begin + numel) of the row-major flattening of `manifest.tensors[tensor]` into `destination`.
  /// Throws    CheckpointError naming file, tensor and elements: missing, truncated, damaged. IoError.
  void read(size_t tensor, int64_t begin, int64_t numel, std::byte* destination);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
