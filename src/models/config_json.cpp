// Hugging Face's config.json, strictly: a key that could change the computation is applied or refused, never passed
// over.
#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <type_traits>

#include "models/options_check.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"
#include "trireme/base/suggest.h"
#include "trireme/models/language_model.h"

namespace trireme {
namespace {

/// Keys that say nothing about the computation of a training step.
const std::vector<std::string> kInformational = {"_name_or_path",
                                                 "architectures",
                                                 "bos_token_id",
                                                 "chunk_size_feed_forward",
                                                 "dtype",
                                                 "eos_token_id",
                                                 "id2label",
                                                 "is_decoder",
                                                 "label2id",
                                                 "model_type",
                                                 "n_ctx",
                                                 "output_attentions",
                                                 "pad_token_id",
                                                 "output_hidden_states",
                                                 "return_dict",
                                                 "summary_activation",
                                                 "summary_type",
                                                 "summary_first_dropout",
                                                 "summary_proj_to_labels",
                                                 "summary_use_proj",
                                                 "torch_dtype",
                                                 "task_specific_params",
                                                 "transformers_version",
                                                 "unk_token_id",
                                                 "use_cache",
                                                 "_attn_implementation"};

/// Reads one object key by key, and in the end refuses what nobody asked for.
class ConfigReader {
 public:
  ConfigReader(const Json& json, std::string origin) : json_(json), origin_(std::move(origin)) {}

  template <class Value>
  void read(const char* key, Value& value) {
    const Json* found = find(key);
    if (!found) return;
    const bool fits = std::is_same_v<Value, bool>      ? found->is_boolean()
                      : std::is_same_v<Value, int64_t> ? found->is_number_integer()
                      : std::is_same_v<Value, double>  ? found->is_number()
                                                       : found->is_string();
    if (!fits) refuse(key, trireme::str("expected ", type_name<Value>()));
    value = found->get<Value>();
  }

  /// The feature exists only with this one value; leaving it out means the same.
  template <class Value>
  void require(const char* key, const Value& only) {
    const Json* found = find(key);
    if (found && *found != Json(only)) refuse(key, trireme::str("only ", Json(only).dump(), " is supported"));
  }

  void require_absent(const char* key) {
    if (find(key)) refuse(key, "not supported; remove it or set it to null");
  }

