// Plain weights out of checkpoints: the right bytes, nothing half-written, and memory that does not grow with the
// model.
#include "trireme/checkpoint/consolidate.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/error_of.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/export.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using namespace checkpoint_test;

/// Not representable in bf16: a master is told from its weight.
at::Tensor master_values(int64_t begin, int64_t numel) {
  return at::arange(begin, begin + numel).to(at::kFloat).add(0.03125);
}

/// As an engine with bf16 weights saves on `size` ranks: a trained weight, one that a second name is tied to, a frozen
/// one, a buffer of integers and one of floating-point numbers.
StateTree bf16_state(int rank, int size) {
  StateTree state;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, at::ScalarType dtype, int64_t first) {
    int64_t numel = 1;
    for (const int64_t extent : shape) numel *= extent;
    const ShardRange range = shard_range(numel, size, rank);
    state.tensors.push_back(
        {name, {std::move(shape)}, range.begin, master_values(first + range.begin, range.end - range.begin).to(dtype)});
  };
  add("model.w", {100, 30}, at::kBFloat16, 0);
  add("model.embed.weight", {50, 4}, at::kBFloat16, 100);
  add("model.frozen", {7}, at::kBFloat16, 200);
  add("model.count", {3}, at::kLong, 0);
  add("model.mean", {2}, at::kFloat, 0);
  for (const std::string kind : {"master", "optimizer.exp_avg"}) {
    add(kind + ".w", {100, 30}, at::kFloat, 0);
    add(kind + ".embed.weight", {50, 4}, at::kFloat, 100);
  }
  state.values = R"({"aliases": {"head.weight": "embed.weight", "other": "frozen"},
                     "parameter_steps": {"w": 4, "embed.weight": 4, "frozen": 0}})";
  return state;
}

CheckpointSource saved_bf16(const Folder& folder, int size = 2) {
  run_ranks(size, [&](Rank& rank) {
    (void)save_checkpoint(rank.world(), folder / "saved", "one", bf16_state(rank.id(), size));
  });
  return open_checkpoint(folder / "saved");
}

TEST(Consolidate, TakesFp32FromTheMastersAndTheRestFromTheWeights) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  const ConsolidatedWeights written = consolidate(source, folder / "out");
  EXPECT_EQ(written.files, std::vector<std::filesystem::path>{folder / "out/model.safetensors"});
  EXPECT_EQ(written.tensors, 5);
  const NamedTensors weights = read_safetensors(folder / "out");
  ASSERT_EQ(weights.size(), 5u);
  EXPECT_TRUE(at::equal(weights.at("w"), master_values(0, 3000).view({100, 30})));
  EXPECT_TRUE(at::equal(weights.at("embed.weight"), master_values(100, 200).view({50, 4})));
  EXPECT_TRUE(at::equal(weights.at("frozen"), master_values(200, 7).to(at::kBFloat16).to(at::kFloat)));
  EXPECT_TRUE(at::equal(weights.at("count"), at::arange(3)));
  EXPECT_TRUE(at::equal(weights.at("mean"), master_values(0, 2)));
  // The metadata names the tied parameter, for whoever opens the file next.
  EXPECT_EQ(Json::parse(open_checkpoint(folder / "out").manifest.values)["aliases"]["head.weight"], "embed.weight");
}

TEST(Consolidate, WritesWhatAnExportOfTheSameTensorsWrites) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder, 3);
  for (const char* name : {"model.safetensors", "model.bin"}) {
    (void)consolidate(source, folder / "out", {.dtype = std::nullopt, .file_name = name});
    const StateTree whole = bf16_state(0, 1);
    std::vector<ExportedTensor> tensors;
    for (const TensorSlice& slice : whole.tensors)
      if (slice.name.starts_with("model."))
        tensors.push_back({slice.name.substr(6), slice.part.shape, slice.data.scalar_type(),
                           [&slice] { return slice.data.view(slice.part.shape); }});
    run_ranks(1, [&](Rank& rank) {
      export_tensors(rank.world(), folder / "expected" / name, tensors,
                     {.aliases = {{"head.weight", "embed.weight"}, {"other", "frozen"}}});
    });
    EXPECT_EQ(text_of(folder / "out" / name), text_of(folder / "expected" / name)) << name;
  }
}

