// Step time and memory of ZeRO-3 on two ranks against two plain ranks that exchange nothing ("nocomm"), interleaved in
// one run. kAbout says how.
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/_fused_adamw.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "benchmarks/flags.h"
#include "benchmarks/own_ranks.h"
#include "benchmarks/peak_pss.h"
#include "benchmarks/train_models.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"
#include "trireme/engine/model_engine.h"

namespace {

using benchmarks::Batch;
using benchmarks::make_model;
using benchmarks::Model;
using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::vector<std::string> models = {"llama-130m", "llama-9m", "mlp64", "tiny64"};
  std::vector<std::string> dtypes = {"fp32", "bf16"};
  std::vector<std::string> systems = {"nocomm", "zero3"};
  int ranks = 2;
  int threads = 1;
  int rounds = 3;
  int steps = 8;
  std::string device = "cpu";
  int64_t samples = 2;  // of a step, over all ranks
  int64_t length = 128;
  bool undecided = false;
  bool memory = false;
  bool json = false;
};

constexpr double kLr = 3e-4, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kWeightDecay = 0.01, kMaxNorm = 1;

/// One step of training, whose loss it returns: a system under test.
using Step = std::function<at::Tensor(const Batch&)>;

Step make_nocomm(const std::shared_ptr<Model>& model, bool bf16, bool clips) {
  if (bf16) model->to(at::kBFloat16);
  struct State {
    std::vector<at::Tensor> parameters, masters, exp_avgs, exp_avg_sqs, steps;
  };
  auto state = std::make_shared<State>();
  state->parameters = model->parameters();
  for (const at::Tensor& parameter : state->parameters) {
    state->masters.push_back(bf16 ? parameter.detach().to(at::kFloat) : parameter.detach());
    state->exp_avgs.push_back(at::zeros_like(state->masters.back()));
    state->exp_avg_sqs.push_back(at::zeros_like(state->masters.back()));
    state->steps.push_back(at::zeros({}, state->masters.back().options()));
  }
  return [model, state, bf16, clips](const Batch& batch) {
    const at::Tensor loss = model->forward(batch);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : state->parameters) {
      gradients.push_back(bf16 ? parameter.grad().to(at::kFloat) : parameter.grad());
      parameter.mutable_grad().reset();
    }
    if (clips) {
      const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
      at::_foreach_mul_(gradients, (kMaxNorm / (norm + 1e-6)).clamp_max(1));
    }
    at::_foreach_add_(state->steps, 1);
    at::_fused_adamw_(state->masters, gradients, state->exp_avgs, state->exp_avg_sqs, {}, state->steps, kLr, kBeta1,
                      kBeta2, kWeightDecay, kEps, false, false);
    gradients.clear();
    if (bf16) at::_foreach_copy_(state->parameters, state->masters);
    return loss.detach();
  };
}

Step make_zero3(trireme::Group& world, const std::shared_ptr<Model>& model, bool bf16, const std::string& system,
                bool clips) {
  trireme::Config config = trireme::default_config(world.size());
  config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = kLr, .weight_decay = kWeightDecay};
  config.gradient_clipping = clips ? kMaxNorm : 0;
  config.precision.check_grad_overflow = clips;
  config.pager.stage = 3;
  if (system == "zero3copy") config.pager.gather = trireme::GatherPolicy::kCopy;
  if (system.starts_with("offload")) config.pager.offload_ratio = 1;
  config.pager.offload_parameters = system == "offloadparam";
  config.pager.deterministic = system == "zero3det";
  if (bf16) config.precision.weight_dtype = at::kBFloat16;
  auto engine =
      std::make_shared<trireme::ModelEngine<Model>>(world, *model, trireme::InitializeOptions{.config = config});
  return [model, engine](const Batch& batch) {
    const at::Tensor loss = engine->forward(batch);
    engine->backward(loss);
    engine->step();
    return loss.detach();
  };
}

constexpr int kWarmUp = 3;

struct Measured {
  std::vector<double> seconds;
  double loss = 0;
  double mib = 0;           ///< of a device, at most
  double mib_after_10 = 0;  ///< the same after 10 steps
};

