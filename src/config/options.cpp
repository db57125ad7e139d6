#include "config/options.h"

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "config/document/keys.h"

namespace trireme {
namespace {

using ConfigRow = Option<Config>;

constexpr NumberRange kAboveZero = {.min = std::numeric_limits<double>::min(),
                                    .max = std::numeric_limits<double>::max(),
                                    .words = "a finite number > 0"};
constexpr NumberRange kLossScale = {
    .min = 0, .max = std::numeric_limits<double>::max(), .words = "a finite number >= 0 (0: dynamic)"};
constexpr NumberRange kExtraCompute = {
    .min = 0, .max = 1.0 / 3, .words = "a share of a step's multiply-adds from 0 to 0.333"};
constexpr NumberRange kShare = {.min = 0, .max = 1, .words = "a number from 0 to 1"};
constexpr IntegerRange kStages = {.min = 0, .max = 3, .words = "an integer from 0 to 3"};
constexpr IntegerRange kBuffers = {.min = 2, .max = 1024, .words = "an integer from 2 to 1024"};
constexpr IntegerRange kPrintSteps = {.min = 0, .words = "an integer >= 0 (0 or an infinity: never)"};
constexpr IntegerRange kTileTokens = {.min = 0, .words = "an integer >= 0 (0: not tiled)"};
constexpr IntegerRange kDepth = {.min = -1, .words = "an integer >= -1"};
constexpr IntegerRange kKept = {.min = 0, .max = 1'000'000, .words = "a number of checkpoints from 0 (all) to 1000000"};

ValueType<at::ScalarType> dtype() {
  return choice<at::ScalarType>({{"fp32", at::kFloat}, {"bf16", at::kBFloat16}, {"fp16", at::kHalf}});
}

ValueType<at::ScalarType> autocast_dtype() {
  return choice<at::ScalarType>({{"bf16", at::kBFloat16},
                                 {"fp16", at::kHalf},
                                 {"bfloat16", at::kBFloat16},
                                 {"float16", at::kHalf},
                                 {"torch.bfloat16", at::kBFloat16},
                                 {"torch.float16", at::kHalf}});
}

enum class OffloadPlace : uint8_t { kNone, kHost, kDisk };

ValueType<OffloadPlace> offload_place() {
  return choice<OffloadPlace>(
      {{"none", OffloadPlace::kNone}, {"cpu", OffloadPlace::kHost}, {"nvme", OffloadPlace::kDisk}});
}

/// null: none.
ValueType<std::string> folder() {
  return {.words = "a folder",
          .read = [](const Document& file, const std::string& path) { return file.text_or(path, ""); },
          .write = [](const std::string& path) { return path.empty() ? Json() : Json(path); }};
}

/// null: none.
ValueType<std::string> file_of_report() {
  ValueType<std::string> type = folder();
  type.words = "a file";
  return type;
}

ValueType<std::string> partition() {
  return {.words = "`\"best\"`, `\"parameters\"`, `\"uniform\"`, `\"type:REGEX\"`",
          .read = [](const Document& file, const std::string& path) -> std::string {
            const std::string method = file.text_or(path, "best");
            if (method != "best" && method != "parameters" && method != "uniform" && !method.starts_with("type:"))
              file.fail(path, R"("best", "parameters", "uniform" or "type:REGEX")");
            return method;
          }};
}

/// Integrations write an infinity for "never", as a number or as a word.
ValueType<int64_t> steps_or_never() {
  return {.words = kPrintSteps.words, .read = [](const Document& file, const std::string& path) -> int64_t {
            const Json& json = *file.find(path);
            if (json.is_string() && find_ignoring_case(json.get<std::string>(), {"inf", "infinity"})) return 0;
            const int64_t steps = file.integer_or(path, 0, kPrintSteps);
            return steps == std::numeric_limits<int64_t>::max() ? 0 : steps;
          }};
}

bool reads_as_off(const Json& answer) { return answer.is_null() || answer == false || answer == 0 || answer == "auto"; }

template <class Predicate>
bool any_enabled(const Json& json, const Predicate& holds) {
  if (json.is_object() && json.contains("enabled") && holds(json["enabled"])) return true;
  return json.is_structured() &&
         std::any_of(json.begin(), json.end(), [&](const Json& inner) { return any_enabled(inner, holds); });
}

/// A section of many or free keys: on when one of its `enabled` is true, or when it has content and no `enabled` at
/// all.
ConfigRow open_section(const KeyGroup& group, const std::string& key) {
  const std::string path = group.path_of(key);
  return {.path = path,
          .effect = Effect::kRefused,
          .type = "an object",
          .standard = "–",
          .doc = group.doc,
          .read =
              [path](Document& file, Config&) {
                const Json* json = file.find(path);
                if (!json || json->empty() || *json == false || *json == 0) return;
                const bool is_on = json->is_object() && json->contains("enabled")
                                       ? file.flag_or(path + ".enabled", false)
                                       : any_enabled(*json, [](const Json& one) { return !reads_as_off(one); }) ||
                                             !any_enabled(*json, [](const Json&) { return true; });
                if (is_on) file.not_there_yet(path, R"(remove it or set its "enabled" to false)");
              },
          .is_open = true};
}

/// The rows as they are added.
class Table {
 public:
  std::vector<ConfigRow> rows;
  std::string section;  ///< "" or "a.": opens the keys of single rows

