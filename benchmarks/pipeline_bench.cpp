// Step time of a Llama in two pipeline stages, two ranks with one thread each, against one rank with one thread,
// interleaved in one run.
#include <ATen/Parallel.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>

#include "benchmarks/flags.h"
#include "benchmarks/own_ranks.h"
#include "trireme/comm/world.h"
#include "trireme/models/language_model.h"
#include "trireme/pipeline/pipeline_engine.h"
#include "trireme/schedule/simulate.h"

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string model = "llama-130m";
  int micro_batches = 8;
  int64_t length = 128;
  std::vector<std::string> schedules = {"1f1b", "zb-h1"};
  int zero = 1;
  int rounds = 3;
  int steps = 3;
  std::string run = {};  // of a rank: the schedule
  bool json = false;     // one run of the first schedule in two stages, for drivers that compare systems
};

constexpr const char* kAbout =
    "step time of a Llama in two pipeline stages, two ranks with one thread each, against one rank with one thread,\n"
    "interleaved in one run.\n\n"
    "A micro-batch is one sample. \"bound\" is the speed-up of the simulated schedule whose parts take equal times, "
    "two\n"
    "stages without bubbles being 2; \"of bound\" is the measured one divided by it. The last line: what the engine "
    "adds\n"
    "to an instruction, messages included, in stages that compute nothing.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const auto smoke = [&] {
    arguments.model = "llama-3m";
    arguments.length = 16;
    arguments.rounds = arguments.steps = 1;
  };
  benchmarks::Flags("pipeline_bench", kAbout)
      .text("--model", arguments.model, "that is trained")
      .whole("--micro-batches", arguments.micro_batches, "of a step")
      .whole("--length", arguments.length, "tokens of a sample")
      .list("--schedules", arguments.schedules, {}, "of two stages (trireme plan names them)")
      .whole("--zero", arguments.zero, "stage of ZeRO", 0)
      .whole("--rounds", arguments.rounds, "of all systems in turns")
      .whole("--steps", arguments.steps, "of a round")
      .on("--json", arguments.json, "one run of the first schedule in two stages, for drivers that compare systems")
      .act("--smoke", smoke, "a small model, once: does it work?")
      .of_ranks("--run", arguments.run)
      .parse(argc, argv);
  return arguments;
}

std::vector<trireme::LayerSpec> layers_of(const trireme::ModelOptions& options, int64_t length) {
  std::vector<trireme::LayerSpec> specs;
  for (const trireme::ModelLayer& layer : trireme::language_model_layers(options, length)) {
    trireme::LayerSpec& spec = specs.emplace_back();
    spec.type = layer.type;
    spec.make = layer.make;
    spec.forward = [layer](torch::nn::Module* module, const c10::IValue& value) {
      return trireme::run_layer(layer, *module, value);
    };
    spec.name = layer.name;
    spec.tie = layer.is_tied ? "embedding" : "";
    spec.cost = static_cast<double>(layer.multiply_adds);
  }
  return specs;
}

// A step of two stages of one multiplication each, against the same multiplications and backward passes of one stage
// without an engine.
void run_overhead() {
  constexpr int kMicroBatches = 64, kRepeats = 20;
  trireme::World world = trireme::init();
  trireme::LayerSpec product = trireme::layer<torch::nn::LinearImpl>(1, 1);
  trireme::PipelineModuleOptions cut;
  cut.stages = world.group->size();
  cut.partition_method = "uniform";
  cut.loss = [](const c10::IValue& output, const c10::IValue&) { return output.toTensor().sum(); };
  trireme::PipelineModule module({product, product}, cut);
  trireme::Config config = trireme::default_config(world.group->size(), {.pipe = cut.stages});
  config.optimizer = {.kind = trireme::OptimizerKind::kAdamW};
  config.batch = {.train_batch_size = kMicroBatches,
                  .train_micro_batch_size_per_gpu = 1,
                  .gradient_accumulation_steps = kMicroBatches};
  auto engine = trireme::initialize(world, module, {.config = config});
  const at::Tensor input = at::ones({1, 1});
  const auto batches = [&] { return std::optional(trireme::MicroBatch{input, input}); };
  (void)engine.train_batch(batches);
  const int64_t before = engine.runner().counters().instructions;
  double with_engine = 1e9, without = 1e9;
  for (int i = 0; i < kRepeats; ++i) {
    world.group->barrier();
    const auto start = Clock::now();
    (void)engine.train_batch(batches);
    with_engine = std::min(with_engine, std::chrono::duration<double>(Clock::now() - start).count());
  }
  const double instructions = static_cast<double>(engine.runner().counters().instructions - before) / kRepeats;
  torch::nn::Linear alone(1, 1);
  for (int i = 0; i < kRepeats; ++i) {
    const auto start = Clock::now();
    for (int micro = 0; micro < kMicroBatches; ++micro)
      alone->forward(input.detach().clone().requires_grad_()).backward(input);
    without = std::min(without, std::chrono::duration<double>(Clock::now() - start).count());
  }
  if (world.group->rank() == 0)
    std::puts(Json{{"seconds", with_engine}, {"without", without}, {"instructions", instructions}}.dump().c_str());
}

