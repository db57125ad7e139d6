// Checkpoints of any layout, opened for reading.
#include "trireme/checkpoint/source.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace checkpoint_test;

void save_state(const Folder& folder, int size, const std::string& tag, int seed) {
  run_ranks(size, [&](Rank& rank) {
    (void)save_checkpoint(rank.world(), folder.path(), tag, state_of(rank.id(), rank.size(), seed));
  });
}

size_t index_of(const CheckpointSource& source, const std::string& name) {
  const auto& tensors = source.manifest.tensors;
  const auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto& t) { return t.name == name; });
  EXPECT_NE(found, tensors.end()) << name;
  return found - tensors.begin();
}

/// Elements [begin, begin + numel) of tensor `name`, one-dimensional.
at::Tensor read_part(const CheckpointSource& source, const std::string& name, int64_t begin, int64_t numel) {
  const size_t tensor = index_of(source, name);
  at::Tensor part = at::empty({numel}, source.manifest.tensors[tensor].dtype);
  TensorReader reader(source);
  reader.read(tensor, begin, numel, static_cast<std::byte*>(part.data_ptr()));
  return part;
}

TEST(OpenCheckpoint, ReadsAnyPartOfATensorWhoeverSavedIt) {
  for (const int world : {1, 3}) {
    const Folder folder;
    save_state(folder, world, "one", 5);
    const CheckpointSource source = open_checkpoint(folder.path());
    EXPECT_EQ(source.layout, CheckpointLayout::kTrireme);
    EXPECT_EQ(source.tag, "one");
    EXPECT_EQ(source.manifest.world_size(), world);
    for (const StateTree whole = state_of(0, 1, 5); const TensorSlice& expected : whole.tensors)
      EXPECT_TRUE(at::equal(read_part(source, expected.name, 0, expected.data.numel()), expected.data.flatten()))
          << expected.name;
    // Across blocks of 1 MiB and across the slices of ranks.
    for (const auto& [begin, numel] : {std::pair<int64_t, int64_t>{262'143, 2}, {238'932, 300'000}, {716'799, 1}})
      EXPECT_TRUE(
          at::equal(read_part(source, "big", begin, numel), at::arange(5 + begin, 5 + begin + numel).to(at::kFloat)))
          << begin;
  }
}

TEST(OpenCheckpoint, TakesTheLatestTheNamedTagOrTheCheckpointsOwnFolder) {
  const Folder folder;
  save_state(folder, 1, "one", 1);
  save_state(folder, 1, "two", 2);
  EXPECT_EQ(open_checkpoint(folder.path()).tag, "two");
  EXPECT_EQ(open_checkpoint(folder.path(), "one").tag, "one");
  EXPECT_EQ(open_checkpoint(folder / "one").tag, "one");
  EXPECT_EQ(open_checkpoint(folder / "one").manifest.values, R"({"seed":1})");
  // Between the two renames of a save.
  std::filesystem::rename(folder / "two", folder / ".old-two");
  EXPECT_EQ(open_checkpoint(folder.path()).tag, "two");
}

/// As the Trainer of transformers leaves checkpoint-3: rounded weights beside `latest` and the checkpoint.
void add_rounded_weights(const std::filesystem::path& folder) {
  write_safetensors(folder / "model.safetensors", {{"weight", at::zeros({2}, at::kBFloat16)}});
}

