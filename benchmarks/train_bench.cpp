// Step time and memory of ZeRO-3 on two ranks against two plain ranks that exchange nothing ("nocomm"), interleaved in
// one run.
//
//   train_bench [--models llama-130m,llama-9m,tiny64,mlp64] [--dtypes fp32,bf16]
//               [--systems nocomm,zero3,zero3copy,zero3det] [--ranks 2] [--threads 1]
//               [--rounds 3] [--steps 8] [--memory] [--json] [--smoke]
//
// --steps counts per round and system, tenfold for models smaller than llama-130m. --smoke runs everything once.
// Both sides run the same module, the same batches and AdamW (lr 3e-4, wd 0.01) with the gradients clipped at norm 1.
// nocomm does the whole update on each rank: ATen's fused AdamW and foreach clip over all parameters, fp32 masters in
// bf16, libtorch's default allocator. zero3det is zero3 with `deterministic`. Times are of rank 0, each step begun at a
// barrier that is not timed. --memory polls the proportional set size instead, peak above what it was before the model
// was built; its times do not count.
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
#include <sstream>
#include <thread>

#include "benchmarks/own_ranks.h"
#include "benchmarks/train_models.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"
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
  bool memory = false;
  bool json = false;
};

constexpr double kLr = 3e-4, kBeta1 = 0.9, kBeta2 = 0.999, kEps = 1e-8, kWeightDecay = 0.01, kMaxNorm = 1;

/// One step of training: a system under test.
using Step = std::function<double(const Batch&)>;

Step make_nocomm(const std::shared_ptr<Model>& model, bool bf16) {
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
    state->steps.push_back(at::zeros({}));
  }
  return [model, state, bf16](const Batch& batch) {
    const at::Tensor loss = model->forward(batch);
    loss.backward();
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (at::Tensor& parameter : state->parameters) {
      gradients.push_back(bf16 ? parameter.grad().to(at::kFloat) : parameter.grad());
      parameter.mutable_grad().reset();
    }
    const at::Tensor norm = at::linalg_vector_norm(at::stack(at::_foreach_norm(gradients)));
    at::_foreach_mul_(gradients, (kMaxNorm / (norm + 1e-6)).clamp_max(1));
    for (at::Tensor& step : state->steps) step.add_(1);
    at::_fused_adamw_(state->masters, gradients, state->exp_avgs, state->exp_avg_sqs, {}, state->steps, kLr, kBeta1,
                      kBeta2, kWeightDecay, kEps, false, false);
    gradients.clear();
    if (bf16) at::_foreach_copy_(state->parameters, state->masters);
    return loss.item<double>();
  };
}

Step make_zero3(trireme::Group& world, const std::shared_ptr<Model>& model, bool bf16, const std::string& system) {
  trireme::Config config = trireme::default_config(world.size());
  config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = kLr, .weight_decay = kWeightDecay};
  config.gradient_clipping = kMaxNorm;
  config.pager.stage = 3;
  config.pager.gather = system == "zero3copy" ? trireme::GatherPolicy::kCopy : trireme::GatherPolicy::kShared;
  config.pager.deterministic = system == "zero3det";
  if (bf16) config.precision.weight_dtype = at::kBFloat16;
  auto engine =
      std::make_shared<trireme::ModelEngine<Model>>(world, *model, trireme::InitializeOptions{.config = config});
  return [model, engine](const Batch& batch) {
    const at::Tensor loss = engine->forward(batch);
    engine->backward(loss);
    engine->step();
    return loss.item<double>();
  };
}

double pss_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) / 1024;
  return 0;
}

