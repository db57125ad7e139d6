#include <gtest/gtest.h>

#include <map>

#include "tests/checkpoint/fixture.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/manifest.h"
#include "trireme/formats/safetensors.h"

namespace trireme {
namespace {

using checkpoint_test::empty_state_of;
using checkpoint_test::Folder;
using checkpoint_test::has_seed;
using checkpoint_test::state_of;
using checkpoint_test::text_of;
using checkpoint_test::write_text;
using testing::named_error_of;

void save(const Folder& folder, int size, const std::string& tag, int seed, const SaveOptions& options = {}) {
  run_ranks(size, [&](Rank& rank) {
    (void)save_checkpoint(rank.world(), folder.path(), tag, state_of(rank.id(), rank.size(), seed), options);
  });
}

/// Loads at `size` ranks; every rank must find `seed`.
void expect_loads(const Folder& folder, int size, const std::string& tag, int seed, const LoadOptions& options = {}) {
  run_ranks(size, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), rank.size());
    const auto loaded = load_checkpoint(rank.world(), folder.path(), tag, state, options);
    ASSERT_TRUE(loaded);
    EXPECT_TRUE(has_seed(state, rank.id(), rank.size(), seed));
    EXPECT_EQ(loaded->values, str(R"({"seed":)", seed, "}"));
  });
}

/// Loads on two ranks into what `change` makes of rank 1's destination; both must throw a text with all of `parts` and
/// leave all memory as it was.
void expect_refused(const Folder& folder, const std::function<void(StateTree&)>& change,
                    const std::vector<std::string>& parts, const LoadOptions& options = {}) {
  run_ranks(2, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), 2);
    if (rank.id() == 1) change(state);
    const std::string error =
        named_error_of([&] { (void)load_checkpoint(rank.world(), folder.path(), "", state, options); });
    EXPECT_TRUE(error.starts_with("CheckpointError: ")) << error;
    for (const auto& part : parts) EXPECT_NE(error.find(part), std::string::npos) << error << " lacks " << part;
    for (const auto& slice : state.tensors) EXPECT_FALSE(slice.data.any().item<bool>()) << slice.name;
  });
}

std::string error_of_load(const std::filesystem::path& directory) {
  std::string error;
  run_ranks(1, [&](Rank& rank) {
    StateTree state = empty_state_of(0, 1);
    error = named_error_of([&] { (void)load_checkpoint(rank.world(), directory, "", state); });
  });
  return error;
}

class AnyWorldToAnyWorld : public ::testing::TestWithParam<std::tuple<int, int>> {};

TEST_P(AnyWorldToAnyWorld, GivesBackEveryElement) {
  const auto [saved, loaded] = GetParam();
  Folder folder;
  save(folder, saved, "one", 3);
  expect_loads(folder, loaded, "one", 3);
  expect_loads(folder, loaded, "", 3, {.verify = Verify::kFirst});
}

INSTANTIATE_TEST_SUITE_P(Worlds, AnyWorldToAnyWorld,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Values(1, 2, 3, 4)));

TEST(Checkpoint, KeepsEveryRanksValues) {
  Folder folder;
  save(folder, 2, "one", 1);
  run_ranks(2, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), 2);
    const auto loaded = load_checkpoint(rank.world(), folder.path(), "", state);
    EXPECT_EQ(loaded->tag, "one");
    EXPECT_EQ(loaded->rank_values, (std::vector<std::string>{R"({"rank":0})", R"({"rank":1})"}));
  });
}

TEST(Checkpoint, WritesEachElementOnceAlthoughManyRanksHoldIt) {
  Folder folder;
  save(folder, 4, "one", 1);
  int64_t bytes = 0;
  for (const auto& file : read_manifest(folder / "one").files) bytes += file.bytes - file.header_bytes;
  // weight, mask, bias, big, step, owned
  EXPECT_EQ(bytes, 3000 * 4 + 7 + 5 * 2 + 700 * 1024 * 4 + 8 + 10 * 8);
}

TEST(Checkpoint, OfOneRankIsAPlainSafetensorsFile) {
  Folder folder;
  save(folder, 1, "one", 2);
  const auto tensors = read_safetensors(folder / "one/shard-00000-of-00001.safetensors");
  EXPECT_EQ(tensors.at("weight").sizes(), (std::vector<int64_t>{3, 1000}));
  EXPECT_EQ(tensors.at("weight").flatten()[2999].item<float>(), 3001);
  EXPECT_EQ(tensors.at("step").dim(), 0);
  EXPECT_EQ(tensors.size(), 7u);
}

