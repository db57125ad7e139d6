// Saves in the background: what the caller waits for, what it may change meanwhile, and where errors come out.
#include "trireme/checkpoint/async_save.h"

#include <gtest/gtest.h>

#include <ATen/ops/zeros.h>

#include <future>
#include <map>
#include <mutex>

#include "tests/checkpoint/fixture.h"
#include "tests/support/captured_log.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using checkpoint_test::empty_state_of;
using checkpoint_test::FaultyFiles;
using checkpoint_test::Folder;
using checkpoint_test::has_seed;
using checkpoint_test::state_of;
using testing::named_error_of;

constexpr int kAsyncRanks = 2;

/// Files whose first change waits until the test lets it go.
class HeldFiles {
 public:
  HeldFiles() : files_(-1, FaultyFiles::Then::kRecover) {
    files_.before(0, [this] { released_.wait(); });
  }
  FileSystem* get() { return &files_; }
  void release() { release_.set_value(); }

 private:
  std::promise<void> release_;
  std::shared_future<void> released_ = release_.get_future().share();
  FaultyFiles files_;
};

void change(StateTree& state) {
  for (auto& slice : state.tensors) slice.data.zero_();
  state.values = "{}";
}

bool holds(Group& group, const Folder& folder, const std::string& tag, int seed) {
  StateTree state = empty_state_of(group.rank(), group.size());
  const auto loaded = load_checkpoint(group, folder.path(), tag, state);
  return loaded && has_seed(state, group.rank(), group.size(), seed) && loaded->values == str(R"({"seed":)", seed, "}");
}

TEST(AsyncSave, SavesWhatTheStateWasAtTheCall) {
  const CapturedLog quiet;
  const Folder folder;
  HeldFiles files;
  run_ranks(kAsyncRanks, [&](Rank& rank) {
    StateTree state = state_of(rank.id(), kAsyncRanks, 7);
    AsyncSaver saver(rank.world());
    const SavedCheckpoint started = saver.save(folder.path(), "one", state, {.files = files.get()});
    EXPECT_TRUE(started.in_background);
    EXPECT_EQ(started.path, folder / "one");
    change(state);
    rank.world().barrier();  // the caller's collectives go on beside the save
    EXPECT_FALSE(std::filesystem::exists(folder / "one"));
    rank.world().barrier();
    if (rank.id() == 0) files.release();
    const auto saved = saver.wait();
    ASSERT_TRUE(saved);
    EXPECT_FALSE(saved->in_background);
    EXPECT_EQ(saved->tensor_bytes, started.tensor_bytes);
    EXPECT_EQ(saved->blocked_seconds, started.blocked_seconds);  // what the caller waited for, not the save itself
    EXPECT_FALSE(saver.wait()) << "told once";
    EXPECT_TRUE(holds(rank.world(), folder, "", 7));
  });
}

TEST(AsyncSave, WritesTheSameBytesAsASaveThatIsWaitedFor) {
  const CapturedLog quiet;
  const Folder a, b;
  run_ranks(kAsyncRanks, [&](Rank& rank) {
    const StateTree state = state_of(rank.id(), kAsyncRanks, 3);
    (void)save_checkpoint(rank.world(), a.path(), "one", state);
    AsyncSaver saver(rank.world());
    (void)saver.save(b.path(), "one", state);
    (void)saver.wait();
  });
  for (const char* name :
       {"one/manifest.json", "one/shard-00000-of-00002.safetensors", "one/shard-00001-of-00002.safetensors", "latest"})
    EXPECT_EQ(checkpoint_test::text_of(a / name), checkpoint_test::text_of(b / name)) << name;
}

TEST(AsyncSave, IsWaitedForByTheNextAndByTheEnd) {
  const CapturedLog quiet;
  const Folder folder;
  run_ranks(kAsyncRanks, [&](Rank& rank) {
    {
      AsyncSaver saver(rank.world());
      for (int seed = 1; seed <= 3; ++seed) {
        StateTree state = state_of(rank.id(), kAsyncRanks, seed);
        (void)saver.save(folder.path(), str("tag", seed), state);
        change(state);
      }
    }  // nobody waited
    for (int seed = 1; seed <= 3; ++seed) EXPECT_TRUE(holds(rank.world(), folder, str("tag", seed), seed)) << seed;
    EXPECT_TRUE(holds(rank.world(), folder, "", 3));
  });
}

TEST(AsyncSave, ThrowsTheErrorOfTheSaveBeforeOnceOnEveryRank) {
  CapturedLog log;
  const Folder folder;
  FaultyFiles full(4, FaultyFiles::Then::kRecover);
  run_ranks(kAsyncRanks, [&](Rank& rank) {
    const StateTree state = state_of(rank.id(), kAsyncRanks, 1);
    AsyncSaver saver(rank.world());
    (void)saver.save(folder.path(), "one", state, {.files = &full});
    const std::string error = named_error_of([&] { (void)saver.save(folder.path(), "two", state); });
    EXPECT_TRUE(error.starts_with("IoError: ")) << error;
    EXPECT_NE(error.find("No space left on device"), std::string::npos) << error;
    rank.world().barrier();
    EXPECT_TRUE(folder.names().empty()) << "neither a checkpoint nor a temporary";
    (void)saver.save(folder.path(), "two", state);
    EXPECT_TRUE(saver.wait());
    EXPECT_TRUE(holds(rank.world(), folder, "", 1));
  });
  EXPECT_NE(log.text().find("'one' failed in the background"), std::string::npos) << log.text();
}

TEST(AsyncSave, RefusesAtOnceWhatTheCallerHasWrong) {
  const CapturedLog quiet;
  const Folder folder;
  run_ranks(kAsyncRanks, [&](Rank& rank) {
    const StateTree state = state_of(rank.id(), kAsyncRanks, 1);
    AsyncSaver saver(rank.world());
    EXPECT_NE(named_error_of([&] { (void)saver.save(folder.path(), "a/b", state); }).find("cannot name a checkpoint"),
              std::string::npos);
    StateTree gap = state;
    gap.tensors[0].begin += 1;
    EXPECT_TRUE(named_error_of([&] { (void)saver.save(folder.path(), "one", gap); }).starts_with("CheckpointError: "));
    EXPECT_FALSE(saver.wait());
  });
  EXPECT_TRUE(folder.names().empty());
}

TEST(AsyncSave, HoldsOneCopyOfWhatARankWritesAndAllocatesItOnce) {
  const CapturedLog quiet;
  const Folder folder;
  std::map<int, size_t> bytes;
  std::mutex mutex;
  run_ranks(4, [&](Rank& rank) {
    StateTree state;  // the same on all ranks: each writes a quarter of it
    for (int i = 0; i < 8; ++i) state.tensors.push_back({str("t", i), {{1024}}, 0, at::zeros({1024})});
    AsyncSaver saver(rank.world());
    EXPECT_EQ(saver.snapshot_bytes(), 0u);
    saver.reserve(state);
    const size_t reserved = saver.snapshot_bytes();
    (void)saver.save(folder.path(), "one", state);
    EXPECT_EQ(saver.snapshot_bytes(), reserved);
    const std::lock_guard lock(mutex);
    bytes[rank.id()] = reserved;
  });
  for (const auto& [rank, held] : bytes) EXPECT_EQ(held, 2 * 1024 * sizeof(float)) << "rank " << rank;
}

}  // namespace
}  // namespace trireme
