// The helpers of fixture.h, and that they do what the tests rely on.
#include "tests/checkpoint/fixture.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>

#include "trireme/base/error.h"

namespace trireme::checkpoint_test {
namespace {

TensorSlice part(const std::string& name, std::vector<int64_t> shape, at::ScalarType dtype, ShardRange range,
                 int seed) {
  auto data = at::arange(seed + range.begin, seed + range.end, at::kLong);
  if (dtype == at::kBool) data = data.remainder(3).eq(0);
  return {name, {std::move(shape)}, range.begin, data.to(dtype)};
}

}  // namespace

std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}

StateTree state_of(int rank, int size, int seed) {
  StateTree state;
  state.tensors.push_back(part("weight", {3, 1000}, at::kFloat, shard_range(3000, size, rank), seed));
  state.tensors.push_back(part("mask", {7}, at::kBool, shard_range(7, size, rank), seed));
  state.tensors.push_back(part("bias", {5}, at::kBFloat16, {0, 5}, seed));
  state.tensors.push_back(part("big", {700, 1024}, at::kFloat, shard_range(700 * 1024, size, rank), seed));
  state.tensors.push_back(part("step", {}, at::kLong, {0, 1}, seed));
  state.tensors.push_back(part("nothing", {0, 4}, at::kHalf, {0, 0}, seed));
  if (rank == size - 1) state.tensors.push_back(part("owned", {10}, at::kDouble, {0, 10}, seed));
  state.values = str(R"({"seed":)", seed, "}");
  state.rank_values = str(R"({"rank":)", rank, "}");
  return state;
}

StateTree empty_state_of(int rank, int size) {
  StateTree state = state_of(rank, size, 0);
  for (auto& slice : state.tensors) slice.data = at::zeros_like(slice.data);
  return state;
}

bool has_seed(const StateTree& state, int rank, int size, int seed) {
  const StateTree expected = state_of(rank, size, seed);
  return std::equal(
      state.tensors.begin(), state.tensors.end(), expected.tensors.begin(), expected.tensors.end(),
      [](const TensorSlice& a, const TensorSlice& b) { return a.name == b.name && a.data.equal(b.data); });
}

namespace {

TEST(Fixture, TellsStatesOfDifferentSeedsApart) {
  EXPECT_TRUE(has_seed(state_of(1, 2, 5), 1, 2, 5));
  EXPECT_FALSE(has_seed(state_of(1, 2, 5), 1, 2, 6));
  EXPECT_FALSE(has_seed(empty_state_of(1, 2), 1, 2, 5));
}

TEST(Fixture, FilesFailOnceOrForGood) {
  Folder folder;
  FaultyFiles once(1, FaultyFiles::Then::kRecover), dead(1, FaultyFiles::Then::kDie);
  for (FaultyFiles* files : {&once, &dead}) {
    files->create_directories(folder / "a");
    EXPECT_THROW(files->create_directories(folder / "b"), IoError);
  }
  once.create_directories(folder / "c");
  EXPECT_THROW(dead.create_directories(folder / "d"), IoError);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"a", "c"}));
}

}  // namespace
}  // namespace trireme::checkpoint_test
