// Groups over real GPUs: skipped where there is none. Each call is compared with the group of the host beneath.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "tests/comm/collective_cases.h"
#include "tests/comm/thrown.h"
#include "tests/support/processes.h"
#include "tests/support/registered_zeros.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/comm/cuda_ipc.h"
#include "trireme/comm/nccl.h"
#include "trireme/device/device.h"
#include "trireme/device/stream.h"

namespace trireme {
namespace {

/// Differences between `group` and `host`; empty: none. `exact`: sums are compared bit by bit.
class Differences {
 public:
  Differences(Group& group, Group& host, c10::Device device, bool exact)
      : group_(group), host_(host), device_(device), exact_(exact) {}

  std::string find() {
    for (const at::ScalarType dtype : all_dtypes())
      for (const int64_t numel : {0, 1, 3, 1000, 8209, 3000017}) compare_all(numel, dtype);
    compare_messages();
    for (const int64_t numel : {1024, 3000000}) compare_registered(numel / group_.size() * group_.size());
    return text_;
  }

 private:
  using Call = std::function<Pending<void>(Group&, const at::Tensor&, const at::Tensor&)>;

  void compare(const std::string& name, const at::Tensor& output, const at::Tensor& input, const Call& call) {
    const at::Tensor host_output = output.clone();
    const at::Tensor device_output = output.to(device_);
    call(group_, device_output, input.is_same(output) ? device_output : input.to(device_)).wait();
    call(host_, host_output, input.is_same(output) ? host_output : input).wait();
    const at::Tensor got = device_output.cpu();
    const bool same = exact_ ? at::equal(got, host_output)
                             : at::allclose(got.to(at::kDouble), host_output.to(at::kDouble), 1e-2, 1e-2);
    if (same) return;
    const at::Tensor apart = got.to(at::kDouble).sub(host_output.to(at::kDouble)).abs();
    text_ += str(name, " of ", input.numel(), " ", c10::toString(input.scalar_type()), ": ",
                 apart.gt(0).sum().item<int64_t>(), " elements differ, the first at ",
                 apart.flatten().gt(0).to(at::kInt).argmax().item<int64_t>(), ", by up to ", apart.max().item<double>(),
                 "\n");
  }

  void compare_all(int64_t numel, at::ScalarType dtype) {
    const int rank = group_.rank();
    const int size = group_.size();
    const ShardRange own = shard_range(numel, size, rank);
    const at::Tensor whole = numbers(numel, rank, dtype);
    compare("all_gather", at::zeros({numel}, dtype), whole.slice(0, own.begin, own.end).contiguous(),
            [](Group& g, const at::Tensor& out, const at::Tensor& in) { return g.all_gather(out, in); });
    compare("broadcast", whole, whole,
            [size](Group& g, const at::Tensor& out, const at::Tensor&) { return g.broadcast(out, size - 1); });
    const at::Tensor blocks = numbers(numel * size, rank, dtype);
    compare("all_to_all", at::zeros_like(blocks), blocks,
            [](Group& g, const at::Tensor& out, const at::Tensor& in) { return g.all_to_all(out, in); });
    compare("scatter", at::zeros_like(whole), blocks, [](Group& g, const at::Tensor& out, const at::Tensor& in) {
      return g.scatter(out, g.rank() == 0 ? in : at::Tensor(), 0);
    });
    compare("gather", at::zeros_like(blocks), whole, [](Group& g, const at::Tensor& out, const at::Tensor& in) {
      return g.gather(g.rank() == 0 ? out : at::Tensor(), in, 0);
    });
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMax, ReduceOp::kMin}) {
      const bool selects = op == ReduceOp::kMax || op == ReduceOp::kMin;
      if (dtype == at::kBool ? !selects : (op == ReduceOp::kMean && !at::isFloatingType(dtype))) continue;
      compare(str("all_reduce by ", static_cast<int>(op)), whole, whole,
              [op](Group& g, const at::Tensor& out, const at::Tensor&) { return g.all_reduce(out, op); });
      compare(str("reduce_scatter by ", static_cast<int>(op)), at::zeros({own.numel()}, dtype), whole,
              [op](Group& g, const at::Tensor& out, const at::Tensor& in) { return g.reduce_scatter(out, in, op); });
    }
    if (dtype == at::kBFloat16 || dtype == at::kHalf)
      compare("reduce_scatter to fp32", at::zeros({own.numel()}), whole,
              [](Group& g, const at::Tensor& out, const at::Tensor& in) { return g.reduce_scatter(out, in); });
  }