TEST(OpenCheckpoint, TakesTheCheckpointThatLatestNamesBeforeWeightsBesideIt) {
  const Folder folder;
  run_ranks(1, [&](Rank& rank) {
    (void)save_checkpoint(rank.world(), folder / "checkpoint-3", "global_step3", state_of(0, 1, 5));
  });
  add_rounded_weights(folder / "checkpoint-3");
  for (const auto& [path, tag] : {std::pair(folder / "checkpoint-3", ""), std::pair(folder.path(), "checkpoint-3")}) {
    const CapturedLog log;
    const CheckpointSource source = open_checkpoint(path, tag);
    EXPECT_EQ(source.layout, CheckpointLayout::kTrireme);
    EXPECT_EQ(source.tag, "global_step3");
    for (const std::string& part : {std::string("checkpoint-3: `latest` names the checkpoint global_step3, which is "
                                                "taken; for the weights beside it give "),
                                    (folder / "checkpoint-3/model.safetensors").string()})
      EXPECT_NE(log.text().find(part), std::string::npos) << log.text();
  }
  EXPECT_EQ(open_checkpoint(folder / "checkpoint-3/model.safetensors").layout, CheckpointLayout::kSafetensors);
  std::filesystem::remove(folder / "checkpoint-3/latest");
  EXPECT_EQ(open_checkpoint(folder / "checkpoint-3").layout, CheckpointLayout::kSafetensors);
}

TEST(OpenCheckpoint, TakesNoWeightsForACheckpointThatLatestNamesAndThatIsDamaged) {
  const Folder folder;
  save_state(folder, 1, "one", 1);
  add_rounded_weights(folder.path());
  const auto refusal = [&] { return named_error_of([&] { (void)open_checkpoint(folder.path()); }); };
  write_text(folder / "one/manifest.json", "{");
  EXPECT_NE(refusal().find("one/manifest.json: truncated"), std::string::npos) << refusal();
  std::filesystem::remove(folder / "one/manifest.json");
  EXPECT_NE(refusal().find("`latest` names one, which is no complete checkpoint: damaged; for the weights beside it"),
            std::string::npos)
      << refusal();
  save_state(folder, 1, "two", 1);
  write_text(folder / "latest", "three");
  EXPECT_NE(refusal().find("`latest` names three, which is not there; name one of its tags: two; for the weights"),
            std::string::npos)
      << refusal();
}

TEST(OpenCheckpoint, SaysWhatItLookedForAndWhatIsThere) {
  const Folder folder;
  const auto refusal = [&](const std::string& path, const std::string& tag = "") {
    return named_error_of([&] { (void)open_checkpoint(path, tag); });
  };
  const std::string nothing = refusal(folder.path());
  EXPECT_TRUE(nothing.starts_with("CheckpointError: ")) << nothing;
  for (const char* part : {"no checkpoint of a known layout", "manifest.json (Trireme)",
                           "model.safetensors.index.json (safetensors)", "`latest`"})
    EXPECT_NE(nothing.find(part), std::string::npos) << nothing << " lacks " << part;
  EXPECT_NE(refusal(folder / "none").find("there is no such file or folder"), std::string::npos);
  write_text(folder / "notes.txt", "x");
  EXPECT_NE(refusal(folder / "notes.txt").find("no checkpoint of a known layout"), std::string::npos);

  save_state(folder, 1, "one", 1);
  save_state(folder, 1, "two", 1);
  EXPECT_NE(refusal(folder.path(), "three").find("three: no complete checkpoint; name one of its tags: one, two"),
            std::string::npos);
  EXPECT_NE(refusal(folder.path(), "../one").find("cannot name a checkpoint"), std::string::npos);
  std::filesystem::remove(folder / "latest");
  EXPECT_NE(refusal(folder.path()).find("no file `latest` says which checkpoint"), std::string::npos);
}

