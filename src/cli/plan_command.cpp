// `trireme plan`: what a run does on each axis, the slices of a model on the tensor axis, and pipelines' schedules,
// before anything runs.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/model_parameters.h"
#include "cli/pipeline_homes.h"
#include "cli/pipeline_schedule.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "cli/train_setup.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/config/source.h"
#include "trireme/config/torch_scheduler.h"
#include "trireme/models/language_model.h"
#include "trireme/parallel/plan.h"
#include "trireme/tensor/partition.h"

namespace trireme::cli {
namespace {

constexpr const char* kPlanFooter =
    "A row is a stage: 3 is the forward of micro-batch 3, 3' its backward, 3\" the gradients of its weights where the\n"
    "schedule computes them apart, a dot an idle stage.\n\n"
    "Examples:\n"
    "  trireme plan --config ds_config.json --model llama-130m --world 8\n"
    "  trireme plan --tp 4 --model llama-130m\n"
    "  trireme plan --homes 2 --model llama-130m\n"
    "  trireme plan --schedule 1f1b --stages 4 --micro-batches 8\n"
    "  trireme plan --schedule zb-h1 --stages 8 --micro-batches 24 --times 18.5,18.1,9.3,0.6 --svg zb-h1.svg\n"
    "  trireme plan --schedule interleaved --chunks 2 --stages 4 --micro-batches 8 --streams";

struct PlanFlags {
  std::string config;
  std::string model;
  std::optional<int> world;
  std::optional<int> rank;
  std::optional<int> tp;
  std::string preset;
  std::string partition_config;
  std::optional<int> homes;
  std::optional<int64_t> tokens;
  std::optional<double> memory_weight;
  ScheduleFlags schedule;
};

void declare(CLI::App& app, PlanFlags& flags) {
  app.add_option("--config", flags.config, "DeepSpeed JSON, or YAML of Accelerate: the plan of all axes of such a run")
      ->type_name("FILE")
      ->group("Run");
  app.add_option("--model", flags.model,
                 "with --config, --tp or --homes: built-in model, or a config.json in Hugging Face's form; with --tp "
                 "also a folder "
                 "of any family's, with safetensors")
      ->check(offered(model_names()))
      ->type_name("NAME|FILE|DIR")
      ->group("Run");
  add_whole(app, "--world", flags.world, "with --config: number of ranks (default: 1)", {.most = 100'000})
      ->group("Run");
  add_whole(app, "--rank", flags.rank, "with --config: whose plan it is (default: 0)", {.least = 0, .most = 99'999})
      ->group("Run");
  add_whole(app, "--tp", flags.tp, "ranks that share each layer: the slices of the --model's parameters, and why",
            {.most = 100'000})
      ->group("Tensor axis");
  app.add_option("--preset", flags.preset, "with --tp: the family whose rules hold (default: by the model's type)")
      ->type_name("NAME")
      ->group("Tensor axis");
  app.add_option("--partition-config", flags.partition_config,
                 "with --tp: JSON of DeepSpeed's tensor_parallel.partition_config, which stands before all other rules")
      ->type_name("FILE")
      ->group("Tensor axis");
  add_whole(app, "--homes", flags.homes, "stages of a step function (smp): which of the --model's layers each one has",
            {.most = 100'000})
      ->group("Step functions");
  add_whole(app, "--tokens", flags.tokens, "with --homes: of a sequence (default: 1024)", {.most = 1'000'000'000})
      ->group("Step functions");
  add_real(app, "--memory-weight", flags.memory_weight, "with --homes: of memory beside time, 0 to 1 (default: 0.8)",
           {.least = 0, .most = 1})
      ->group("Step functions");
  declare_schedule(app, flags.schedule);
  app.footer(kPlanFooter);
}

Config config_of(const PlanFlags& flags) {
  ConfigSource source = read_input([&] { return read_source(flags.config); });
  (void)take_torch_scheduler(source.options);
  (void)fill_in_autos(source.options, {});
  return config_from_source(source, flags.world.value_or(1));
}

/// `parameters` of `model` become the slices of the rank at `position` on the axis "tensor".
void cut(std::vector<ParameterSpec>& parameters, const std::string& model, const Config& config, int position) {
  const ModelToPartition of = model_to_partition(model);
  TensorParallelOptions rules = config.tensor;
  rules.tp_plan = of.tp_plan;
  const PartitionPlan plan = make_partition_plan(of.model, rules);
  for (ParameterSpec& spec : parameters) {
    const auto found = std::find_if(plan.parameters.begin(), plan.parameters.end(),
                                    [&](const PartitionedParameter& one) { return one.name == spec.name; });
    TRIREME_CHECK(found != plan.parameters.end(), "no slices of ", spec.name);
    const TensorPart& part = found->parts[position];
    if (part.dim < 0) continue;
    spec.part = part;
    spec.shape = local_shape(part);
  }
}

/// The plan of a run, and the schedule of its pipelines.
std::string text_of_run(const PlanFlags& flags) {
  if (flags.schedule.has_any())
    throw ConfigError(
        "--config: the configuration says the schedule; leave --schedule, --stages, --micro-batches and --chunks out");
  const int world = flags.world.value_or(1), rank = flags.rank.value_or(0);
  if (rank >= world)
    throw ConfigError(str("--rank ", rank, ": there are ", world, " ranks; give one below, or --world"));
  const Config config = config_of(flags);
  std::vector<ParameterSpec> parameters;
  if (!flags.model.empty())
    parameters = parameters_of(read_input([&] { return model_options(flags.model); }), config.precision.weight_dtype);
  const Topology topology = topology_of(config.degrees, world);
  if (config.degrees.tensor > 1 && !parameters.empty())
    cut(parameters, flags.model, config, topology.position_of(rank, "tensor"));
  const std::string schedule = schedule_text(config, flags.schedule);
  ParallelOptions options = parallel_options(config);
  options.takes_sizes_from_inputs = true;  // as the program will say, of which nothing is known here
  return plan_text(make_plan(topology, rank, options, parameters)) + (schedule.empty() ? "" : "\n" + schedule);
}

/// The slices of a model's parameters.
std::string text_of_tensor_axis(const PlanFlags& flags) {
  for (const auto& [name, is_given] : {std::pair{"--config", !flags.config.empty()},
                                       {"--schedule", !flags.schedule.name.empty()},
                                       {"--stages", flags.schedule.stages.has_value()},
                                       {"--micro-batches", flags.schedule.micro_batches.has_value()},
                                       {"--world", flags.world.has_value()},
                                       {"--rank", flags.rank.has_value()}})
    if (is_given) throw ConfigError(str(name, " is not for --tp, which plans the tensor axis alone; leave one out"));
  if (flags.model.empty()) throw ConfigError("--model is required with --tp (see trireme plan --help)");
  const ModelToPartition of = model_to_partition(flags.model);
  TensorParallelOptions options{.autotp_size = *flags.tp, .preset_model = flags.preset, .tp_plan = of.tp_plan};
  if (!flags.partition_config.empty())
    options.partition_config = read_input([&] { return partition_config_from(read_json(flags.partition_config)); });
  return partition_text(make_partition_plan(of.model, options));
}

/// The stages of a model that a step function trains.
std::string text_of_homes(const PlanFlags& flags) {
  for (const auto& [name, is_given] : {std::pair{"--config", !flags.config.empty()},
                                       {"--tp", flags.tp.has_value()},
                                       {"--schedule, --stages, --micro-batches or --chunks", flags.schedule.has_any()},
                                       {"--world", flags.world.has_value()},
                                       {"--rank", flags.rank.has_value()}})
    if (is_given) throw ConfigError(str(name, " is not for --homes, which places layers alone; leave one out"));
  if (flags.model.empty()) throw ConfigError("--model is required with --homes (see trireme plan --help)");
  HomesFlags homes{.stages = *flags.homes, .model = flags.model};
  homes.tokens = flags.tokens.value_or(homes.tokens);
  homes.memory_weight = flags.memory_weight.value_or(homes.memory_weight);
  return homes_text(homes);
}

/// A schedule alone.
std::string text_of_schedule(const PlanFlags& flags) {
  const ScheduleFlags& schedule = flags.schedule;
  const std::pair<const char*, bool> needed[] = {{"--schedule", !schedule.name.empty()},
                                                 {"--stages", schedule.stages.has_value()},
                                                 {"--micro-batches", schedule.micro_batches.has_value()}};
  for (const auto& [name, is_given] : needed)
    if (!is_given)
      throw ConfigError(str(name, " is missing: for a pipeline's schedule give --schedule, --stages and ",
                            "--micro-batches, for a run --config FILE, for the slices of a model --tp N and --model ",
                            "(see trireme plan --help)"));
  for (const auto& [name, is_given] : {std::pair{"--model", !flags.model.empty()},
                                       {"--world", flags.world.has_value()},
                                       {"--rank", flags.rank.has_value()}})
    if (is_given) throw ConfigError(str(name, " is for a run of a configuration; give --config, or leave it out"));
  return schedule_text(schedule);
}

int run_plan(const PlanFlags& flags) {
  for (const auto& [name, is_given] :
       {std::pair{"--preset", !flags.preset.empty()}, {"--partition-config", !flags.partition_config.empty()}})
    if (is_given && !flags.tp) throw ConfigError(str(name, " is for the tensor axis; give --tp, or leave it out"));
  for (const auto& [name, is_given] :
       {std::pair{"--tokens", flags.tokens.has_value()}, {"--memory-weight", flags.memory_weight.has_value()}})
    if (is_given && !flags.homes)
      throw ConfigError(str(name, " is for stages of a step function; give --homes, or leave it out"));
  if (flags.homes)
    print_result(text_of_homes(flags));
  else if (flags.tp)
    print_result(text_of_tensor_axis(flags));
  else
    print_result(flags.config.empty() ? text_of_schedule(flags) : text_of_run(flags));
  return kDone;
}

}  // namespace

Action add_plan(CLI::App& app) {
  const auto flags = std::make_shared<PlanFlags>();
  declare(app, *flags);
  return [flags](const Invocation&) { return run_plan(*flags); };
}

}  // namespace trireme::cli
