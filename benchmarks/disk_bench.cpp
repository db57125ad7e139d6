// A step whose masters and states are on disk, and a forward pass whose weights are, beside their transfers alone and
// both in memory, in the same run.
// kAbout says how.
#include <ATen/Parallel.h>
#include <ATen/ops/ones.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "benchmarks/flags.h"
#include "trireme/base/error.h"
#include "trireme/comm/world.h"
#include "trireme/device/disk.h"
#include "trireme/engine/engine.h"

namespace {

using Clock = std::chrono::steady_clock;

struct Arguments {
  std::filesystem::path folder = ".";
  int64_t layers = 12;
  int64_t width = 4096;
  int rounds = 3;
  int buffers = 4;
  int threads = static_cast<int>(std::thread::hardware_concurrency());
};

double seconds_of(const std::function<void()>& run) {
  const auto start = Clock::now();
  run();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr int64_t kBlockBytes = int64_t{12} << 20;
constexpr int kReaders = 4;

/// Every block of a file of `bytes` is read, and written two blocks later, by plain calls of as many threads as an
/// engine takes: what no update can be faster than.
double transfer_seconds(trireme::DiskFile& file, int64_t bytes) {
  const int64_t blocks = bytes / kBlockBytes;
  return seconds_of([&] {
    std::vector<std::thread> threads;
    for (int writes = 0; writes < 2; ++writes)
      threads.emplace_back([&, writes] {
        const trireme::DiskBuffer buffer(kBlockBytes);
        for (int64_t i = 0; i < blocks; ++i)
          writes ? file.write(i * kBlockBytes, buffer.first(kBlockBytes))
                 : file.read(i * kBlockBytes, buffer.first(kBlockBytes));
      });
    for (std::thread& thread : threads) thread.join();
  });
}

/// All of a file of `bytes` is read, by as many threads as read weights.
double read_seconds(trireme::DiskFile& file, int64_t bytes) {
  return seconds_of([&] {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kReaders; ++thread)
      threads.emplace_back([&, thread] {
        const trireme::DiskBuffer buffer(trireme::kDiskPieceBytes);
        for (int64_t at = thread * trireme::kDiskPieceBytes; at < bytes; at += kReaders * trireme::kDiskPieceBytes)
          file.read(at, buffer.first(std::min(trireme::kDiskPieceBytes, bytes - at)));
      });
    for (std::thread& thread : threads) thread.join();
  });
}

enum class Place { kMemory, kStatesOnDisk, kWeightsOnDisk };

class Trained {
 public:
  Trained(const Arguments& arguments, trireme::Group& group, Place place) : width_(arguments.width) {
    for (int64_t i = 0; i < arguments.layers; ++i)
      net_->push_back(torch::nn::Linear(torch::nn::LinearOptions(width_, width_).bias(false)));
    trireme::Config config = trireme::default_config(1);
    config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = 1e-4};
    config.precision.weight_dtype = config.precision.accumulation_dtype = at::kBFloat16;
    config.pager.stage = place == Place::kWeightsOnDisk ? 3 : 1;
    config.pager.accumulation_dtype = at::kBFloat16;
    if (place == Place::kWeightsOnDisk) {
      config.optimizer = {};
      config.pager.disk = {.folder = arguments.folder.string()};
      config.pager.units.merge_below_bytes = 0;
      config.pager.live_bytes = 4 * 2 * width_ * width_;
    }
    if (place == Place::kStatesOnDisk)
      config.disk = {.folder = arguments.folder.string(), .buffers = arguments.buffers};
    engine_ = std::make_unique<trireme::Engine>(group, *net_, trireme::InitializeOptions{.config = config});
  }

  double forward_seconds() {
    const at::NoGradGuard no_grad;
    return seconds_of([&] { net_->forward(at::ones({1, width_}, at::kBFloat16)); });
  }

  /// The time of step() alone, without backward.
  double step_seconds() {
    engine_->backward(net_->forward(at::ones({1, width_}, at::kBFloat16)).to(at::kFloat).square().mean());
    return seconds_of([&] { engine_->step(); });
  }