  template <class... Rest>
  void works(const char* key, Rest&&... rest) {
    rows.push_back(trireme::works<Config>(section + key, std::forward<Rest>(rest)...));
  }
  template <class... Rest>
  void resolved(const char* key, Rest&&... rest) {
    rows.push_back(trireme::resolved<Config>(section + key, std::forward<Rest>(rest)...));
  }

  /// The keys that stand under `place` in keys.json, each as `changed` makes its row.
  void keys(const char* place, ConfigRow (*changed)(ConfigRow row, const Json& normal) = nullptr) {
    for (const KeyGroup& group : key_groups(place))
      for (const auto& [key, normal] : group.keys.items()) {
        ConfigRow row = group.fate == KeyGroup::Fate::kOpen ? open_section(group, key) : row_of<Config>(group, key);
        rows.push_back(changed ? changed(std::move(row), normal) : std::move(row));
      }
  }
};

/// Values below 1 are refused by read_batch_sizes(), in DeepSpeed's own words.
ConfigRow batch_size(const char* path, int64_t BatchSizes::*member, const char* doc) {
  return resolved<Config>(
      path, integer(kBatchSize), [member](const Config& c) { return c.batch.*member; }, "–", doc);
}

ConfigRow section_of_type(const char* path, Json (*write)(const Config&)) {
  return {.path = path,
          .type = "an object",
          .standard = "–",
          .doc = "see below: its keys depend on `type`",
          .read = [](Document&, Config&) {},
          .write =
              [write](const Config& config) {
                const Json json = write(config);
                return json.is_null() ? std::nullopt : std::optional(json);
              },
          .is_open = true};
}

void add_top(Table& table) {
  table.rows.push_back(batch_size("train_batch_size", &BatchSizes::train_batch_size, "samples of an optimizer step"));
  table.rows.push_back(batch_size("train_micro_batch_size_per_gpu", &BatchSizes::train_micro_batch_size_per_gpu,
                                  "samples of one rank's forward pass"));
  table.rows.push_back(batch_size("gradient_accumulation_steps", &BatchSizes::gradient_accumulation_steps,
                                  "forward passes of an optimizer step"));
  table.rows.push_back(section_of_type(
      "optimizer", [](const Config& c) { return c.optimizer ? optimizer_json(*c.optimizer) : Json(); }));
  table.rows.push_back(section_of_type(
      "scheduler", [](const Config& c) { return c.scheduler ? scheduler_json(*c.scheduler) : Json(); }));
  table.section = "";
  table.works("gradient_clipping", number(kNonNegative), at<&Config::gradient_clipping>,
              "largest global L2 norm of the gradients; 0 switches clipping off");
  table.works("managed_gradient_accumulation", flag(), at<&Config::managed_gradient_accumulation>,
              "false: every `step()` updates ([engine](engine.md))");
}

void add_precision(Table& table) {
  constexpr auto precision = &Config::precision;
  constexpr auto scale = &PrecisionOptions::loss_scale;
  constexpr auto autocast = &PrecisionOptions::autocast;
  // Ranges of the loss scale's keys hold only where it is dynamic: elsewhere nobody looks at them. See resolve().
  const auto dynamic_only = [](const char* words) { return IntegerRange{.words = words}; };
  const auto is = [](at::ScalarType dtype) {
    return [dtype](const Config& config) { return config.precision.weight_dtype == dtype; };
  };
  table.section = "bf16.";
  table.resolved("enabled", flag(), is(at::kBFloat16), "`false`", "weights in bf16, masters and states in fp32");
  table.works("check_grad_overflow", flag(), at<precision, &PrecisionOptions::check_grad_overflow>,
              "a step with gradients that are not finite is skipped");
  table.keys("bf16");
  const auto updates_in_bf16 = [](const Config& config) { return config.precision.update_dtype == at::kBFloat16; };
  table.resolved(
      "bf16_master_weights_and_grads", flag(), updates_in_bf16, "`false`",
      "with `bf16_optimizer_states` the mode `low`: no masters; gradients' sums, states and the step in bf16 "
      "([precision](precision.md)); not one of the two alone");
  table.resolved("bf16_optimizer_states", flag(), updates_in_bf16, "`false`", "see above");
  table.section = "fp16.";
  table.resolved("enabled", flag(), is(at::kHalf), "`false`",
                 "weights in fp16, masters and states in fp32, a loss scale; not with `bf16` or `torch_autocast`");
  table.works("auto_cast", flag(), at<precision, &PrecisionOptions::casts_inputs>,
              "floating tensors that `engine(…)` is called with are cast to fp16");
  table.works("loss_scale", number(kLossScale), at<precision, scale, &LossScaleOptions::loss_scale>,
              "above 0 fixed; 0 dynamic, by the keys below ([precision](precision.md)); for `torch_autocast` "
              "in fp16 too");
  table.works("initial_scale_power", integer(dynamic_only("an integer from 0 to 126")),
              at<precision, scale, &LossScaleOptions::initial_scale_power>, "the scale begins as 2 to this power");
  table.works("loss_scale_window", integer(dynamic_only(kPositive.words)),
              at<precision, scale, &LossScaleOptions::loss_scale_window>,
              "steps without overflow until the scale doubles");
  table.works(
      "hysteresis", integer(dynamic_only(kPositive.words)), at<precision, scale, &LossScaleOptions::hysteresis>,
      "overflows until the scale halves, at ZeRO stages 1 to 3; at stage 0 each one halves it, as in DeepSpeed");
  table.works("consecutive_hysteresis", flag(), at<precision, scale, &LossScaleOptions::consecutive_hysteresis>,
              "a step without overflow begins their count anew");
  table.works("min_loss_scale", number({.words = kAboveZero.words}),
              at<precision, scale, &LossScaleOptions::min_loss_scale>, "the scale falls no further");
  table.keys("fp16");
  table.section = "torch_autocast.";
  table.works("enabled", flag(), at<precision, autocast, &AutocastOptions::enabled>,
              "`engine(…)` runs under autocast; not with `bf16` or `fp16`");
  table.works("dtype", autocast_dtype(), at<precision, autocast, &AutocastOptions::dtype>, "in fp16 with a loss scale");
  table.works("lower_precision_safe_modules", texts(),
              at<precision, autocast, &AutocastOptions::lower_precision_safe_modules>,
              "gradients of parameters of modules of exactly these classes travel in `dtype`; of a name the last "
              "part counts. A class that the model does not have is warned of");
  table.section = "data_types.";
  table.works("grad_accum_dtype", dtype(), at<precision, &PrecisionOptions::accumulation_dtype>,
              "`\"fp32\"`, or the dtype of 16-bit weights");
  table.resolved("param_dtype", dtype(), nullptr, "the weights'", "must agree with `bf16.enabled` and `fp16.enabled`");
  table.works("buffer_dtype", dtype(), at<precision, &PrecisionOptions::buffer_dtype>,
              "floating buffers are cast to it; by default they keep the model's dtype");
  table.section = "";
  table.works("communication_data_type", dtype(), at<precision, &PrecisionOptions::communication_dtype>,
              "in 16 bit gradients travel in it; `\"fp32\"`: as they are kept ([precision](precision.md))");
  table.works("gradient_allreduce_op", choice<ReduceOp>({{"mean", ReduceOp::kMean}, {"sum", ReduceOp::kSum}}),
              at<&Config::pager, &PagerPolicy::gradient_op>,
              "the mean or the sum of the ranks' gradients, at every stage");
  table.works("gradient_predivide_factor", number(kAboveZero), at<&Config::pager, &PagerPolicy::predivide_factor>,
              "gradients are divided by it before they travel, and their sum is multiplied by it");
  table.resolved("prescale_gradients", flag(), nullptr, "`false`",
                 "true: `gradient_predivide_factor` is the number of ranks; one of the two");
  table.resolved("dataloader_drop_last", flag(), nullptr, "`false`",
                 "of Python's `training_data`: a last batch that is not full is left out. `trireme train` has none");
}

void add_zero(Table& table) {
  constexpr auto pager = &Config::pager;
  constexpr auto disk = &Config::disk;
  constexpr auto weights_on_disk = &PagerPolicy::disk;
  constexpr auto leaves = &Config::leaf_modules;
  table.section = "zero_optimization.";
  table.works("stage", integer(kStages), at<pager, &PagerPolicy::stage>,
              "ZeRO stage; `true` for the section is an old spelling of stage 1 and warned of");
  table.resolved(
      "offload_optimizer.device", offload_place(),
      [](const Config& c) {
        if (c.disk.is_on()) return OffloadPlace::kDisk;
        return c.pager.offload_ratio > 0 ? OffloadPlace::kHost : OffloadPlace::kNone;
      },
      "`\"none\"`",
      "`\"cpu\"`: a GPU's parameters are updated on the host, at stages 1 to 3 "
      "([device](device.md#offloading)); without effect, and said, where they are there already. `\"nvme\"`: masters "
      "and states are on disk ([optim](optim.md#states-on-disk)), at every stage, on hosts too");
  table.works("offload_optimizer.nvme_path", folder(), at<disk, &DiskSpace::folder>,
              "with `\"nvme\"`: a folder of the disk; each rank makes a file there that has no name");
  table.works("offload_optimizer.buffer_count", integer(kBuffers), at<disk, &DiskSpace::buffers>,
              "with `\"nvme\"`: blocks of 1 Mi elements in memory, half of them read ahead and half being written");
  table.resolved(
      "offload_optimizer.ratio", number(kShare),
      [](const Config& c) { return c.pager.offload_ratio > 0 ? c.pager.offload_ratio : 1; }, "`1.0`",
      "at least this share of the elements is updated on the host, the rest on the GPU");
  table.resolved(
      "offload_param.device", offload_place(),
      [](const Config& c) {
        if (c.pager.disk.is_on()) return OffloadPlace::kDisk;
        return c.pager.offload_parameters ? OffloadPlace::kHost : OffloadPlace::kNone;
      },
      "`\"none\"`",
      "`\"cpu\"`: the host keeps the shards of stage 3 too, and frozen ones; it updates them, so this "
      "stands for `offload_optimizer` as well. `\"nvme\"`: the shards of stage 3 are on disk "
      "([pager](pager.md#weights-on-disk)), for models on hosts");
  table.works("offload_param.nvme_path", folder(), at<pager, weights_on_disk, &DiskSpace::folder>,
              "with `\"nvme\"`: a folder of the disk; each rank makes a file there that has no name");
  table.works("offload_param.buffer_count", integer(kBuffers), at<pager, weights_on_disk, &DiskSpace::buffers>,
              "with `\"nvme\"`: shards in memory during an update, half of them read ahead and half being written");
  table.works("ignore_unused_parameters", flag(), at<&Config::ignore_unused_parameters>,
              "false: a trainable parameter without a gradient is an error");
  table.works("leaf_module.classes", text_or_texts(), at<leaves, &LeafModuleOptions::classes>,
              "modules of these classes are gathered whole ([pager](pager.md)); the last part of the name counts, "
              "without libtorch's `Impl`");
  table.works("leaf_module.names", text_or_texts(), at<leaves, &LeafModuleOptions::names>,
              "likewise by name; one that no module has is refused");
  table.works("leaf_module.name_suffixes", text_or_texts(), at<leaves, &LeafModuleOptions::name_suffixes>,
              "likewise by the end of the name");
  table.resolved("stage3_max_live_parameters", integer(kCount), nullptr, "`1000000000`",
                 "times the size of a weight it is `trireme.live_bytes`");
  table.resolved("stage3_prefetch_bucket_size", integer(kCount), nullptr, "`50000000`",
                 "times the size of a weight it is `trireme.prefetch_bytes`");
  table.keys("zero_optimization");
  table.resolved("cpu_offload", flag(), nullptr, "–", "deprecated, warned of: `offload_optimizer` with device `cpu`");
  table.resolved("cpu_offload_param", flag(), nullptr, "–", "deprecated, warned of: `offload_param` with device `cpu`");
  table.resolved("cpu_offload_use_pin_memory", flag(), nullptr, "–", "deprecated, warned of, and without a meaning");
  table.resolved(
      "mics_shard_size", integer(kShardSize),
      [](const Config& c) {
        return c.degrees.replicas > 1 && !c.states_over_replicas ? int64_t{c.degrees.data / c.degrees.replicas} : -1;
      },
      "`-1`",
      "neighbouring ranks that shard the model states together, at stages 1 to 3; others hold the same shards, and "
      "gradients are summed over both (MiCS, FSDP's hybrid sharding). -1: all ranks");
  table.resolved(
      "zero_hpz_partition_size", integer(kPositive),
      [](const Config& c) { return c.states_over_replicas ? int64_t{c.degrees.data / c.degrees.replicas} : 1; }, "`1`",
      "stage 3: neighbouring ranks that shard weights together, so that gathers stay among them; gradients and "
      "optimizer states are sharded over all ranks (ZeRO++'s hpZ). 1: weights too are sharded over all");
  table.keys("zero_optimization, refused");
}

void add_own(Table& table) {
  constexpr auto pager = &Config::pager;
  constexpr auto selective = &RecomputeConfig::selective;
  const auto gather = choice<GatherPolicy>(
      {{"auto", GatherPolicy::kAuto}, {"shared", GatherPolicy::kShared}, {"copy", GatherPolicy::kCopy}});
  const auto mode = choice<RecomputeMode>(
      {{"none", RecomputeMode::kNone}, {"full", RecomputeMode::kFull}, {"selective", RecomputeMode::kSelective}});
  const auto bytes = [](int64_t PagerPolicy::*member) {
    return [member](const Config& config) { return config.pager.*member; };
  };
  table.section = "trireme.";
  table.works("gather", gather, at<pager, &PagerPolicy::gather>,
              "`\"shared\"`: the ranks of a host read one segment, a gather moves nothing; `\"copy\"`: "
              "all-gather into buffers");
  table.resolved("live_bytes", integer(kCount), bytes(&PagerPolicy::live_bytes), "from `stage3_max_live_parameters`",
                 "`copy`: bytes of gathered units. Not together with that key");
  table.resolved("prefetch_bytes", integer(kCount), bytes(&PagerPolicy::prefetch_bytes),
                 "from `stage3_prefetch_bucket_size`", "`copy`: bytes gathered ahead. Not together with that key");
  table.works("merge_below_bytes", integer(kCount), at<pager, &PagerPolicy::units, &UnitRules::merge_below_bytes>,
              "neighbouring units smaller than this are merged");
  table.works("unit_patterns", texts(), at<pager, &PagerPolicy::units, &UnitRules::patterns>,
              "regular expressions: names that share the text up to the end of the first match are one unit; by "
              "default repeated blocks, such as `layers.7.`");
  table.works("sequence_attention",
              choice<SequenceAttention>({{"ulysses", SequenceAttention::kUlysses}, {"ring", SequenceAttention::kRing}}),
              at<&Config::sequence_attention>,
              "with `sequence_parallel_size`: all tokens of some heads, or keys and values in a ring");
  table.works("stochastic_rounding", flag(), at<&Config::precision, &PrecisionOptions::stochastic_rounding>,
              "in the mode `low`: updates are computed in fp32, and weights and states rounded by chance "
              "([precision](precision.md#stochastic-rounding))");
  table.works("poison", flag(), at<pager, &PagerPolicy::poison>, "`copy`: fill released memory with NaN, for tests");
  table.works("register_buffers", flag(), at<pager, &PagerPolicy::register_buffers>,
              "several ranks on GPUs over NCCL: what they exchange stands in memory that is registered with NCCL "
              "([device](device.md#registered-buffers)). Without effect elsewhere (one rank, CUDA IPC, the host)");
  table.rows.push_back(
      {.path = "trireme.recompute",
       .type = "a mode, or an object",
       .standard = "`\"none\"`",
       .doc = "activations that are computed again in backward ([recompute](recompute.md)): a text is its `mode`",
       .read = [](Document&, Config&) {},
       .write = [mode](const Config& c) -> std::optional<Json> {
         if (c.recompute.mode == RecomputeMode::kSelective) return std::nullopt;
         return mode.write(c.recompute.mode);
       }});
  table.works("recompute.mode", mode, at<&Config::recompute, &RecomputeConfig::mode>,
              "`\"full\"`: those of layers; `\"selective\"`, which an object means without it: those of "
              "cheap operators");
  table.works("recompute.keep", texts(), at<&Config::recompute, selective, &SelectivePolicy::keep>,
              "`selective`: names of more operators to keep");
  table.works("recompute.extra_compute", number(kExtraCompute),
              at<&Config::recompute, selective, &SelectivePolicy::extra_compute>,
              "`selective`: share of a step's multiply-adds for products");
  for (ConfigRow& row : table.rows)
    if (row.path.starts_with("trireme.recompute."))
      row.write = [write = row.write](const Config& c) {
        return c.recompute.mode == RecomputeMode::kSelective ? write(c) : std::nullopt;
      };
  table.works("tiled.loss_tokens", integer(kTileTokens), at<&Config::tiled, &TilePolicy::loss_tokens>,
              "logits and their cross entropy are computed this many tokens at a time; 0: whole "
              "([recompute](recompute.md#tiled-computation))");
  table.works("tiled.mlp_tokens", integer(kTileTokens), at<&Config::tiled, &TilePolicy::mlp_tokens>,
              "the same of inner activations of MLPs");
}

void add_pipeline(Table& table) {
  table.section = "pipeline.";
  table.resolved(
      "stages", integer(kPositive), [](const Config& c) { return int64_t{c.degrees.pipe}; }, "`1`",
      "stages of a [pipeline](pipeline.md): `trireme train` cuts its model into them; a program says the number "
      "in its PipelineModule, and the file may repeat it");
  table.works("partition", partition(), at<&Config::pipeline, &PipelineConfig::partition>,
              "`trireme train`: stages have as many multiply-adds each, as many parameters, as many layers, or as many "
              "layers whose class the expression finds");
  table.works(
      "activation_checkpoint_interval", integer(kCount),
      at<&Config::pipeline, &PipelineConfig::activation_checkpoint_interval>,
      "so many layers at a time are recomputed in backward; 0: none, or as a PipelineModule of a Python program "
      "says; a C++ program says it in its PipelineModuleOptions");
  table.resolved("use_reentrant", flag(), nullptr, "`true`",
                 "Python programs, beside `activation_checkpoint_interval`: `false` replaces the PipelineModule's "
                 "activation_checkpoint_func by `trireme.checkpointing.checkpoint`; elsewhere recomputation is never "
                 "reentrant");
  table.section = "trireme.pipeline.";
  table.works("schedule",
              choice<std::string>({{"1f1b", "1f1b"},
                                   {"gpipe", "gpipe"},
                                   {"interleaved", "interleaved"},
                                   {"zb-h1", "zb-h1"},
                                   {"zb-v", "zb-v"},
                                   {"dualpipe-v", "dualpipe-v"}}),
              at<&Config::pipeline, &PipelineConfig::schedule>, "`trireme train`: the order of a stage's work");
  table.works("chunks", integer(kPositive), at<&Config::pipeline, &PipelineConfig::chunks>,
              "`trireme train`: parts of the model on each stage; 2 for `\"zb-v\"` and `\"dualpipe-v\"`");
  table.works("whole_gradients", flag_or_auto(), at<&Config::pipeline, &PipelineConfig::whole_gradients>,
              "any pipeline at ZeRO 2 and 3: a rank sums its whole gradients over the micro-batches of a step, and "
              "reduces them once, as at stage 1; costs that stage's memory of gradients; `\"auto\"`: where they fit "
              "([the rule](schedule.md#whole-gradients))");
  ConfigRow& whole_gradients = table.rows.back();
  whole_gradients.standard = "`\"auto\"`";
  whole_gradients.write = [](const Config& config) -> std::optional<Json> {
    return config.pipeline.whole_gradients ? Json(*config.pipeline.whole_gradients) : Json("auto");
  };
}

void add_checkpoint(Table& table) {
  constexpr auto checkpoint = &Config::checkpoint;
  table.section = "checkpoint.";
  table.works("tag_validation",
              choice<TagValidation>(
                  {{"Ignore", TagValidation::kIgnore}, {"Warn", TagValidation::kWarn}, {"Fail", TagValidation::kFail}}),
              at<checkpoint, &CheckpointOptions::tag_validation>, "when ranks save under different tags");
  table.works("keep_last", integer(kKept), at<checkpoint, &CheckpointOptions::keep_last>,
              "ours: complete checkpoints that stay in the directory, the oldest others are removed; 0 keeps all");
  table.works("async_save", flag(), at<checkpoint, &CheckpointOptions::async_save>,
              "ours: training waits for a copy in host memory only ([checkpoint](checkpoint.md), \"In the "
              "background\"); that memory is taken at `initialize()`");
  table.works("verify", choice<Verify>({{"while_reading", Verify::kWhileReading}, {"full", Verify::kFirst}}),
              at<checkpoint, &CheckpointOptions::verify>,
              "ours: `\"full\"` checks everything that a load will read before it changes memory, at the "
              "price of reading twice");
  table.resolved("writer.decoupled", flag(), nullptr, "`false`", "another word for `async_save`");
  table.keys("checkpoint.writer");
  table.rows.push_back(
      resolved<Config>("checkpoint.load_universal", flag(), nullptr, "`false`",
                       "accepted, and says so: every checkpoint loads at any number of ranks and stage as it is"));
  table.keys("checkpoint");
}

/// `tensorboard` or `csv_monitor`.
void add_files(Table& table, const char* section, FileMonitorOptions MonitorOptions::*files, const char* doc) {
  const auto of = [files](auto member) {
    return [ files, member ](auto& config) -> auto& { return config.monitors.*files.*member; };
  };
  table.section = section;
  table.works("enabled", flag(), of(&FileMonitorOptions::enabled), doc);
  table.works("output_path", text(), of(&FileMonitorOptions::output_path),
              "a folder; `\"\"`: the one where the program runs");
  table.works("job_name", text(), of(&FileMonitorOptions::job_name), "the folder in it that has the files");
}

void add_monitors(Table& table) {
  constexpr auto monitors = &Config::monitors;
  constexpr auto wandb = &MonitorOptions::wandb;
  constexpr auto comet = &MonitorOptions::comet;
  add_files(
      table, "tensorboard.", &MonitorOptions::tensorboard,
      "losses, learning rates and a program's own events in TensorBoard's files ([observe](observe.md#monitors))");
  add_files(table, "csv_monitor.", &MonitorOptions::csv_monitor, "the same in CSV files, one for each name");
  table.section = "wandb.";
  table.works("enabled", flag(), at<monitors, wandb, &WandbOptions::enabled>,
              "the same to Weights & Biases, by the package `wandb`; in Python programs");
  table.works("group", text(), at<monitors, wandb, &WandbOptions::group>, "of runs, there");
  table.works("team", text(), at<monitors, wandb, &WandbOptions::team>, "wandb's `entity`");
  table.works("project", text(), at<monitors, wandb, &WandbOptions::project>, "of runs, there");
  table.section = "comet.";
  table.works("enabled", flag(), at<monitors, comet, &CometOptions::enabled>,
              "the same to Comet, by the package `comet_ml`; in Python programs");
  table.works("samples_log_interval", integer(kCount), at<monitors, comet, &CometOptions::samples_log_interval>,
              "so many samples at least from one value of an event to its next one");
  table.works("project", text(), at<monitors, comet, &CometOptions::project>, "of experiments, there");
  table.works("workspace", text(), at<monitors, comet, &CometOptions::workspace>, "of projects, there");
  table.works("api_key", text(), at<monitors, comet, &CometOptions::api_key>,
              "a secret: resolved_config.json leaves it out; better in `COMET_API_KEY`");
  table.rows.back().write = nullptr;
  table.works("experiment_name", text(), at<monitors, comet, &CometOptions::experiment_name>, "of the new one");
  table.works("experiment_key", text(), at<monitors, comet, &CometOptions::experiment_key>,
              "of an experiment that goes on");
  table.works("online", flag(), at<monitors, comet, &CometOptions::online>, "false: kept on this machine");
  table.works("mode", choice<std::string>({{"get", "get"}, {"create", "create"}, {"get_or_create", "get_or_create"}}),
              at<monitors, comet, &CometOptions::mode>, "whether an experiment goes on or begins");
}

/// Whether a layer's matrices are cut. What is no number is refused elsewhere.
bool cuts_layers(const Document& file, const Config& config) {
  const auto is_degree = [&](const char* key) {
    const Json* json = file.find(key);
    return json != nullptr && json->is_number() && json->get<double>() > 1;
  };
  return config.degrees.tensor > 1 || is_degree("tensor_parallel.autotp_size") ||
         is_degree("tensor_parallel.tp.tp_size") || is_degree("tensor_parallel.partition_config.tp_size");
}

/// The row where layers are cut; elsewhere the key is checked.
ConfigRow where_layers_are_cut(ConfigRow row, const Json& normal) {
  row.read = [read = row.read, path = row.path, normal](Document& file, Config& config) {
    if (cuts_layers(file, config))
      read(file, config);
    else
      (void)differs(file, path, normal);
  };
  return row;
}

ValueType<std::string> preset() {
  std::vector<std::pair<std::string, std::string>> names;
  for (const std::string& name : preset_names()) names.emplace_back(name, name);
  ValueType<std::string> type = choice<std::string>(names);
  type.write = [](const std::string& name) { return name.empty() ? Json() : Json(name); };
  return type;
}

ConfigRow partition_config() {
  const std::string path = "tensor_parallel.partition_config";
  return {.path = path,
          .type = "an object",
          .standard = "`null`",
          .doc = "rules of one's own, before `preset_model` ([tensor](tensor.md)); `tp_size` inside as `autotp_size`",
          .read =
              [path](Document& file, Config& config) {
                const Json* json = file.find(path);
                if (json == nullptr) return;
                try {
                  config.tensor.partition_config = partition_config_from(*json);
                } catch (const ConfigError& error) {
                  file.refuse(path, error.what(), error.code());
                }
              },
          .write = [](const Config& config) -> std::optional<Json> {
            const auto& rules = config.tensor.partition_config;
            return rules ? to_json(*rules) : Json();
          },
          .is_open = true};
}

void add_tensor(Table& table) {
  table.section = "tensor_parallel.";
  table.resolved(
      "autotp_size", integer(kCount), [](const Config& c) { return int64_t{c.tensor.autotp_size}; }, "`0`",
      "so many neighbouring ranks have slices of each layer's matrices ([tensor](tensor.md)); 0 and 1: one");
  table.works("preset_model", preset(), at<&Config::tensor, &TensorParallelOptions::preset_model>,
              "the rules of a family; without it those of the model's own type, or heuristics");
  table.rows.push_back(partition_config());
  table.resolved("tp.tp_size", integer(kCount), nullptr, "`1`", "another word for `autotp_size`");
  table.works("tp.tp_grain_size", integer(kPositive), at<&Config::tensor, &TensorParallelOptions::tp_grain_size>,
              "features and tokens are cut in steps of so many");
  table.works("sequence_parallel", flag(), at<&Config::tensor, &TensorParallelOptions::sequence_parallel>,
              "ours, Megatron's: norms, dropout and residuals between layers run on some tokens of each rank");
  table.works("tp_overlap_comm", flag(), at<&Config::tensor, &TensorParallelOptions::tp_overlap_comm>,
              "ranks add up large products by pieces, each while the next one is computed; not with "
              "`sequence_parallel`");
  table.keys("tensor_parallel", where_layers_are_cut);
}

void add_observe(Table& table) {
  constexpr auto observe = &Config::observe;
  constexpr auto comms = &ObserveOptions::comms_logger;
  constexpr auto timeline = &ObserveOptions::timeline;
  table.section = "";
  table.works("wall_clock_breakdown", flag(), at<observe, &ObserveOptions::wall_clock_breakdown>,
              "a line of the log for each window: milliseconds of forward, backward and step "
              "([observe](observe.md#times-of-a-step))");
  table.works("memory_breakdown", flag(), at<observe, &ObserveOptions::memory_breakdown>,
              "memory of rank 0 in that line");
  table.works("dump_state", flag(), at<observe, &ObserveOptions::dump_state>,
              "rank 0 logs the whole configuration at the beginning");
  table.section = "comms_logger.";
  table.works("enabled", flag(), at<observe, comms, &CommsLoggerOptions::enabled>,
              "count and time the calls of groups, by operation and size ([observe](observe.md#calls-of-groups))");
  table.works("verbose", flag(), at<observe, comms, &CommsLoggerOptions::verbose>, "a line of the log for each call");
  table.works("prof_all", flag(), at<observe, comms, &CommsLoggerOptions::prof_all>,
              "all operations; else those of `prof_ops`");
  table.works("debug", flag(), at<observe, comms, &CommsLoggerOptions::debug>,
              "those lines tell method, unit and group");
  table.works("prof_ops", texts(), at<observe, comms, &CommsLoggerOptions::prof_ops>,
              "`\"all_reduce\"`, `\"all_gather\"`, … ([comm](comm.md)); another name is refused");
  table.section = "trireme.timeline.";
  table.works("enabled", flag(), at<observe, timeline, &TimelineOptions::enabled>,
              "ours: record what each rank does when, for Perfetto ([observe](observe.md#timeline))");
  table.works("output_path", folder(), at<observe, timeline, &TimelineOptions::output_path>,
              "a folder, in which each rank has a file; `trireme timeline` joins them");
  table.works("start_step", integer(kPositive), at<observe, timeline, &TimelineOptions::start_step>,
              "the first optimizer step that is recorded; the first ever is 1");
  table.works("steps", integer(kCount), at<observe, timeline, &TimelineOptions::steps>, "so many steps; 0: to the end");
  table.works("operators", flag(), at<observe, timeline, &TimelineOptions::operators>, "with libtorch's operators");
  table.section = "trireme.";
  table.works("record", folder(), at<observe, &ObserveOptions::record>,
              "ours: rank 0 writes `metrics.jsonl` and `report.html` of the run there "
              "([observe](observe.md#a-programs-record))");
}

void add_flops_profiler(Table& table) {
  constexpr auto profiler = &Config::flops_profiler;
  table.section = "flops_profiler.";
  table.works("enabled", flag(), at<profiler, &FlopsProfilerConfig::enabled>,
              "the multiply-adds, times and parameters of each module in one step ([profiling](profiling.md)); refused "
              "by FSDP's and smp's engines");
  table.works("recompute_fwd_factor", number(kNonNegative), at<profiler, &FlopsProfilerConfig::recompute_fwd_factor>,
              "changes nothing: what backward computes again is counted");
  table.works("profile_step", integer(kCount), at<profiler, &FlopsProfilerConfig::profile_step>,
              "optimizer steps before the one that is profiled; the first one or two are slower");
  table.works("module_depth", integer(kDepth), at<profiler, &FlopsProfilerConfig::module_depth>,
              "of the modules whose sums are told; -1: each depth");
  table.works("top_modules", integer(kPositive), at<profiler, &FlopsProfilerConfig::top_modules>,
              "classes of modules that are named at each depth");
  table.works("detailed", flag(), at<profiler, &FlopsProfilerConfig::detailed>, "the tree of all modules, too");
  table.works("output_file", file_of_report(), at<profiler, &FlopsProfilerConfig::output_file>,
              "of rank 0; by default standard output, in C++ the log");
}

void add_rest(Table& table) {
  table.section = "";
  table.resolved(
      "sequence_parallel_size", integer(kPositive), [](const Config& c) { return int64_t{c.degrees.sequence}; }, "`1`",
      "so many neighbouring ranks share samples and have some of their tokens each ([sequence](sequence.md))");
  table.works("deterministic", flag(), at<&Config::pager, &PagerPolicy::deterministic>,
              "ours: the same weights at any number of ranks and any stage ([engine](engine.md))");
  table.works("steps_per_print", steps_or_never(), at<&Config::steps_per_print>,
              "an info line every so many steps, for a log sink ([base](base.md)); 0, `1e999`, `\"inf\"` and numbers "
              "beyond int64 are never");
  table.resolved("data_parallel_size", integer(kPositive), nullptr, "the ranks", "must be all data-parallel ranks");
  table.keys("rest");
  add_tensor(table);
  add_flops_profiler(table);
  table.section = "compile.";
  table.resolved("deepcompile", flag(), nullptr, "`false`", "with `passes` = `[\"autosp\"]` alone");
  table.resolved("passes", texts(), nullptr, "`null`",
                 "`[\"autosp\"]` is `sequence_parallel_size`, by default all ranks, and `trireme.recompute` of all "
                 "products; read with `deepcompile`");
  table.keys("sections");
}

}  // namespace

const std::vector<Option<Config>>& options() {
  static const std::vector<ConfigRow> all = [] {
    Table rows;
    add_top(rows);
    add_precision(rows);
    add_zero(rows);
    add_own(rows);
    add_pipeline(rows);
    add_checkpoint(rows);
    add_observe(rows);
    add_rest(rows);
    add_monitors(rows);
    return rows.rows;
  }();
  return all;
}

}  // namespace trireme
