// A step whose optimizer is offloaded, beside what its parts cannot be faster than, measured in the same run.
//
//   offload_bench [--model llama-4b] [--samples 1] [--length 4096] [--device auto] [--threads N] [--gradients
//   fp32|bf16]
//                 [--ratio 1] [--parameters] [--steps 5] [--rounds 3] [--smoke]
//
// forward + backward: the bare module, in bf16. transfers: gradients to the host and weights back, each at the speed of
// a copy of 1 GiB between page-locked memory and the device; the slower way counts, for the two run beside each other.
// host Adam: its 26 bytes per parameter and those of a gradient, at the speed at which all threads together copy
// memory. The limits are those of a step whose norm decides (clipping, a look for overflows), forward + backward + the
// larger of the other two, and of one over which nothing decides, the largest of the three.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/train_models.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"
#include "trireme/engine/model_engine.h"

namespace {

using benchmarks::Batch;
using benchmarks::Model;
using Clock = std::chrono::steady_clock;

struct Arguments {
  std::string model = "llama-4b";
  std::string device = "auto";
  at::ScalarType gradients = at::kFloat;
  int64_t samples = 1;
  int64_t length = 4096;
  int64_t copied_bytes = int64_t{1} << 30;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
  int steps = 5;
  int rounds = 3;
  double ratio = 1;
  bool parameters = false;
};

void wait_for(c10::Device device) { trireme::Mark::here(device).wait(); }

/// Seconds of `run`, all that it enqueues on `device` included; the least of `rounds`.
double seconds_of(c10::Device device, int rounds, const std::function<void()>& run) {
  double least = 1e30;
  for (int round = 0; round < rounds; ++round) {
    wait_for(device);
    const auto start = Clock::now();
    run();
    wait_for(device);
    least = std::min(least, std::chrono::duration<double>(Clock::now() - start).count());
  }
  return least;
}

double forward_backward_seconds(const Arguments& arguments, Model& model, const Batch& batch, c10::Device device) {
  const auto run = [&] {
    for (int i = 0; i < arguments.steps; ++i) {
      model.forward(batch).backward();
      for (at::Tensor& parameter : model.parameters()) parameter.mutable_grad().reset();
    }
  };
  run();
  return seconds_of(device, arguments.rounds, run) / arguments.steps;
}

/// The slower of the two ways.
double transfer_seconds(const Arguments& arguments, double gradient_bytes, double weight_bytes, c10::Device device) {
  const at::Tensor host = trireme::pinned_memory(arguments.copied_bytes, at::kByte, device);
  const at::Tensor there = at::empty({arguments.copied_bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  const auto leave = [&] { at::Tensor(host).copy_(there, /*non_blocking=*/true); };
  const auto come = [&] { at::Tensor(there).copy_(host, /*non_blocking=*/true); };
  leave();
  come();
  const auto bytes = static_cast<double>(arguments.copied_bytes);
  const double leave_speed = bytes / seconds_of(device, arguments.rounds, leave);
  const double come_speed = bytes / seconds_of(device, arguments.rounds, come);
  std::printf("copies: %.1f GB/s to the host, %.1f GB/s to the device\n", leave_speed / 1e9, come_speed / 1e9);
  return std::max(gradient_bytes / leave_speed, weight_bytes / come_speed);
}

double host_adam_seconds(const Arguments& arguments, double bytes) {
  const int64_t numel = arguments.copied_bytes / 4;
  const at::Tensor from = at::empty({numel}, at::kFloat).fill_(1), to = at::empty({numel}, at::kFloat).fill_(0);
  const auto copy = [&] { at::Tensor(to).copy_(from); };
  const double speed = 2.0 * static_cast<double>(arguments.copied_bytes) / seconds_of(at::kCPU, arguments.rounds, copy);
  std::printf("memory: %.1f GB/s read and written by %d threads\n", speed / 1e9, arguments.threads);
  return bytes / speed;
}

double step_seconds(const Arguments& arguments, trireme::Group& group, const Batch& batch, c10::Device device,
                    bool decides) {
  const auto model = benchmarks::make_model(arguments.model, arguments.samples, arguments.length);
  model->to(device);
  trireme::Config config = trireme::default_config(1);
  config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = 3e-4};
  config.precision.weight_dtype = at::kBFloat16;
  config.precision.accumulation_dtype = config.pager.accumulation_dtype = arguments.gradients;
  config.precision.check_grad_overflow = decides;
  config.gradient_clipping = decides ? 1 : 0;
  config.pager.stage = 3;
  config.pager.offload_ratio = arguments.ratio;
  config.pager.offload_parameters = arguments.parameters;
  trireme::ModelEngine<Model> engine(group, *model, {.config = config});
  const auto run = [&] {
    for (int i = 0; i < arguments.steps; ++i) {
      engine.backward(engine.forward(batch));
      engine.step();
    }
    engine.pager().await_published();
  };
  run();
  return seconds_of(device, arguments.rounds, run) / arguments.steps;
}

constexpr const char* kUsage =
    "offload_bench [--model llama-4b] [--samples 1] [--length 4096] [--device auto] [--threads N] [--gradients "
    "fp32|bf16]\n"
    "              [--ratio 1] [--parameters] [--steps 5] [--rounds 3] [--smoke]\n";

/// Throws ConfigError for what it does not know.
Arguments parse(const std::vector<std::string>& flags) {
  Arguments arguments;
  if (std::find(flags.begin(), flags.end(), "--smoke") != flags.end())
    arguments = {.model = "llama-3m", .length = 16, .copied_bytes = 1 << 20, .threads = 1, .steps = 1, .rounds = 1};
  const auto refuse = [](const std::string& flag, const std::string& value) {
    throw trireme::ConfigError(trireme::str(flag, value.empty() ? "" : " ", value, " is not known\n", kUsage));
  };
  std::string gradients = "fp32";
  const std::map<std::string, std::string*> texts = {
      {"--model", &arguments.model}, {"--device", &arguments.device}, {"--gradients", &gradients}};
  const std::map<std::string, std::function<void(const std::string&)>> numbers = {
      {"--samples", [&](const std::string& value) { arguments.samples = std::stoll(value); }},
      {"--length", [&](const std::string& value) { arguments.length = std::stoll(value); }},
      {"--threads", [&](const std::string& value) { arguments.threads = std::stoi(value); }},
      {"--steps", [&](const std::string& value) { arguments.steps = std::stoi(value); }},
      {"--rounds", [&](const std::string& value) { arguments.rounds = std::stoi(value); }},
      {"--ratio", [&](const std::string& value) { arguments.ratio = std::stod(value); }}};
  for (size_t i = 0; i < flags.size(); ++i) {
    const std::string& flag = flags[i];
    if (flag == "--smoke") continue;
    if (flag == "--parameters") arguments.parameters = true;
    if (flag == "--parameters") continue;
    const auto text = texts.find(flag);
    const auto number = numbers.find(flag);
    if ((text == texts.end() && number == numbers.end()) || i + 1 == flags.size()) refuse(flag, "");
    const std::string& value = flags[++i];
    if (text != texts.end()) *text->second = value;
    if (number == numbers.end()) continue;
    try {
      number->second(value);
    } catch (const std::logic_error&) {
      refuse(flag, value);
    }
  }
  if (gradients != "fp32" && gradients != "bf16") refuse("--gradients", gradients);
  if (!(arguments.ratio > 0 && arguments.ratio <= 1)) refuse("--ratio", std::to_string(arguments.ratio));
  arguments.gradients = gradients == "bf16" ? at::kBFloat16 : at::kFloat;
  return arguments;
}

void report(const char* what, double seconds, double limit) {
  std::printf("%-34s %9.1f ms, limit %9.1f ms: %.2f of it\n", what, 1e3 * seconds, 1e3 * limit, seconds / limit);
}

void run(const Arguments& arguments) {
  at::set_num_threads(arguments.threads);
  const trireme::World world = trireme::init();
  const c10::Device device = trireme::choose_device(arguments.device, 0);
  if (trireme::is_host(device)) {
    std::printf("there is no GPU: nothing is offloaded, and figures would mean nothing\n");
    if (arguments.model == "llama-4b") return;
  }
  auto model = benchmarks::make_model(arguments.model, arguments.samples, arguments.length);
  model->to(device, at::kBFloat16);
  Batch batch = model->batch(0, 0, 1);
  batch = {batch.input.to(device), batch.target.to(device)};
  double parameters = 0;
  for (const at::Tensor& parameter : model->parameters()) parameters += static_cast<double>(parameter.numel());
  std::printf("%s: %.2f G parameters, %s on %s\n", arguments.model.c_str(), parameters / 1e9, "bf16",
              trireme::device_name(device).c_str());

  const double compute = forward_backward_seconds(arguments, *model, batch, device);
  model.reset();
  const auto gradient_bytes = static_cast<double>(c10::elementSize(arguments.gradients));
  const double transfers = transfer_seconds(arguments, arguments.ratio * parameters * gradient_bytes,
                                            arguments.ratio * parameters * 2, device);
  // Masters and both moments are read and written, weights written.
  const double adam = host_adam_seconds(arguments, arguments.ratio * parameters * (3 * 8 + 2 + gradient_bytes));
  std::printf("forward + backward %.1f ms, transfers %.1f ms, host Adam %.1f ms\n", 1e3 * compute, 1e3 * transfers,
              1e3 * adam);
  report("step whose norm decides", step_seconds(arguments, *world.group, batch, device, true),
         compute + std::max(transfers, adam));
  report("step over which nothing decides", step_seconds(arguments, *world.group, batch, device, false),
         std::max({compute, transfers, adam}));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::vector<std::string> flags(argv + 1, argv + argc);
    if (std::find(flags.begin(), flags.end(), "--help") != flags.end())
      std::printf("%s", kUsage);
    else
      run(parse(flags));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "offload_bench: %s\n", error.what());
    return 1;
  }
}
