// `trireme plan`: what a run does on each axis, the slices of a model on the tensor axis, and pipelines' schedules,
// before anything runs.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/model_parameters.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "cli/train_setup.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/json.h"
#include "trireme/config/source.h"
#include "trireme/config/torch_scheduler.h"
#include "trireme/models/language_model.h"
#include "trireme/parallel/plan.h"
#include "trireme/schedule/schedule.h"
#include "trireme/schedule/simulate.h"
#include "trireme/tensor/partition.h"

namespace trireme::cli {
namespace {

constexpr const char* kPlanFooter =
    "A row is a stage: 3 is the forward of micro-batch 3, 3' its backward, 3\" the gradients of its weights where the\n"
    "schedule computes them apart, a dot an idle stage.\n\n"
    "Examples:\n"
    "  trireme plan --config ds_config.json --model llama-130m --world 8\n"
    "  trireme plan --tp 4 --model llama-130m\n"
    "  trireme plan --schedule 1f1b --stages 4 --micro-batches 8\n"
    "  trireme plan --schedule zb-h1 --stages 8 --micro-batches 24 --times 18.5,18.1,9.3,0.6 --svg zb-h1.svg\n"
    "  trireme plan --schedule interleaved --chunks 2 --stages 4 --micro-batches 8 --streams";

constexpr const char* kInterleaved = "interleaved";

struct PlanFlags {
  std::string config;
  std::string model;
  std::optional<int> world;
  std::optional<int> rank;
  std::optional<int> tp;
  std::string preset;
  std::string partition_config;
  std::string schedule;
  std::optional<int> stages;
  std::optional<int> micro_batches;
  std::optional<int> chunks;
  std::string times = "1,1,1,0";
  std::string svg;
  bool streams = false;
};

/// Nothing where `text` is not "F,B,W,COMM": three numbers above 0, and one of at least 0.
std::optional<pipeline::PartTimes> times_of(const std::string& text) {
  pipeline::PartTimes times;
  const char *begin = text.data(), *const end = text.data() + text.size();
  for (double* time : {&times.forward, &times.backward_input, &times.backward_weight, &times.message}) {
    const bool is_last = time == &times.message;
    const auto [behind, error] = std::from_chars(begin, end, *time, std::chars_format::general);
    const bool is_time = error == std::errc() && *time <= 1e12 && (is_last ? *time >= 0 : *time > 0);
    if (!is_time || (is_last ? behind != end : behind == end || *behind != ',')) return std::nullopt;
    begin = behind + 1;
  }
  return times;
}

void declare(CLI::App& app, PlanFlags& flags) {
  app.add_option("--config", flags.config, "DeepSpeed JSON, or YAML of Accelerate: the plan of all axes of such a run")
      ->type_name("FILE")
      ->group("Run");
  app.add_option(
         "--model", flags.model,
         "with --config or --tp: built-in model, or a config.json in Hugging Face's form; with --tp also a folder "
         "of any family's, with safetensors")
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
  app.add_option("--schedule", flags.schedule, "1f1b, inference, gpipe, interleaved, zb-h1, zb-v or dualpipe-v")
      ->check(one_of(pipeline::schedule_names()))
      ->type_name("NAME")
      ->group("Schedule");
  add_whole(app, "--stages", flags.stages, "parts of the model that run at the same time", {.most = 100'000})
      ->group("Schedule");
  add_whole(app, "--micro-batches", flags.micro_batches, "of one optimizer step", {.most = 100'000})->group("Schedule");
  add_whole(app, "--chunks", flags.chunks, "parts of the model on each stage, of interleaved (default: 2)",
            {.most = 100'000})
      ->group("Schedule");
  app.add_option("--times", flags.times,
                 "of one part and micro-batch: forward, backward of the inputs and of the weights, message")
      ->check(CLI::Validator(
          [](const std::string& text) {
            return times_of(text)
                       ? ""
                       : str("'", text,
                             "' is not F,B,W,COMM: three numbers above 0 and one of at least 0, such as 1,1,1,0.1");
          },
          ""))
      ->capture_default_str()
      ->type_name("F,B,W,COMM")
      ->group("Times");
  app.add_flag("--streams", flags.streams, "the instructions of each stage in place of the timeline")->group("Output");
  app.add_option("--svg", flags.svg, "writes the timeline as a drawing, too")->type_name("FILE")->group("Output");
  app.footer(kPlanFooter);
}

/// The largest product of stages, micro-batches and chunks: a larger plan takes minutes and gigabytes.
constexpr int64_t kMostOfPlan = 1'000'000;

pipeline::Schedule schedule_of(const PlanFlags& flags) {
  const std::pair<const char*, bool> needed[] = {{"--schedule", !flags.schedule.empty()},
                                                 {"--stages", flags.stages.has_value()},
                                                 {"--micro-batches", flags.micro_batches.has_value()}};
  for (const auto& [name, is_given] : needed)
    if (!is_given)
      throw ConfigError(str(name, " is missing: for a pipeline's schedule give --schedule, --stages and ",
                            "--micro-batches, for a run --config FILE, for the slices of a model --tp N and --model ",
                            "(see trireme plan --help)"));
  for (const auto& [name, is_given] : {std::pair{"--model", !flags.model.empty()},
                                       {"--world", flags.world.has_value()},
                                       {"--rank", flags.rank.has_value()}})
    if (is_given) throw ConfigError(str(name, " is for a run of a configuration; give --config, or leave it out"));
  if (flags.chunks && flags.schedule != kInterleaved)
    throw ConfigError(str("--chunks ", *flags.chunks, ": the schedule '", flags.schedule,
                          "' has a fixed number of parts per stage; leave --chunks out, or give --schedule ",
                          kInterleaved));
  const int64_t product = int64_t{*flags.stages} * *flags.micro_batches * flags.chunks.value_or(1);
  if (product > kMostOfPlan)
    throw ConfigError(str("--stages ", *flags.stages, " --micro-batches ", *flags.micro_batches,
                          flags.chunks ? str(" --chunks ", *flags.chunks) : "", ": their product ", product,
                          " is above ", kMostOfPlan, "; give fewer: the middle of a schedule repeats itself"));
  return pipeline::make_schedule(flags.schedule, *flags.stages, *flags.micro_batches, flags.chunks.value_or(2));
}

std::string title_of(const pipeline::Schedule& schedule) {
  return str(schedule.name, ": ", schedule.stages, schedule.stages == 1 ? " stage, " : " stages, ",
             schedule.chunks > 1 ? str(schedule.chunks, " parts on each, ") : "", schedule.micro_batches,
             schedule.micro_batches == 1 ? " micro-batch" : " micro-batches");
}

std::string streams_of(const pipeline::Schedule& schedule) {
  std::string text;
  for (int stage = 0; stage < schedule.stages; ++stage) {
    text += str("stage ", stage, '\n');
    const auto& stream = schedule.streams[stage];
    for (size_t step = 0; step < stream.size(); ++step) {
      text += str("  step ", step, ':');
      for (const pipeline::Instruction& instruction : stream[step]) text += str(' ', to_text(instruction));
      text += '\n';
    }
  }
  return text;
}

// Forwards of `inference` have no backward that they wait for.
bool has_backward(const pipeline::Timeline& timeline) {
  return std::any_of(timeline.slots[0].begin(), timeline.slots[0].end(),
                     [](const pipeline::Slot& slot) { return slot.instruction.kind != pipeline::Kind::kForward; });
}

std::string summary_of(const pipeline::Schedule& schedule, const pipeline::Timeline& timeline) {
  std::string text = formatted("bubble share  {:.2f} % of {:.6g} on each stage\nbuffers      ",
                               100 * timeline.bubble_share, timeline.makespan);
  for (const auto& of_chunks : schedule.buffers)
    text += str(' ', std::accumulate(of_chunks.begin(), of_chunks.end(), 0));
  text += " on the stages, each for the activations of one part and micro-batch\n";
  if (!has_backward(timeline)) return text;
  text += "activations  ";
  for (const int peak : timeline.peak_activations) text += str(' ', peak);
  return text + " at most, of one part and micro-batch each\n";
}

std::string text_of(const pipeline::Schedule& schedule, const PlanFlags& flags) {
  const auto times = *times_of(flags.times);
  const auto timeline = pipeline::simulate(schedule, times);
  const std::string title = title_of(schedule);
  if (!flags.svg.empty()) write_file_atomically(posix_file_system(), flags.svg, pipeline::to_svg(timeline, title));
  // Where times are very unlike, a short one gets no column.
  const double column =
      std::max(std::min({times.forward, times.backward_input, times.backward_weight}), timeline.makespan / 2000);
  return flags.streams ? str(title, "\n\n", streams_of(schedule))
                       : str(title, "; a column is ", column, "\n\n", to_text(timeline, column), "\n",
                             summary_of(schedule, timeline));
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
  if (!flags.schedule.empty() || flags.stages || flags.micro_batches || flags.chunks)
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
  std::string text = plan_text(make_plan(topology, rank, parallel_options(config), parameters));
  if (config.degrees.pipe == 1) return text;
  const auto schedule = pipeline::make_schedule(config.pipeline.schedule, config.degrees.pipe,
                                                static_cast<int>(config.batch.gradient_accumulation_steps),
                                                static_cast<int>(config.pipeline.chunks));
  return str(text, "\n", text_of(schedule, flags));
}

/// The slices of a model's parameters.
std::string text_of_tensor_axis(const PlanFlags& flags) {
  for (const auto& [name, is_given] : {std::pair{"--config", !flags.config.empty()},
                                       {"--schedule", !flags.schedule.empty()},
                                       {"--stages", flags.stages.has_value()},
                                       {"--micro-batches", flags.micro_batches.has_value()},
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

int run_plan(const PlanFlags& flags) {
  for (const auto& [name, is_given] :
       {std::pair{"--preset", !flags.preset.empty()}, {"--partition-config", !flags.partition_config.empty()}})
    if (is_given && !flags.tp) throw ConfigError(str(name, " is for the tensor axis; give --tp, or leave it out"));
  if (flags.tp)
    print_result(text_of_tensor_axis(flags));
  else
    print_result(flags.config.empty() ? text_of(schedule_of(flags), flags) : text_of_run(flags));
  return kDone;
}

}  // namespace

Action add_plan(CLI::App& app) {
  const auto flags = std::make_shared<PlanFlags>();
  declare(app, *flags);
  return [flags](const Invocation&) { return run_plan(*flags); };
}

}  // namespace trireme::cli
