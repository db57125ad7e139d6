// Saves on a disk that is really full, and on one that is really read-only: a small file system of the test's own.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>

#include <cstdio>

#include "tests/checkpoint/fixture.h"
#include "tests/support/processes.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme {
namespace {

using checkpoint_test::empty_state_of;
using checkpoint_test::Folder;
using checkpoint_test::has_seed;
using checkpoint_test::state_of;
using testing::named_error_of;

constexpr int kCannotMount = 77;

/// A tmpfs of `options` on `place`, which only this process sees.
bool mount_own(const std::string& place, const char* options) {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return false;
  return ::mount("tmpfs", place.c_str(), "tmpfs", 0, options) == 0;
}

#define REQUIRE_OR_RETURN(condition)                                           \
  do {                                                                         \
    if (condition) break;                                                      \
    std::fprintf(stderr, "%s is false: %s\n", #condition, last_error.c_str()); \
    return 1;                                                                  \
  } while (false)

/// On a disk of 4 MiB that holds one checkpoint of 2.8 MiB: a second one, and then one on the same disk made read-only.
int save_on_small_disk(Group& world, const std::string& place) {
  if (!mount_own(place, "size=4m")) return kCannotMount;
  std::string last_error;
  const auto save = [&](const char* tag, int seed) {
    const StateTree state = state_of(0, 1, seed);
    last_error = named_error_of([&] { (void)save_checkpoint(world, place, tag, state); });
    return has_seed(state, 0, 1, seed);  // unharmed
  };
  const auto says = [&](const std::string& text) { return last_error.find(text) != std::string::npos; };
  const auto is_intact = [&] {
    StateTree state = empty_state_of(0, 1);
    const auto loaded = load_checkpoint(world, place, "", state);
    return loaded && loaded->tag == "one" && has_seed(state, 0, 1, 1);
  };
  REQUIRE_OR_RETURN(save("one", 1) && last_error == "nothing");
  REQUIRE_OR_RETURN(save("two", 2) && last_error.starts_with("IoError: ") && says("No space left on device"));
  REQUIRE_OR_RETURN(says("shard-00000-of-00001.safetensors"));
  for (const auto& entry : std::filesystem::directory_iterator(place)) {
    last_error = entry.path().filename().string();
    REQUIRE_OR_RETURN(last_error == "one" || last_error == "latest" || last_error == "zero_to_fp32.py");
  }
  REQUIRE_OR_RETURN(is_intact());
  REQUIRE_OR_RETURN(::mount("tmpfs", place.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, "size=4m") == 0);
  REQUIRE_OR_RETURN(save("two", 2) && last_error.starts_with("IoError: ") && says("Read-only file system"));
  REQUIRE_OR_RETURN(is_intact());
  return 0;
}

TEST(SmallDisk, FullOrReadOnlyIsNamedAndTheCheckpointOnItIntact) {
  const Folder folder;
  const auto results = run_processes(1, save_on_small_disk, {.argument = folder.path().string()});
  if (results[0].exit_code == kCannotMount) GTEST_SKIP() << "this user may not mount a file system of its own";
  EXPECT_EQ(results[0].exit_code, 0) << results[0].error_text;
}

}  // namespace
}  // namespace trireme