TEST(Consolidate, RoundsTheMasterOnceWhenTheDtypeIsAnother) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  (void)consolidate(source, folder / "half", {.dtype = at::kHalf});
  EXPECT_TRUE(
      at::equal(read_safetensors(folder / "half").at("w"), master_values(0, 3000).to(at::kHalf).view({100, 30})));
  (void)consolidate(source, folder / "same", {.dtype = at::kBFloat16});
  EXPECT_TRUE(
      at::equal(read_safetensors(folder / "same").at("w"), master_values(0, 3000).to(at::kBFloat16).view({100, 30})));
  EXPECT_EQ(read_safetensors(folder / "same").at("count").scalar_type(), at::kLong);
}

TEST(Consolidate, NamesAFileThatStandsWhereTheFolderShallBe) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  const std::string file = (folder / "file").string();
  write_file_atomically(posix_file_system(), file, "text");
  EXPECT_EQ(testing::error_of<ConfigError>([&] { (void)consolidate(source, file); }),
            file + ": this is a file; name a folder for the weights");
}

TEST(Consolidate, LeavesOutFrozenParametersAndWhatIsTiedToThem) {
  const Folder folder;
  (void)consolidate(saved_bf16(folder), folder / "out", {.exclude_frozen_parameters = true});
  const NamedTensors weights = read_safetensors(folder / "out");
  EXPECT_EQ(weights.count("frozen"), 0u);
  EXPECT_EQ(weights.count("mean"), 1u);  // a buffer is no parameter
  EXPECT_EQ(Json::parse(open_checkpoint(folder / "out").manifest.values)["aliases"].size(), 1u);
  // A file of weights does not say which of them were trained.
  EXPECT_NE(named_error_of([&] {
              (void)consolidate(open_checkpoint(folder / "out"), folder / "again", {.exclude_frozen_parameters = true});
            }).find("nothing in this checkpoint tells frozen parameters from others"),
            std::string::npos);
}

TEST(Consolidate, ALargeModelBecomesSeveralFilesAndAnIndex) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  const ConsolidatedWeights written = consolidate(source, folder / "out", {.max_shard_bytes = 900});
  // 12000 (larger than any file), 800 + 28 + 24 + 8 bytes.
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"out", "saved"}));
  EXPECT_EQ(written.files, (std::vector<std::filesystem::path>{folder / "out/model-00001-of-00002.safetensors",
                                                               folder / "out/model-00002-of-00002.safetensors",
                                                               folder / "out/model.safetensors.index.json"}));
  const Json index = Json::parse(text_of(folder / "out/model.safetensors.index.json"));
  EXPECT_EQ(index["metadata"]["total_size"], 12000 + 800 + 28 + 24 + 8);
  EXPECT_EQ(index["weight_map"]["w"], "model-00001-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"]["mean"], "model-00002-of-00002.safetensors");
  EXPECT_EQ(index["weight_map"].size(), 5u);
  const NamedTensors weights = read_safetensors(folder / "out");
  EXPECT_TRUE(at::equal(weights.at("w"), master_values(0, 3000).view({100, 30})));
  EXPECT_TRUE(at::equal(weights.at("count"), at::arange(3)));
}

