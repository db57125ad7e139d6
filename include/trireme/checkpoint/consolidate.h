// The weights of a checkpoint of any layout and any number of ranks as files that other programs read.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "trireme/checkpoint/source.h"

namespace trireme {

class FileSystem;

/// The fate of weights that are in the folder already.
enum class ExistingOutput {
  kRefuse,   ///< CheckpointError
  kReplace,  ///< the former files stay until all new ones are complete; those that the new ones do not replace go too
};

/// Options of consolidate().
struct ConsolidateOptions {
  /// The dtype of floating-point tensors; nullopt: as saved. fp32 comes from the masters where there are any.
  std::optional<at::ScalarType> dtype = at::kFloat;
  /// The largest size of a file: weights that need more become several files with an index. Tensors are not split.
  int64_t max_shard_bytes = 5'000'000'000;
  bool exclude_frozen_parameters = false;
  /// .safetensors, or .bin, .pt, .pth for torch.load(). Of several files: NAME-00001-of-00003.safetensors, and
  /// NAME.safetensors.index.json, as Hugging Face names them.
  std::string file_name = "model.safetensors";
  /// config.json and the files of tokenizer and generation go beside model.safetensors or pytorch_model.bin of whole
  /// models, so that from_pretrained() opens the folder. False: weights alone.
  bool model_files = true;
  /// The folder in Hugging Face's form that these files come from. Empty: the folder beside the checkpoint if there is
  /// a config.json (the Trainer of transformers writes it beside `latest`), otherwise config.json alone, from the
  /// checkpoint, if it records the model (`trireme train` and Python's engines with a model of transformers do).
  std::filesystem::path model_folder = {};
  ExistingOutput existing = ExistingOutput::kRefuse;
  FileSystem* files = nullptr;                                                 ///< of the output; nullptr: POSIX files
  std::function<void(int64_t done_bytes, int64_t total_bytes)> progress = {};  ///< several times per second of work
};

/// The result of consolidate().
struct ConsolidatedWeights {
  std::vector<std::filesystem::path> files;  ///< weights, their index, config.json and what goes along
  int64_t tensors = 0;
  int64_t bytes = 0;  ///< of tensors
};

/// Writes the weights and buffers of `source` into `folder`, which is made where there is none, under the model's own
/// names. A tied parameter is written once; safetensors files list its other names in their metadata.
///
/// Ordering  a file appears under its name when all are complete and on disk; after an error none does.
/// Cost      reads each tensor once, in pieces of 4 MiB: memory for the source's manifest and a few pieces, in .bin
///           files for the largest tensor as well.
/// Throws    before anything is written: ConfigError (a file name without a known extension or with a slash, a dtype
///           that is no floating-point one, a shard size below 1, a `model_folder` without config.json, of another
///           model, or beside weights that are not a whole model's), CheckpointError (no weights, a file that exists
///           and kRefuse: config.json only if it is of another model, frozen parameters that nothing tells apart).
///           While reading as TensorReader::read; CheckpointError: a value beyond fp16's range. IoError.
ConsolidatedWeights consolidate(const CheckpointSource& source, const std::filesystem::path& folder,
                                const ConsolidateOptions& options = {});

/// The weights that consolidate() writes, whole and in fp32, by the model's own names; other names of a tied parameter
/// have the same tensor. Local. Throws as consolidate() before anything is written, and while reading.
std::map<std::string, at::Tensor> fp32_state_dict(const CheckpointSource& source,
                                                  bool exclude_frozen_parameters = false);

/// A size such as "5GB", "500 MB", "2GiB" or "1000" in bytes; kB, MB, GB and TB are powers of 1000.
/// Throws    ConfigError.
int64_t parse_bytes(const std::string& text);

}  // namespace trireme