  /// In memory that the group has registered, and releases meanwhile.
  void compare_registered(int64_t numel) {
    const int64_t bytes = numel * 4, shard = numel / group_.size(), begin = shard * group_.rank();
    const at::Tensor slab = testing::registered_zeros(group_, device_, 2 * bytes);
    if (slab.any().item<bool>()) text_ += "registered memory that is not zero\n";
    const at::Tensor input = slab.narrow(0, 0, bytes).view(at::kFloat);
    const at::Tensor output = slab.narrow(0, bytes, bytes).view(at::kFloat);
    const at::Tensor on_host = numbers(numel, group_.rank(), at::kFloat);
    const auto expect = [&](const char* name, const at::Tensor& got, const at::Tensor& expected) {
      if (!at::allclose(got.cpu(), expected, 1e-2, 1e-2)) text_ += std::string("registered ") + name + "\n";
    };
    input.copy_(on_host);
    group_.reduce_scatter(output.narrow(0, begin, shard), input).wait();
    host_.all_reduce(on_host).wait();
    expect("reduce_scatter", output.narrow(0, begin, shard), on_host.narrow(0, begin, shard));
    group_.all_gather(output, output.narrow(0, begin, shard)).wait();
    expect("all_gather", output, on_host);
    group_.all_reduce(input).wait();
    expect("all_reduce", input, on_host);
  }

  void compare_messages() {
    if (group_.size() == 1) return;
    const int next = (group_.rank() + 1) % group_.size();
    const int previous = (group_.rank() + group_.size() - 1) % group_.size();
    for (const int64_t numel : {1, 3000017}) {
      auto sent =
          group_.send(at::full({numel}, group_.rank(), at::TensorOptions().dtype(at::kFloat).device(device_)), next);
      const at::Tensor got = at::zeros({numel}, at::TensorOptions().device(device_));
      group_.recv(got, previous).wait();
      sent.wait();
      if (!got.eq(previous).all().item<bool>()) text_ += "message of " + std::to_string(numel) + "\n";
    }
  }

  Group& group_;
  Group& host_;
  const c10::Device device_;
  const bool exact_;
  std::string text_;
};

/// argument: "nccl", "nccl in rank order" or "cuda_ipc".
int compare_with_host(Group& world, const std::string& argument) {
  const c10::Device device = choose_device("cuda", world.rank());
  NcclGroupOptions nccl;
  if (argument == "nccl in rank order") nccl.sums = NcclGroupOptions::Sums::kInRankOrder;
  auto group = argument == "cuda_ipc" ? make_cuda_ipc_group(world.clone("gpus"), device)
                                      : make_nccl_group(world.clone("gpus"), device, nccl);
  const std::string differences = Differences(*group, world, device, argument != "nccl").find();
  const at::Tensor outlives = testing::registered_zeros(*group, device, 4096);
  group.reset();
  if (!differences.empty()) std::fprintf(stderr, "%s", differences.c_str());
  if (outlives.any().item<bool>()) return 2;
  return differences.empty() ? 0 : 1;
}

/// A rank goes while the others' GPUs wait for it.
int lose_rank_1(Group& world, const std::string&) {
  const c10::Device device = choose_device("cuda", world.rank());
  const auto group = make_cuda_ipc_group(world.clone("gpus"), device);
  const at::Tensor tensor = at::ones({1000}, at::TensorOptions().device(device));
  group->all_reduce(tensor).wait();
  world.barrier();
  if (world.rank() == 1) ::_exit(0);
  for (;;) {
    group->all_reduce(tensor).wait();
    (void)tensor.sum().item<float>();
  }
}

void expect_success(const std::vector<ProcessResult>& results) {
  for (const ProcessResult& result : results) EXPECT_EQ(result.exit_code, 0) << result.error_text;
}

#define SKIP_WITH_FEWER_GPUS_THAN(count) \
  if (count_gpus() < (count)) GTEST_SKIP() << "there are " << count_gpus() << " GPUs"

TEST(OnGpus, NcclOfOneRankGivesWhatTheHostDoes) {
  SKIP_WITH_FEWER_GPUS_THAN(1);
  for (const char* kind : {"nccl", "nccl in rank order"})
    expect_success(run_processes(1, compare_with_host, {.argument = kind}));
}

TEST(OnGpus, NcclGivesWhatTheHostDoes) {
  SKIP_WITH_FEWER_GPUS_THAN(2);
  for (const char* kind : {"nccl", "nccl in rank order"})
    expect_success(run_processes(count_gpus(), compare_with_host, {.argument = kind}));
}

TEST(OnGpus, CudaIpcBetweenProcessesGivesTheBitsOfTheHost) {
  SKIP_WITH_FEWER_GPUS_THAN(1);
  for (const int size : {1, 2, 3}) expect_success(run_processes(size, compare_with_host, {.argument = "cuda_ipc"}));
}

TEST(OnGpus, TwoRanksOnOneAreRefusedByNccl) {
  SKIP_WITH_FEWER_GPUS_THAN(1);
  run_ranks(2, [](Rank& rank) {
    const Thrown thrown =
        thrown_by([&] { make_nccl_group(rank.world().clone("gpus"), choose_device("cuda:0", rank.id())); });
    EXPECT_EQ(thrown.code, ErrorCode::kConfig) << thrown.text;
    EXPECT_TRUE(thrown.has("cuda_ipc")) << thrown.text;
  });
}

TEST(OnGpus, ARankThatDiesIsNamedAndItsPeersGpusAreFree) {
  SKIP_WITH_FEWER_GPUS_THAN(1);
  const auto results = run_processes(2, lose_rank_1, {});
  EXPECT_NE(results[0].error_text.find("rank 1 (pid "), std::string::npos) << results[0].error_text;
  EXPECT_LT(results[0].seconds, 50);
}

}  // namespace
}  // namespace trireme
