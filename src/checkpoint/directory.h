// The directory that holds the checkpoints of a run: tags, `latest`, and how a new one comes in.
//
//   TAG/            a complete checkpoint
//   latest          names the tag to resume from
//   latest.tmpPID   its successor being written, or left by a crash
//   .tmp-TAG-PID    being written, or left by a crash
//   .old-TAG        the former TAG while a new one takes its place; counts as TAG where there is no TAG
#pragma once

#include <filesystem>
#include <string>

#include "trireme/base/file.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme {

/// Throws    CheckpointError: empty, too long, hidden, or with characters that file names or `latest` cannot have.
void check_tag(const std::string& tag);

/// The folder that holds `tag` now. Throws CheckpointError, which offers the complete ones.
std::filesystem::path find_checkpoint(FileSystem& files, const std::filesystem::path& directory,
                                      const std::string& tag);

/// Only one run saves into a directory at a time. The lock goes with the process, however it ends.
class SaveLock {
 public:
  /// Throws    CheckpointError: somebody else holds it; IoError.
  explicit SaveLock(const std::filesystem::path& directory);
  ~SaveLock();
  SaveLock(const SaveLock&) = delete;
  SaveLock& operator=(const SaveLock&) = delete;

 private:
  int directory_ = -1;
};

/// One save, from the temporary folder to the final name; on one rank. What is not committed is removed at the end.
class SaveTransaction {
 public:
  /// Takes the lock, tidies up what crashes left, and creates the temporary folder.
  SaveTransaction(FileSystem& files, const std::filesystem::path& directory, const std::string& tag,
                  const SaveOptions& options);
  ~SaveTransaction();
  SaveTransaction(const SaveTransaction&) = delete;
  SaveTransaction& operator=(const SaveTransaction&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }

  /// Writes the manifest, renames, updates `latest`, removes what `keep_last` does not keep.
  ///
  /// Requires  every other file stands synced in the temporary folder.
  /// Throws    IoError; all is as it was before, but when only `latest` could not be replaced the new checkpoint stays.
  void commit(const std::string& manifest);

 private:
  void recover();
  void put_in_place();
  void prune() noexcept;

  FileSystem& files_;
  const std::filesystem::path directory_;
  const std::string tag_;
  const SaveOptions options_;
  const std::filesystem::path final_;
  const std::filesystem::path old_;
  const std::filesystem::path temporary_;
  std::unique_ptr<SaveLock> lock_;
  bool temporary_exists_ = false;
};

}  // namespace trireme
