#include "checkpoint/export/model_files.h"

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/log.h"
#include "trireme/checkpoint/training_values.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

/// Names of files that the classes of transformers write beside config.json and weights.
bool goes_along(const std::string& name) {
  constexpr std::array<std::string_view, 12> kNames{"added_tokens.json",
                                                    "chat_template.jinja",
                                                    "chat_template.json",
                                                    "generation_config.json",
                                                    "merges.txt",
                                                    "preprocessor_config.json",
                                                    "processor_config.json",
                                                    "sentencepiece.bpe.model",
                                                    "special_tokens_map.json",
                                                    "spiece.model",
                                                    "vocab.json",
                                                    "vocab.txt"};
  return std::ranges::find(kNames, name) != kNames.end() ||
         (name.starts_with("tokenizer") && (name.ends_with(".json") || name.ends_with(".model")));
}

const char* name_of(at::ScalarType dtype) {
  return dtype == at::kFloat      ? "float32"
         : dtype == at::kBFloat16 ? "bfloat16"
         : dtype == at::kHalf     ? "float16"
         : dtype == at::kDouble   ? "float64"
                                  : nullptr;
}

/// transformers 5 calls it dtype, 4 torch_dtype, which 5 reads too.
void set_dtype(Json& config, std::optional<at::ScalarType> dtype) {
  const bool is_new = config.contains("dtype");
  config.erase("dtype");
  config.erase("torch_dtype");
  if (dtype && name_of(*dtype) != nullptr) config[is_new ? "dtype" : "torch_dtype"] = name_of(*dtype);
}

struct SavedModel {
  Json config;          ///< null: unknown
  Path folder;          ///< empty: unknown
  Path tokenizer = {};  ///< folder with the copy of a run's tokenizer; empty: none
};

SavedModel saved_model(const CheckpointSource& source) {
  const Json state = parse_own_json(training_values(source.manifest).client_state.value_or("{}"));
  SavedModel saved;
  const auto take = [&](const char* key) {
    if (state.contains(key) && state[key].is_object() && state[key].contains("model_type")) saved.config = state[key];
    return !saved.config.is_null();
  };
  // Python's engines keep all that transformers says. `trireme train` knows of no first and last token; left out, they
  // would be those of the family's own tokenizer.
  if (!take("trireme.model") && take("model"))
    for (const char* key : {"bos_token_id", "eos_token_id"}) saved.config[key] = nullptr;
  if (const Json tokenizer = state.value("tokenizer", Json()); tokenizer.is_object()) {
    if (saved.config.is_object()) saved.config["eos_token_id"] = tokenizer.value("document_end", Json());
    const Path copy = std::filesystem::absolute(source.folder).parent_path().parent_path() / "tokenizer";
    if (posix_file_system().exists(copy)) saved.tokenizer = copy;
  }
  if (const Json folder = state.value("model_folder", Json()); folder.is_string())
    saved.folder = folder.get<std::string>();
  return saved;
}

/// The folder whose config.json stands beside a checkpoint's weights: the Trainer of transformers writes it beside
/// `latest`, everybody else beside safetensors. Empty: none that tells a model, such as one of another program's.
Path folder_beside(const CheckpointSource& source) {
  const Path folder = source.layout == CheckpointLayout::kSafetensors ? source.folder : source.folder.parent_path();
  const Path path = folder / kModelConfigName;
  if (!posix_file_system().exists(path)) return {};
  try {
    const Json config = read_json(path);
    if (config.is_object() && config.contains("model_type")) return folder;
    log(LogLevel::kWarning, str(path.string(), ": it has no model_type, so it is not written beside the weights"));
  } catch (const Error& error) {
    log(LogLevel::kWarning, str("no config.json is written beside the weights: ", error.what()));
  }
  return {};
}

}  // namespace

std::string model_difference(const std::string& there, const std::string& here) {
  const Json a = parse_json(there, kModelConfigName), b = parse_json(here, kModelConfigName);
  for (const auto& [key, value] : b.items()) {
    const bool says_nothing = key == "dtype" || key == "torch_dtype" || key == "architectures" ||
                              key == "transformers_version" || key == "_name_or_path" ||
                              key == "max_position_embeddings";
    if (says_nothing || !a.contains(key) || a[key].is_null() || value.is_null() || a[key] == value) continue;
    return str(key, " is ", a[key].dump(), " there, ", value.dump(), " here");
  }
  return "";
}

std::vector<ModelFile> model_files(const CheckpointSource& source, const ModelFilesRequest& request) {
  FileSystem& files = posix_file_system();
  SavedModel saved = saved_model(source);
  Path folder = request.model_folder;
  if (folder.empty()) folder = folder_beside(source);
  if (folder.empty() && !saved.folder.empty() && files.exists(saved.folder / kModelConfigName)) folder = saved.folder;
  Json config = saved.config;
  if (!folder.empty()) {
    if (!files.exists(folder / kModelConfigName))
      throw ConfigError(
          str("--model ", folder.string(), ": there is no config.json in it; give a folder in Hugging Face's form"));
    config = read_json(folder / kModelConfigName);
    const std::string difference = saved.config.is_null() ? "" : model_difference(config.dump(), saved.config.dump());
    // A run may have needed more positions than the folder's model has.
    if (saved.config.contains("max_position_embeddings"))
      config["max_position_embeddings"] = saved.config["max_position_embeddings"];
    for (const char* key : {"bos_token_id", "eos_token_id"})
      if (saved.config.contains(key) && !config.contains(key)) config[key] = saved.config[key];
    if (!difference.empty() && request.model_folder.empty()) {  // the folder is of another model by now
      log(LogLevel::kWarning,
          str((folder / kModelConfigName).string(), ": it is of another model than the checkpoint ",
              source.folder.string(), ": ", difference, " (the checkpoint); the checkpoint's is written"));
      config = saved.config;
      folder.clear();
    } else if (!difference.empty()) {
      throw ConfigError(str("--model ", folder.string(), ": the checkpoint ", source.folder.string(),
                            " is of another model: ", difference,
                            " (the checkpoint); leave --model out, or give the folder of its model"));
    }
  }
  if (config.is_null()) return {};
  set_dtype(config, request.dtype);
  std::vector<ModelFile> found = {{kModelConfigName, config.dump(2) + "\n"}};
  std::vector<std::string> names = folder.empty() ? std::vector<std::string>{} : files.list(folder);
  // The tokens that the model was trained on are those of the run's own tokenizer.
  const bool has_own = !saved.tokenizer.empty() && request.model_folder.empty();
  if (has_own) names = files.list(saved.tokenizer);
  std::ranges::sort(names);
  for (const std::string& name : names)
    if (goes_along(name)) found.push_back({name, files.read((has_own ? saved.tokenizer : folder) / name)});
  return found;
}

}  // namespace trireme
