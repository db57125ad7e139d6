// A step whose optimizer is offloaded, beside what its parts cannot be faster than, measured in the same run. kAbout
// says how.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/flags.h"
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

void wait_for(c10::Device device) { trireme::Event::record(device).synchronize(); }

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

constexpr const char* kAbout =
    "a step whose optimizer is offloaded, beside what its parts cannot be faster than, measured in the same run.\n\n"
    "forward + backward: the bare module, in bf16. transfers: gradients to the host and weights back, each at the\n"
    "speed of a copy of 1 GiB between page-locked memory and the device; the slower way counts, for the two run "
    "beside\n"
    "each other. host Adam: its 26 bytes per parameter and those of a gradient, at the speed at which all threads\n"
    "together copy memory. The limits are those of a step whose norm decides (clipping, a look for overflows), "
    "forward\n"
    "+ backward + the larger of the other two, and of one over which nothing decides, the largest of the three.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  std::string gradients = "fp32";
  const auto smoke = [&] {
    arguments.model = "llama-3m";
    arguments.length = 16;
    arguments.copied_bytes = 1 << 20;
    arguments.threads = arguments.steps = arguments.rounds = 1;
  };
  benchmarks::Flags("offload_bench", kAbout)
      .text("--model", arguments.model, "that is trained")
      .whole("--samples", arguments.samples, "of a step")
      .whole("--length", arguments.length, "tokens of a sample")
      .text("--device", arguments.device, "auto, cpu, cuda or cuda:N")
      .whole("--threads", arguments.threads, "of the host")
      .one_of("--gradients", gradients, {"fp32", "bf16"}, "in which dtype gradients are sent to the host")
      .share("--ratio", arguments.ratio, "share of the parameters whose optimizer is offloaded")
      .on("--parameters", arguments.parameters, "parameters are offloaded too")
      .whole("--steps", arguments.steps, "of a round")
      .whole("--rounds", arguments.rounds, "of which the fastest counts")
      .act("--smoke", smoke, "a small model, once: does it work?")
      .parse(argc, argv);
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
    run(parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "offload_bench: %s\n", error.what());
    return 1;
  }
}