TEST(Checkpoint, SavingTwiceGivesTheSameBytes) {
  Folder folder;
  save(folder, 2, "one", 1);
  save(folder, 2, "two", 1);
  for (const char* name : {"manifest.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"})
    EXPECT_EQ(text_of(folder / "one" / name), text_of(folder / "two" / name)) << name;
}

TEST(Checkpoint, LatestNamesTheLastSaveUnlessToldOtherwise) {
  Folder folder;
  save(folder, 1, "one", 1);
  save(folder, 1, "two", 2);
  save(folder, 1, "three", 3, {.latest = UpdateLatest::kNo});
  EXPECT_EQ(text_of(folder / "latest"), "two\n");
  EXPECT_EQ(latest_tag(folder.path()), "two");
  expect_loads(folder, 1, "", 2);
}

TEST(Checkpoint, NothingToResumeFromIsNoError) {
  Folder folder;
  run_ranks(2, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), 2);
    EXPECT_FALSE(load_checkpoint(rank.world(), folder.path(), "", state));
    EXPECT_FALSE(load_checkpoint(rank.world(), folder / "none", "", state));
  });
}

TEST(Checkpoint, AFolderThatIsACheckpointItselfIsNotTakenForAnEmptyOne) {
  Folder folder;
  save(folder, 1, "one", 1);
  EXPECT_NE(error_of_load(folder / "one").find(str("load from ", folder.path().string(), " with the tag one")),
            std::string::npos)
      << error_of_load(folder / "one");
}

TEST(Checkpoint, OfAnotherLayoutIsRefusedWithTheCommandThatConvertsIt) {
  for (const auto& [file, layout] : std::map<std::string, std::string>{{"mp_rank_00_model_states.pt", "DeepSpeed"},
                                                                       {".metadata", "PyTorch DCP"},
                                                                       {"model.safetensors", "safetensors"}}) {
    Folder folder;
    std::filesystem::create_directory(folder / "global_step1");
    checkpoint_test::write_text(folder / "global_step1" / file, "");
    checkpoint_test::write_text(folder / "latest", "global_step1");
    for (const std::string& error : {error_of_load(folder.path()), error_of_load(folder / "global_step1")}) {
      EXPECT_NE(error.find(str("a checkpoint of ", layout)), std::string::npos) << error;
      EXPECT_NE(error.find("trireme convert"), std::string::npos) << error;
    }
  }
}

TEST(Checkpoint, WithoutLatestTheNewestIsOfferedByName) {
  Folder folder;
  save(folder, 1, "one", 1);
  save(folder, 1, "two", 1);
  std::filesystem::remove(folder / "latest");
  expect_refused(folder, [](StateTree&) {}, {"the newest is two"});
  write_text(folder / "latest", "gone\n");
  expect_refused(folder, [](StateTree&) {}, {"gone", "newest complete one is two", "all: one, two"});
}

TEST(Checkpoint, AnExistingTagIsReplacedOrRefused) {
  Folder folder;
  save(folder, 2, "one", 1);
  save(folder, 2, "one", 2);
  expect_loads(folder, 2, "one", 2);
  run_ranks(2, [&](Rank& rank) {
    const auto error = named_error_of([&] {
      (void)save_checkpoint(rank.world(), folder.path(), "one", state_of(rank.id(), 2, 3),
                            {.existing = ExistingTag::kRefuse});
    });
    EXPECT_NE(error.find("exists already"), std::string::npos) << error;
  });
  expect_loads(folder, 2, "one", 2);
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"latest", "one", "zero_to_fp32.py"}));
}

TEST(Checkpoint, KeepsTheLastOnesAndWhatLatestNames) {
  Folder folder;
  save(folder, 1, "base", 1);
  save(folder, 1, "step1", 1, {.latest = UpdateLatest::kNo});
  save(folder, 1, "step2", 1, {.latest = UpdateLatest::kNo});
  save(folder, 1, "step3", 1, {.latest = UpdateLatest::kNo, .keep_last = 3});
  EXPECT_EQ(complete_tags(folder.path()), (std::vector<std::string>{"base", "step2", "step3"}));
  save(folder, 1, "step4", 1, {.keep_last = 2});
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"latest", "step3", "step4", "zero_to_fp32.py"}));
}

