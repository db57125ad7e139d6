// Saving and loading a training state on several ranks, beside plain writes and reads of as many bytes, interleaved in
// one run. kAbout says what each way is.
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>

#include "benchmarks/flags.h"
#include "benchmarks/own_ranks.h"
#include "benchmarks/train_models.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/world.h"
#include "trireme/engine/model_engine.h"

namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;
using Path = std::filesystem::path;

struct Arguments {
  std::string model = "llama-130m";
  int ranks = 2;
  int stage = 3;
  int rounds = 5;
  Path directory = std::filesystem::temp_directory_path() / trireme::str("trireme-checkpoint-bench-", getpid());
  bool json = false;
};

double status_mib(const char* key) {
  std::ifstream file("/proc/self/status");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with(key)) return std::stod(line.substr(std::string(key).size())) / 1024;
  return 0;
}

class Job {
 public:
  explicit Job(const Arguments& arguments)
      : arguments_(arguments), world_(trireme::init()), model_(benchmarks::make_model(arguments.model)) {
    trireme::Config config = trireme::default_config(world_.size);
    config.optimizer = {.kind = trireme::OptimizerKind::kAdamW, .lr = 3e-4, .weight_decay = 0.01};
    config.pager.stage = arguments.stage;
    config.checkpoint.async_save = true;  // the snapshot's memory is there before the first save
    engine_ = std::make_unique<trireme::ModelEngine<benchmarks::Model>>(*world_.group, *model_,
                                                                        trireme::InitializeOptions{.config = config});
    engine_->backward(engine_->forward(model_->batch(0, world_.rank, world_.size)));
    engine_->step();
  }

  Json run() {
    const Path folder = arguments_.directory;
    bytes_ = engine_->save_checkpoint(folder, {.tag = "first", .async_save = false}).tensor_bytes;
    buffer_ = at::empty({bytes_}, at::kByte).fill_(1);
    for (int round = 0; round < arguments_.rounds; ++round) {
      const std::string tag = trireme::str("round", round % 2);
      remove(folder / "plain");  // truncating a file of that size takes time that a new one does not
      measure("write", [&] {
        if (world_.rank == 0) write(folder / "plain", bytes_);
      });
      for (int rank = 0; rank < world_.size; ++rank) remove(folder / trireme::str("plain", rank));
      measure("write-each", [&] { write(part(folder), bytes_ / world_.size); });
      remove(folder / tag);
      measure("save", [&] { engine_->save_checkpoint(folder, {.tag = tag, .async_save = false}); });
      remove(folder / tag);
      measure("async", [&] { engine_->save_checkpoint(folder, {.tag = tag}); });
      measure("async-end", [&] { (void)engine_->wait_for_checkpoint(); });
      measure("read-each", [&] { read(part(folder), bytes_ / world_.size); });
      measure("load", [&] { (void)engine_->load_checkpoint(folder); });
      measure("load-full", [&] { (void)engine_->load_checkpoint(folder, {.verify = trireme::Verify::kFirst}); });
    }
    engine_->destroy();
    if (world_.rank == 0) std::filesystem::remove_all(folder);
    return {{"bytes", bytes_}, {"ways", rows_}};
  }

  bool speaks() const { return world_.rank == 0; }

 private:
  void measure(const char* way, const std::function<void()>& work) {
    std::ofstream("/proc/self/clear_refs") << "5";  // forgets the peak
    const double steady = status_mib("VmRSS:");
    world_.group->barrier();
    const auto start = Clock::now();
    work();
    double found[2] = {std::chrono::duration<double>(Clock::now() - start).count(), status_mib("VmHWM:") - steady};
    world_.group->all_reduce(at::from_blob(found, {2}, at::kDouble), trireme::ReduceOp::kMax).wait();
    rows_[way]["seconds"].push_back(found[0]);
    rows_[way]["mib"].push_back(found[1]);
  }

  Path part(const Path& folder) const { return folder / trireme::str("plain", world_.rank); }

  void remove(const Path& path) {
    if (world_.rank == 0) std::filesystem::remove_all(path);
    world_.group->barrier();
  }

