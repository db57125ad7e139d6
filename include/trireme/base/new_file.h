// Files that appear under their names when they are complete, or not at all.
#pragma once

#include <deque>
#include <filesystem>
#include <memory>
#include <string_view>
#include <vector>

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
  void write(std::string_view text) { write(text.data(), text.size()); }
  /// Syncs and closes, after which only the rename can still fail. Throws IoError.
  void finish();
  /// finish(), unless that was done; renames and syncs the folder. Throws IoError.
  void commit();

 private:
  friend class NewFiles;

  FileSystem& files_;
  const std::filesystem::path path_;
  const std::filesystem::path temporary_;
  std::unique_ptr<WritableFile> file_;
  bool committed_ = false;
};

/// Files of one output, which appear together: a reader finds all of them or none.
class NewFiles {
 public:
  explicit NewFiles(FileSystem& files) : files_(files) {}

  /// Opens one more; it lives as long as this does. Throws IoError.
  NewFile& add(const std::filesystem::path& path) { return new_files_.emplace_back(files_, path); }
  /// One more with this text, finished. Throws IoError.
  void add(const std::filesystem::path& path, std::string_view text);
  /// Finishes all, then gives them their names in the order of add(). Throws IoError, after which none has its name:
  /// what was renamed by then is removed, last first. A file that one of them replaced does not come back.
  void commit();
  /// In the order of add().
  std::vector<std::filesystem::path> paths() const;

 private:
  FileSystem& files_;
  std::deque<NewFile> new_files_;
};

}  // namespace trireme
