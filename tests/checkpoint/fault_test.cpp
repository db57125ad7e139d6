// Saves that fail at every step, and files that were damaged afterwards.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <set>

#include "tests/checkpoint/fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme {
namespace {

using checkpoint_test::empty_state_of;
using checkpoint_test::FaultyFiles;
using checkpoint_test::Folder;
using checkpoint_test::has_seed;
using checkpoint_test::state_of;
using checkpoint_test::text_of;
using checkpoint_test::write_text;
using testing::named_error_of;

constexpr int kRanks = 2;

/// Saves on two ranks; returns the different outcomes of the ranks.
std::set<std::string> save(const Folder& folder, const std::string& tag, int seed, FileSystem* files = nullptr) {
  std::mutex mutex;
  std::set<std::string> outcomes;
  run_ranks(kRanks, [&](Rank& rank) {
    const auto error = named_error_of([&] {
      (void)save_checkpoint(rank.world(), folder.path(), tag, state_of(rank.id(), kRanks, seed), {.files = files});
    });
    const std::lock_guard lock(mutex);
    outcomes.insert(error);
  });
  return outcomes;
}

/// The seed of what `tag` holds: all ranks and tensors must agree on it. Or the error.
std::string load(const Folder& folder, const std::string& tag, const LoadOptions& options = {}) {
  std::mutex mutex;
  std::set<std::string> outcomes;
  run_ranks(kRanks, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), kRanks);
    std::string found;
    const auto error =
        named_error_of([&] { found = load_checkpoint(rank.world(), folder.path(), tag, state, options)->values; });
    for (const int seed : {1, 2})
      if (has_seed(state, rank.id(), kRanks, seed) && found == str(R"({"seed":)", seed, "}"))
        found = std::to_string(seed);
    const std::lock_guard lock(mutex);
    outcomes.insert(error == "nothing" ? found : error);
  });
  EXPECT_EQ(outcomes.size(), 1u) << "ranks disagree: " << *outcomes.begin() << " / " << *outcomes.rbegin();
  return *outcomes.begin();
}

/// Number of operations of an undisturbed save into a directory that holds tag "one".
int operations_of_a_save(const std::string& tag) {
  Folder folder;
  save(folder, "one", 1);
  FaultyFiles files(-1, FaultyFiles::Then::kRecover);
  EXPECT_EQ(save(folder, tag, 2, &files), std::set<std::string>{"nothing"});
  return files.operations();
}

bool has_temporary(const Folder& folder) {
  const auto names = folder.names();
  return std::any_of(names.begin(), names.end(),
                     [](const auto& name) { return name.starts_with(".") || name.starts_with("latest."); });
}

TEST(FailingSave, LeavesThePreviousCheckpointAndNoTemporary) {
  const CapturedLog quiet;  // warnings about clean-up are expected
  const int operations = operations_of_a_save("two");
  ASSERT_GE(operations, 20);
  for (int at = 0; at < operations; ++at) {
    Folder folder;
    save(folder, "one", 1);
    FaultyFiles files(at, FaultyFiles::Then::kRecover);
    const auto outcomes = save(folder, "two", 2, &files);
    ASSERT_EQ(outcomes.size(), 1u) << "ranks disagree at operation " << at;
    EXPECT_NE(outcomes.begin()->find("No space left on device"), std::string::npos) << at << *outcomes.begin();
    EXPECT_NE(outcomes.begin()->find(folder.path()), std::string::npos) << "no path in " << *outcomes.begin();
    EXPECT_FALSE(has_temporary(folder)) << "operation " << at;
    EXPECT_EQ(load(folder, "one"), "1");
    // `latest` names the old one, or, where only the last sync failed, the complete new one.
    EXPECT_EQ(load(folder, ""), *latest_tag(folder.path()) == "one" ? "1" : "2");
    EXPECT_EQ(save(folder, "two", 2), std::set<std::string>{"nothing"});
    EXPECT_EQ(load(folder, ""), "2");
  }
}