/// Polls the proportional set size while it lives.
class PeakPss {
 public:
  PeakPss()
      : start_(pss_mib()), thread_([this] {
          while (!stop_) {
            peak_ = std::max(peak_.load(), pss_mib());
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
        }) {}
  double above_start() {
    stop_ = true;
    thread_.join();
    return peak_ - start_;
  }

 private:
  double start_;
  std::atomic<double> peak_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

int run_rank(const Arguments& arguments) {
  at::set_num_threads(arguments.threads);
  const trireme::World world = trireme::init();
  const bool bf16 = arguments.dtypes.front() == "bf16";
  const std::string& system = arguments.systems.front();
  world.group->barrier();
  std::optional<PeakPss> peak;
  if (arguments.memory) peak.emplace();
  const auto model = make_model(arguments.models.front());
  const Step step = system == "nocomm" ? make_nocomm(model, bf16) : make_zero3(*world.group, model, bf16, system);
  std::vector<double> seconds;
  double loss = 0;
  constexpr int kWarmUp = 3;
  for (int i = 0; i < kWarmUp + arguments.steps; ++i) {
    const Batch batch = model->batch(i, world.rank, world.size);
    world.group->barrier();
    const auto start = Clock::now();
    loss = step(batch);
    if (i >= kWarmUp) seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  world.group->barrier();
  double pss = peak ? peak->above_start() : 0;
  world.group->all_reduce(at::from_blob(&pss, {1}, at::kDouble), trireme::ReduceOp::kMax).wait();
  if (world.rank == 0) std::printf("%s\n", Json{{"seconds", seconds}, {"pss_mib", pss}, {"loss", loss}}.dump().c_str());
  std::fflush(stdout);
  return 0;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--memory") arguments.memory = true;
    if (flag == "--json") arguments.json = true;
    if (flag == "--smoke") {
      arguments.models = {"tiny64"};
      arguments.systems = {"nocomm", "zero3", "zero3copy", "zero3det"};
      arguments.rounds = arguments.steps = 1;
    }
    if (flag == "--memory" || flag == "--json" || flag == "--smoke" || i + 1 >= argc) continue;
    const std::string value = argv[++i];
    if (flag == "--models") arguments.models = split(value);
    if (flag == "--dtypes") arguments.dtypes = split(value);
    if (flag == "--systems") arguments.systems = split(value);
    if (flag == "--ranks") arguments.ranks = std::stoi(value);
    if (flag == "--threads") arguments.threads = std::stoi(value);
    if (flag == "--rounds") arguments.rounds = std::stoi(value);
    if (flag == "--steps") arguments.steps = std::stoi(value);
  }
  return arguments;
}

struct Result {
  std::vector<double> seconds;
  double pss_mib = 0;
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
  const bool small = model != "llama-130m";
  for (int round = 0; round < arguments.rounds; ++round) {
    for (const std::string& system : arguments.systems) {
      std::vector<std::string> flags = {"--models",  model,
                                        "--dtypes",  dtype,
                                        "--systems", system,
                                        "--threads", std::to_string(arguments.threads),
                                        "--steps",   std::to_string(small ? 10 * arguments.steps : arguments.steps)};
      if (arguments.memory) flags.push_back("--memory");
      const Json row = benchmarks::run_own_ranks({arguments.ranks, arguments.threads, program, flags});
      Result& result = results[system];
      for (const double seconds : row["seconds"]) result.seconds.push_back(seconds);
      result.pss_mib = std::max(result.pss_mib, row["pss_mib"].get<double>());
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
                               {"pss_mib", result.pss_mib},
                               {"loss", result.loss}}
                              .dump()
                              .c_str());
      continue;
    }
    std::printf("%-11s %-5s %-10s %9.2f %9.2f %8.2f %8.2f", model.c_str(), dtype.c_str(), system.c_str(),
                1e3 * result.quantile(0), 1e3 * result.quantile(0.5), result.quantile(0) / base.quantile(0),
                result.quantile(0.5) / base.quantile(0.5));
    if (arguments.memory) std::printf(" %9.0f", result.pss_mib);
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
                  "/ median", arguments.memory ? "   PSS MiB" : "");
    for (const std::string& model : arguments.models)
      for (const std::string& dtype : arguments.dtypes) compare(arguments, argv[0], model, dtype);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_bench: %s\n", error.what());
    return 1;
  }
}
