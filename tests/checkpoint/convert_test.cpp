// Copies in other layouts: memory does not grow with the model, damage is noticed, and nothing half-written stays.
#include "trireme/checkpoint/convert.h"

#include <ATen/ops/ones.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "tests/checkpoint/fixture.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"

namespace trireme {
namespace {

using namespace checkpoint_test;

int64_t kib_of(const char* field) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(field)) return std::stoll(line.substr(std::string(field).size()));
  return -1;
}

/// MiB by which the process grows at most while `work` runs.
int64_t growth_mib(const std::function<void()>& work) {
  malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << "5";  // the high-water mark begins anew
  const int64_t before = kib_of("VmRSS:");
  work();
  return (kib_of("VmHWM:") - before) / 1024;
}

/// An fp32 model of 64 MiB with as much of each Adam state, one tensor of half of it.
CheckpointSource large_source(const Folder& folder) {
  run_ranks(1, [&](Rank& rank) {
    StateTree state;
    Json steps = Json::object();
    for (const auto& [name, numel] :
         {std::pair<std::string, int64_t>{"half", 8 << 20}, {"a", 4 << 20}, {"b", 4 << 20}}) {
      for (const std::string kind : {"model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."})
        state.tensors.push_back({kind + name, {{numel}}, 0, at::ones({numel})});
      steps[name] = 1;
    }
    state.values =
        Json{{"global_steps", 1}, {"skipped_steps", 0}, {"global_samples", 1}, {"parameter_steps", steps}}.dump();
    save_checkpoint(rank.world(), folder / "large", "one", state);
  });
  return open_checkpoint(folder / "large");
}

TEST(Convert, NeedsMemoryForBlocksNotForTheModelNorForATensor) {
  const Folder folder;
  const CheckpointSource source = large_source(folder);
  EXPECT_GT(growth_mib([] { (void)at::ones({64 << 20}, at::kByte); }), 60);  // that the measurement sees what is there
  EXPECT_LT(growth_mib([&] { write_trireme_checkpoint(source, folder / "ours"); }), 16);
  // 16 flat tensors of 12 MiB: one of them, and blocks.
  EXPECT_LT(growth_mib([&] { write_deepspeed_checkpoint(source, folder / "theirs", {.stage = 3, .ranks = 16}); }), 48);
  const CheckpointSource theirs = open_checkpoint(folder / "theirs");
  EXPECT_LT(growth_mib([&] { write_trireme_checkpoint(theirs, folder / "again"); }), 16);
}

TEST(Convert, PutsLargeFlatTensorsTogetherInAFileThatIsGoneAfterwards) {
  const Folder folder;
  write_deepspeed_checkpoint(large_source(folder), folder / "theirs",
                             {.stage = 2, .ranks = 1});  // flat tensors of 64 MiB
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "theirs/one"))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  EXPECT_EQ(names,
            (std::vector<std::string>{"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"}));
  const CheckpointSource theirs = open_checkpoint(folder / "theirs");
  TensorReader reader(theirs);
  std::vector<float> end(2);
  reader.read(0, (8 << 20) - 2, 2, reinterpret_cast<std::byte*>(end.data()));
  EXPECT_EQ(end, (std::vector<float>{1, 1}));
}

TEST(Convert, LeavesExistingTagsAlone) {
  const Folder folder;
  run_ranks(1, [&](Rank& rank) { save_checkpoint(rank.world(), folder / "from", "one", state_of(0, 1, 3)); });
  const CheckpointSource source = open_checkpoint(folder / "from");
  write_trireme_checkpoint(source, folder / "to");
  const std::string manifest = text_of(folder / "to/one/manifest.json");
  const std::string error = named_error_of([&] { write_trireme_checkpoint(source, folder / "to"); });
  EXPECT_TRUE(error.starts_with("CheckpointError: " + (folder / "to/one").string() + ": this tag exists already"))
      << error;
  EXPECT_EQ(text_of(folder / "to/one/manifest.json"), manifest);
  EXPECT_NE(named_error_of([&] { write_trireme_checkpoint(source, folder / "to", {.tag = "a/b"}); }).find("a/b"),
            std::string::npos);
  write_trireme_checkpoint(source, folder / "to", {.tag = "two"});
  EXPECT_EQ(text_of(folder / "to/latest"), "two\n");
}

TEST(Convert, StopsAtDamageOfTheSourceAndLeavesNothing) {
  const Folder folder;
  run_ranks(1, [&](Rank& rank) { save_checkpoint(rank.world(), folder / "from", "one", state_of(0, 1, 3)); });
  const auto shard = folder / "from/one/shard-00000-of-00001.safetensors";
  std::string bytes = text_of(shard);
  bytes[bytes.size() - 100] ^= 1;
  write_text(shard, bytes);
  const std::string error =
      named_error_of([&] { write_trireme_checkpoint(open_checkpoint(folder / "from"), folder / "to"); });
  EXPECT_NE(error.find("are damaged: checksum"), std::string::npos) << error;
  EXPECT_TRUE(std::filesystem::is_empty(folder / "to"));
}

TEST(Convert, LeavesNothingHalfWrittenWhereverTheDiskFails) {
  const Folder folder;
  run_ranks(1, [&](Rank& rank) { save_checkpoint(rank.world(), folder / "from", "one", state_of(0, 1, 3)); });
  const CheckpointSource source = open_checkpoint(folder / "from");
  int failures = 0;
  for (int fail_at = 0; failures == fail_at; ++fail_at) {
    FaultyFiles files(fail_at, FaultyFiles::Then::kRecover);
    const std::string error =
        named_error_of([&] { write_trireme_checkpoint(source, folder / "to", {.files = &files}); });
    if (error == "nothing") break;
    ++failures;
    ASSERT_TRUE(error.starts_with("IoError: ")) << error;
    std::error_code ignored;
    for (const auto& entry : std::filesystem::directory_iterator(folder / "to", ignored))
      ASSERT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path() << " after operation " << fail_at;
    std::filesystem::remove_all(folder / "to", ignored);
  }
  EXPECT_GE(failures, 8);
  EXPECT_EQ(open_checkpoint(folder / "to").manifest.tensors.size(), source.manifest.tensors.size());
}

}  // namespace
}  // namespace trireme