TEST(KilledSave, LeavesTheOldOrTheNewCheckpointAndTheNextSaveTidiesUp) {
  const CapturedLog quiet;  // warnings about clean-up are expected
  const int operations = operations_of_a_save("two");
  for (int at = 0; at < operations; ++at) {
    Folder folder;
    save(folder, "one", 1);
    write_text(folder / "latest.tmp1", "on");  // of another process, which died before it could rename it
    FaultyFiles files(at, FaultyFiles::Then::kDie);
    save(folder, "two", 2, &files);
    EXPECT_EQ(load(folder, "one"), "1") << "operation " << at;
    EXPECT_EQ(load(folder, ""), *latest_tag(folder.path()) == "one" ? "1" : "2") << "operation " << at;
    const bool has_two = std::filesystem::exists(folder / "two");
    EXPECT_EQ(save(folder, "three", 2), std::set<std::string>{"nothing"});
    EXPECT_EQ(folder.names(), has_two ? (std::vector<std::string>{"latest", "one", "three", "two", "zero_to_fp32.py"})
                                      : (std::vector<std::string>{"latest", "one", "three", "zero_to_fp32.py"}))
        << "operation " << at;
    EXPECT_EQ(load(folder, ""), "2");
  }
}

TEST(KilledReplacement, IsTheOldOrTheNewCheckpointNeverAMixture) {
  const CapturedLog quiet;  // warnings about clean-up are expected
  const int operations = operations_of_a_save("one");
  std::set<std::string> seen;
  for (int at = 0; at < operations; ++at) {
    Folder folder;
    save(folder, "one", 1);
    FaultyFiles files(at, FaultyFiles::Then::kDie);
    save(folder, "one", 2, &files);
    const std::string found = load(folder, "");
    EXPECT_TRUE(found == "1" || found == "2") << "operation " << at << ": " << found;
    seen.insert(found);
    EXPECT_EQ(save(folder, "two", 1), std::set<std::string>{"nothing"});
    EXPECT_EQ(load(folder, "one"), found) << "recovery changed the checkpoint, operation " << at;
    EXPECT_FALSE(has_temporary(folder)) << "operation " << at;
  }
  EXPECT_EQ(seen.size(), 2u);
}

TEST(FailingSave, NamesTheDirectoryThatWentAway) {
  const CapturedLog quiet;  // warnings about clean-up are expected
  const int operations = operations_of_a_save("two");
  for (int at = 1; at < operations; at += 3) {
    Folder folder;
    save(folder, "one", 1);
    FaultyFiles files(-1, FaultyFiles::Then::kRecover);
    files.before(at, [&] { std::filesystem::remove_all(folder.path()); });
    const auto outcomes = save(folder, "two", 2, &files);
    ASSERT_EQ(outcomes.size(), 1u);
    EXPECT_TRUE(outcomes.begin()->starts_with("IoError: ")) << at << *outcomes.begin();
    EXPECT_FALSE(std::filesystem::exists(folder / "two"));
  }
}

TEST(FailingSave, ReportsWhatTheSystemSaysAboutARealWrite) {
  Folder folder;
  save(folder, "one", 1);
  // The kernel refuses to let any file of this process grow beyond 1 MB: a write that ends half-way, without a special
  // mount.
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = 1'000'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &tight), 0);
  const auto outcomes = save(folder, "two", 2);
  setrlimit(RLIMIT_FSIZE, &before);
  ASSERT_EQ(outcomes.size(), 1u);
  EXPECT_NE(outcomes.begin()->find("File too large"), std::string::npos) << *outcomes.begin();
  EXPECT_NE(outcomes.begin()->find("shard-0000"), std::string::npos) << *outcomes.begin();
  EXPECT_EQ(folder.names(), (std::vector<std::string>{"latest", "one", "zero_to_fp32.py"}));
  EXPECT_EQ(load(folder, ""), "1");
}

