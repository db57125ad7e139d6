// Activation memory and step time with recomputation against without, in turns in one run, on one thread.
#include <ATen/Parallel.h>
#include <ATen/ops/randint.h>
#include <time.h>

#include <algorithm>
#include <cstdio>

#include "benchmarks/flags.h"
#include "tests/support/live_bytes.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"
#include "trireme/engine/model_engine.h"
#include "trireme/intercept.h"
#include "trireme/models/language_model.h"

namespace {

/// Processor time of this thread, which does all the work.
double thread_time_ms() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

struct Arguments {
  std::string model = "llama-10m";
  std::vector<std::string> dtypes = {"fp32", "bf16"};
  std::vector<std::string> extra_compute = {"0", "0.05", "0.1"};
  int64_t batch = 4;
  int64_t seq = 256;
  int rounds = 5;
  int steps = 2;
};

struct Row {
  std::string name;
  trireme::RecomputeConfig recompute;
  int64_t activation_bytes = 0;
  std::vector<double> times_ms = {};
};

std::vector<Row> rows_of(const Arguments& arguments) {
  using trireme::RecomputeMode;
  std::vector<Row> rows = {{.name = "none", .recompute = {}},
                           {.name = "full", .recompute = {RecomputeMode::kFull, {}}}};
  for (const std::string& extra : arguments.extra_compute)
    rows.push_back({.name = "selective, extra_compute " + extra,
                    .recompute = {RecomputeMode::kSelective, {.keep = {}, .extra_compute = std::stod(extra)}}});
  return rows;
}

/// A round of one row: a new engine, one step to warm up, then `steps` that count.
void run(Row& row, const Arguments& arguments, const std::string& dtype) {
  trireme::World world = trireme::init();
  trireme::manual_seed(1);
  const auto options = trireme::with_positions(trireme::model_options(arguments.model), arguments.seq);
  const auto model = trireme::make_language_model(options);
  trireme::Config config = trireme::default_config(1);
  config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = 3e-4};
  if (dtype == "bf16") config.precision.weight_dtype = at::kBFloat16;
  config.recompute = row.recompute;
  auto engine = trireme::initialize(world, model, {.config = config});
  const auto tokens = at::randint(trireme::vocab_size(options), {arguments.batch, arguments.seq + 1}, at::kLong);
  const auto inputs = tokens.narrow(1, 0, arguments.seq), targets = tokens.narrow(1, 1, arguments.seq);
  for (int step = 0; step <= arguments.steps; ++step) {
    const double begin_ms = thread_time_ms();
    const auto [loss, activation_bytes] = [&] {
      const trireme::testing::LiveBytes live;
      auto value = model->loss(inputs, targets);
      return std::pair(value, live.bytes());
    }();
    engine.backward(loss);
    engine.step();
    if (step == 0) continue;
    row.activation_bytes = std::max(row.activation_bytes, activation_bytes);
    row.times_ms.push_back(thread_time_ms() - begin_ms);
  }
  engine.destroy();
}

void print(const std::vector<Row>& rows, const std::string& dtype) {
  const auto median = [](std::vector<double> times) {
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  };
  const auto minimum = [](const std::vector<double>& times) { return *std::min_element(times.begin(), times.end()); };
  const Row& base = rows.front();
  for (const Row& row : rows)
    std::printf("%-5s %-32s activations %8.2f MiB, saved %5.1f %%   min %8.1f ms (%.3f)  median %8.1f ms (%.3f)\n",
                dtype.c_str(), row.name.c_str(), row.activation_bytes / 1048576.0,
                100.0 * (1 - double(row.activation_bytes) / double(base.activation_bytes)), minimum(row.times_ms),
                minimum(row.times_ms) / minimum(base.times_ms), median(row.times_ms),
                median(row.times_ms) / median(base.times_ms));
}

constexpr const char* kAbout =
    "activation memory and step time with recomputation against without, in turns in one run, on one thread.\n\n"
    "A step is forward, backward and AdamW, by the engine on one rank. *activations* is what forward leaves "
    "allocated,\n"
    "the most of all steps that count (libtorch's host allocator; parameters and gradients exist by then), *time* the\n"
    "minimum and median of the thread's processor time in all steps, so that other work on the host counts as little\n"
    "as it can; ratios are to the first row.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const auto smoke = [&] {
    arguments.model = "llama-3m";
    arguments.batch = 1;
    arguments.seq = 32;
    arguments.rounds = arguments.steps = 1;
  };
  benchmarks::Flags("recompute_bench", kAbout)
      .text("--model", arguments.model, "that is trained")
      .list("--dtypes", arguments.dtypes, {"fp32", "bf16"}, "of weights, a table each")
      .whole("--batch", arguments.batch, "samples of a step")
      .whole("--seq", arguments.seq, "tokens of a sample")
      .whole("--rounds", arguments.rounds, "of all rows in turns")
      .whole("--steps", arguments.steps, "of a round")
      .list("--extra-compute", arguments.extra_compute, {}, "of the rows `selective`")
      .act("--smoke", smoke, "a small model, once: does it work?")
      .parse(argc, argv);
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = parse(argc, argv);
    at::set_num_threads(1);
    for (const std::string& dtype : arguments.dtypes) {
      std::vector<Row> rows = rows_of(arguments);
      for (int round = 0; round < arguments.rounds; ++round)
        for (Row& row : rows) run(row, arguments, dtype);
      print(rows, dtype);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
