// A file that appears under its name when it is complete, or not at all.
#pragma once

#include <filesystem>
#include <memory>

#include "trireme/base/file.h"

namespace trireme {

/// A file being written under a temporary name; commit() renames it.
class NewFile {
 public:
  /// Opens a temporary file beside `path`. Throws IoError.
  NewFile(FileSystem& files, std::filesystem::path path);
  /// Removes the temporary file if it was not committed.
  ~NewFile();
  NewFile(const NewFile&) = delete;
  NewFile& operator=(const NewFile&) = delete;

  /// Appends. Throws IoError.
  void write(const void* data, size_t bytes) { file_->write(data, bytes); }
  /// Syncs and closes, after which only the rename can still fail. Throws IoError.
  void finish();
  /// finish(), unless that was done; renames and syncs the folder. Throws IoError.
  void commit();
  /// Whether commit() has put it under its name.
  bool is_in_place() const noexcept { return committed_; }

 private:
  FileSystem& files_;
  const std::filesystem::path path_;
  const std::filesystem::path temporary_;
  std::unique_ptr<WritableFile> file_;
  bool committed_ = false;
};

}  // namespace trireme
