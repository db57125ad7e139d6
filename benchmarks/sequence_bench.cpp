// Step time and memory of a Llama whose sequences are cut over ranks of one thread each, against one rank with one
// thread, interleaved in one run.
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>

#include "benchmarks/flags.h"
#include "benchmarks/own_ranks.h"
#include "benchmarks/peak_pss.h"
#include "trireme/comm/world.h"
#include "trireme/config/config.h"
#include "trireme/engine/engine.h"
#include "trireme/models/language_model.h"

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string model = "llama-10m";
  int64_t vocabulary = 256;
  int64_t length = 4096;
  int ranks = 2;
  std::vector<std::string> attention = {"ulysses", "ring"};
  int zero = 1;
  int64_t loss_tokens = 0;  // of a tile; 0: not tiled
  int64_t mlp_tokens = 0;   // likewise
  bool recompute = false;
  int rounds = 3;
  int steps = 3;
  bool has_one_rank = true;
  bool memory = false;
};

constexpr const char* kAbout =
    "step time and memory of a Llama whose sequences are cut over ranks of one thread each, against one rank with one\n"
    "thread, interleaved in one run. \"of a share\" is the step time divided by one rank's over the number of ranks: 1 "
    "is\n"
    "ideal.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const auto smoke = [&] {
    arguments.model = "llama-3m";
    arguments.length = 32;
    arguments.rounds = arguments.steps = 1;
  };
  benchmarks::Flags("sequence_bench", kAbout)
      .text("--model", arguments.model, "that is trained")
      .whole("--vocabulary", arguments.vocabulary, "of the model")
      .whole("--length", arguments.length, "tokens of a sequence")
      .whole("--ranks", arguments.ranks, "over which a sequence is cut")
      .list("--attention", arguments.attention, {"ulysses", "ring"}, "kinds")
      .whole("--zero", arguments.zero, "stage of ZeRO", 0)
      .whole<int64_t>("--loss-tokens", arguments.loss_tokens, "of a tile of the loss; 0: not tiled", 0)
      .whole<int64_t>("--mlp-tokens", arguments.mlp_tokens, "of a tile of the MLP; 0: not tiled", 0)
      .on("--recompute", arguments.recompute, "layers are recomputed")
      .whole("--rounds", arguments.rounds, "of all systems in turns")
      .whole("--steps", arguments.steps, "of a round")
      .act(
          "--without-one", [&] { arguments.has_one_rank = false; }, "no row of one rank")
      .on("--memory", arguments.memory,
          "the peak of a step above what the states and a short step need, by the proportional\n"
          "                                  set size of the rank that needs most; times do not count then")
      .act("--smoke", smoke, "a small model, once: does it work?")
      .parse(argc, argv);
  return arguments;
}

trireme::Config config_of(const Arguments& arguments, int ranks) {
  Json json = {{"train_micro_batch_size_per_gpu", 1},
               {"gradient_clipping", 1.0},
               {"optimizer", {{"type", "AdamW"}, {"params", {{"lr", 3e-4}}}}},
               {"zero_optimization", {{"stage", arguments.zero}}},
               {"sequence_parallel_size", ranks}};
  json["trireme"]["sequence_attention"] = arguments.attention.front();
  if (arguments.recompute) json["trireme"]["recompute"] = "full";
  if (arguments.loss_tokens > 0) json["trireme"]["tiled"]["loss_tokens"] = arguments.loss_tokens;
  if (arguments.mlp_tokens > 0) json["trireme"]["tiled"]["mlp_tokens"] = arguments.mlp_tokens;
  return trireme::config_from_json(json, ranks, {}, "sequence_bench");
}

void run_rank(const Arguments& arguments) {
  at::set_num_threads(1);
  trireme::World world = trireme::init();
  trireme::ModelOptions options = trireme::with_positions(trireme::model_options(arguments.model), arguments.length);
  std::visit([&](auto& own) { own.vocab_size = arguments.vocabulary; }, options);
  const auto model = trireme::make_language_model(options);
  trireme::Engine engine(*world.group, *model, {.config = config_of(arguments, world.size)});
  const auto step = [&](int64_t length) {
    const at::Tensor tokens = at::randint(arguments.vocabulary, {1, length + 1}, at::kLong);
    world.group->broadcast(tokens, 0).wait();
    const auto start = Clock::now();
    const auto part = engine.cut({.input_ids = tokens.narrow(1, 0, length).contiguous(),
                                  .labels = tokens.narrow(1, 1, length).contiguous(),
                                  .position_ids = at::arange(length, at::kLong).unsqueeze(0)});
    engine.backward(model->loss(part.input_ids, part.labels, part.position_ids));
    engine.step();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  (void)step(std::min<int64_t>(arguments.length, 16 * world.size));  // makes the states
  Json seconds = Json::array();
  double mib = 0;
  if (arguments.memory) {
    world.group->barrier();
    benchmarks::PeakPss peak;
    seconds.push_back(step(arguments.length));
    mib = peak.above_start();
    world.group->all_reduce(at::from_blob(&mib, {1}, at::kDouble), trireme::ReduceOp::kMax).wait();
  } else {
    (void)step(arguments.length);
    for (int i = 0; i < arguments.steps; ++i) seconds.push_back(step(arguments.length));
  }
  if (world.rank == 0) std::puts(Json{{"seconds", seconds}, {"mib", mib}}.dump().c_str());
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// One rank, or a kind of attention over several.
struct System {
  std::string attention;
  int ranks;
  std::vector<double> seconds = {};
  double mib = 0;
};

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  if (benchmarks::is_own_rank()) {
    run_rank(arguments);
    return 0;
  }
  std::vector<System> systems;
  if (arguments.has_one_rank) systems.push_back({arguments.attention.front(), 1});
  for (const std::string& attention : arguments.attention) systems.push_back({attention, arguments.ranks});
  for (int round = 0; round < arguments.rounds; ++round)
    for (System& system : systems) {
      std::vector<std::string> flags(argv + 1, argv + argc);
      flags.insert(flags.end(), {"--attention", system.attention});
      const Json result = benchmarks::run_own_ranks({.ranks = system.ranks, .program = argv[0], .flags = flags});
      for (const Json& value : result["seconds"]) system.seconds.push_back(value.get<double>());
      system.mib = std::max(system.mib, result["mib"].get<double>());
    }
  std::printf("%s, vocabulary %ld, %ld tokens, ZeRO %d\n", arguments.model.c_str(),
              static_cast<long>(arguments.vocabulary), static_cast<long>(arguments.length), arguments.zero);
  std::printf("%-20s %10s %10s %11s %10s %9s\n", "", "min ms", "median ms", "of a share", "peak MiB", "of one");
  const auto least = [](const System& system) {
    return *std::min_element(system.seconds.begin(), system.seconds.end());
  };
  const System* const one = arguments.has_one_rank ? &systems.front() : nullptr;
  for (const System& system : systems) {
    const std::string name = system.ranks == 1 ? "one rank" : trireme::str(system.attention, ", ranks ", system.ranks);
    std::printf("%-20s %10.1f %10.1f", name.c_str(), 1e3 * least(system), 1e3 * median(system.seconds));
    if (one) std::printf(" %11.2f", least(system) / least(*one) * system.ranks);
    if (arguments.memory) std::printf(" %10.1f", system.mib);
    if (one && arguments.memory) std::printf(" %9.3f", system.mib / one->mib);
    std::puts("");
  }
  return 0;
}
