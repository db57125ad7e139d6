#include "trireme/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file_limit.h"
#include "trireme/base/new_file.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

[[noreturn]] void fail(const Path& path, const std::string& operation, const std::error_code& reason) {
  throw IoError(str(path.string(), ": ", operation, " failed: ", reason.message(), write_error_fix(reason.value())));
}

[[noreturn]] void fail_with_errno(const Path& path, const std::string& operation) {
  fail(path, operation, std::error_code(errno, std::generic_category()));
}

/// The kind of a path that is no file with bytes of its own; empty: it is one.
const char* other_kind(mode_t mode) {
  return S_ISREG(mode)    ? ""
         : S_ISDIR(mode)  ? "a folder"
         : S_ISFIFO(mode) ? "a pipe"
         : S_ISSOCK(mode) ? "a socket"
                          : "a device";
}

/// Pipes may be waited for without an end, devices have none.
void require_file(const Path& path, mode_t mode) {
  if (const std::string kind = other_kind(mode); !kind.empty())
    throw IoError(str(path.string(), ": this is ", kind, ", expected a file; give the path of a file"));
}

/// Owns an open file descriptor.
class Descriptor {
 public:
  Descriptor(const Path& path, int flags, const char* operation) : fd_(::open(path.c_str(), flags | O_CLOEXEC, 0666)) {
    if (fd_ >= 0) return;
    const int reason = errno;
    struct stat info {};
    if (reason == ENXIO && ::stat(path.c_str(), &info) == 0) require_file(path, info.st_mode);  // a socket
    errno = reason;
    fail_with_errno(path, operation);
  }
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  int get() const noexcept { return fd_; }
  int release() noexcept { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

/// A regular file, open for reading.
class FileToRead {
 public:
  // A pipe is opened without waiting for its other end, and then refused.
  explicit FileToRead(const Path& path) : file_(path, O_RDONLY | O_NONBLOCK | O_NOCTTY, "open for reading") {
    struct stat info {};
    if (::fstat(file_.get(), &info) != 0) fail_with_errno(path, "stat");
    require_file(path, info.st_mode);
    bytes_ = static_cast<size_t>(info.st_size);
  }

  int get() const noexcept { return file_.get(); }
  size_t bytes() const noexcept { return bytes_; }

 private:
  const Descriptor file_;
  size_t bytes_ = 0;
};

class PosixWritableFile final : public WritableFile {
 public:
  explicit PosixWritableFile(const Path& path) : path_(path), file_(path, O_WRONLY | O_CREAT | O_TRUNC, "create") {}

  void write(const void* data, size_t bytes) override {
    auto* next = static_cast<const char*>(data);
    for (size_t left = bytes; left > 0;) {
      const ssize_t written = write_some(next, left);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) fail_with_errno(path_, str("write of ", bytes, " bytes"));
      next += written;
      left -= static_cast<size_t>(written);
    }
  }

  void sync() override {
    if (::fsync(file_.get()) != 0) fail_with_errno(path_, "sync");
  }

  void close() override {
    const int fd = file_.release();
    if (fd >= 0 && ::close(fd) != 0) fail_with_errno(path_, "close");
  }

 private:
  ssize_t write_some(const char* data, size_t bytes) {
    const FileLimitScope limit;
    return ::write(file_.get(), data, bytes);
  }

  const Path path_;
  Descriptor file_;
};

class PosixReadableFile final : public ReadableFile {
 public:
  explicit PosixReadableFile(const Path& path) : path_(path), file_(path) {}

  void read(size_t offset, void* data, size_t bytes) override {
    auto* next = static_cast<char*>(data);
    for (size_t left = bytes; left > 0;) {
      const ssize_t got = ::pread(file_.get(), next, left, static_cast<off_t>(offset));
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_with_errno(path_, str("read of ", bytes, " bytes"));
      if (got == 0)
        throw IoError(str(path_.string(), ": read of ", bytes, " bytes failed: the file ends at byte ", offset));
      next += got;
      offset += static_cast<size_t>(got);
      left -= static_cast<size_t>(got);
    }
  }

  size_t bytes() const noexcept override { return file_.bytes(); }

 private:
  const Path path_;
  const FileToRead file_;
};

class PosixMappedFile final : public MappedFile {
 public:
  explicit PosixMappedFile(const Path& path) {
    const FileToRead file(path);
    bytes_ = file.bytes();
    if (bytes_ == 0) return;  // mmap refuses a length of zero
    void* start = ::mmap(nullptr, bytes_, PROT_READ, MAP_PRIVATE, file.get(), 0);
    if (start == MAP_FAILED) fail_with_errno(path, "map");
    data_ = static_cast<const std::byte*>(start);
  }
  ~PosixMappedFile() override {
    if (data_) ::munmap(const_cast<std::byte*>(data_), bytes_);
  }
  PosixMappedFile(const PosixMappedFile&) = delete;
  PosixMappedFile& operator=(const PosixMappedFile&) = delete;

  const std::byte* data() const noexcept override { return data_; }
  size_t bytes() const noexcept override { return bytes_; }

 private:
  const std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class PosixFileSystem final : public FileSystem {
 public:
  std::unique_ptr<WritableFile> create(const Path& path) override { return std::make_unique<PosixWritableFile>(path); }

  void create_directories(const Path& path) override {
    std::error_code reason;
    std::filesystem::create_directories(path, reason);
    if (reason) fail(path, "create directory", reason);
  }

  void sync_directory(const Path& directory) override {
    const Descriptor folder(directory, O_RDONLY | O_DIRECTORY, "open directory");
    // Some network file systems refuse to sync a directory; they order renames by themselves.
    if (::fsync(folder.get()) != 0 && errno != EINVAL) fail_with_errno(directory, "sync directory");
  }

  void rename(const Path& from, const Path& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) fail_with_errno(from, str("rename to ", to.string()));
  }

  void remove_all(const Path& path) override {
    std::error_code reason;
    std::filesystem::remove_all(path, reason);
    if (reason) fail(path, "remove", reason);
  }

  bool exists(const Path& path) override {
    std::error_code reason;
    const bool found = std::filesystem::exists(path, reason);
    if (reason) fail(path, "stat", reason);
    return found;
  }

  std::vector<std::string> list(const Path& directory) override {
    std::error_code reason;
    std::vector<std::string> names;
    auto entry = std::filesystem::directory_iterator(directory, reason);
    for (; !reason && entry != std::filesystem::directory_iterator(); entry.increment(reason))
      names.push_back(entry->path().filename().string());
    if (reason) fail(directory, "list", reason);
    std::sort(names.begin(), names.end());
    return names;
  }

  size_t size(const Path& path) override {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) fail_with_errno(path, "stat");
    require_file(path, info.st_mode);
    return static_cast<size_t>(info.st_size);
  }

  std::string read(const Path& path) override {
    const FileToRead file(path);
    std::string contents;
    char block[1 << 16];
    while (true) {
      const ssize_t got = ::read(file.get(), block, sizeof block);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail_with_errno(path, "read");
      if (got == 0) return contents;
      contents.append(block, static_cast<size_t>(got));
    }
  }

  std::unique_ptr<ReadableFile> open(const Path& path) override { return std::make_unique<PosixReadableFile>(path); }

  std::shared_ptr<const MappedFile> map(const Path& path) override { return std::make_shared<PosixMappedFile>(path); }
};

}  // namespace

FileSystem& posix_file_system() {
  static PosixFileSystem instance;
  return instance;
}

void write_file_atomically(FileSystem& files, const Path& path, std::string_view contents) {
  NewFile file(files, path);
  file.write(contents);
  file.commit();
}

}  // namespace trireme
