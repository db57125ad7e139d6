#include "trireme/config/config.h"

#include <algorithm>
#include <sstream>

#include "config/dialects/accelerate.h"
#include "config/document/yaml.h"
#include "config/options.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/log.h"
#include "trireme/config/dialects/accelerate.h"
#include "trireme/config/source.h"
#include "trireme/parallel/plan.h"

namespace trireme {
namespace {

constexpr const char* kTrainBatch = "train_batch_size";
constexpr const char* kMicroBatch = "train_micro_batch_size_per_gpu";

Document open(const ConfigSource& source) {
  Document file(source.options, source.origin, source.names, source.places);
  file.without_meaning = source.without_meaning;
  file.hints = source.hints;
  if (source.micro_batch && !file.has(kTrainBatch) && !file.has(kMicroBatch))
    file.replace(kMicroBatch, *source.micro_batch);
  return file;
}

/// Reads `file` into a Config; what is wrong with it is file.mistakes() then.
Config read(Document& file, int world_size, const Degrees& degrees) {
  TRIREME_CHECK(world_size >= 1, "world_size is ", world_size, ".");
  Config config;
  config.degrees = degrees;
  std::vector<KnownKey> known;
  add_keys(options(), known);
  bring_up_to_date(file);
  read_rows(options(), file, config);
  resolve(file, config, world_size);
  read_optimizer(file, config, known);
  read_scheduler(file, config, known);
  refuse_unknown_keys(known, file);
  return config;
}

void report(const Document& file) {
  for (const std::string& warning : file.warnings) log(LogLevel::kWarning, warning);
  for (const std::string& hint : file.hints) log(LogLevel::kInfo, str(file.origin(), ": ", hint));
  if (file.without_meaning.empty()) return;
  std::string keys;
  for (const std::string& key : file.without_meaning) keys += (keys.empty() ? "`" : ", `") + key + "`";
  log(LogLevel::kInfo,
      str(file.origin(), ": ignored, because Trireme does not need them (`trireme docs config` says why): ", keys));
}

/// Throws all of them, a line each, so that a file is mended in one go. Nothing where there are none.
void refuse(std::vector<ConfigMistake> mistakes, const std::string& origin) {
  if (mistakes.empty()) return;
  constexpr size_t kMostShown = 11;
  const size_t hidden = mistakes.size() - std::min(mistakes.size(), kMostShown);
  mistakes.resize(mistakes.size() - hidden);
  std::string text = text_of(mistakes, origin);
  if (hidden > 0) text += str("\nand ", hidden, " more; `trireme config check` lists them");
  throw ConfigError(text, mistakes[0].code);
}

/// Those of the source and of `file`, which was opened from it and read, by line.
std::vector<ConfigMistake> all_mistakes(const ConfigSource& source, Document& file) {
  std::vector<ConfigMistake> mistakes = source.mistakes;
  for (const KeyError& error : file.mistakes()) mistakes.push_back(mistake_of(error, source.lines));
  std::stable_sort(mistakes.begin(), mistakes.end(), [](const ConfigMistake& a, const ConfigMistake& b) {
    return a.file.empty() != b.file.empty() ? a.file.empty() : a.line < b.line;
  });
  return mistakes;
}

// Keys of transformers' TrainingArguments that no configuration has.
constexpr const char* kTrainerKeys[] = {"output_dir",       "per_device_train_batch_size",
                                        "num_train_epochs", "per_device_eval_batch_size",
                                        "save_strategy",    "lr_scheduler_type"};

void refuse_trainers(const Json& json, const std::string& origin) {
  if (!json.is_object() || json.contains("zero_optimization") || json.contains("train_batch_size") ||
      json.contains("train_micro_batch_size_per_gpu"))
    return;
  for (const char* key : kTrainerKeys)
    if (json.contains(key))
      throw ConfigError(str(origin, ": `", key, "` is of transformers' TrainingArguments, which the program with the ",
                            "Trainer reads; a configuration is what their `deepspeed` names. Write one: ",
                            "train_micro_batch_size_per_gpu for per_device_train_batch_size, optimizer.params.lr for ",
                            "learning_rate, gradient_clipping for max_grad_norm, bf16.enabled for bf16, and a ",
                            "zero_optimization.stage"));
}

/// `text` with two blanks for each tab that a line begins with: YAML takes none there.
std::string without_tabs(const std::string& text, const std::string& origin, std::vector<ConfigMistake>& mistakes) {
  std::istringstream lines(text);
  std::string result;
  int number = 0;
  for (std::string line; std::getline(lines, line); result += "\n") {
    ++number;
    const size_t begin = std::min(line.find_first_not_of(" \t"), line.size());
    if (begin == line.size() || line[begin] == '#' || line.find('\t') >= begin) {
      result += line;
      continue;
    }
    constexpr size_t kMostNamed = 1000;
    if (mistakes.size() < kMostNamed)
      mistakes.push_back(
          {.message = str(origin, ": line ", number, " is indented by a tab; write blanks"), .line = number});
    for (size_t i = 0; i < begin; ++i) result += line[i] == '\t' ? "  " : " ";
    result += line.substr(begin);
  }
  return result;
}

ConfigSource source_of_yaml(const std::string& text, const std::string& origin) {
  YamlText yaml = parse_yaml(text, origin);
  return source_from_json(std::move(yaml.json), origin, std::move(yaml.lines));
}

}  // namespace

ConfigSource read_source(const std::filesystem::path& path) {
  std::string text;
  try {
    text = read_config_text(path);
  } catch (const IoError& error) {
    std::error_code gone;
    const std::filesystem::path folder = std::filesystem::current_path(gone);
    const std::string from = path.is_absolute() || gone ? "" : str(", from ", folder.string());
    throw IoError(str(error.what(), "; give the path of a configuration", from,
                      ": DeepSpeed's JSON, such as {\"train_micro_batch_size_per_gpu\": 1}, or Accelerate's YAML; "
                      "`trireme docs config` has the keys"));
  }
  return parse_source(text, path.string());
}

ConfigSource parse_source(std::string_view text, const std::string& origin) {
  if (!origin.ends_with(".yaml") && !origin.ends_with(".yml"))
    return source_from_json(parse_hjson(text, origin), origin, key_lines(text));
  try {
    return source_of_yaml(std::string(text), origin);
  } catch (const ConfigError&) {
    std::vector<ConfigMistake> tabs;
    const std::string blanks = without_tabs(std::string(text), origin, tabs);
    if (tabs.empty()) throw;
    try {  // for the other mistakes
      ConfigSource source = source_of_yaml(blanks, origin);
      source.mistakes.insert(source.mistakes.begin(), tabs.begin(), tabs.end());
      return source;
    } catch (const ConfigError&) {  // by how the tabs were read
      throw ConfigError(tabs[0].message, tabs[0].code);
    }
  }
}

ConfigSource source_from_json(Json json, const std::string& origin, std::map<std::string, int> lines) {
  refuse_trainers(json, origin);
  ConfigSource source{.options = std::move(json), .origin = origin, .lines = std::move(lines)};
  if (is_accelerates(source.options)) read_accelerate(source);
  return source;
}

void name_as_in_file(ConfigSource& source, const std::filesystem::path& path) {
  ConfigSource file = read_source(path);
  source.lines = std::move(file.lines);
  source.names = std::move(file.names);
  source.places = std::move(file.places);
}

Json options_of(const ConfigSource& source) {
  refuse(source.mistakes, source.origin);
  if (!source.micro_batch) return source.options;
  const Document file = open(source);
  report(file);
  return file.json();
}

Config config_from_source(const ConfigSource& source, int world_size, const Degrees& degrees) {
  Document file = open(source);
  Config config = read(file, world_size, degrees);
  refuse(all_mistakes(source, file), source.origin);
  report(file);
  return config;
}

std::vector<ConfigMistake> mistakes_in(const ConfigSource& source, int world_size, const Degrees& degrees) {
  Document file = open(source);
  read(file, world_size, degrees);
  return all_mistakes(source, file);
}

std::string text_of(const std::vector<ConfigMistake>& mistakes, const std::string& origin) {
  std::string text;
  const bool is_a_file = !origin.starts_with("<");  // or text of a program, such as <string>
  for (const ConfigMistake& mistake : mistakes) {
    const std::string opening = (mistake.file.empty() ? origin : mistake.file) + ": ";
    std::string line = mistake.message;
    const size_t place = line.find(opening);
    if (is_a_file && mistake.line > 0 && place != std::string::npos)
      line.insert(place + opening.size() - 2, str(":", mistake.line));
    text += (text.empty() ? "" : "\n") + line;
  }
  return text;
}

Config read_config(const std::filesystem::path& path, int world_size, const Degrees& degrees) {
  return config_from_source(read_source(path), world_size, degrees);
}

Config parse_config(std::string_view text, int world_size, const Degrees& degrees, const std::string& origin) {
  return config_from_source(parse_source(text, origin), world_size, degrees);
}

Config config_from_json(const Json& json, int world_size, const Degrees& degrees, const std::string& origin) {
  return config_from_source(source_from_json(json, origin), world_size, degrees);
}

Config default_config(int world_size, const Degrees& degrees) {
  return config_from_json(Json{{"train_micro_batch_size_per_gpu", 1}}, world_size, degrees, "<defaults>");
}

ParallelOptions parallel_options(const Config& config) {
  return {.degrees = config.degrees,
          .pager = config.pager,
          .states_over_replicas = config.states_over_replicas,
          .sequence_attention = config.sequence_attention,
          .shards_tokens = config.tensor.sequence_parallel,
          .recomputes_selectively = config.recompute.mode == RecomputeMode::kSelective,
          .computes_in_tiles = config.tiled.is_on()};
}

Json to_json(const Config& config) {
  Json json = Json::object();
  write_rows(options(), config, json);
  return json;
}

std::string to_text(const Config& config) { return to_json(config).dump(2) + "\n"; }

}  // namespace trireme
