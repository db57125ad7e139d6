#include <algorithm>
#include <cmath>

#include "config/options.h"
#include "config/typed_section.h"
#include "trireme/config/torch_scheduler.h"

namespace trireme {
namespace {

using ScheduleRow = Option<LrScheduleOptions>;
using Types = std::vector<std::string>;

constexpr LrScheduleKind kScheduleKinds[] = {
    LrScheduleKind::kWarmup,      LrScheduleKind::kWarmupDecay, LrScheduleKind::kWarmupCosine,
    LrScheduleKind::kLrRangeTest, LrScheduleKind::kOneCycle,    LrScheduleKind::kConstant,
    LrScheduleKind::kLinear,      LrScheduleKind::kCosine,      LrScheduleKind::kWsd};
const Types kTorchSchedulers = {"LambdaLR",         "MultiplicativeLR",  "StepLR",
                                "MultiStepLR",      "ConstantLR",        "LinearLR",
                                "ExponentialLR",    "CosineAnnealingLR", "CosineAnnealingWarmRestarts",
                                "ChainedScheduler", "SequentialLR",      "ReduceLROnPlateau",
                                "CyclicLR",         "OneCycleLR",        "PolynomialLR"};

Json per_group_json(const PerGroup& each) { return each.values.size() == 1 ? Json(each.values[0]) : Json(each.values); }

/// A number, or a list with one for each parameter group.
ValueType<PerGroup> per_group() {
  const char* words = "a finite number >= 0, or a list of them, one for each parameter group";
  const auto read = [words](const Document& file, const std::string& path) -> PerGroup {
    const Json& json = *file.find(path);
    if (!json.is_array()) return file.number_or(path, 0, kNonNegative);
    const auto fits = [](const Json& one) { return one.is_number() && one >= 0.0 && std::isfinite(one.get<double>()); };
    if (json.empty() || !std::all_of(json.begin(), json.end(), fits)) file.fail(path, words);
    return json.get<std::vector<double>>();
  };
  return {.words = words, .read = read, .write = per_group_json};
}

ScheduleRow required(ScheduleRow row, const char* fix) {
  row.standard = "required";
  row.read = [read = row.read, path = row.path, fix](Document& file, LrScheduleOptions& options) {
    if (!file.has(path)) file.refuse(path, str("`", file.path_of(path), "` is missing", fix));
    read(file, options);
  };
  return row;
}

/// "auto" is what integrations write for "the optimizer's lr".
ScheduleRow warmup_max_lr(const char* standard) {
  const char* path = "scheduler.params.warmup_max_lr";
  ScheduleRow row = works<LrScheduleOptions>(path, per_group(), at<&LrScheduleOptions::warmup_max_lr>,
                                             "`\"auto\"` is the optimizer's `lr`");
  row.standard = standard;
  row.read = [path, read = row.read](Document& file, LrScheduleOptions& options) {
    if (options.kind == LrScheduleKind::kWarmupDecay && !file.is_auto(path)) options.warmup_max_lr = 0.001;
    read(file, options);
  };
  row.write = [write = row.write](const LrScheduleOptions& options) {
    return options.warmup_max_lr == LrScheduleOptions::kOptimizerLr ? Json("auto") : write(options);
  };
  return row;
}

/// Schedulers start with the run; their position is part of a checkpoint.
ScheduleRow last_batch_iteration() {
  const char* path = "scheduler.params.last_batch_iteration";
  return {.path = path,
          .effect = Effect::kRefused,
          .type = "an integer",
          .standard = "`-1`",
          .doc = "a checkpoint holds the position",
          .read = [path](Document& file, LrScheduleOptions&) {
            if (file.integer_or(path, -1, {}) != -1)
              file.not_there_yet(path, "a checkpoint holds the position; remove it");
          }};
}

std::vector<ScheduleRow> schedule_rows() {
  using Options = LrScheduleOptions;
  constexpr auto range_test = &Options::lr_range_test;
  constexpr auto cycle = &Options::one_cycle;
  const Types warmups = {"WarmupLR", "WarmupDecayLR"}, cosine = {"WarmupCosineLR"}, own = {"linear", "cosine", "wsd"};
  const Types all_warmups = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
  const Types warm = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "linear", "cosine", "wsd"};
  const Types ending = {"WarmupDecayLR", "WarmupCosineLR", "linear", "cosine", "wsd"};
  const Types one_cycle = {"OneCycle"}, test = {"LRRangeTest"};
  std::vector<ScheduleRow> rows;
  const auto add = [&](const Types& types, ScheduleRow row) {
    row.types = types;
    rows.push_back(std::move(row));
  };
  const auto row = [](const char* key, auto type, auto member, const char* doc) {
    return works<Options>(str("scheduler.params.", key), type, member, doc);
  };
  const auto log_or_linear = choice<WarmupKind>({{"log", WarmupKind::kLog}, {"linear", WarmupKind::kLinear}});
  constexpr const char* kLr = "; set it to a learning rate, a finite number >= 0";
  add(warm, row("warmup_num_steps", integer(kCount), at<&Options::warmup_num_steps>, "steps of the warm-up"));
  add(all_warmups, row("warmup_type", log_or_linear, at<&Options::warmup_type>, "form of the warm-up"));
  add(ending,
      required(row("total_num_steps", integer(kPositive), at<&Options::total_num_steps>, "steps of the whole run"),
               ", or \"auto\", which only `trireme train` fills in; set it to the number of optimizer steps of "
               "the whole run"));
  add(cosine, row("warmup_min_ratio", number(kNonNegative), at<&Options::warmup_min_ratio>,
                  "first learning rate over the optimizer's"));
  add(cosine, row("cos_min_ratio", number(kNonNegative), at<&Options::cos_min_ratio>,
                  "last learning rate over the optimizer's"));
  add(warmups, row("warmup_min_lr", per_group(), at<&Options::warmup_min_lr>, "where the warm-up begins"));
  add({"WarmupLR"}, warmup_max_lr("the optimizer's"));
  add({"WarmupDecayLR"}, warmup_max_lr("`0.001`"));
  add(own, row("min_ratio", number(kNonNegative), at<&Options::min_ratio>, "last learning rate over the optimizer's"));
  add({"wsd"}, row("decay_num_steps", integer(kCount), at<&Options::decay_num_steps>, "the last steps; required"));
  add(test, row("lr_range_test_min_lr", per_group(), at<range_test, &LrRangeTestOptions::min_lr>, "where it begins"));
  add(test, row("lr_range_test_step_size", integer(kPositive), at<range_test, &LrRangeTestOptions::step_size>,
                "steps of an interval"));
  add(test, row("lr_range_test_step_rate", number(kNonNegative), at<range_test, &LrRangeTestOptions::step_rate>,
                "growth over an interval"));
  add(test, row("lr_range_test_staircase", flag(), at<range_test, &LrRangeTestOptions::staircase>,
                "constant within an interval"));
  add(one_cycle,
      required(row("cycle_min_lr", per_group(), at<cycle, &OneCycleOptions::cycle_min_lr>, "ends of the cycle"), kLr));
  add(one_cycle,
      required(row("cycle_max_lr", per_group(), at<cycle, &OneCycleOptions::cycle_max_lr>, "top of the cycle"), kLr));
  add(one_cycle,
      row("decay_lr_rate", number(kNonNegative), at<cycle, &OneCycleOptions::decay_lr_rate>, "after the cycle"));
  add(one_cycle, row("cycle_first_step_size", integer(kPositive), at<cycle, &OneCycleOptions::cycle_first_step_size>,
                     "steps of the first half"));
  add(one_cycle, row("cycle_second_step_size", integer(kCount), at<cycle, &OneCycleOptions::cycle_second_step_size>,
                     "of the second; by default as the first; 0: the cycle ends at its top"));
  add(one_cycle, row("cycle_first_stair_count", integer(kCount), at<cycle, &OneCycleOptions::cycle_first_stair_count>,
                     "stairs of the first half"));
  add(one_cycle, row("cycle_second_stair_count", integer(kCount), at<cycle, &OneCycleOptions::cycle_second_stair_count>,
                     "of the second; by default as the first"));
  add(one_cycle, row("decay_step_size", integer(kCount), at<cycle, &OneCycleOptions::decay_step_size>,
                     "steps of an interval of decay; 0: no decay"));
  add(one_cycle,
      row("cycle_momentum", flag(), at<cycle, &OneCycleOptions::cycle_momentum>, "momentum goes the other way"));
  add(one_cycle, row("cycle_min_mom", per_group(), at<cycle, &OneCycleOptions::cycle_min_mom>, "momentum at the top"));
  add(one_cycle, row("cycle_max_mom", per_group(), at<cycle, &OneCycleOptions::cycle_max_mom>, "momentum at the ends"));
  add(one_cycle,
      row("decay_mom_rate", number(kNonNegative), at<cycle, &OneCycleOptions::decay_mom_rate>, "after the cycle"));
  add({}, last_batch_iteration());
  return rows;
}

/// Parameters that do not fit together: the schedule itself refuses them.
void check_together(Document& file, const LrScheduleOptions& options) {
  const OneCycleOptions& cycle = options.one_cycle;
  const PerGroup* lists[] = {&options.warmup_min_lr, &options.warmup_max_lr, &options.lr_range_test.min_lr,
                             &cycle.cycle_min_lr,    &cycle.cycle_max_lr,    &cycle.cycle_min_mom,
                             &cycle.cycle_max_mom};
  size_t groups = 1;  // how many there are is not known yet
  for (const PerGroup* list : lists) groups = std::max(groups, list->values.size());
  try {
    (void)LrSchedule(options, std::vector<double>(groups, 0.0));
  } catch (const ConfigError& error) {
    file.refuse("scheduler.params", error.what());
  }
  // As in DeepSpeed, which warns too: its learning rate falls to 0 at the end of the warm-up.
  if (options.kind == LrScheduleKind::kWarmupDecay && options.total_num_steps < options.warmup_num_steps)
    file.warnings.push_back(str(file.origin(), ": `scheduler.params.total_num_steps` ", options.total_num_steps,
                                " is less than `warmup_num_steps` ", options.warmup_num_steps,
                                ": the learning rate is 0 after the warm-up; set it to the steps of the whole run"));
}

}  // namespace

