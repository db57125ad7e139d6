// Helpers that the tests of checkpoint share: a temporary folder, states with known contents, and files that fail on
// demand.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/file.h"
#include "trireme/base/state_tree.h"
#include "trireme/comm/group.h"

namespace trireme::checkpoint_test {

using Folder = testing::TemporaryFolder;
using testing::named_error_of;

std::string text_of(const std::filesystem::path& path);
void write_text(const std::filesystem::path& path, const std::string& text);

/// Rank `rank` of `size`'s part of a state whose tensors hold `seed` + index: sharded evenly ("weight", "mask", and
/// "big" of several checksum blocks), the same on all ranks ("bias", "step"), empty ("nothing"), on the last rank only
/// ("owned").
StateTree state_of(int rank, int size, int seed);
/// The same slices, filled with zeros.
StateTree empty_state_of(int rank, int size);
/// True when every slice of `state` has the contents of `state_of(..., seed)`.
bool has_seed(const StateTree& state, int rank, int size, int seed);

/// Reads as the system does; what changes something is for tests to disturb.
class DisturbedFiles : public FileSystem {
 public:
  bool exists(const Path& path) override { return posix_file_system().exists(path); }
  std::vector<std::string> list(const Path& directory) override { return posix_file_system().list(directory); }
  size_t size(const Path& path) override { return posix_file_system().size(path); }
  std::string read(const Path& path) override { return posix_file_system().read(path); }
  std::unique_ptr<ReadableFile> open(const Path& path) override { return posix_file_system().open(path); }
  std::shared_ptr<const MappedFile> map(const Path& path) override { return posix_file_system().map(path); }
};

/// The system's files, where the n-th operation that changes something fails.
class FaultyFiles final : public DisturbedFiles {
 public:
  enum class Then {
    kRecover,  ///< one operation fails: a full disk that somebody makes room on
    kDie,      ///< nothing works from then on: what a killed process leaves
  };

  /// Operation `fail_at` (from 0) fails; -1: none.
  FaultyFiles(int fail_at, Then then) : fail_at_(fail_at), then_(then) {}
  /// Operations so far.
  int operations() const { return count_; }
  /// Runs before operation `at`.
  void before(int at, std::function<void()> action) { action_at_ = at, action_ = std::move(action); }

  std::unique_ptr<WritableFile> create(const Path& path) override;
  void create_directories(const Path& path) override;
  void sync_directory(const Path& directory) override;
  void rename(const Path& from, const Path& to) override;
  void remove_all(const Path& path) override;

  /// True where the operation that begins now fails.
  bool fails();
  /// Throws when the operation that begins now fails.
  void step(const Path& path, const char* operation);

 private:
  const int fail_at_;
  const Then then_;
  std::atomic<int> count_{0};
  int action_at_ = -1;
  std::function<void()> action_;
};

}  // namespace trireme::checkpoint_test
