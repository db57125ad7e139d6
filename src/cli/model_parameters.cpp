#include "cli/model_parameters.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "cli/flags.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/formats/safetensors.h"

namespace trireme::cli {
namespace {

constexpr const char* kHead = "lm_head.weight";

bool is_embedding(const std::string& name) {
  for (const char* layer : {"embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight"})
    if (name.ends_with(layer)) return true;
  return false;
}

bool makes_logits(const Json& config) {
  const auto names = config.find("architectures");
  if (names == config.end() || !names->is_array()) return false;
  for (const Json& name : *names)
    for (const char* part : {"CausalLM", "LMHead", "ForMaskedLM", "ForConditionalGeneration"})
      if (name.is_string() && name.get<std::string>().find(part) != std::string::npos) return true;
  return false;
}

/// A tied head is in no file.
void tie_head(std::vector<NamedShape>& parameters) {
  for (const NamedShape& parameter : parameters)
    for (const char* head : {"lm_head.", "embed_out.", "output_layer."})
      if (parameter.name.find(head) != std::string::npos) return;
  for (NamedShape& parameter : parameters)
    if (is_embedding(parameter.name)) {
      parameter.tied.emplace_back(kHead);
      return;
    }
}

ModelToPartition of_folder(const std::filesystem::path& folder) {
  const Json config = read_json(folder / "config.json");
  ModelToPartition result{.model = partition_model_from(config)};
  result.model.is_ordered = false;
  for (const auto& [name, tensor] : read_safetensors(folder))
    result.model.parameters.push_back({.name = name, .shape = tensor.sizes().vec()});
  const auto ties = config.find("tie_word_embeddings");
  if (ties != config.end() && ties->is_boolean() ? ties->get<bool>() : makes_logits(config))
    tie_head(result.model.parameters);
  if (const auto plan = config.find("base_model_tp_plan"); plan != config.end() && plan->is_object())
    for (const auto& [key, style] : plan->items())
      if (style.is_string()) result.tp_plan.emplace_back(key, style.get<std::string>());
  return result;
}

}  // namespace

std::vector<ParameterSpec> parameters_of(const ModelOptions& model, at::ScalarType dtype) {
  std::vector<ParameterSpec> specs;
  std::map<std::string, std::vector<ParameterSpec>> of_types;
  bool has_tied = false;
  for (const ModelLayer& layer : language_model_layers(model, /*seq=*/1)) {
    if (layer.is_tied && std::exchange(has_tied, true)) continue;
    const auto [type, is_new] = of_types.try_emplace(layer.type);
    if (is_new)
      for (const auto& item : layer.make()->named_parameters())
        type->second.push_back({.name = item.key(), .shape = item.value().sizes().vec(), .dtype = dtype});
    for (ParameterSpec spec : type->second) {
      spec.name = str(layer.name, ".", spec.name);
      specs.push_back(std::move(spec));
    }
  }
  return specs;
}

ModelToPartition model_to_partition(const std::string& name_or_path) {
  const std::filesystem::path folder(name_or_path);
  if (std::filesystem::is_directory(folder))
    return read_input([&] {
      try {
        return of_folder(folder);
      } catch (const CheckpointError& error) {
        throw ConfigError(error.what());
      }
    });
  return model_to_partition(read_input([&] { return model_options(name_or_path); }), name_or_path);
}

ModelToPartition model_to_partition(const ModelOptions& options, const std::string& name) {
  ModelToPartition result{.model = partition_model_from(parse_json(config_json(options), name))};
  for (const ParameterSpec& spec : parameters_of(options, at::kFloat))
    result.model.parameters.push_back({.name = spec.name, .shape = spec.shape});
  tie_head(result.model.parameters);
  return result;
}

}  // namespace trireme::cli