  /// Present and not null.
  const Json* find(const char* key) {
    known_.emplace_back(key);
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  void finish() {
    known_.insert(known_.end(), kInformational.begin(), kInformational.end());
    for (const auto& [key, value] : json_.items()) {
      if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
      throw ConfigError(trireme::str(origin_, ": unknown key `", key, "`=", value.dump(),
                                     "; remove it if the model does not depend on it.", did_you_mean(key, known_)));
    }
  }

  [[noreturn]] void refuse(const char* key, const std::string& reason) const {
    throw ConfigError(trireme::str(origin_, ": ", key, "=", json_.at(key).dump(), ": ", reason),
                      reason.find("supported") != std::string::npos ? ErrorCode::kUnsupported : ErrorCode::kConfig);
  }

  const std::string& origin() const { return origin_; }

 private:
  template <class Value>
  static const char* type_name() {
    if (std::is_same_v<Value, bool>) return "true or false";
    if (std::is_same_v<Value, int64_t>) return "an integer";
    return std::is_same_v<Value, double> ? "a number" : "a string";
  }

  const Json& json_;
  const std::string origin_;
  std::vector<std::string> known_;
};

/// transformers 4 writes rope_theta and rope_scaling, transformers 5 one object rope_parameters.
void read_rope(ConfigReader& reader, LlamaOptions& o) {
  reader.read("rope_theta", o.rope_theta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const Json* found = reader.find(key);
    if (!found) continue;
    if (!found->is_object()) reader.refuse(key, "expected an object");
    ConfigReader inner(*found, reader.origin() + ": " + key);
    inner.require("rope_type", "default");
    inner.require("type", "default");
    inner.read("rope_theta", o.rope_theta);
    inner.finish();
  }
}

LlamaOptions read_llama(ConfigReader& reader) {
  LlamaOptions o;
  reader.read("vocab_size", o.vocab_size);
  reader.read("hidden_size", o.hidden_size);
  reader.read("intermediate_size", o.intermediate_size);
  reader.read("num_hidden_layers", o.num_hidden_layers);
  reader.read("num_attention_heads", o.num_attention_heads);
  o.num_key_value_heads = o.num_attention_heads;
  reader.read("num_key_value_heads", o.num_key_value_heads);
  reader.read("head_dim", o.head_dim);
  reader.read("max_position_embeddings", o.max_position_embeddings);
  reader.read("rms_norm_eps", o.rms_norm_eps);
  reader.read("initializer_range", o.initializer_range);
  reader.read("tie_word_embeddings", o.tie_word_embeddings);
  read_rope(reader, o);
  reader.require("hidden_act", "silu");
  reader.require("attention_bias", false);
  reader.require("mlp_bias", false);
  reader.require("attention_dropout", 0.0);
  reader.require("pretraining_tp", 1);
  return o;
}

GptOptions read_gpt(ConfigReader& reader) {
  GptOptions o;
  reader.read("vocab_size", o.vocab_size);
  reader.read("n_embd", o.n_embd);
  reader.read("n_layer", o.n_layer);
  reader.read("n_head", o.n_head);
  reader.read("n_inner", o.n_inner);
  reader.read("n_positions", o.n_positions);
  reader.read("layer_norm_epsilon", o.layer_norm_epsilon);
  reader.read("initializer_range", o.initializer_range);
  reader.require("activation_function", "gelu_new");
  reader.require("scale_attn_weights", true);
  reader.require("scale_attn_by_inverse_layer_idx", false);
  reader.require("reorder_and_upcast_attn", false);
  reader.require("add_cross_attention", false);
  reader.require("tie_word_embeddings", true);
  // Every published GPT-2 file has these at 0.1, so refusing them would refuse all.
  for (const char* key : {"attn_pdrop", "embd_pdrop", "resid_pdrop"}) {
    double probability = 0;
    reader.read(key, probability);
    if (probability == 0) continue;
    log(LogLevel::kWarning, trireme::str(reader.origin(), ": ", key, "=", probability,
                                         " is not applied: this model has no dropout; set it to 0"));
  }
  return o;
}

struct BuiltIn {
  const char* name;
  ModelOptions options;
};

const std::vector<BuiltIn>& built_ins() {
  static const std::vector<BuiltIn> kModels = {
      {"llama-3m", LlamaOptions{.vocab_size = 256,
                                .hidden_size = 256,
                                .intermediate_size = 512,
                                .num_hidden_layers = 4,
                                .num_attention_heads = 4,
                                .num_key_value_heads = 4,
                                .tie_word_embeddings = true}},
      {"llama-10m", LlamaOptions{.vocab_size = 256,
                                 .hidden_size = 384,
                                 .intermediate_size = 1024,
                                 .num_hidden_layers = 6,
                                 .num_attention_heads = 6,
                                 .num_key_value_heads = 6,
                                 .tie_word_embeddings = true}},
      {"llama-130m", LlamaOptions{}},
      // Llama 3.2 1B and 3.1 8B, without the rope scaling that stretches their 8192 positions to 131,072.
      {"llama-1b", LlamaOptions{.vocab_size = 128256,
                                .hidden_size = 2048,
                                .intermediate_size = 8192,
                                .num_hidden_layers = 16,
                                .num_attention_heads = 32,
                                .num_key_value_heads = 8,
                                .max_position_embeddings = 8192,
                                .rms_norm_eps = 1e-5,
                                .rope_theta = 500000,
                                .tie_word_embeddings = true}},
      {"llama-8b", LlamaOptions{.vocab_size = 128256,
                                .hidden_size = 4096,
                                .intermediate_size = 14336,
                                .num_hidden_layers = 32,
                                .num_attention_heads = 32,
                                .num_key_value_heads = 8,
                                .max_position_embeddings = 8192,
                                .rms_norm_eps = 1e-5,
                                .rope_theta = 500000}},
      {"gpt2", GptOptions{}},
  };
  return kModels;
}

ModelOptions read_model(const Json& json, const std::string& origin) {
  if (!json.is_object()) throw ConfigError(origin + ": expected an object in the form of Hugging Face's config.json");
  ConfigReader reader(json, origin);
  std::string type;
  reader.read("model_type", type);
  ModelOptions options;
  if (type == "llama") {
    options = read_llama(reader);
  } else if (type == "gpt2") {
    options = read_gpt(reader);
  } else {
    throw ConfigError(trireme::str(origin, ": model_type=\"", type, "\": only \"llama\" and \"gpt2\" are supported"),
                      ErrorCode::kUnsupported);
  }
  reader.finish();
  try {
    std::visit([](const auto& o) { check_options(o); }, options);
  } catch (const ConfigError& error) {
    throw ConfigError(origin + ": " + error.what());
  }
  return options;
}

Json to_json(const LlamaOptions& o) {
  return {{"model_type", "llama"},
          {"architectures", {"LlamaForCausalLM"}},
          {"vocab_size", o.vocab_size},
          {"hidden_size", o.hidden_size},
          {"intermediate_size", o.intermediate_size},
          {"num_hidden_layers", o.num_hidden_layers},
          {"num_attention_heads", o.num_attention_heads},
          {"num_key_value_heads", o.num_key_value_heads},
          {"head_dim", head_dim(o)},
          {"max_position_embeddings", o.max_position_embeddings},
          {"rms_norm_eps", o.rms_norm_eps},
          {"rope_theta", o.rope_theta},
          {"initializer_range", o.initializer_range},
          {"tie_word_embeddings", o.tie_word_embeddings},
          {"hidden_act", "silu"}};
}

Json to_json(const GptOptions& o) {
  return {{"model_type", "gpt2"},
          {"architectures", {"GPT2LMHeadModel"}},
          {"vocab_size", o.vocab_size},
          {"n_embd", o.n_embd},
          {"n_layer", o.n_layer},
          {"n_head", o.n_head},
          {"n_inner", inner_size(o)},
          {"n_positions", o.n_positions},
          {"layer_norm_epsilon", o.layer_norm_epsilon},
          {"initializer_range", o.initializer_range},
          {"activation_function", "gelu_new"},
          {"attn_pdrop", 0.0},
          {"embd_pdrop", 0.0},
          {"resid_pdrop", 0.0}};
}

/// Decided by the first bytes, because files of weights are large.
bool is_binary(const std::string& path) {
  std::array<char, 16> begin{};
  const size_t bytes = std::min(posix_file_system().size(path), begin.size());
  posix_file_system().open(path)->read(0, begin.data(), bytes);
  return std::string_view(begin.data(), bytes).find('\0') != std::string_view::npos;
}

}  // namespace

const std::vector<std::string>& model_names() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (const auto& model : built_ins()) names.emplace_back(model.name);
    return names;
  }();
  return kNames;
}

