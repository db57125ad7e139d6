// The system's files, of which an operation fails, or kills the process: for tests of what is left behind.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"

namespace trireme::testing {

/// Files of the system that count the operations that change something, and that may disturb each.
class DisturbedFiles : public FileSystem {
 public:
  /// Operations so far.
  int operations() const { return count_; }

  std::unique_ptr<WritableFile> create(const Path& path) override {
    begin(path, "create");
    return std::make_unique<File>(*this, path);
  }
  void create_directories(const Path& path) override {
    begin(path, "create directory");
    posix_file_system().create_directories(path);
  }
  void sync_directory(const Path& directory) override {
    begin(directory, "sync directory");
    posix_file_system().sync_directory(directory);
  }
  void rename(const Path& from, const Path& to) override {
    begin(from, "rename");
    posix_file_system().rename(from, to);
  }
  void remove_all(const Path& path) override {
    begin(path, "remove");
    posix_file_system().remove_all(path);
  }

  bool exists(const Path& path) override { return posix_file_system().exists(path); }
  std::vector<std::string> list(const Path& directory) override { return posix_file_system().list(directory); }
  size_t size(const Path& path) override { return posix_file_system().size(path); }
  std::string read(const Path& path) override { return posix_file_system().read(path); }
  std::unique_ptr<ReadableFile> open(const Path& path) override { return posix_file_system().open(path); }
  std::shared_ptr<const MappedFile> map(const Path& path) override { return posix_file_system().map(path); }

 protected:
  struct Operation {
    int number;  ///< from 0
    const std::filesystem::path& path;
    const char* name;
    std::function<void()> half;  ///< of a write: does half of it, as a disk that fills up; else none
  };

  /// Runs before `operation`, which is not done where this throws.
  virtual void disturb(const Operation& operation) = 0;
  virtual void written(const Path&) {}
  virtual void synced(const Path&) {}

  void begin(const Path& path, const char* name, std::function<void()> half = {}) {
    disturb({count_++, path, name, std::move(half)});
  }

 private:
  class File final : public WritableFile {
   public:
    File(DisturbedFiles& owner, const Path& path)
        : owner_(owner), path_(path), file_(posix_file_system().create(path)) {}
    void write(const void* data, size_t bytes) override {
      owner_.begin(path_, "write", [&] { file_->write(data, bytes / 2); });
      file_->write(data, bytes);
      owner_.written(path_);
    }
    void sync() override {
      owner_.begin(path_, "sync");
      file_->sync();
      owner_.synced(path_);
    }
    void close() override {
      owner_.begin(path_, "close");
      file_->close();
    }

   private:
    DisturbedFiles& owner_;
    const Path path_;
    const std::unique_ptr<WritableFile> file_;
  };

  std::atomic<int> count_{0};
};

/// Files whose n-th operation fails.
class FaultyFiles final : public DisturbedFiles {
 public:
  enum class Then {
    kRecover,  ///< one operation fails: a full disk that somebody makes room on
    kDie,      ///< nothing works from then on: what a killed process leaves
  };

  /// Operation `fail_at` (from 0) fails; -1: none.
  FaultyFiles(int fail_at, Then then) : fail_at_(fail_at), then_(then) {}
  /// Runs before operation `at`.
  void before(int at, std::function<void()> action) { action_at_ = at, action_ = std::move(action); }

 private:
  void disturb(const Operation& operation) override {
    if (operation.number == action_at_) action_();
    const bool is_later = operation.number > fail_at_ && then_ == Then::kDie;
    if (fail_at_ < 0 || !(operation.number == fail_at_ || is_later)) return;
    if (operation.half) operation.half();
    throw IoError(str(operation.path.string(), ": ", operation.name, " failed: No space left on device"));
  }

  const int fail_at_;
  const Then then_;
  int action_at_ = -1;
  std::function<void()> action_;
};

/// Files of a process that is killed at operation `kill_at` (from 0; -1: none), with `victims`, in their order. What
/// was written and not synced is lost then, as when the power fails.
class KilledFiles final : public DisturbedFiles {
 public:
  KilledFiles(int kill_at, std::vector<pid_t> victims) : kill_at_(kill_at), victims_(std::move(victims)) {}

  // As many system calls as there are files: a kill may come between any two.
  void remove_all(const Path& path) override {
    if (!std::filesystem::exists(path)) return;
    if (std::filesystem::is_directory(path))
      for (const auto& name : list(path)) remove_all(path / name);
    begin(path, "remove");
    std::filesystem::remove(path);
  }

 private:
  void disturb(const Operation& operation) override {
    if (operation.number != kill_at_) return;
    if (operation.half) operation.half();
    for (const auto& path : unsynced_)
      ::truncate(path.c_str(), static_cast<off_t>(std::filesystem::file_size(path) / 2));
    for (const pid_t pid : victims_) ::kill(pid, SIGKILL);
  }
  void written(const Path& path) override { unsynced_.insert(path); }
  void synced(const Path& path) override { unsynced_.erase(path); }

  const int kill_at_;
  const std::vector<pid_t> victims_;
  std::set<Path> unsynced_;
};

}  // namespace trireme::testing
