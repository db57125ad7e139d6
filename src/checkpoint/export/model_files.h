// Files that Hugging Face's from_pretrained() reads beside weights: config.json, and those of tokenizer and generation.
#pragma once

#include <c10/core/ScalarType.h>

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "trireme/checkpoint/source.h"

namespace trireme {

inline constexpr const char* kModelConfigName = "config.json";

struct ModelFile {
  std::string name;
  std::string text;
};

struct ModelFilesRequest {
  std::filesystem::path model_folder;   ///< that has a config.json; empty: see model_files()
  std::optional<at::ScalarType> dtype;  ///< of the weights; nullopt: of several, or as saved
};

/// The files of the model that `source` is of: config.json as `request.model_folder` has it, otherwise the one beside
/// the checkpoint (beside `latest`, or beside safetensors), in the folder that the checkpoint names, or as the
/// checkpoint tells it (those of `trireme train`, and of models of transformers), with the weights' dtype; the other
/// files as they are in the folder. Empty: nothing tells which model it is. A file that says another model than the
/// checkpoint is warned of and left out.
///
/// Throws    ConfigError: no config.json in `request.model_folder`, or of another model than the checkpoint tells;
///           names the key and both values. IoError.
std::vector<ModelFile> model_files(const CheckpointSource& source, const ModelFilesRequest& request);

/// The first thing that two config.json say differently of a model, as "hidden_size is 64 there, 96 here"; empty: none.
/// A key that one of them lacks is no difference, and neither are dtypes, names, and positions that need no weights.
std::string model_difference(const std::string& there, const std::string& here);

}  // namespace trireme