ModelOptions model_options_from_json(const std::string& text, const std::string& origin) {
  return read_model(parse_json(text, origin), origin);
}

ModelOptions model_options(const std::string& name_or_path) {
  for (const auto& model : built_ins()) {
    if (name_or_path == model.name) return model.options;
  }
  std::error_code ignored;
  const bool is_file = std::filesystem::exists(name_or_path, ignored);
  if (std::filesystem::is_directory(name_or_path, ignored)) {
    const auto inside = std::filesystem::path(name_or_path) / "config.json";
    if (std::filesystem::exists(inside, ignored)) return model_options(inside.string());
    throw ConfigError(trireme::str(
        "model `", name_or_path, "` is a folder without a config.json; give the path of one, or of a folder with one"));
  }
  if (is_file && is_binary(name_or_path))
    throw ConfigError(trireme::str("model `", name_or_path,
                                   "` is a binary file, such as one of weights; give a built-in model or the path of a "
                                   "config.json, and safetensors as first weights: `trireme train --init-from ",
                                   name_or_path, "`"));
  if (is_file || name_or_path.ends_with(".json")) return read_model(read_json(name_or_path), name_or_path);
  std::string known;
  for (const auto& name : model_names()) known += (known.empty() ? "" : ", ") + name;
  throw ConfigError(trireme::str("model `", name_or_path, "` is neither a built-in (", known,
                                 ") nor a file; give one of those or the path of a config.json.",
                                 did_you_mean(name_or_path, model_names())));
}

std::string config_json(const ModelOptions& options) {
  return std::visit([](const auto& o) { return to_json(o); }, options).dump(2) + "\n";
}

}  // namespace trireme
