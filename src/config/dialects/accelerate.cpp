#include "config/dialects/accelerate.h"

#include <algorithm>
#include <filesystem>
#include <sstream>

#include "config/document/keys.h"
#include "config/document/option.h"
#include "config/document/yaml.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/suggest.h"
#include "trireme/base/utf8.h"
#include "trireme/config/dialects/accelerate.h"

namespace trireme {
namespace {

/// The keys here that a file of Accelerate stands for, as they are gathered, or from which one is written.
struct Draft {
  Json options = Json::object();
  std::map<std::string, std::string> names = {};   ///< key here -> key of the file
  std::map<std::string, ConfigPlace> places = {};  ///< keys here that stand in `deepspeed_config_file`
  int replicas = 1;                                ///< of the resolved options
};

using DraftRow = Option<Draft>;
using Names = std::vector<std::string>;

/// A row with its place in the table of dialects.
struct Mapping {
  DraftRow row;
  std::string topic = {};  ///< of the line in the table; keys of the same topic share it
  std::string here = {};   ///< the keys here, as the table shows them
};

/// Beside a DeepSpeed file Accelerate fills in what that leaves open; two values for one key are a mistake.
void set(Document& file, Draft& draft, const std::string& key, const std::string& path, const Json& value) {
  const Json* there = value_at(draft.options, path);
  if (there && *there != "auto" && *there != value)
    file.refuse(key, str("`", file.path_of(key), "` and `",
                         draft.names.contains(path) ? draft.names[path] : path + "` of `deepspeed_config_file",
                         "` say different things; keep one of the two"));
  for (size_t dot = path.find('.'); dot != std::string::npos; dot = path.find('.', dot + 1))
    if (const Json* section = value_at(draft.options, path.substr(0, dot)); section && !section->is_object())
      return;  // a section of `deepspeed_config_file` that is none, which is refused there
  put(draft.options, path, value);
  draft.names[path] = file.path_of(key);
  draft.places.erase(path);
}

bool is_same(const Json& one, const Json& other) {
  return one.is_string() && other.is_string() ? lower_case(one) == lower_case(other) : one == other;
}

/// `key` stands for the key `path` here. With `pairs` by its values; without, they are the same.
Mapping maps(const std::string& key, const std::string& path, const std::vector<ValuePair>& pairs) {
  std::string words;
  for (const auto& [theirs, here] : pairs) words += (words.empty() ? "" : ", ") + theirs.dump();
  DraftRow row{.path = key, .type = words.empty() ? "as in Accelerate" : "one of " + words, .standard = "–", .doc = {}};
  row.read = [=](Document& file, Draft& draft) {
    const Json* value = file.find(key);
    if (!value) return;
    if (pairs.empty()) return set(file, draft, key, path, *value);
    const auto pair =
        std::find_if(pairs.begin(), pairs.end(), [&](const auto& one) { return is_same(one.first, *value); });
    if (pair == pairs.end()) {
      std::vector<std::string> choices;
      for (const auto& [theirs, here] : pairs)
        choices.push_back(theirs.is_string() ? theirs.get<std::string>() : theirs.dump());
      const std::string hint = value->is_string() ? did_you_mean(value->get<std::string>(), choices) : "";
      file.fail(key, str("one of ", words, hint.empty() ? "" : "." + hint));
    }
    if (!pair->second.is_null()) set(file, draft, key, path, pair->second);
  };
  row.write = [=](const Draft& draft) -> std::optional<Json> {
    const Json* value = value_at(draft.options, path);
    if (!value || pairs.empty()) return value ? std::optional(*value) : std::nullopt;
    const auto pair = std::find_if(pairs.begin(), pairs.end(), [&](const auto& one) { return one.second == *value; });
    return pair == pairs.end() ? std::nullopt : std::optional(pair->first);
  };
  return {.row = std::move(row), .here = path.empty() ? "" : str("`", path, "`")};
}

/// Its values are checked as those of `type`, though they change nothing.
template <class T>
Mapping checked_by(Mapping mapping, ValueType<T> type) {
  mapping.row.type = type.words;
  mapping.row.read = [type, key = mapping.row.path, read = mapping.row.read](Document& file, Draft& draft) {
    if (file.has(key)) (void)type.read(file, key);
    read(file, draft);
  };
  return mapping;
}

/// Or texts, or a number, as Accelerate takes the numbers of GPUs.
ValueType<Json> number_or_text() {
  return {.words = "a number, or a string", .read = [](const Document& file, const std::string& path) {
            const Json& value = *file.find(path);
            if (!value.is_number_integer() && !value.is_string()) file.fail(path, "a number, or a string");
            return value;
          }};
}

/// YAML's yes and no, which Accelerate's own files have in quotes too.
ValueType<bool> flag_or_word() {
  return {.words = "true or false", .read = [](const Document& file, const std::string& path) {
            const Json& value = *file.find(path);
            if (!value.is_string()) return file.flag_or(path, false);
            return file.choice_or(path, "no", {"no", "yes"}) == "yes";
          }};
}

/// Names of attention that Accelerate's sequence parallelism takes; here the model has its own.
ValueType<std::string> attention() {
  const std::string words =
      "\"sdpa\", \"flash_attention_2\", \"flash_attention_3\", or a kernel such as "
      "\"kernels-community/flash-attn2\"";
  return {.words = words, .read = [words](const Document& file, const std::string& path) {
            const std::string text = file.text_or(path, "");
            const bool is_kernel = text.find('/') != std::string::npos && text.find("flash-attn") != std::string::npos;
            if (!is_kernel && text != "sdpa" && text != "flash_attention_2" && text != "flash_attention_3")
              file.fail(path, words);
            return text;
          }};
}

/// One of these names.
ValueType<std::string> name_among(const std::vector<std::string>& names) {
  std::vector<std::pair<std::string, std::string>> pairs;
  for (const std::string& name : names) pairs.emplace_back(name, name);
  return choice<std::string>(pairs);
}

Names names_of_dtypes() {
  Names names;
  for (const auto& [theirs, here] : value_pairs(Json::array({"dtypes"}))) names.push_back(theirs);
  return names;
}

/// `values` of a group in keys.json: names, or what kind of value.
Mapping checked_by(Mapping mapping, const Json& values) {
  if (values.is_array()) return checked_by(std::move(mapping), name_among(values));
  if (values == "positive") return checked_by(std::move(mapping), integer(kPositive));
  if (values == "count") return checked_by(std::move(mapping), integer(kCount));
  if (values == "flag") return checked_by(std::move(mapping), flag());
  if (values == "texts") return checked_by(std::move(mapping), text_or_texts());
  if (values == "number or text") return checked_by(std::move(mapping), number_or_text());
  if (values == "attention") return checked_by(std::move(mapping), attention());
  if (values == "flag or word") return checked_by(std::move(mapping), flag_or_word());
  if (values == "dtypes") return checked_by(std::move(mapping), name_among(names_of_dtypes()));
  return mapping;
}

/// These of its values are not there yet.
Mapping but_not(Mapping mapping, const Json& values, const std::string& fix) {
  DraftRow& row = mapping.row;
  row.read = [values, fix, key = row.path, read = row.read](Document& file, Draft& draft) {
    const Json* value = file.find(key);
    const auto is_it = [&](const Json& one) { return is_same(one, *value); };
    if (value && std::any_of(values.begin(), values.end(), is_it)) file.not_there_yet(key, fix);
    read(file, draft);
  };
  return mapping;
}

/// A name of a dtype: the 16-bit ones switch a mode on.
Mapping mode(const std::string& key, const Names& names, const char* doc) {
  Mapping mapping{.row = {.path = key, .type = "a dtype", .standard = "–", .doc = doc},
                  .here = "`bf16.enabled`, `fp16.enabled`"};
  mapping.row.read = [key, names](Document& file, Draft& draft) {
    if (file.has(key) && *file.find(key) == false) return;  // YAML's plain `no`
    const std::string name = file.choice_or(key, names[0], names);
    if (name == "fp8") file.not_there_yet(key, R"(set it to "bf16", "fp16" or "no")");
    if (name.find("16") == std::string::npos) return;
    set(file, draft, key, name.find('b') == std::string::npos ? "fp16.enabled" : "bf16.enabled", true);
  };
  mapping.row.write = [](const Draft& draft) -> std::optional<Json> {
    for (const char* kind : {"bf16", "fp16"})
      if (draft.options.at(kind).at("enabled") == true) return Json(kind);
    return Json("no");
  };
  return mapping;
}

constexpr const char* kStagePath = "zero_optimization.stage";
constexpr const char* kOffloadOptimizer = "zero_optimization.offload_optimizer.device";
constexpr const char* kOffloadParam = "zero_optimization.offload_param.device";
constexpr const char* kFsdpOffload = "fsdp_config.fsdp_offload_params";

/// FSDP offloads parameters, gradients and states, or nothing. Read by settle(), which knows the stage.
Mapping fsdp_offload() {
  Mapping mapping{.row = {.path = kFsdpOffload,
                          .type = "true or false",
                          .standard = "`false`",
                          .doc = "FSDP offloads all or nothing; parameters stay on the host at stage 3 alone"},
                  .here = str("`", kOffloadParam, "`, `", kOffloadOptimizer, "`")};
  mapping.row.read = [](Document& file, Draft&) { (void)file.flag_or(kFsdpOffload, false); };
  mapping.row.write = [](const Draft& draft) -> std::optional<Json> {
    const Json& zero = draft.options.at("zero_optimization");
    const auto is_on_host = [&](const char* section) { return zero.at(section).at("device") == "cpu"; };
    return Json(is_on_host("offload_optimizer") && zero.at("offload_optimizer").at("ratio") == 1.0 &&
                (zero.at("stage") != 3 || is_on_host("offload_param")));
  };
  return mapping;
}

/// "A,B" for a list.
Mapping moe_classes() {
  const std::string key = "deepspeed_config.deepspeed_moe_layer_cls_names";
  const std::string path = "zero_optimization.leaf_module.classes";
  Mapping mapping = maps(key, path, {});
  mapping.row.doc = "names between commas; gathered whole at stage 3";
  mapping.row.write = nullptr;
  mapping.row.read = [=](Document& file, Draft& draft) {
    if (!file.has(key)) return;
    Json classes = Json::array();
    std::istringstream names(file.text_or(key, ""));
    for (std::string name; std::getline(names >> std::ws, name, ',');) classes.push_back(name);
    set(file, draft, key, path, classes);
  };
  return mapping;
}

constexpr const char* kReshard = "fsdp_config.fsdp_reshard_after_forward";
constexpr const char* kStrategy = "fsdp_config.fsdp_sharding_strategy";
constexpr const char* kReplicate = "parallelism_config.parallelism_config_dp_replicate_size";
constexpr const char* kShard = "parallelism_config.parallelism_config_dp_shard_size";
constexpr const char* kMics = "zero_optimization.mics_shard_size";

/// Whether this value of a strategy shards within a machine and replicates over machines.
bool is_hybrid(const Json& strategy) {
  for (const char* name : {"HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "4", "5"})
    if (is_same(Json(name), strategy)) return true;
  return strategy == 4 || strategy == 5;
}

/// Written together, where there are several replicas. Read by settle_replicas().
Mapping shards_of_replicas(const std::string& key, const char* doc) {
  Mapping mapping{.row = {.path = key, .type = kPositive.words, .standard = "`1`", .doc = doc},
                  .here = str("`", kMics, "`")};
  mapping.row.read = [key](Document& file, Draft&) {
    (void)file.integer_or(key, 1, key == kShard ? kShardSize : kPositive);
  };
  mapping.row.write = [key](const Draft& draft) -> std::optional<Json> {
    if (draft.replicas == 1) return std::nullopt;
    return key == kReplicate ? Json(draft.replicas) : *value_at(draft.options, kMics);
  };
  return mapping;
}

/// The rows of Fate::kCode.
Mapping row_by_code(const std::string& path) {
  const Mapping file{
      .row = {.path = "deepspeed_config.deepspeed_config_file",
              .type = "a path",
              .standard = "–",
              .doc = "its keys, with those of the file of Accelerate where it says `\"auto\"` or nothing",
              .read = [](Document&, Draft&) {}}};
  Mapping dtype = mode("fsdp_config.fsdp_mixed_precision_policy.param_dtype", names_of_dtypes(),
                       "of a plugin or a `MixedPrecisionPolicy`");
  dtype.row.write = nullptr;  // `mixed_precision` says the same
  const Mapping rows[] = {
      mode("mixed_precision", {"no", "bf16", "fp16", "fp8"}, "weights in 16 bit, masters and states in fp32"),
      shards_of_replicas(kReplicate, "so many copies, each over the same number of ranks"),
      shards_of_replicas(kShard, "ranks of a copy; every rank where there is one copy"),
      fsdp_offload(),
      dtype,
      file,
      moe_classes()};
  return *std::find_if(std::begin(rows), std::end(rows), [&](const Mapping& one) { return one.row.path == path; });
}

/// The row of a key of the group; where another key says the same, it is never written.
Mapping mapping_of(const KeyGroup& group, const std::string& key) {
  const std::string path = group.path_of(key);
  if (group.fate == KeyGroup::Fate::kCode) return row_by_code(path);
  if (group.fate != KeyGroup::Fate::kMaps) return checked_by({.row = row_of<Draft>(group, key)}, group.values);
  const Json& here = group.keys.at(key);
  Mapping mapping = maps(path, here.is_null() ? "" : here.get<std::string>(), group.pairs);
  mapping.row.doc = group.doc;
  if (!group.is_written) mapping.row.write = nullptr;
  return mapping;
}

/// The keys under `place` in keys.json.
void add_rows(std::vector<Mapping>& rows, const std::string& place) {
  for (const KeyGroup& group : key_groups(place))
    for (const auto& item : group.keys.items()) {
      Mapping mapping = mapping_of(group, item.key());
      if (!group.not_yet.empty()) mapping = but_not(std::move(mapping), group.not_yet, group.fix);
      mapping.topic = group.topic;
      rows.push_back(std::move(mapping));
    }
}

void add_other_sections(std::vector<Mapping>& rows) {
  for (const char* section : {"dynamo_config", "fp8_config", "megatron_lm_config"}) {
    Mapping mapping{.row = refused<Draft>(section, {}, "refused unless it is empty"), .topic = "other sections"};
    mapping.row.is_open = true;
    mapping.row.read = [section](Document& file, Draft&) {
      const Json* json = file.find(section);
      if (json && !json->empty() && json->value("dynamo_backend", "") != "NO") file.not_there_yet(section, "remove it");
    };
    rows.push_back(std::move(mapping));
  }
}

const std::vector<Mapping>& mappings() {
  static const std::vector<Mapping> rows = [] {
    std::vector<Mapping> all;
    add_rows(all, "accelerate");
    add_other_sections(all);
    add_rows(all, "accelerate, fsdp_config");
    add_rows(all, "accelerate, deepspeed_config");
    return all;
  }();
  return rows;
}

const std::vector<DraftRow>& rows() {
  static const std::vector<DraftRow> all = [] {
    std::vector<DraftRow> them;
    for (const Mapping& mapping : mappings()) them.push_back(mapping.row);
    return them;
  }();
  return all;
}

// --- plugins -------------------------------------------------------------------------------------------------------

/// A FullyShardedDataParallelPlugin calls some of FSDP's keys otherwise than a file.
std::string plugin_name(const std::string& key) {
  static const std::map<std::string, std::string> names = {
      {"offload_params", "cpu_offload"},
      {"version", "fsdp_version"},
      {"transformer_layer_cls_to_wrap", "transformer_cls_names_to_wrap"}};
  const auto found = names.find(key);
  return found == names.end() ? key : found->second;
}

/// The keys of a file's `fsdp_config`, without "fsdp_", by the names of a plugin.
const std::map<std::string, std::string>& plugin_keys() {
  static const std::map<std::string, std::string> keys = [] {
    const std::string prefix = "fsdp_config.fsdp_";
    std::map<std::string, std::string> found;
    for (const DraftRow& row : rows()) {
      if (!row.path.starts_with(prefix)) continue;
      const std::string key = row.path.substr(prefix.size(), row.path.find('.', prefix.size()) - prefix.size());
      found.emplace(plugin_name(key), key);
    }
    return found;
  }();
  return keys;
}

bool is_plugin(const Json& json) {
  const auto& keys = plugin_keys();
  // DeepSpeed has a section of this name.
  return std::any_of(keys.begin(), keys.end(), [&](const auto& key) {
    return key.first != "activation_checkpointing" && json.contains(key.first);
  });
}

/// As a file of Accelerate would say it, whose keys errors call by the plugin's names.
Document as_file(const Json& plugin, const std::string& origin) {
  Json section = Json::object();
  std::map<std::string, std::string> names;
  for (const auto& item : plugin.items()) {
    const auto found = plugin_keys().find(item.key());
    const std::string key = "fsdp_" + (found == plugin_keys().end() ? item.key() : found->second);
    names["fsdp_config." + key] = item.key();
    section[key] = item.value();
  }
  return Document({{"distributed_type", "FSDP"}, {"fsdp_config", section}}, origin, names);
}

// --- reading -------------------------------------------------------------------------------------------------------

/// A text is the dtype of everything, as in a file's `mixed_precision`.
void take_policy_as_text(Document& file) {
  const std::string key = "fsdp_config.fsdp_mixed_precision_policy";
  const Json* policy = file.find(key);
  if (!policy || !policy->is_string()) return;
  file.call(key + ".param_dtype", key);
  file.replace(key, {{"param_dtype", *policy}});
}

/// A path from where the program runs, as Accelerate takes it, or from the folder of the file that names it.
void read_deepspeed_file(const Document& file, Draft& draft) {
  const std::string key = "deepspeed_config.deepspeed_config_file";
  const std::string path = file.text_or(key, "");
  if (path.empty() || path == "none") return;
  const auto beside = std::filesystem::path(file.origin()).parent_path() / path;
  const auto found = std::filesystem::exists(path) ? std::filesystem::path(path) : beside;
  std::string text;
  try {
    text = read_config_text(found);
  } catch (const IoError& error) {
    file.refuse(key, str("`", file.path_of(key), "` = \"", path, "\": ", error.what(), "; correct the path"));
  }
  Json options = parse_hjson(text, found.string());
  if (!options.is_object())
    throw ConfigError(str(path, ": the whole file is ", excerpt(options.dump(), 100), "; expected an object { … }"));
  draft.options = std::move(options);
  for (const auto& [name, line] : key_lines(text)) draft.places[name] = {.file = found.string(), .line = line};
}

void check_version(Document& file) {
  const std::string key = "fsdp_config.fsdp_reshard_after_forward";
  const Json* value = file.find(key);
  if (!value) return;
  const int64_t version = file.integer_or("fsdp_config.fsdp_version", 1, {});
  if (version == 2 && !value->is_boolean()) file.fail(key, "true or false with `fsdp_version` 2");
  if (version == 1 && value->is_boolean() && file.has("fsdp_config.fsdp_version"))
    file.fail(key, "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD with `fsdp_version` 1");
}

/// The copies that the file asks for: over machines with a hybrid strategy, or by their number.
void settle_replicas(Document& file, Draft& draft, bool is_a_plugin) {
  const int64_t processes = file.integer_or("num_processes", 0, kPositive);
  const int64_t machines = file.integer_or("num_machines", 1, kPositive);
  const auto by = [&](const std::string& key, int64_t copies) {
    if (processes == 0 || processes % copies != 0)
      file.refuse(key, str("`", file.path_of(key), "` = ", file.find(key)->dump(), " makes ", copies, " copies of ",
                           processes == 0 ? std::string("an unknown number of") : std::to_string(processes),
                           " processes; set `num_processes` to a multiple of ", copies));
    set(file, draft, key, kMics, processes / copies);
    const auto is_read = [](const std::string& name) { return name == "num_processes" || name == "num_machines"; };
    std::erase_if(file.without_meaning, is_read);
  };
  for (const char* key : {kReshard, kStrategy}) {
    const Json* strategy = file.find(key);
    if (!strategy || !is_hybrid(*strategy)) continue;
    if (is_a_plugin)
      file.not_there_yet(
          key,
          "use FULL_SHARD or SHARD_GRAD_OP, or DeepSpeed's keys with `zero_optimization.mics_shard_size`, "
          "the ranks of a machine");
    if (machines > 1) by(key, machines);
  }
  const int64_t copies = file.integer_or(kReplicate, 1, kPositive), shards = file.integer_or(kShard, -1, kShardSize);
  if (copies == 1 || *value_at(draft.options, kStagePath) == 0) return;
  const int64_t tokens = file.integer_or("parallelism_config.parallelism_config_sp_size", 1, kPositive);
  if (shards < 1) return by(kReplicate, copies);
  if (processes > 0 && processes != copies * shards * tokens)
    file.refuse(kReplicate, str("`", kReplicate, "` = ", copies, " copies of ", shards, " ranks are not the ",
                                processes, " of `num_processes`; let them agree"));
  set(file, draft, kShard, kMics, shards);
}

/// Outputs are cast by the program itself here, so only the weights' dtype can be asked for.
void check_output_dtype(Document& file, const Draft& draft) {
  const std::string key = "fsdp_config.fsdp_mixed_precision_policy.output_dtype";
  const std::string name = file.text_or(key, "");
  if (name.empty()) return;
  const auto is_on = [&](const char* mode) {
    const Json* const value = value_at(draft.options, str(mode, ".enabled"));
    return value != nullptr && *value == true;
  };
  const std::string weights = is_on("bf16") ? "bf16" : is_on("fp16") ? "fp16" : "fp32";
  const bool is_16_bit = name.find("16") != std::string::npos, is_bf16 = name.find('b') != std::string::npos;
  if ((!is_16_bit ? "fp32" : is_bf16 ? "bf16" : "fp16") != weights)
    file.not_there_yet(key, str("outputs have the dtype of the weights: set it to \"", weights,
                                "\", or remove it and cast what the model returns"));
}

/// Everything that follows from several keys, and what a framework does where the file says nothing.
void settle(Document& file, Draft& draft, const std::string& kind, bool is_a_plugin) {
  Json& options = draft.options;
  const bool has_own_file = file.has("deepspeed_config.deepspeed_config_file");
  if (!value_at(options, kStagePath) && !has_own_file)
    put(options, kStagePath, kind == "fsdp" ? 3 : kind == "deepspeed" ? 2 : 0);
  if (file.flag_or(kFsdpOffload, false)) {
    set(file, draft, kFsdpOffload, kOffloadOptimizer, "cpu");
    if (*value_at(options, kStagePath) == 3) set(file, draft, kFsdpOffload, kOffloadParam, "cpu");
  }
  check_output_dtype(file, draft);
  if (value_at(options, kStagePath)) settle_replicas(file, draft, is_a_plugin);
  // DeepSpeed clips by itself, the others where the program does.
  if (kind != "deepspeed" && !options.contains("gradient_clipping")) options["gradient_clipping"] = 0;
}

/// Accelerate reads the section of the framework in force alone.
void leave_out_others(Document& file, const std::string& kind) {
  for (const auto& [section, owner] : {std::pair{"fsdp_config", "FSDP"}, {"deepspeed_config", "DEEPSPEED"}}) {
    const Json* json = file.find(section);
    if (!json || !json->is_object() || json->empty() || kind == lower_case(owner)) continue;
    file.hints.push_back(str("`", section, "` is read with `distributed_type: ", owner, "` alone, and left out here"));
    file.replace(section, Json::object());
  }
}

}  // namespace

bool is_accelerates(const Json& json) {
  return json.is_object() &&
         (json.contains("distributed_type") || json.contains("compute_environment") || is_plugin(json));
}

void read_accelerate(ConfigSource& source) {
  const bool is_a_plugin = is_plugin(source.options);
  Document file = is_a_plugin ? as_file(source.options, source.origin) : Document(source.options, source.origin);
  Draft draft;
  std::string kind;
  file.attempt([&] {
    kind = lower_case(file.text_or("distributed_type", ""));
    if (kind.empty()) file.refuse("", "`distributed_type` is missing; set it to FSDP, DEEPSPEED or MULTI_GPU");
  });
  leave_out_others(file, kind);
  take_policy_as_text(file);
  file.attempt([&] { read_deepspeed_file(file, draft); });
  read_rows(rows(), file, draft);
  if (!file.is_mistaken({"fsdp_config"})) file.attempt([&] { check_version(file); });
  if (file.mistakes().empty()) file.attempt([&] { settle(file, draft, kind, is_a_plugin); });
  std::vector<KnownKey> known;
  add_keys(rows(), known);
  refuse_unknown_keys(known, file);
  for (const KeyError& error : file.mistakes()) source.mistakes.push_back(mistake_of(error, source.lines));
  source.without_meaning = file.without_meaning;
  source.hints = file.hints;
  source.names = draft.names;
  source.places = draft.places;
  source.options = draft.options;
  source.micro_batch = 1;
  source.steps_in_the_models_dtype = kind == "fsdp";
}

std::string write_accelerate(const Json& resolved, int replicas) {
  const int stage = resolved.at("zero_optimization").at("stage");
  const Draft draft{.options = resolved, .replicas = replicas};
  Json file = {{"compute_environment", "LOCAL_MACHINE"}, {"distributed_type", stage == 0 ? "MULTI_GPU" : "FSDP"}};
  if (stage > 0) file["fsdp_config"]["fsdp_version"] = 2;
  for (const DraftRow& row : rows())
    if (const auto value = row.write ? row.write(draft) : std::nullopt;
        value && (stage > 0 || !row.path.starts_with("fsdp_config")))
      put(file, row.path, *value);
  return to_yaml(file);
}

std::string accelerate_table() {
  struct Line {
    std::vector<std::string> fsdp, deepspeed, here;
    std::vector<std::pair<std::string, std::vector<std::string>>> remarks;  ///< and the keys that each is about
  };
  std::vector<std::string> topics;
  std::map<std::string, Line> lines;
  for (const auto& [row, topic, here] : mappings()) {
    add_once(topics, topic);
    Line& line = lines[topic];
    const std::string name = str("`", row.path.substr(row.path.rfind('.') + 1), "`");
    const bool is_fsdps = row.path.starts_with("fsdp_config."),
               is_deepspeeds = row.path.starts_with("deepspeed_config.");
    if (!is_deepspeeds) line.fsdp.push_back(name);
    if (!is_fsdps) add_once(line.deepspeed, is_deepspeeds ? name : "the same");
    add_once(line.here, here);
    const char* fate = row.effect == Effect::kWorks     ? ""
                       : row.effect == Effect::kRefused ? "not there yet: "
                                                        : "no meaning: ";
    if (row.doc.empty()) continue;
    const std::string remark = fate + row.doc;
    const auto is_it = [&](const auto& one) { return one.first == remark; };
    const auto same = std::find_if(line.remarks.begin(), line.remarks.end(), is_it);
    (same == line.remarks.end() ? line.remarks.emplace_back(remark, Names{}) : *same).second.push_back(name);
  }
  std::string text =
      "| | FSDP | DeepSpeed, in a file of Accelerate | here, and in DeepSpeed's JSON | |\n|---|---|---|---|---|\n";
  for (const std::string& topic : topics) {
    const Line& line = lines[topic];
    std::vector<std::string> remarks;
    for (const auto& [remark, keys] : line.remarks) remarks.push_back(str(joined_or_dash(keys), ": ", remark));
    text += str("| ", topic, " | ", joined_or_dash(line.fsdp), " | ", joined_or_dash(line.deepspeed), " | ",
                joined_or_dash(line.here), " | ", joined_or_dash(remarks, "; "), " |\n");
  }
  return text;
}

}  // namespace trireme