void run_rank(const Arguments& arguments) {
  at::set_num_threads(1);
  if (arguments.run == "overhead") return run_overhead();
  trireme::World world = trireme::init();
  const trireme::ModelOptions options = trireme::model_options(arguments.model);
  trireme::PipelineModuleOptions cut;
  cut.stages = world.group->size();
  cut.schedule = arguments.run;
  cut.seed_layers = true;
  cut.partition_method = "best";
  cut.loss = [](const c10::IValue& logits, const c10::IValue& labels) {
    return at::cross_entropy_loss(logits.toTensor().flatten(0, 1).to(at::kFloat), labels.toTensor().flatten());
  };
  trireme::PipelineModule module(layers_of(options, arguments.length), cut);
  trireme::Config config = trireme::default_config(world.group->size(), {.pipe = cut.stages});
  config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = 3e-4, .weight_decay = 0.01};
  config.gradient_clipping = 1;
  config.pager.stage = arguments.zero;
  config.batch = {.train_batch_size = arguments.micro_batches,
                  .train_micro_batch_size_per_gpu = 1,
                  .gradient_accumulation_steps = arguments.micro_batches};
  auto engine = trireme::initialize(world, module, {.config = config});
  const at::Tensor tokens = at::randint(trireme::vocab_size(options), {1, arguments.length + 1}, at::kLong);
  const auto batches = [&] {
    return std::optional(trireme::MicroBatch{tokens.narrow(1, 0, arguments.length).contiguous(),
                                             tokens.narrow(1, 1, arguments.length).contiguous()});
  };
  (void)engine.train_batch(batches);
  Json seconds = Json::array();
  for (int step = 0; step < arguments.steps; ++step) {
    world.group->barrier();
    const auto start = Clock::now();
    (void)engine.train_batch(batches);
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  if (world.group->rank() == 0) std::puts(Json{{"seconds", seconds}}.dump().c_str());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  if (benchmarks::is_own_rank()) {
    run_rank(arguments);
    return 0;
  }
  const auto run = [&](const std::string& schedule, int ranks) {
    return benchmarks::run_own_ranks(
        {.ranks = ranks,
         .program = argv[0],
         .flags = {"--run", schedule, "--model", arguments.model, "--micro-batches",
                   std::to_string(arguments.micro_batches), "--length", std::to_string(arguments.length), "--zero",
                   std::to_string(arguments.zero), "--steps", std::to_string(arguments.steps)}});
  };
  if (arguments.json) {
    std::puts(run(arguments.schedules.front(), 2).dump().c_str());
    return 0;
  }
  std::vector<std::pair<std::string, int>> systems = {{"1f1b", 1}};
  for (const std::string& schedule : arguments.schedules) systems.emplace_back(schedule, 2);
  std::vector<std::vector<double>> seconds(systems.size());
  for (int round = 0; round < arguments.rounds; ++round)
    for (size_t i = 0; i < systems.size(); ++i) {
      const Json result = run(systems[i].first, systems[i].second);
      for (const Json& value : result["seconds"]) seconds[i].push_back(value.get<double>());
    }
  std::printf("%s, %d micro-batches of 1 x %ld tokens, ZeRO %d\n", arguments.model.c_str(), arguments.micro_batches,
              static_cast<long>(arguments.length), arguments.zero);
  std::printf("%-22s %10s %10s %9s %7s %9s\n", "", "min ms", "median ms", "speed-up", "bound", "of bound");
  const double one = *std::min_element(seconds[0].begin(), seconds[0].end());
  for (size_t i = 0; i < systems.size(); ++i) {
    const double least = *std::min_element(seconds[i].begin(), seconds[i].end());
    const auto schedule =
        trireme::pipeline::make_schedule(systems[i].first, systems[i].second, arguments.micro_batches);
    const double bound = systems[i].second * (1 - trireme::pipeline::simulate(schedule).bubble_share);
    std::printf("%-22s %10.1f %10.1f %9.2f %7.2f %9.2f\n",
                trireme::str(systems[i].first, ", ranks ", systems[i].second).c_str(), 1e3 * least,
                1e3 * median(seconds[i]), one / least, bound, one / least / bound);
  }
  const Json overhead = benchmarks::run_own_ranks({.ranks = 2, .program = argv[0], .flags = {"--run", "overhead"}});
  const double instructions = overhead["instructions"];
  std::printf(
      "a stage of one number: %.0f instructions in %.2f ms, its products alone %.2f ms: %.1f us per instruction\n",
      instructions, 1e3 * overhead["seconds"].get<double>(), 1e3 * overhead["without"].get<double>(),
      1e6 * (overhead["seconds"].get<double>() - overhead["without"].get<double>()) / instructions);
  return 0;
}
