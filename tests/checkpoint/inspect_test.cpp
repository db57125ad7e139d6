// Findings of an inspection: everything that is wrong, and nothing that is right.
#include "trireme/checkpoint/inspect.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <set>

#include "tests/checkpoint/fixture.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace checkpoint_test;

/// As an engine saves: rank `rank` of two has its half of a weight, its master and its states.
StateTree engine_state(int rank) {
  StateTree state;
  const int64_t begin = rank * 600'000;
  const auto half = [&](const std::string& name, at::ScalarType dtype) {
    state.tensors.push_back({name, {{1200, 1000}}, begin, at::arange(begin, begin + 600'000).to(dtype)});
  };
  half("model.w", at::kBFloat16);
  state.tensors.push_back({"model.b", {{3}}, 0, at::ones({3}, at::kBFloat16)});
  half("master.w", at::kFloat);
  half("optimizer.exp_avg.w", at::kFloat);
  half("optimizer.exp_avg_sq.w", at::kFloat);
  state.values = R"({"global_steps": 7, "lr": 0.5, "client_state": {"epoch": 3, "model": {}}})";
  return state;
}

void save_engine_state(const Folder& folder, const std::string& tag) {
  run_ranks(2, [&](Rank& rank) { (void)save_checkpoint(rank.world(), folder.path(), tag, engine_state(rank.id())); });
}

void flip_bit(const std::filesystem::path& path, size_t byte) {
  std::string text = text_of(path);
  text.at(byte) ^= 4;
  write_text(path, text);
}

std::string lines_of(const CheckpointReport& report) {
  std::string text;
  for (const DamagedPlace& place : report.damages)
    text += str(place.file, "|", place.tensor, "|", place.begin, "|", place.end, "|", place.problem, "\n");
  return text;
}

constexpr const char* kFirst = "shard-00000-of-00002.safetensors";
constexpr const char* kSecond = "shard-00001-of-00002.safetensors";

TEST(Inspect, LooksAtTheCheckpointThatLatestNamesAndNotAtWeightsBesideIt) {
  const Folder folder;
  save_engine_state(folder, "a");
  write_safetensors(folder / "model.safetensors", {{"w", at::ones({3})}});
  EXPECT_TRUE(inspect_checkpoint(folder.path()).healthy());
  flip_bit(folder / "a" / kSecond, 4000);
  EXPECT_FALSE(inspect_checkpoint(folder.path()).healthy());
}

TEST(Inspect, TellsWhatAHealthyCheckpointHolds) {
  const Folder folder;
  save_engine_state(folder, "a");
  save_engine_state(folder, "b");
  const CheckpointReport report = inspect_checkpoint(folder.path(), "a");
  EXPECT_TRUE(report.healthy()) << lines_of(report);
  EXPECT_TRUE(report.verified);
  EXPECT_EQ(report.tags, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(report.latest, "b");
  const Json json = to_json(report, ListTensors::kAll);
  EXPECT_EQ(json["layout"], "Trireme");
  EXPECT_EQ(json["tag"], "a");
  EXPECT_EQ(json["world_size"], 2);
  EXPECT_EQ(json["values"]["global_steps"], 7);
  EXPECT_EQ(json["healthy"], true);
  const auto kind = [](const char* name, const char* dtype, int tensors, int elements, int bytes) {
    return Json{{"kind", name}, {"dtype", dtype}, {"tensors", tensors}, {"elements", elements}, {"bytes", bytes}};
  };
  EXPECT_EQ(json["kinds"],
            (Json{kind("weights", "BF16", 2, 1'200'003, 2'400'006), kind("masters", "F32", 1, 1'200'000, 4'800'000),
                  kind("optimizer exp_avg", "F32", 1, 1'200'000, 4'800'000),
                  kind("optimizer exp_avg_sq", "F32", 1, 1'200'000, 4'800'000)}));
  EXPECT_EQ(json["tensors"].size(), 5u);
  // Everything but the manifest, which has a checksum of its own.
  int64_t bytes = 0;
  for (const SavedFile& file : report.source.manifest.files)
    bytes += static_cast<int64_t>(std::filesystem::file_size(folder / "a" / file.name));
  EXPECT_EQ(report.verified_bytes, bytes);
  // Headers of 2 files; per rank 2 blocks of bf16 and 3 x 3 of fp32, and the bias.
  EXPECT_EQ(report.checksums, 2 + 2 * (2 + 9) + 1);

  const std::string text = to_text(report);
  for (const char* part : {"Trireme checkpoint", "a, b (latest)", "2 ranks, trireme", "global_steps 7", "epoch, model",
                           "1,200,003", "largest tensors\n  master.w  F32 [1200, 1000]  4.80 MB", "health        good"})
    EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
}

TEST(Inspect, ListsEveryDamagedPlaceWhateverTheNumberOfThreads) {
  const Folder folder;
  save_engine_state(folder, "a");
  const Manifest manifest = read_manifest(folder / "a");
  std::mt19937 random(7);
  std::set<std::pair<std::string, int64_t>> expected;  // tensor, first element of the block
  for (int i = 0; i < 12; ++i) {
    const SavedTensor& tensor = manifest.tensors[random() % manifest.tensors.size()];
    const SavedSlice& slice = tensor.slices[random() % tensor.slices.size()];
    const auto byte = static_cast<int64_t>(random() % slice.bytes);
    const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const auto block =
        std::pair(tensor.name, slice.begin + byte / kChecksumBlockBytes * kChecksumBlockBytes / itemsize);
    if (expected.insert(block).second) flip_bit(folder / "a" / manifest.files[slice.file].name, slice.offset + byte);
  }
  ASSERT_GT(expected.size(), 5u);
  std::string lines;
  for (const int threads : {1, 4}) {
    const CheckpointReport report = inspect_checkpoint(folder.path(), "a", {.threads = threads});
    std::set<std::pair<std::string, int64_t>> found;
    for (const DamagedPlace& place : report.damages) {
      EXPECT_EQ(place.problem, "wrong checksum");
      const int64_t itemsize = place.tensor.starts_with("model.") ? 2 : 4;
      const int64_t slice_begin = place.begin / 600'000 * 600'000;
      // A place may be several blocks in a row.
      for (int64_t begin = place.begin; begin < place.end; begin += kChecksumBlockBytes / itemsize) {
        EXPECT_EQ((begin - slice_begin) * itemsize % kChecksumBlockBytes, 0);
        found.emplace(place.tensor, begin);
      }
    }
    EXPECT_EQ(found, expected);
    if (!lines.empty()) {
      EXPECT_EQ(lines_of(report), lines);
    }
    lines = lines_of(report);
  }
}

TEST(Inspect, TellsTruncatedMissingLongerAndBadHeadersApart) {
  const Folder folder;
  save_engine_state(folder, "a");
  const auto problems = [&] { return lines_of(inspect_checkpoint(folder.path())); };
  const std::string first = text_of(folder / "a" / kFirst);

  write_text(folder / "a" / kFirst, first + "x");
  EXPECT_EQ(problems(), str(kFirst, "||0|0|it has ", first.size() + 1, " bytes, expected ", first.size(), "\n"));

  write_text(folder / "a" / kFirst, first);
  flip_bit(folder / "a" / kFirst, 20);
  EXPECT_EQ(problems(), str(kFirst, "||0|0|the header is damaged: wrong checksum\n"));

  // The bf16 tensors come last; 10 bytes of the weight's second block, and the bias with them, are gone.
  const CheckpointSource source = open_checkpoint(folder.path());
  const SavedTensor& weight = source.manifest.tensors[0];
  ASSERT_EQ(weight.name, "model.w");
  write_text(folder / "a" / kFirst, first.substr(0, weight.slices[0].offset + weight.slices[0].bytes - 10));
  const std::string truncated = problems();
  EXPECT_NE(truncated.find(str(kFirst, "||0|0|truncated: it has ")), std::string::npos) << truncated;
  EXPECT_NE(truncated.find(str(kFirst, "|model.w|524288|600000|missing: truncated\n")), std::string::npos) << truncated;

  std::filesystem::remove(folder / "a" / kSecond);
  write_text(folder / "a" / kFirst, first);
  const std::string missing = problems();
  EXPECT_NE(missing.find(str(kSecond, "||0|0|the file is missing\n")), std::string::npos) << missing;
  for (const char* tensor : {"model.w", "master.w", "optimizer.exp_avg.w", "optimizer.exp_avg_sq.w"})
    EXPECT_NE(missing.find(str(kSecond, "|", tensor, "|600000|1200000|missing\n")), std::string::npos) << missing;
  EXPECT_EQ(missing.find(kFirst), std::string::npos) << missing;
}

TEST(Inspect, LooksAtSizesOnlyWhenToldSo) {
  const Folder folder;
  save_engine_state(folder, "a");
  flip_bit(folder / "a" / kSecond, 5000);
  EXPECT_FALSE(inspect_checkpoint(folder.path()).healthy());
  const CheckpointReport quick = inspect_checkpoint(folder.path(), "", {.verify = false});
  EXPECT_TRUE(quick.healthy());
  EXPECT_FALSE(quick.verified);
  EXPECT_NE(to_text(quick).find("checksums were not compared"), std::string::npos);
  std::filesystem::resize_file(folder / "a" / kSecond, 5000);
  EXPECT_FALSE(inspect_checkpoint(folder.path(), "", {.verify = false}).healthy());
}

TEST(Inspect, ReportsADamagedManifestOrLatestAndThrowsOnlyWhereThereIsNothing) {
  const Folder folder;
  save_engine_state(folder, "a");
  flip_bit(folder / "a/manifest.json", 200);
  const CheckpointReport report = inspect_checkpoint(folder.path());
  ASSERT_EQ(report.damages.size(), 1u);
  EXPECT_EQ(report.damages[0].file, "manifest.json");
  EXPECT_NE(report.damages[0].problem.find("damaged"), std::string::npos);
  EXPECT_NE(to_text(report).find("DAMAGED in 1 place"), std::string::npos);
  EXPECT_EQ(to_json(report)["damages"][0]["file"], "manifest.json");

  flip_bit(folder / "a/manifest.json", 200);
  write_text(folder / "latest", ".hidden");
  EXPECT_NE(lines_of(inspect_checkpoint(folder / "a")).find("../latest||0|0|"), std::string::npos);
  EXPECT_NE(named_error_of([&] { (void)inspect_checkpoint(folder / "none"); }).find("no such file or folder"),
            std::string::npos);
}

TEST(Inspect, SaysWhatItCannotCheckOfOtherLayouts) {
  const Folder folder;
  write_safetensors(folder / "model.safetensors", {{"w", at::ones({5})}});
  const CheckpointReport report = inspect_checkpoint(folder.path());
  EXPECT_TRUE(report.healthy());
  const std::string text = to_text(report);
  for (const char* part : {"safetensors checkpoint", "weights", "this layout has no checksums to compare"})
    EXPECT_NE(text.find(part), std::string::npos) << text << " lacks " << part;
  std::filesystem::resize_file(folder / "model.safetensors", 90);
  EXPECT_NE(lines_of(inspect_checkpoint(folder.path())).find("truncated"), std::string::npos);
}

}  // namespace
}  // namespace trireme