TEST(Consolidate, WritesTheConfigJsonThatStandsBesideLatest) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  const auto config_of = [&](const std::string& out) {
    (void)consolidate(source, folder / out);
    return std::filesystem::exists(folder / out / "config.json") ? read_json(folder / out / "config.json") : Json();
  };
  write_text(folder / "saved/config.json", R"({"model_type": "llama", "hidden_size": 4, "torch_dtype": "bfloat16"})");
  write_text(folder / "saved/tokenizer.json", "{}");
  EXPECT_EQ(config_of("out"), Json::parse(R"({"model_type": "llama", "hidden_size": 4, "torch_dtype": "float32"})"));
  EXPECT_TRUE(std::filesystem::exists(folder / "out/tokenizer.json"));
  // A file of this name that tells no model is not one for from_pretrained().
  for (const char* other : {R"({"train_batch_size": 1})", "{"}) {
    write_text(folder / "saved/config.json", other);
    const CapturedLog log;
    EXPECT_EQ(config_of(str("out", std::string(other).size())), Json());
    EXPECT_NE(log.text().find("saved/config.json"), std::string::npos) << log.text();
  }
}

TEST(Consolidate, ReplacesFormerWeightsOnlyWhenToldSo) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  (void)consolidate(source, folder / "out", {.max_shard_bytes = 900});
  write_text(folder / "out/config.json", "{}");
  const std::string error = named_error_of([&] { (void)consolidate(source, folder / "out"); });
  EXPECT_NE(error.find("model-00001-of-00002.safetensors: this file exists already"), std::string::npos) << error;
  (void)consolidate(source, folder / "out", {.existing = ExistingOutput::kReplace});
  // A former index beside the new file would be two models in one folder.
  EXPECT_EQ(posix_file_system().list(folder / "out"), (std::vector<std::string>{"config.json", "model.safetensors"}));
}

TEST(Consolidate, LeavesNoFileUnderItsNameWhereverTheDiskFails) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  for (const auto& [file_name, shard_bytes] :
       {std::pair("model.safetensors", 900), std::pair("model.safetensors", 1 << 30), std::pair("model.bin", 900)}) {
    int failures = 0;
    for (int fail_at = 0; failures == fail_at; ++fail_at) {
      std::filesystem::remove_all(folder / "out");
      FaultyFiles files(fail_at, FaultyFiles::Then::kRecover);
      const std::string error = named_error_of([&] {
        (void)consolidate(source, folder / "out",
                          {.max_shard_bytes = shard_bytes, .file_name = file_name, .files = &files});
      });
      if (error == "nothing") break;
      ++failures;
      EXPECT_TRUE(error.starts_with("IoError: ")) << error;
      if (std::filesystem::exists(folder / "out")) {
        EXPECT_TRUE(posix_file_system().list(folder / "out").empty()) << error;
      }
    }
    EXPECT_GE(failures, 6);  // folder, file, writes, sync, close, rename
    EXPECT_TRUE(
        std::filesystem::exists(folder / "out" / (shard_bytes == 900 ? str(file_name, ".index.json") : file_name)));
  }
}

TEST(Consolidate, ADamagedCheckpointGivesNoWeights) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  const auto shard = folder.path() / "saved/one" / source.manifest.files[1].name;
  std::string text = text_of(shard);
  text[source.manifest.files[1].header_bytes + 40] ^= 1;
  write_text(shard, text);
  const std::string error = named_error_of([&] { (void)consolidate(source, folder / "out"); });
  EXPECT_TRUE(error.starts_with("CheckpointError: " + shard.string())) << error;
  EXPECT_NE(error.find("are damaged: checksum"), std::string::npos) << error;
  EXPECT_TRUE(posix_file_system().list(folder / "out").empty());
}