TEST(TensorReader, NamesWhatIsDamagedTruncatedOrMissing) {
  const Folder folder;
  save_state(folder, 1, "one", 1);
  const CheckpointSource source = open_checkpoint(folder.path());
  const auto shard = folder.path() / "one" / source.manifest.files[0].name;
  const SavedSlice& big = source.manifest.tensors[index_of(source, "big")].slices[0];
  const std::string good = text_of(shard);
  const auto refusal = [&](int64_t begin, int64_t numel) {
    return named_error_of([&] { (void)read_part(source, "big", begin, numel); });
  };
  std::string bad = good;
  bad[big.offset + 262'144 * 4 + 9] ^= 1;  // the second block
  write_text(shard, bad);
  EXPECT_EQ(refusal(0, 262'144), "nothing");
  for (const std::string& part : {shard.string(), std::string("\"big\", elements [262144, 524288) are damaged")})
    EXPECT_NE(refusal(300'000, 1).find(part), std::string::npos) << refusal(300'000, 1);
  write_text(shard, good.substr(0, good.size() - 1));
  EXPECT_NE(refusal(0, 1).find("truncated"), std::string::npos) << refusal(0, 1);
  std::filesystem::remove(shard);
  EXPECT_NE(refusal(0, 1).find("missing"), std::string::npos) << refusal(0, 1);
  EXPECT_NE(refusal(716'799, 2).find("has 716800 elements, [716799, 716801) are asked for"), std::string::npos);
}

TEST(OpenCheckpoint, NamesTheTensorsOfASafetensorsFileAsAnEngineDoes) {
  const Folder folder;
  write_safetensors(folder / "a.safetensors",
                    {{"w", at::arange(0, 12).to(at::kFloat).view({3, 4})}, {"b", at::arange(0, 3).to(at::kBFloat16)}},
                    {{"tied", "w"}, {"note", "x"}});
  const CheckpointSource source = open_checkpoint(folder / "a.safetensors");
  EXPECT_EQ(source.layout, CheckpointLayout::kSafetensors);
  EXPECT_EQ(source.folder, std::filesystem::weakly_canonical(folder.path()));
  EXPECT_EQ(source.manifest.tensors[index_of(source, "model.w")].shape, (std::vector<int64_t>{3, 4}));
  EXPECT_TRUE(at::equal(read_part(source, "model.w", 5, 4), at::arange(5, 9).to(at::kFloat)));
  EXPECT_TRUE(at::equal(read_part(source, "model.b", 0, 3), at::arange(0, 3).to(at::kBFloat16)));
  EXPECT_EQ(Json::parse(source.manifest.values)["aliases"], (Json{{"tied", "w"}}));

  std::filesystem::resize_file(folder / "a.safetensors", 100);
  EXPECT_NE(named_error_of([&] { (void)read_part(source, "model.w", 5, 4); }).find("it is truncated"),
            std::string::npos);
  EXPECT_NE(named_error_of([&] { (void)open_checkpoint(folder / "a.safetensors"); }).find("truncated"),
            std::string::npos);
}

TEST(OpenCheckpoint, ReadsAHuggingFaceFolder) {
  const Folder folder;
  write_safetensors(folder / "m1.safetensors", {{"a", at::tensor({1.0f, 2.0f})}});
  write_safetensors(folder / "m2.safetensors", {{"b", at::tensor({3.0f})}, {"c", at::ones({2})}});
  const auto index = [&](const std::string& map) {
    write_text(folder / "model.safetensors.index.json", R"({"metadata":{},"weight_map":)" + map + "}");
  };
  index(R"({"a":"m1.safetensors","b":"m2.safetensors"})");
  for (const auto& path : {folder.path(), folder / "model.safetensors.index.json"}) {
    const CheckpointSource source = open_checkpoint(path);
    EXPECT_EQ(source.manifest.tensors.size(), 2u);  // the index does not name c
    EXPECT_EQ(read_part(source, "model.a", 1, 1).item<float>() + read_part(source, "model.b", 0, 1).item<float>(), 5);
  }
  index(R"({"a":"m2.safetensors"})");
  EXPECT_NE(named_error_of([&] { (void)open_checkpoint(folder.path()); }).find("tensor \"a\" is not in m2.safetensors"),
            std::string::npos);
  index(R"({"a":"../m1.safetensors"})");
  EXPECT_NE(named_error_of([&] { (void)open_checkpoint(folder.path()); }).find("is in another folder"),
            std::string::npos);
}

TEST(OpenCheckpoint, DoesNotTakeOneShardForAModel) {
  const Folder folder;
  save_state(folder, 2, "one", 1);
  const std::string error =
      named_error_of([&] { (void)open_checkpoint(folder / "one/shard-00000-of-00002.safetensors"); });
  EXPECT_NE(error.find("this is one shard of a checkpoint"), std::string::npos) << error;
}

}  // namespace
}  // namespace trireme