/// Each step is begun together, and timed.
Measured run_on_host(trireme::Group& group, const Model& model, const Step& step, int steps,
                     const trireme::World& world) {
  Measured measured;
  for (int i = 0; i < kWarmUp + steps; ++i) {
    const Batch batch = model.batch(i, world.rank, world.size);
    group.barrier();
    const auto start = Clock::now();
    measured.loss = step(batch).item<double>();
    if (i >= kWarmUp) measured.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  group.barrier();
  return measured;
}

/// The steps go on one after the other, as in training: the host waits for the last one.
Measured run_on_device(trireme::Group& group, const Model& model, const Step& step, int steps,
                       const trireme::World& world, c10::Device device) {
  std::vector<Batch> batches;
  for (int i = 0; i < 4; ++i) {
    const Batch batch = model.batch(i, world.rank, world.size);
    batches.push_back({batch.input.to(device), batch.target.to(device)});
  }
  const auto peak_mib = [&] { return static_cast<double>(trireme::device_memory(device).peak_bytes) / (1 << 20); };
  Measured measured;
  at::Tensor loss;
  for (int i = 0; i < kWarmUp; ++i) loss = step(batches[i % 4]);
  (void)loss.item<double>();
  trireme::reset_device_peak(device);
  group.barrier();
  const auto start = Clock::now();
  for (int i = 0; i < steps; ++i) {
    loss = step(batches[i % 4]);
    if (i == 9) measured.mib_after_10 = peak_mib();
  }
  measured.loss = loss.item<double>();
  trireme::Event::record(device).synchronize();  // the update comes after the loss
  measured.seconds = {std::chrono::duration<double>(Clock::now() - start).count() / steps};
  measured.mib = peak_mib();
  group.barrier();
  return measured;
}

int run_rank(const Arguments& arguments) {
  at::set_num_threads(arguments.threads);
  const trireme::World world = trireme::init();
  const bool bf16 = arguments.dtypes.front() == "bf16";
  const std::string& system = arguments.systems.front();
  world.group->barrier();
  std::optional<benchmarks::PeakPss> peak;
  if (arguments.memory) peak.emplace();
  const c10::Device device = trireme::choose_device(arguments.device, world.local_rank);
  const auto model = make_model(arguments.models.front(), arguments.samples, arguments.length);
  model->to(device);
  const bool clips = !arguments.undecided;
  const Step step =
      system == "nocomm" ? make_nocomm(model, bf16, clips) : make_zero3(*world.group, model, bf16, system, clips);
  Measured measured = trireme::is_host(device)
                          ? run_on_host(*world.group, *model, step, arguments.steps, world)
                          : run_on_device(*world.group, *model, step, arguments.steps, world, device);
  double mib = peak ? peak->above_start() : 0;
  if (!trireme::is_host(device)) mib = measured.mib;
  world.group->all_reduce(at::from_blob(&mib, {1}, at::kDouble), trireme::ReduceOp::kMax).wait();
  const Json row = {
      {"seconds", measured.seconds}, {"mib", mib}, {"mib_after_10", measured.mib_after_10}, {"loss", measured.loss}};
  if (world.rank == 0) std::printf("%s\n", row.dump().c_str());
  std::fflush(stdout);
  return 0;
}

constexpr const char* kAbout =
    "step time and memory of ZeRO-3 against plain ranks that exchange nothing (\"nocomm\"), interleaved in one run.\n\n"
    "Both sides run the same module, the same batches and AdamW (lr 3e-4, wd 0.01) with the gradients clipped at norm "
    "1.\n"
    "nocomm does the whole update on each rank: ATen's fused AdamW and foreach clip over all parameters, fp32 masters "
    "in\n"
    "bf16, libtorch's default allocator. zero3 is stage 3 with shared weights, zero3copy with gathered ones, zero3det\n"
    "zero3 with `deterministic`; offload keeps the optimizer on the host, offloadparam parameters too. Times are of "
    "rank\n"
    "0, each step begun at a barrier that is not timed.\n\n"
    "On GPUs a row's times are means over a round, whose end alone is waited for, and --memory is the most that\n"
    "libtorch's allocator gave out, after 10 steps and at the end. Models: those of trireme train, llama-9m, "
    "llama-4b,\n"
    "tiny64, mlp64 and mlp1024 (64 layers of 16, 256 and 1024).";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const auto smoke = [&] {
    arguments.models = {"tiny64"};
    arguments.systems = {"nocomm", "zero3", "zero3copy", "zero3det", "offload"};
    arguments.rounds = arguments.steps = 1;
  };
  benchmarks::Flags("train_bench", kAbout)
      .list("--models", arguments.models, {}, "that are trained")
      .list("--dtypes", arguments.dtypes, {"fp32", "bf16"}, "of weights")
      .list("--systems", arguments.systems, {"nocomm", "zero3", "zero3copy", "zero3det", "offload", "offloadparam"},
            "rows")
      .whole("--ranks", arguments.ranks, "processes")
      .whole("--threads", arguments.threads, "of a rank")
      .text("--device", arguments.device, "of a rank: cpu, cuda or cuda:N")
      .whole("--samples", arguments.samples, "of a step, over all ranks")
      .whole("--length", arguments.length, "tokens of a sample")
      .on("--undecided", arguments.undecided, "no clipping, no look for overflows")
      .whole("--rounds", arguments.rounds, "of all systems in turns")
      .whole("--steps", arguments.steps,
             "of a round and system, tenfold for models smaller than llama-130m on the host")
      .on("--memory", arguments.memory,
          "the peak of the proportional set size above that before the model was built; times do not count then")
      .on("--json", arguments.json, "lines of JSON in place of the table")
      .act("--smoke", smoke, "a small model, once: does it work?")
      .parse(argc, argv);
  return arguments;
}