TEST(Consolidate, RefusesWhatItCannotDoBeforeItWrites) {
  const Folder folder;
  const CheckpointSource source = saved_bf16(folder);
  const auto refusal = [&](const ConsolidateOptions& options) {
    return named_error_of([&] { (void)consolidate(source, folder / "out", options); });
  };
  EXPECT_EQ(refusal({.file_name = "model.npz"}).find("ConfigError: 'model.npz' names no format"), 0u);
  EXPECT_EQ(refusal({.file_name = "a/model.bin"}).find("ConfigError: file name 'a/model.bin' has a slash"), 0u);
  EXPECT_EQ(refusal({.dtype = at::kInt}).find("ConfigError: dtype Int is no floating-point one"), 0u);
  EXPECT_EQ(refusal({.max_shard_bytes = 0}).find("ConfigError: a shard size of 0 bytes"), 0u);
  CheckpointSource empty = source;
  empty.manifest.tensors.clear();
  EXPECT_NE(named_error_of([&] { (void)consolidate(empty, folder / "out"); }).find("holds no weights"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
}

TEST(Consolidate, DoesNotTurnLargeNumbersIntoInfinity) {
  const Folder folder;
  at::Tensor values = at::full({5}, 60000.0);
  write_safetensors(folder / "a.safetensors", {{"w", values}, {"inf", at::full({5}, INFINITY)}});
  (void)consolidate(open_checkpoint(folder / "a.safetensors"), folder / "out", {.dtype = at::kHalf});
  EXPECT_TRUE(at::equal(read_safetensors(folder / "out").at("inf"), at::full({5}, INFINITY).to(at::kHalf)));
  values[3] = 70000.0;
  write_safetensors(folder / "b.safetensors", {{"w", values}});
  const std::string error = named_error_of(
      [&] { (void)consolidate(open_checkpoint(folder / "b.safetensors"), folder / "other", {.dtype = at::kHalf}); });
  EXPECT_NE(error.find("tensor \"model.w\", elements [0, 5): a value is beyond fp16's largest"), std::string::npos)
      << error;
}

int64_t status_bytes(const std::string& field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field)) return 1024 * std::stoll(line.substr(field.size() + 1));
  return -1;
}

/// By how much the process grows at most while `work` runs.
int64_t peak_growth(const std::function<void()>& work) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the high-water mark begins anew
  const int64_t before = status_bytes("VmRSS:");
  work();
  return status_bytes("VmHWM:") - before;
}

TEST(Consolidate, NeedsMemoryForPiecesNotForTheModelNorForATensor) {
  constexpr int64_t kTensors = 16, kNumel = 4 << 20;  // 128 MiB of bf16 weights, 256 MiB of masters
  const Folder folder;
  run_ranks(1, [&](Rank& rank) {
    StateTree state;
    const at::Tensor weight = at::ones({kNumel}, at::kBFloat16), master = at::ones({kNumel});
    for (int64_t i = 0; i < kTensors; ++i) {
      state.tensors.push_back({str("model.", i), {{kNumel}}, 0, weight});
      state.tensors.push_back({str("master.", i), {{kNumel}}, 0, master});
    }
    (void)save_checkpoint(rank.world(), folder.path(), "one", state);
  });
  const CheckpointSource source = open_checkpoint(folder.path());
  // That the measurement sees what is there.
  EXPECT_GT(peak_growth([] { (void)at::ones({64 << 20}, at::kByte); }), 60 << 20);

  const int64_t streamed = peak_growth([&] { (void)consolidate(source, folder / "out"); });
  EXPECT_LT(streamed, 16 << 20);  // two pieces of 4 MiB: read, converted
  constexpr int64_t kLargest = 4 * kNumel;
  const int64_t archived = peak_growth([&] { (void)consolidate(source, folder / "out", {.file_name = "model.bin"}); });
  EXPECT_LT(archived, kLargest + (16 << 20));
}

TEST(ParseBytes, ReadsSizesAndRefusesTheRest) {
  EXPECT_EQ(parse_bytes("5GB"), 5'000'000'000);
  EXPECT_EQ(parse_bytes("1.5 kb"), 1500);
  EXPECT_EQ(parse_bytes("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(parse_bytes("17"), 17);
  for (const char* text : {"", "GB", "5 potatoes", "-1MB", "0", "1e30TB", "nan"})
    EXPECT_TRUE(named_error_of([&] { (void)parse_bytes(text); }).starts_with("ConfigError: ")) << text;
}

}  // namespace
}  // namespace trireme