TEST(DamagedCheckpoint, EveryFlippedBitIsDetectedAndItsFileNamed) {
  Folder folder;
  save(folder, "one", 1);
  std::mt19937_64 random(7);
  for (const char* name : {"manifest.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"}) {
    const auto path = folder / "one" / name;
    const std::string intact = text_of(path);
    for (int i = 0; i < 40; ++i) {
      std::string damaged = intact;
      // Half of the places in the first and last KiB: headers, lengths, the manifest's own checksum.
      const size_t edge = std::min<size_t>(1024, intact.size());
      const size_t at = i % 4 == 0   ? random() % edge
                        : i % 4 == 1 ? intact.size() - 1 - random() % edge
                                     : random() % intact.size();
      damaged[at] = static_cast<char>(damaged[at] ^ 1 << random() % 8);
      write_text(path, damaged);
      const std::string found = load(folder, "one");
      EXPECT_TRUE(found.starts_with("CheckpointError: ") && found.find(name) != std::string::npos)
          << name << " byte " << at << " of " << intact.size() << ": " << found;
    }
    write_text(path, intact);
  }
  EXPECT_EQ(load(folder, "one"), "1");
}

TEST(DamagedCheckpoint, ATruncatedOrMissingFileIsNamedBeforeMemoryChanges) {
  Folder folder;
  save(folder, "one", 1);
  for (const char* name : {"manifest.json", "shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"}) {
    const auto path = folder / "one" / name;
    const std::string intact = text_of(path);
    for (const size_t bytes : {size_t{0}, size_t{5}, intact.size() / 2, intact.size() - 1}) {
      write_text(path, intact.substr(0, bytes));
      const std::string found = load(folder, "one");
      EXPECT_TRUE(found.starts_with("CheckpointError: ") && found.find(name) != std::string::npos)
          << name << bytes << ": " << found;
      if (name[0] == 's') {
        EXPECT_NE(found.find("tensor \""), std::string::npos) << found;
      }
    }
    std::filesystem::remove(path);
    const std::string found = load(folder, "one");
    EXPECT_TRUE(found.starts_with("CheckpointError: ")) << found;
    if (name[0] == 's') {
      EXPECT_NE(found.find(name), std::string::npos) << found;
    }
    write_text(path, intact);
  }
}

TEST(DamagedCheckpoint, VerifyFirstFindsItBeforeMemoryChanges) {
  Folder folder;
  save(folder, "one", 1);
  const auto path = folder / "one/shard-00001-of-00002.safetensors";
  std::string bytes = text_of(path);
  bytes[bytes.size() - 1] = static_cast<char>(bytes[bytes.size() - 1] ^ 1);
  write_text(path, bytes);
  run_ranks(kRanks, [&](Rank& rank) {
    StateTree state = empty_state_of(rank.id(), kRanks);
    EXPECT_THROW((void)load_checkpoint(rank.world(), folder.path(), "one", state, {.verify = Verify::kFirst}),
                 CheckpointError);
    for (const auto& slice : state.tensors) EXPECT_FALSE(slice.data.any().item<bool>()) << slice.name;
  });
}

TEST(DamagedCheckpoint, NamesTheOtherOnesNewestFirst) {
  Folder folder;
  for (const char* tag : {"one", "two", "three"}) save(folder, tag, 1);
  for (const char* name : {"manifest.json", "shard-00000-of-00002.safetensors"}) {
    const auto path = folder / "three" / name;
    const std::string intact = text_of(path);
    write_text(path, intact.substr(0, intact.size() - 1));
    const std::string found = load(folder, "");
    EXPECT_TRUE(found.ends_with("; beside it, newest first: two, one")) << found;
    write_text(path, intact);
  }
}

TEST(DamagedCheckpoint, ATornTemporaryIsNeverLoaded) {
  Folder folder;
  save(folder, "one", 1);
  std::filesystem::copy(folder / "one", folder / ".tmp-two-123");
  EXPECT_EQ(complete_tags(folder.path()), std::vector<std::string>{"one"});
  EXPECT_NE(load(folder, "two").find("newest complete one is one"), std::string::npos);
}

}  // namespace
}  // namespace trireme