struct Result {
  std::vector<double> seconds;
  double mib = 0, mib_after_10 = 0;
  double loss = 0;
  double quantile(double q) const {
    auto sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))];
  }
};

void compare(const Arguments& arguments, const std::string& program, const std::string& model,
             const std::string& dtype) {
  std::map<std::string, Result> results;
  const bool small = model != "llama-130m" && arguments.device == "cpu";
  for (int round = 0; round < arguments.rounds; ++round) {
    for (const std::string& system : arguments.systems) {
      std::vector<std::string> flags = {"--models",  model,
                                        "--dtypes",  dtype,
                                        "--systems", system,
                                        "--threads", std::to_string(arguments.threads),
                                        "--device",  arguments.device,
                                        "--samples", std::to_string(arguments.samples),
                                        "--length",  std::to_string(arguments.length),
                                        "--steps",   std::to_string(small ? 10 * arguments.steps : arguments.steps)};
      if (arguments.memory) flags.push_back("--memory");
      if (arguments.undecided) flags.push_back("--undecided");
      const Json row = benchmarks::run_own_ranks({arguments.ranks, arguments.threads, program, flags});
      Result& result = results[system];
      for (const double seconds : row["seconds"]) result.seconds.push_back(seconds);
      result.mib = std::max(result.mib, row["mib"].get<double>());
      result.mib_after_10 = std::max(result.mib_after_10, row["mib_after_10"].get<double>());
      result.loss = row["loss"];
    }
  }
  const Result& base = results.at(arguments.systems.front());
  for (const std::string& system : arguments.systems) {
    const Result& result = results.at(system);
    if (arguments.json) {
      std::printf("%s\n", Json{{"model", model},
                               {"dtype", dtype},
                               {"system", system},
                               {"ranks", arguments.ranks},
                               {"seconds", result.seconds},
                               {"mib", result.mib},
                               {"mib_after_10", result.mib_after_10},
                               {"loss", result.loss}}
                              .dump()
                              .c_str());
      continue;
    }
    std::printf("%-11s %-5s %-10s %9.2f %9.2f %8.2f %8.2f", model.c_str(), dtype.c_str(), system.c_str(),
                1e3 * result.quantile(0), 1e3 * result.quantile(0.5), result.quantile(0) / base.quantile(0),
                result.quantile(0.5) / base.quantile(0.5));
    if (arguments.memory) std::printf(" %9.0f", result.mib);
    if (arguments.memory && arguments.device != "cpu") std::printf(" (%.0f after 10)", result.mib_after_10);
    std::printf("   loss %.4f\n", result.loss);
  }
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = parse(argc, argv);
    if (benchmarks::is_own_rank()) return run_rank(arguments);
    if (!arguments.json)
      std::printf("%-11s %-5s %-10s %9s %9s %8s %8s%s\n", "model", "dtype", "system", "min ms", "median", "/ min",
                  "/ median", arguments.memory ? "       MiB" : "");
    for (const std::string& model : arguments.models)
      for (const std::string& dtype : arguments.dtypes) compare(arguments, argv[0], model, dtype);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_bench: %s\n", error.what());
    return 1;
  }
}