 private:
  const int64_t width_;
  torch::nn::Sequential net_;
  std::unique_ptr<trireme::Engine> engine_;
};

constexpr const char* kAbout =
    "a step of AdamW whose masters and moments are on disk, and a forward pass whose weights are, beside the same in\n"
    "memory and the transfers alone.\n\n"
    "The model is --layers matrices of --width x --width in bf16, on one rank; 12 bytes of each element are on\n"
    "disk, in blocks of 12 MiB. transfers: two threads read and write a file of that size in the same folder,\n"
    "block by block, and do nothing else. limit: the larger of the step in memory and the transfers; the last\n"
    "column is the step on disk over it. reads: four threads read a file as large as the weights; of a forward pass, "
    "of\n"
    "one row, the limit is the larger of them and of the pass in memory, and four matrices stay in memory. Rounds are\n"
    "interleaved, and the least of each column counts.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  benchmarks::Flags("disk_bench", kAbout)
      .path("--folder", arguments.folder, "where the file is made")
      .whole("--layers", arguments.layers, "matrices")
      .whole("--width", arguments.width, "of a matrix")
      .whole("--rounds", arguments.rounds, "interleaved")
      .whole("--buffers", arguments.buffers, "blocks in memory", 2)
      .whole("--threads", arguments.threads, "of the update")
      .act(
          "--smoke", [&] { arguments.layers = 2, arguments.width = 512, arguments.rounds = 1; },
          "everything once, small")
      .parse(argc, argv);
  return arguments;
}

void run(const Arguments& arguments) {
  at::set_num_threads(arguments.threads);
  const trireme::World world = trireme::init();
  const int64_t elements = arguments.layers * arguments.width * arguments.width;
  const int64_t bytes = std::max(elements * 12 / kBlockBytes, int64_t{1}) * kBlockBytes;
  const auto file = trireme::make_disk_file(arguments.folder, bytes);
  const int64_t weight_bytes = elements * 2;
  Trained in_memory(arguments, *world.group, Place::kMemory), on_disk(arguments, *world.group, Place::kStatesOnDisk);
  Trained weights_on_disk(arguments, *world.group, Place::kWeightsOnDisk);
  double transfers = 1e30, memory = 1e30, disk = 1e30, reads = 1e30, forward = 1e30, from_disk = 1e30;
  for (int round = 0; round <= arguments.rounds; ++round) {
    const double measured[] = {transfer_seconds(*file, bytes), in_memory.step_seconds(),
                               on_disk.step_seconds(),         read_seconds(*file, weight_bytes),
                               in_memory.forward_seconds(),    weights_on_disk.forward_seconds()};
    if (round == 0) continue;  // touches memory and disk for the first time
    transfers = std::min(transfers, measured[0]);
    memory = std::min(memory, measured[1]);
    disk = std::min(disk, measured[2]);
    reads = std::min(reads, measured[3]);
    forward = std::min(forward, measured[4]);
    from_disk = std::min(from_disk, measured[5]);
  }
  std::printf("%.0f M elements, %.2f GB on disk, %d threads, %d buffers\n", static_cast<double>(elements) / 1e6,
              static_cast<double>(bytes) / 1e9, arguments.threads, arguments.buffers);
  std::printf("transfers %8.1f ms (%.2f GB/s each way)\n", 1e3 * transfers,
              static_cast<double>(bytes) / transfers / 1e9);
  std::printf("in memory %8.1f ms\n", 1e3 * memory);
  std::printf("on disk   %8.1f ms   %.2f x limit\n", 1e3 * disk, disk / std::max(transfers, memory));
  std::printf("forward in memory %6.1f ms, reads %6.1f ms (%.2f GB/s)\n", 1e3 * forward, 1e3 * reads,
              static_cast<double>(weight_bytes) / reads / 1e9);
  std::printf("forward on disk   %6.1f ms   %.2f x limit\n", 1e3 * from_disk, from_disk / std::max(reads, forward));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "disk_bench: %s\n", error.what());
    return 1;
  }
}
