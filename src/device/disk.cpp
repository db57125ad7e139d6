#include "trireme/device/disk.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file_limit.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/wait_hook.h"

namespace trireme {
namespace {

[[noreturn]] void fail(const std::filesystem::path& folder, const std::string& what, int reason) {
  throw IoError(str(folder.string(), ": ", what, " failed: ", std::strerror(reason), write_error_fix(reason)));
}

/// Bytes that the file system of `folder` has for this process.
int64_t free_bytes(const std::filesystem::path& folder) {
  struct statvfs found = {};
  if (statvfs(folder.c_str(), &found) != 0) fail(folder, "statvfs", errno);
  return static_cast<int64_t>(found.f_bavail) * static_cast<int64_t>(found.f_frsize);
}

bool is_in_memory(const std::filesystem::path& folder) {
  struct statfs found = {};
  return statfs(folder.c_str(), &found) == 0 && (found.f_type == TMPFS_MAGIC || found.f_type == RAMFS_MAGIC);
}

class UnnamedFile final : public DiskFile {
 public:
  UnnamedFile(std::filesystem::path folder, int64_t bytes) : folder_(std::move(folder)) {
    std::error_code problem;
    std::filesystem::create_directories(folder_, problem);
    if (problem)
      throw IoError(str(folder_.string(), ": the folder cannot be made: ", problem.message(), "; choose another one"));
    descriptor_ = open_unnamed(O_DIRECT);
    if (descriptor_ < 0 && errno == EINVAL) descriptor_ = open_unnamed(0);
    if (descriptor_ < 0)
      throw IoError(str(folder_.string(), ": a file without a name cannot be made there: ", std::strerror(errno),
                        "; choose a folder of a local disk that may be written to"));
    try {
      reserve(bytes);
    } catch (...) {
      ::close(descriptor_);
      throw;
    }
  }
  ~UnnamedFile() override { ::close(descriptor_); }
  UnnamedFile(const UnnamedFile&) = delete;
  UnnamedFile& operator=(const UnnamedFile&) = delete;

  void read(int64_t offset, std::span<std::byte> to) override {
    while (!to.empty()) {
      const ssize_t done = ::pread(descriptor_, to.data(), to.size(), offset);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail(folder_, str("read of ", to.size(), " bytes"), errno);
      if (done == 0)
        throw IoError(str(folder_.string(), ": read of ", to.size(), " bytes failed: the file ends there"));
      to = to.subspan(done);
      offset += done;
    }
  }

  void write(int64_t offset, std::span<const std::byte> from) override {
    while (!from.empty()) {
      const ssize_t done = write_some(offset, from);
      if (done < 0 && errno == EINTR) continue;
      if (done < 0) fail(folder_, str("write of ", from.size(), " bytes"), errno);
      from = from.subspan(done);
      offset += done;
    }
  }

 private:
  ssize_t write_some(int64_t offset, std::span<const std::byte> from) const {
    const FileLimitScope limit;
    return ::pwrite(descriptor_, from.data(), from.size(), offset);
  }

  int allocate(int64_t bytes) const {
    const FileLimitScope limit;
    return ::fallocate(descriptor_, 0, 0, bytes);
  }