  void write(const Path& path, int64_t bytes) {
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    const char* data = static_cast<const char*>(buffer_.const_data_ptr());
    for (int64_t done = 0, now = 0; done < bytes; done += now) {
      now = ::write(file, data + done, static_cast<size_t>(bytes - done));
      if (now <= 0) throw trireme::IoError("write failed: is the disk full?");
    }
    if (fsync(file) != 0) throw trireme::IoError("fsync failed");
    close(file);
  }

  void read(const Path& path, int64_t bytes) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    char* data = static_cast<char*>(buffer_.data_ptr());
    for (int64_t done = 0, now = 0; done < bytes; done += now) {
      now = ::read(file, data + done, static_cast<size_t>(bytes - done));
      if (now <= 0) throw trireme::IoError("read failed");
    }
    close(file);
  }

  const Arguments arguments_;
  trireme::World world_;
  std::shared_ptr<benchmarks::Model> model_;
  std::unique_ptr<trireme::ModelEngine<benchmarks::Model>> engine_;
  int64_t bytes_ = 0;
  at::Tensor buffer_;
  Json rows_;
};

int run_rank(const Arguments& arguments) {
  at::set_num_threads(1);
  trireme::set_log_sink([](trireme::LogLevel, const std::string&) {});
  Job job(arguments);
  const Json result = job.run();
  if (job.speaks()) std::printf("%s\n", result.dump().c_str());
  std::fflush(stdout);
  return 0;
}

constexpr const char* kAbout =
    "saving and loading a training state on several ranks, beside plain writes and reads of as many bytes,\n"
    "interleaved in one run.\n\n"
    "  write       one process: write() of as many bytes as a checkpoint has, then fsync\n"
    "  write-each  every rank its share of them, at the same time\n"
    "  save        Engine::save_checkpoint(): checksums, manifest, fsync of files and folders, renames\n"
    "  async       the same in the background: what the call blocks; async-end: until it is complete, with nothing\n"
    "              else to do\n"
    "  read-each   every rank reads its share of the files, from the page cache\n"
    "  load        Engine::load_checkpoint(), which verifies checksums, from the page cache\n"
    "  load-full   the same with verify=full\n\n"
    "Times are of the slowest rank. MiB: the most that the larger rank's resident memory grew in that call; it cannot\n"
    "tell pages of files from others.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  const auto smoke = [&] {
    arguments.model = "llama-9m";
    arguments.rounds = 1;
  };
  benchmarks::Flags("checkpoint_bench", kAbout)
      .text("--model", arguments.model, "whose training state is saved, with AdamW's moments")
      .whole("--ranks", arguments.ranks, "processes")
      .whole("--stage", arguments.stage, "of ZeRO", 0)
      .whole("--rounds", arguments.rounds, "of all ways in turns")
      .path("--dir", arguments.directory, "where the files go")
      .on("--json", arguments.json, "one line of JSON in place of the table")
      .act("--smoke", smoke, "a small model, once: does it work?")
      .parse(argc, argv);
  return arguments;
}

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  return values[static_cast<size_t>(q * static_cast<double>(values.size() - 1))];
}

void print(const Json& result) {
  const double gigabytes = result["bytes"].get<double>() / 1e9;
  std::printf("%.2f GB\n%-11s %9s %9s %14s %9s\n", gigabytes, "way", "min s", "median", "GB/s (median)", "MiB");
  for (const auto& [way, row] : result["ways"].items()) {
    const auto seconds = row["seconds"].get<std::vector<double>>();
    const double median = quantile(seconds, 0.5);
    std::printf("%-11s %9.3f %9.3f %14.2f %9.0f\n", way.c_str(), quantile(seconds, 0), median, gigabytes / median,
                quantile(row["mib"].get<std::vector<double>>(), 1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const Arguments arguments = parse(argc, argv);
    if (benchmarks::is_own_rank()) return run_rank(arguments);
    const Json result = benchmarks::run_own_ranks(
        {.ranks = arguments.ranks,
         .program = argv[0],
         .flags = {"--model", arguments.model, "--stage", std::to_string(arguments.stage), "--rounds",
                   std::to_string(arguments.rounds), "--dir", arguments.directory.string()}});
    if (arguments.json)
      std::printf("%s\n", result.dump().c_str());
    else
      print(result);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "checkpoint_bench: %s\n", error.what());
    return 1;
  }
}
