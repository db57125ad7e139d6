// Files behind one small interface, so that tests can make any operation fail (a full disk, a torn rename).
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace trireme {

// Every function here throws IoError with the path, the operation and the system's reason, e.g.
// "checkpoints/a.safetensors: write of 4096 bytes failed: No space left on device".

/// A file that is being written from its beginning. The destructor closes it; what was not synced may be lost in a
/// crash.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  /// Appends.
  virtual void write(const void* data, size_t bytes) = 0;
  /// Returns when everything written so far is on the device.
  virtual void sync() = 0;
  /// Some file systems report a full disk only here, so call it before relying on the contents.
  virtual void close() = 0;
};

/// A file that is read in pieces, into memory of the caller's.
class ReadableFile {
 public:
  virtual ~ReadableFile() = default;
  /// Reads exactly `bytes` bytes from `offset` on; an end of the file before that is an IoError too.
  virtual void read(size_t offset, void* data, size_t bytes) = 0;
  /// When it was opened.
  virtual size_t bytes() const noexcept = 0;
};

/// A file's bytes, mapped read-only and privately. Unmapped with the last holder.
class MappedFile {
 public:
  virtual ~MappedFile() = default;
  virtual const std::byte* data() const noexcept = 0;
  virtual size_t bytes() const noexcept = 0;
};

/// Files by path. Tests replace it to make single operations fail.
class FileSystem {
 public:
  using Path = std::filesystem::path;
  virtual ~FileSystem() = default;

  /// Creates the file, or empties the one that is there.
  virtual std::unique_ptr<WritableFile> create(const Path& path) = 0;
  /// With parents; fine when it is there already.
  virtual void create_directories(const Path& path) = 0;
  /// Makes the entries of `directory` (files created, renamed, removed) last through a crash.
  virtual void sync_directory(const Path& directory) = 0;
  /// Atomic; replaces a file that is there, or an empty directory by a directory.
  virtual void rename(const Path& from, const Path& to) = 0;
  /// A file or a folder with all that is in it; fine when there is nothing.
  virtual void remove_all(const Path& path) = 0;

  virtual bool exists(const Path& path) = 0;
  /// Names (not paths) of the entries of `directory`, sorted.
  virtual std::vector<std::string> list(const Path& directory) = 0;
  virtual size_t size(const Path& path) = 0;
  virtual std::string read(const Path& path) = 0;
  virtual std::unique_ptr<ReadableFile> open(const Path& path) = 0;
  /// An empty file gives bytes() == 0.
  virtual std::shared_ptr<const MappedFile> map(const Path& path) = 0;
};

/// The operating system's files. Stateless, so one serves all threads.
FileSystem& posix_file_system();

/// Writes a temporary file beside `path`, syncs it, renames it and syncs the directory: after a crash or an error
/// `path` has either the old contents or the new, and nothing else is left behind by an error.
void write_file_atomically(FileSystem& files, const std::filesystem::path& path, std::string_view contents);

}  // namespace trireme