TEST(Checkpoint, ATagThatIsNoPlainNameIsRefused) {
  Folder folder;
  for (const std::string tag : {"", "a/b", "..", ".hidden", "latest", "latest.tmp7", "a\nb", "blank ", " blank"}) {
    run_ranks(1, [&](Rank& rank) {
      const auto error =
          named_error_of([&] { (void)save_checkpoint(rank.world(), folder.path(), tag, state_of(0, 1, 1)); });
      EXPECT_NE(error.find("cannot name a checkpoint"), std::string::npos) << tag << error;
    });
  }
  EXPECT_TRUE(folder.names().empty());
}

TEST(Checkpoint, SlicesThatLeaveAGapAreRefusedOnAllRanks) {
  Folder folder;
  run_ranks(2, [&](Rank& rank) {
    StateTree state = state_of(rank.id(), 2, 1);
    if (rank.id() == 1) state.tensors[0].begin += 1, state.tensors[0].data = state.tensors[0].data.slice(0, 1);
    const auto error = named_error_of([&] { (void)save_checkpoint(rank.world(), folder.path(), "one", state); });
    EXPECT_EQ(error, "CheckpointError: tensor \"weight\": no rank holds elements [1500, 1501)");
  });
  EXPECT_TRUE(folder.names().empty());
}

TEST(Checkpoint, AMissingTensorIsNamed) {
  Folder folder;
  save(folder, 2, "one", 1);
  const auto rename = [](StateTree& state) { state.tensors[0].name = "new_weight"; };
  expect_refused(folder, rename, {"1 expected and not in the checkpoint: new_weight"});
}

TEST(Checkpoint, AnExtraTensorIsNamed) {
  Folder folder;
  save(folder, 2, "one", 1);
  // Only rank 1 asks for "owned".
  expect_refused(folder, [](StateTree& state) { state.tensors.pop_back(); },
                 {"1 in the checkpoint and not expected: owned"});
}

TEST(Checkpoint, AWrongShapeIsNamedWithExpectedAndFound) {
  Folder folder;
  save(folder, 2, "one", 1);
  const auto change = [](StateTree& state) { state.tensors[0].part.shape = {1000, 3}; };
  expect_refused(folder, change, {"\"weight\"", "expected [1000, 3] F32", "found in the checkpoint [3, 1000] F32"});
}

TEST(Checkpoint, AWrongDtypeIsNamedWithExpectedAndFound) {
  Folder folder;
  save(folder, 2, "one", 1);
  const auto change = [](StateTree& state) { state.tensors[2].data = state.tensors[2].data.to(at::kHalf); };
  expect_refused(folder, change, {"\"bias\"", "expected [5] F16", "found in the checkpoint [5] BF16"});
}

TEST(Checkpoint, PartsCanBeLoadedWhenMismatchesAreIgnored) {
  Folder folder;
  save(folder, 1, "one", 1);
  run_ranks(1, [&](Rank& rank) {
    StateTree state = empty_state_of(0, 1);
    state.tensors.erase(state.tensors.begin() + 2, state.tensors.end());
    state.tensors[1].name = "new_mask";
    (void)load_checkpoint(rank.world(), folder.path(), "", state,
                          {.missing = Mismatch::kIgnore, .extra = Mismatch::kIgnore});
    EXPECT_TRUE(state.tensors[0].data.equal(state_of(0, 1, 1).tensors[0].data));
    EXPECT_FALSE(state.tensors[1].data.any().item<bool>());
  });
}

TEST(Checkpoint, ASecondRunInTheSameDirectoryIsRefused) {
  Folder folder;
  checkpoint_test::FaultyFiles files(-1, checkpoint_test::FaultyFiles::Then::kRecover);
  std::string second;
  // While the first save creates its shard, another one begins.
  files.before(2, [&] {
    run_ranks(1, [&](Rank& rank) {
      second = named_error_of([&] { (void)save_checkpoint(rank.world(), folder.path(), "two", state_of(0, 1, 2)); });
    });
  });
  save(folder, 1, "one", 1, {.files = &files});
  EXPECT_NE(second.find("another run is saving into this directory"), std::string::npos) << second;
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"latest", "one", "zero_to_fp32.py"}));
}

}  // namespace
}  // namespace trireme