  int open_unnamed(int direct) const {
    const int flags = O_RDWR | O_CLOEXEC | direct;
    const int made = ::open(folder_.c_str(), O_TMPFILE | flags, 0600);
    if (made >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return made;
    std::string name = (folder_ / "trireme-XXXXXX").string();  // the file system has none without a name
    const int named = ::mkostemp(name.data(), O_CLOEXEC | direct);
    if (named >= 0) ::unlink(name.c_str());
    return named;
  }

  void reserve(int64_t bytes) {
    if (bytes == 0) return;
    // Asked first: a file system may take all that is free before it says that this is too little.
    const int64_t free = free_bytes(folder_);
    if (free < bytes) no_space(bytes, free, ENOSPC);
    if (allocate(bytes) == 0) return;
    if (errno != EOPNOTSUPP) no_space(bytes, free, errno);
    constexpr int64_t kPieceBytes = int64_t{4} << 20;
    const DiskBuffer zeros(kPieceBytes);
    std::memset(zeros.data(), 0, kPieceBytes);
    for (int64_t begin = 0; begin < bytes; begin += kPieceBytes)
      write(begin, zeros.first(std::min(kPieceBytes, disk_aligned(bytes - begin))));
  }

  [[noreturn]] void no_space(int64_t bytes, int64_t free, int reason) const {
    if (reason == EFBIG)
      throw IoError(str(folder_.string(), ": files of ", size_text(bytes), " are not allowed: ", std::strerror(reason),
                        write_error_fix(reason), ", or use more ranks"));
    throw IoError(str(folder_.string(), ": ", size_text(bytes), " are needed and ", size_text(free),
                      " are free: ", std::strerror(reason), "; give a folder of a larger disk, or use more ranks"));
  }

  const std::filesystem::path folder_;
  int descriptor_ = -1;
};

}  // namespace

std::unique_ptr<DiskFile> make_disk_file(const std::filesystem::path& folder, int64_t bytes) {
  auto file = std::make_unique<UnnamedFile>(folder, bytes);
  if (is_in_memory(folder))
    log(LogLevel::kWarning, str(folder.string(), ": this folder is memory (tmpfs), so nothing is saved by moving ",
                                size_text(bytes), " there; give a folder of a disk"));
  return file;
}

DiskBuffer::DiskBuffer(int64_t bytes)
    : data_(static_cast<std::byte*>(std::aligned_alloc(kDiskAlignment, disk_aligned(std::max<int64_t>(bytes, 1))))) {
  if (!data_) throw IoError(str("no memory for ", size_text(bytes), " to transfer to and from disk"));
}

void DiskBuffer::Free::operator()(std::byte* data) const { std::free(data); }

void read_bytes(DiskFile& file, int64_t offset, std::span<std::byte> to, const DiskBuffer& scratch) {
  while (!to.empty()) {
    const int64_t begin = offset / kDiskAlignment * kDiskAlignment, before = offset - begin;
    const int64_t bytes = std::min(static_cast<int64_t>(to.size()), kDiskPieceBytes - before);
    file.read(begin, scratch.first(disk_aligned(before + bytes)));
    std::memcpy(to.data(), scratch.data() + before, bytes);
    to = to.subspan(bytes);
    offset += bytes;
  }
}

void write_bytes(DiskFile& file, int64_t offset, std::span<const std::byte> from, const DiskBuffer& scratch) {
  while (!from.empty()) {
    const int64_t begin = offset / kDiskAlignment * kDiskAlignment, before = offset - begin;
    const int64_t bytes = std::min(static_cast<int64_t>(from.size()), kDiskPieceBytes - before);
    const std::span<std::byte> blocks = scratch.first(disk_aligned(before + bytes));
    const int64_t after = static_cast<int64_t>(blocks.size()) - before - bytes;
    if (before > 0) file.read(begin, blocks.first(kDiskAlignment));
    const bool is_read = before > 0 && static_cast<int64_t>(blocks.size()) == kDiskAlignment;
    if (after > 0 && !is_read)
      file.read(begin + static_cast<int64_t>(blocks.size()) - kDiskAlignment, blocks.last(kDiskAlignment));
    std::memcpy(blocks.data() + before, from.data(), bytes);
    file.write(begin, blocks);
    from = from.subspan(bytes);
    offset += bytes;
  }
}

DiskTransfer& DiskTransfer::operator=(DiskTransfer&& other) noexcept {
  wait();
  parts_ = std::move(other.parts_);
  waited_ns_ = std::move(other.waited_ns_);
  return *this;
}

void DiskTransfer::wait() noexcept {
  for (const std::future<void>& part : parts_) part.wait();
}

void DiskTransfer::get() {
  const auto is_done = [](const std::future<void>& part) {
    return part.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  };
  if (!std::all_of(parts_.begin(), parts_.end(), is_done)) {
    const WaitScope host;  // a Python program's other threads go on
    const auto start = std::chrono::steady_clock::now();
    wait();
    *waited_ns_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - start).count();
  }
  for (std::future<void>& part : std::exchange(parts_, {})) part.get();
}

DiskQueue::DiskQueue(DiskFile& file, int threads) : file_(file), process_(::getpid()), threads_(threads) {
  for (Worker& thread : threads_) thread.start_once([this] { run(); });
}

DiskQueue::~DiskQueue() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  for (Worker& thread : threads_) thread.join();
}

namespace {

bool is_aligned(std::span<const std::byte> memory) {
  return reinterpret_cast<uintptr_t>(memory.data()) % kDiskAlignment == 0 && memory.size() % kDiskAlignment == 0;
}

}  // namespace

DiskQueue::Task DiskQueue::task(int64_t offset, std::span<std::byte> to) {
  read_bytes_ += static_cast<int64_t>(to.size());
  if (is_aligned(to)) return Task([this, offset, to](const DiskBuffer&) { file_.read(offset, to); });
  return Task([this, offset, to](const DiskBuffer& scratch) { read_bytes(file_, offset, to, scratch); });
}

DiskQueue::Task DiskQueue::task(int64_t offset, std::span<const std::byte> from) {
  written_bytes_ += static_cast<int64_t>(from.size());
  return Task([this, offset, from](const DiskBuffer&) { file_.write(offset, from); });
}

template <class Memory>
DiskTransfer DiskQueue::move(int64_t offset, Memory memory) {
  DiskTransfer transfer;
  transfer.waited_ns_ = waited_ns_;
  while (!memory.empty()) {
    const size_t bytes = std::min<size_t>(memory.size(), kDiskPieceBytes);
    transfer.parts_.push_back(enqueue(task(offset, memory.first(bytes))));
    memory = memory.subspan(bytes);
    offset += static_cast<int64_t>(bytes);
  }
  return transfer;
}

DiskTransfer DiskQueue::read(int64_t offset, std::span<std::byte> to) { return move(offset, to); }
DiskTransfer DiskQueue::write(int64_t offset, std::span<const std::byte> from) { return move(offset, from); }

DiskUse DiskQueue::use() const {
  return {
      .read_bytes = read_bytes_, .written_bytes = written_bytes_, .wait_s = 1e-9 * static_cast<double>(*waited_ns_)};
}

std::future<void> DiskQueue::enqueue(Task task) {
  if (::getpid() != process_)
    throw StateError(str("process ", ::getpid(), " was forked from process ", process_,
                         " and cannot use what that has on disk; use a thread, or start the program anew"));
  std::future<void> done = task.get_future();
  {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(task));
  }
  changed_.notify_one();
  return done;
}

void DiskQueue::run() {
  const DiskBuffer scratch(kDiskPieceBytes);  // of which a page is taken where it is written
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
    if (waiting_.empty()) return;
    Task task = std::move(waiting_.front());
    waiting_.pop_front();
    lock.unlock();
    task(scratch);
    lock.lock();
  }
}

}  // namespace trireme