std::optional<Json> take_torch_scheduler(Json& config) {
  const auto section = config.is_object() ? config.find("scheduler") : config.end();
  if (section == config.end() || !section->is_object()) return std::nullopt;
  const Json type = section->value("type", Json());
  // As Python's initialize(): names of torch's classes, letter by letter.
  if (!type.is_string() ||
      std::find(kTorchSchedulers.begin(), kTorchSchedulers.end(), type.get<std::string>()) == kTorchSchedulers.end())
    return std::nullopt;
  Json taken = *section;
  config.erase(section);
  return taken;
}

const std::vector<ScheduleRow>& scheduler_options() {
  static const std::vector<ScheduleRow> rows = schedule_rows();
  return rows;
}

void read_scheduler(Document& file, Config& config, std::vector<KnownKey>& known) {
  TypeNames names{.not_there_yet = kTorchSchedulers,
                  .others = ", or in Python a scheduler of torch.optim.lr_scheduler",
                  .instead = "initialize() in Python makes it of torch.optim.lr_scheduler; in C++ "};
  for (const LrScheduleKind kind : kScheduleKinds) names.supported.emplace_back(name_of(kind));
  const auto type = read_type(file, "scheduler", names, known);
  if (!type) return;
  LrScheduleOptions& options = config.scheduler.emplace();
  for (const LrScheduleKind kind : kScheduleKinds)
    if (*type == name_of(kind)) options.kind = kind;
  const auto rows = rows_of(scheduler_options(), *type);
  add_keys(rows, known);
  read_rows(rows, file, options);
  if (!file.is_mistaken({"scheduler"})) file.attempt([&] { check_together(file, options); });
}

Json scheduler_json(const LrScheduleOptions& options) {
  return typed_json("scheduler", scheduler_options(), name_of(options.kind), options);
}

}  // namespace trireme
