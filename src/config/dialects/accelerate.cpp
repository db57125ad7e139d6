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
  std::string topic;      ///< of the line in the table; keys of the same topic share it
  std::string here = {};  ///< the keys here, as the table shows them
};

/// A value of a file of Accelerate, and the one here.
struct ValuePair {
  Json theirs;
  Json here;
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
Mapping maps(const char* topic, const std::string& key, const std::string& path, std::vector<ValuePair> pairs,
             const char* doc) {
  std::string words;
  for (const ValuePair& pair : pairs) words += (words.empty() ? "" : ", ") + pair.theirs.dump();
  DraftRow row{
      .path = key, .type = words.empty() ? "as in Accelerate" : "one of " + words, .standard = "–", .doc = doc};
  row.read = [=](Document& file, Draft& draft) {
    const Json* value = file.find(key);
    if (!value) return;
    if (pairs.empty()) return set(file, draft, key, path, *value);
    const auto pair =
        std::find_if(pairs.begin(), pairs.end(), [&](const auto& one) { return is_same(one.theirs, *value); });
    if (pair == pairs.end()) {
      std::vector<std::string> choices;
      for (const ValuePair& one : pairs)
        choices.push_back(one.theirs.is_string() ? one.theirs.get<std::string>() : one.theirs.dump());
      const std::string hint = value->is_string() ? did_you_mean(value->get<std::string>(), choices) : "";
      file.fail(key, str("one of ", words, hint.empty() ? "" : "." + hint));
    }
    if (!pair->here.is_null()) set(file, draft, key, path, pair->here);
  };
  row.write = [=](const Draft& draft) -> std::optional<Json> {
    const Json* value = value_at(draft.options, path);
    if (!value || pairs.empty()) return value ? std::optional(*value) : std::nullopt;
    const auto pair = std::find_if(pairs.begin(), pairs.end(), [&](const auto& one) { return one.here == *value; });
    return pair == pairs.end() ? std::nullopt : std::optional(pair->theirs);
  };
  return {.row = std::move(row), .topic = topic, .here = path.empty() ? "" : str("`", path, "`")};
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

/// `values` of a group in keys.json: names, or what kind of value.
Mapping checked_by(Mapping mapping, const Json& values) {
  if (values.is_array()) return checked_by(std::move(mapping), name_among(values));
  if (values == "positive") return checked_by(std::move(mapping), integer(kPositive));
  if (values == "count") return checked_by(std::move(mapping), integer(kCount));
  if (values == "flag") return checked_by(std::move(mapping), flag());
  if (values == "texts") return checked_by(std::move(mapping), text_or_texts());
  if (values == "number or text") return checked_by(std::move(mapping), number_or_text());
  if (values == "attention") return checked_by(std::move(mapping), attention());
  return mapping;
}

/// The keys under `place` in keys.json.
void add_plain(std::vector<Mapping>& rows, const std::string& place) {
  for (const KeyGroup& group : key_groups(place))
    for (const auto& key : group.keys.items())
      rows.push_back(checked_by(Mapping{.row = row_of<Draft>(group, key.key()), .topic = group.topic}, group.values));
}

/// These of its values are not there yet.
Mapping but_not(Mapping mapping, std::vector<Json> values, const char* fix) {
  DraftRow& row = mapping.row;
  row.read = [values, fix, key = row.path, read = row.read](Document& file, Draft& draft) {
    const Json* value = file.find(key);
    const auto is_it = [&](const Json& one) { return is_same(one, *value); };
    if (value && std::any_of(values.begin(), values.end(), is_it)) file.not_there_yet(key, fix);
    read(file, draft);
  };
  return mapping;
}

/// It is never written: another key says the same.
Mapping read_only(Mapping mapping) {
  mapping.row.write = nullptr;
  return mapping;
}

Mapping distributed_type() {
  Mapping mapping = but_not(maps("framework", "distributed_type", "",
                                 {{"FSDP", {}}, {"DEEPSPEED", {}}, {"MULTI_GPU", {}}, {"MULTI_CPU", {}}, {"NO", {}}},
                                 "the stage where nothing else says it: FSDP 3, DEEPSPEED 2, the others 0"),
                            {"MEGATRON_LM", "TP", "XLA", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA",
                             "MULTI_MUSA", "MULTI_HPU", "MULTI_NEURON"},
                            "use FSDP, DEEPSPEED, MULTI_GPU or MULTI_CPU");
  return read_only(std::move(mapping));
}

/// A name of a dtype: the 16-bit ones switch a mode on.
Mapping mode(const std::string& key, std::vector<std::string> names, const char* doc) {
  Mapping mapping{.row = {.path = key, .type = "a dtype", .standard = "–", .doc = doc},
                  .topic = "precision",
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
                  .topic = "offloading",
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
  Mapping mapping =
      read_only(maps("mixture of experts", key, path, {}, "names between commas; gathered whole at stage 3"));
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
                  .topic = "other axes",
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

void add_fsdp(std::vector<Mapping>& rows) {
  const std::vector<ValuePair> strategies = {{"FULL_SHARD", 3},
                                             {"SHARD_GRAD_OP", 2},
                                             {"NO_SHARD", 0},
                                             {"HYBRID_SHARD", 3},
                                             {"HYBRID_SHARD_ZERO2", 2},
                                             {1, 3},
                                             {2, 2},
                                             {3, 0},
                                             {4, 3},
                                             {5, 2},
                                             {"1", 3},
                                             {"2", 2},
                                             {"3", 0},
                                             {"4", 3},
                                             {"5", 2}};
  std::vector<ValuePair> reshard = {{true, 3}, {false, 2}};
  reshard.insert(reshard.end(), strategies.begin(), strategies.end());
  const std::vector<ValuePair> dtypes = {
      {"fp32", "fp32"},          {"bf16", "bf16"},           {"fp16", "fp16"},
      {"float32", "fp32"},       {"bfloat16", "bf16"},       {"float16", "fp16"},
      {"torch.float32", "fp32"}, {"torch.bfloat16", "bf16"}, {"torch.float16", "fp16"}};
  const std::string fsdp = "fsdp_config.fsdp_", policy = fsdp + "mixed_precision_policy.";
  rows.push_back(read_only(maps("FSDP's version", fsdp + "version", "", {{1, {}}, {2, {}}}, "both are read")));
  rows.push_back(maps("sharding", kReshard, kStagePath, reshard,
                      "true, FULL_SHARD, HYBRID_SHARD: stage 3; false, SHARD_GRAD_OP, HYBRID_SHARD_ZERO2: 2; NO_SHARD: "
                      "0; hybrid: `zero_optimization.mics_shard_size` is the ranks of a machine"));
  rows.push_back(read_only(maps("sharding", kStrategy, kStagePath, strategies, "")));
  rows.push_back(fsdp_offload());
  rows.push_back(maps("recomputation", fsdp + "activation_checkpointing", "trireme.recompute",
                      {{true, "full"}, {false, "none"}}, ""));
  std::vector<std::string> names;
  for (const ValuePair& pair : dtypes) names.push_back(pair.theirs);
  rows.push_back(read_only(mode(policy + "param_dtype", names, "of a plugin or a `MixedPrecisionPolicy`")));
  rows.push_back(read_only(maps("precision", policy + "reduce_dtype", "communication_data_type", dtypes, "")));
  rows.push_back(read_only(maps("precision", policy + "buffer_dtype", "data_types.buffer_dtype", dtypes, "")));
  rows.push_back(
      checked_by(Mapping{.row = no_meaning<Draft>(policy + "output_dtype", {},
                                                  "outputs have the dtype of the weights; another one is refused"),
                         .topic = "precision"},
                 name_among(names)));
  add_plain(rows, "accelerate, fsdp_config");
}

void add_deepspeed(std::vector<Mapping>& rows) {
  const std::string ds = "deepspeed_config.", zero = "zero_optimization.";
  rows.push_back({.row = {.path = ds + "deepspeed_config_file",
                          .type = "a path",
                          .standard = "–",
                          .doc = "its keys, with those of the file of Accelerate where it says `\"auto\"` or nothing",
                          .read = [](Document&, Draft&) {}},
                  .topic = "DeepSpeed's file",
                  .here = {}});
  rows.push_back(read_only(maps("sharding", ds + "zero_stage", kStagePath, {}, "")));
  for (const char* what : {"optimizer", "param"}) {
    const std::string section = str("offload_", what);
    rows.push_back(read_only(maps("offloading", ds + section + "_device", zero + section + ".device", {}, "")));
    rows.push_back(read_only(maps("offloading", ds + section + "_nvme_path", zero + section + ".nvme_path", {}, "")));
  }
  rows.push_back(read_only(maps("gradients", ds + "gradient_accumulation_steps", "gradient_accumulation_steps", {},
                                "FSDP: of the program")));
  rows.push_back(read_only(
      maps("gradients", ds + "gradient_clipping", "gradient_clipping", {}, "FSDP clips only where the program does")));
  rows.push_back(read_only(
      maps("checkpoints", ds + "zero3_save_16bit_model", zero + "stage3_gather_16bit_weights_on_model_save", {}, "")));
  rows.push_back(moe_classes());
  add_plain(rows, "accelerate, deepspeed_config");
}

void add_top_level(std::vector<Mapping>& rows) {
  rows.push_back(distributed_type());
  rows.push_back(
      mode("mixed_precision", {"no", "bf16", "fp16", "fp8"}, "weights in 16 bit, masters and states in fp32"));
  rows.push_back(read_only(maps("gradients", "gradient_accumulation_steps", "gradient_accumulation_steps", {}, "")));
  rows.push_back(read_only(maps("gradients", "gradient_clipping", "gradient_clipping", {}, "")));
  rows.push_back(but_not(checked_by(Mapping{.row = no_meaning<Draft>("downcast_bf16", {}, "flags of `trireme launch`"),
                                            .topic = "processes"},
                                    flag_or_word()),
                         {true, "yes"}, "it is of TPUs; remove it or set it to \"no\""));
  rows.push_back(but_not(read_only(maps("processes", "compute_environment", "", {{"LOCAL_MACHINE", {}}}, "")),
                         {"AMAZON_SAGEMAKER"}, "set it to LOCAL_MACHINE"));
  const std::string parallelism = "parallelism_config.parallelism_config_";
  rows.push_back(shards_of_replicas(kReplicate, "so many copies, each over the same number of ranks"));
  rows.push_back(shards_of_replicas(kShard, "ranks of a copy; every rank where there is one copy"));
  rows.push_back(read_only(maps("other axes", parallelism + "sp_size", "sequence_parallel_size", {}, "")));
  add_plain(rows, "accelerate");
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
    add_top_level(all);
    add_fsdp(all);
    add_deepspeed(all);
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
  const int64_t sequence = file.integer_or("parallelism_config.parallelism_config_sp_size", 1, kPositive);
  if (shards < 1) return by(kReplicate, copies);
  if (processes > 0 && processes != copies * shards * sequence)
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
