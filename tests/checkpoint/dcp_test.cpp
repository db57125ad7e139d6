// torch.distributed.checkpoint's blocks as row-major stretches, and its layout written, opened and interrupted.
// tests/peers/torch_distributed_test.py has torch itself read and write it.
#include <ATen/ops/arange.h>
#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <utility>

#include "checkpoint/layouts/dcp/metadata.h"
#include "tests/checkpoint/fixture.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/torch_distributed.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace checkpoint_test;

int64_t product(const std::vector<int64_t>& extents) {
  return std::accumulate(extents.begin(), extents.end(), int64_t{1}, std::multiplies<>());
}

TEST(DcpRuns, MatchIndexArithmeticForEveryBlock) {
  const std::vector<int64_t> shape{3, 4, 5};
  // All blocks of all sizes at all offsets.
  for (int64_t code = 0; code < 3 * 4 * 4 * 5 * 5 * 6; ++code) {
    int64_t rest = code;
    const auto digit = [&](int64_t base) { return std::exchange(rest, rest / base) % base; };
    dcp::StoredItem block;
    for (const int64_t extent : shape) {
      block.offsets.push_back(digit(extent));
      block.sizes.push_back(std::min(digit(extent + 1), extent - block.offsets.back()));
    }
    const at::Tensor whole = at::arange(60).view(shape);
    at::Tensor part = whole;
    for (int64_t dim = 0; dim < 3; ++dim) part = part.narrow(dim, block.offsets[dim], block.sizes[dim]);
    const at::Tensor flat = part.contiguous().flatten();
    std::vector<int64_t> elements;
    int64_t runs = 0;
    dcp::for_each_run(shape, block, [&](int64_t begin, int64_t within, int64_t numel) {
      EXPECT_EQ(within, static_cast<int64_t>(elements.size()));
      for (int64_t i = 0; i < numel; ++i) elements.push_back(begin + i);
      ++runs;
    });
    ASSERT_EQ(elements,
              std::vector<int64_t>(flat.const_data_ptr<int64_t>(), flat.const_data_ptr<int64_t>() + flat.numel()));
    const bool has_whole_rows = block.sizes[1] == 4 && block.sizes[2] == 5;
    if (has_whole_rows && product(block.sizes) > 0) {
      EXPECT_EQ(runs, 1);
    }
  }
}

TEST(DcpWrite, LeavesNothingUnderAFinalNameWhereverTheDiskFails) {
  const Folder folder;
  write_safetensors(folder / "a.safetensors", {{"w", at::arange(0, 30).to(at::kFloat).view({5, 6})}});
  const CheckpointSource source = open_checkpoint(folder / "a.safetensors");
  int failures = 0;
  for (int fail_at = 0; failures == fail_at; ++fail_at) {
    std::filesystem::remove_all(folder / "out");
    FaultyFiles files(fail_at, FaultyFiles::Then::kRecover);
    const std::string error =
        named_error_of([&] { (void)write_torch_distributed(source, folder / "out", {.files = &files}); });
    if (error == "nothing") break;
    ++failures;
    EXPECT_TRUE(error.starts_with("IoError: ")) << error;
    if (std::filesystem::exists(folder / "out")) {
      EXPECT_TRUE(posix_file_system().list(folder / "out").empty()) << fail_at << error;
    }
  }
  EXPECT_GE(failures, 10);
  const CheckpointSource written = open_checkpoint(folder / "out");
  EXPECT_EQ(written.layout, CheckpointLayout::kTorchDistributed);
  ASSERT_EQ(written.manifest.tensors.size(), 1u);
  std::vector<float> values(7);
  TensorReader reader(written);
  reader.read(0, 20, 7, reinterpret_cast<std::byte*>(values.data()));
  EXPECT_EQ(values, (std::vector<float>{20, 21, 22, 23, 24, 25, 26}));
  EXPECT_NE(named_error_of([&] { (void)write_torch_distributed(source, folder / "out"); }).find("is there already"),
            std::string::npos);
}

}  // namespace
}  // namespace trireme
