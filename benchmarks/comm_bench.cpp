// Collectives between processes of this host, against the memcpys that they need, measured in the same run by the same
// processes. comm.sh compares with Gloo in one run.
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "benchmarks/flags.h"
#include "trireme/comm/world.h"

namespace {

using trireme::Group;
using Clock = std::chrono::steady_clock;

struct Arguments {
  int ranks = 2;
  int repetitions = 9;
  bool json = false;
  bool smoke = false;
};

struct Row {
  std::string operation;
  int64_t bytes = 0;
  std::vector<double> seconds;
  double min() const { return *std::min_element(seconds.begin(), seconds.end()); }
  double median() const {
    auto sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted[sorted.size() / 2];
  }
};

/// Short operations are repeated within one measurement, so that the clock and the barrier do not count.
Row measure(Group& world, const std::string& operation, int64_t bytes, int repetitions,
            const std::function<void()>& run) {
  const int calls = bytes <= (64 << 10) ? 1000 : bytes <= (4 << 20) ? 20 : 2;
  Row row{operation, bytes, {}};
  for (int call = 0; call < std::min(calls, 20); ++call) run();
  for (int repetition = 0; repetition < repetitions; ++repetition) {
    world.barrier();
    const auto start = Clock::now();
    for (int call = 0; call < calls; ++call) run();
    row.seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count() / calls);
  }
  return row;
}

/// All ranks copy `bytes` at the same time between buffers of their own.
Row measure_memcpy(Group& world, int64_t bytes, int repetitions) {
  std::vector<char> from(static_cast<size_t>(bytes), 1);
  std::vector<char> to(static_cast<size_t>(bytes), 2);
  return measure(world, "memcpy", bytes, repetitions, [&] { std::memcpy(to.data(), from.data(), from.size()); });
}

std::vector<Row> measure_all(Group& world, const Arguments& arguments) {
  const int repetitions = arguments.smoke ? 1 : arguments.repetitions;
  std::vector<Row> rows;
  const auto add = [&](const char* name, int64_t bytes, const std::function<void()>& run) {
    rows.push_back(measure(world, name, bytes, repetitions, run));
  };
  rows.push_back(measure(world, "barrier", 0, repetitions, [&] { world.barrier(); }));
  for (const int64_t bytes : {int64_t{4} << 10, int64_t{256} << 10, int64_t{4} << 20, int64_t{64} << 20}) {
    if (arguments.smoke && bytes > (256 << 10)) break;
    const int64_t numel = bytes / 4;
    const auto own = trireme::shard_range(numel, world.size(), world.rank());
    const at::Tensor whole = at::full({numel}, 1.0, at::kFloat);
    const at::Tensor shard = at::full({own.numel()}, 1.0, at::kFloat);
    const at::Tensor slice = whole.slice(0, own.begin, own.end);
    rows.push_back(measure_memcpy(world, bytes / world.size(), repetitions));
    add("all_gather", bytes, [&] { world.all_gather(whole, slice).wait(); });
    add("reduce_scatter", bytes, [&] { world.reduce_scatter(shard, whole).wait(); });
    add("all_reduce", bytes, [&] { world.all_reduce(whole, trireme::ReduceOp::kMax).wait(); });
    add("broadcast", bytes, [&] { world.broadcast(whole, 0).wait(); });
  }
  return rows;
}

/// Bytes read and written by one rank in the copies that an operation on private tensors cannot do without: own data
/// into shared memory, the peers' data out of it (a sum reads its own operand too).
double touched_bytes(const Row& row, int ranks) {
  const double bytes = static_cast<double>(row.bytes);
  const double others = bytes * (ranks - 1) / ranks;
  const double part = bytes / ranks;
  if (row.operation == "memcpy") return 2 * bytes;
  if (row.operation == "all_gather") return 2 * part + 2 * others;
  if (row.operation == "reduce_scatter") return 2 * others + bytes + part;
  if (row.operation == "all_reduce") return 2 * others + bytes + part + 2 * part + 2 * others;
  return 2 * bytes;
}

void print_table(const std::vector<Row>& rows, int ranks) {
  std::printf("%d ranks, one process each\n", ranks);
  std::printf("%-15s %12s %12s %12s %10s %12s %10s\n", "operation", "bytes", "min us", "median us", "GB/s", "r+w GB/s",
              "of memcpy");
  double memcpy_rate = 0;
  for (const Row& row : rows) {
    const double rate = touched_bytes(row, ranks) / row.median() / 1e9;
    if (row.operation == "memcpy") memcpy_rate = rate;
    std::printf("%-15s %12lld %12.2f %12.2f %10.2f %12.2f", row.operation.c_str(), static_cast<long long>(row.bytes),
                row.min() * 1e6, row.median() * 1e6, static_cast<double>(row.bytes) / row.median() / 1e9, rate);
    if (memcpy_rate > 0)
      std::printf(" %9.0f%%\n", 100 * rate / memcpy_rate);
    else
      std::printf("\n");
  }
}

void print_json(const std::vector<Row>& rows, int ranks) {
  nlohmann::ordered_json line{{"system", "trireme"}, {"ranks", ranks}, {"rows", nlohmann::ordered_json::array()}};
  for (const Row& row : rows)
    line["rows"].push_back({{"operation", row.operation}, {"bytes", row.bytes}, {"seconds", row.seconds}});
  std::printf("%s\n", line.dump().c_str());
}

int run_rank(const Arguments& arguments) {
  const trireme::World world = trireme::init();
  const auto rows = measure_all(*world.group, arguments);
  if (world.rank == 0) arguments.json ? print_json(rows, world.size) : print_table(rows, world.size);
  std::fflush(stdout);
  return 0;
}

constexpr const char* kAbout =
    "collectives between processes of this host, against the memcpys that they need, measured in the same run by\n"
    "the same processes. Every repetition starts at a barrier and is timed on rank 0; `bytes` is the size of the "
    "whole\n"
    "tensor. benchmarks/comm.sh compares with Gloo.";

Arguments parse(int argc, char** argv) {
  Arguments arguments;
  benchmarks::Flags("comm_bench", kAbout)
      .whole("--ranks", arguments.ranks, "processes")
      .whole("--repetitions", arguments.repetitions, "of each operation and size")
      .on("--json", arguments.json,
          "one line: {\"system\", \"rows\": [{\"operation\", \"bytes\", \"seconds\": [...]}]}")
      .on("--smoke", arguments.smoke, "everything once, up to 256 KiB: does it work?")
      .parse(argc, argv);
  return arguments;
}

}  // namespace

int main(int argc, char** argv) {
  const Arguments arguments = parse(argc, argv);
  if (std::getenv("WORLD_SIZE")) return run_rank(arguments);
  ::setenv("WORLD_SIZE", std::to_string(arguments.ranks).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", std::to_string(20000 + ::getpid() % 12000).c_str(), 1);
  ::setenv("OMP_NUM_THREADS", "1", 0);
  for (int rank = 0; rank < arguments.ranks; ++rank) {
    if (::fork() != 0) continue;
    ::setenv("RANK", std::to_string(rank).c_str(), 1);
    std::_Exit(run_rank(arguments));
  }
  int worst = 0;
  for (int status = 0; ::wait(&status) > 0;) worst = std::max(worst, WIFEXITED(status) ? WEXITSTATUS(status) : 1);
  return worst;
}
