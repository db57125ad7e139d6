// Space on disk for what does not fit into memory, read and written beside the program.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "trireme/base/worker.h"

namespace trireme {

/// Offsets, sizes and addresses of transfers are multiples of it, so that a disk moves them without the system's cache
/// (O_DIRECT).
constexpr int64_t kDiskAlignment = 4096;
constexpr int64_t disk_aligned(int64_t bytes) { return (bytes + kDiskAlignment - 1) / kDiskAlignment * kDiskAlignment; }

/// Bytes that are read and written at any place; any number of threads at a time. All functions throw IoError with the
/// folder, the operation and the system's reason.
class DiskFile {
 public:
  virtual ~DiskFile() = default;
  virtual void read(int64_t offset, std::span<std::byte> to) = 0;
  virtual void write(int64_t offset, std::span<const std::byte> from) = 0;
};

/// A file of `bytes` zeros in `folder`, which is made where it is missing. The file has no name: it is gone with its
/// holder, and with a process that is killed. Its space is taken here, so that a full disk is told now and not in the
/// middle of a step. Where the file system has no O_DIRECT, transfers pass through the system's cache.
///
/// Throws    IoError: no such folder, or no space, with the bytes that are free.
std::unique_ptr<DiskFile> make_disk_file(const std::filesystem::path& folder, int64_t bytes);

/// Where weights or states are kept on disk, and in how much memory they are used: DeepSpeed's offload_param and
/// offload_optimizer with the device "nvme".
struct DiskSpace {
  std::string folder = {};                 ///< nvme_path; empty: all is in memory
  int buffers = 4;                         ///< buffer_count: shards or blocks that are in memory during an update
  int64_t block_numel = int64_t{1} << 20;  ///< elements of a block of states; a multiple of 4096
  /// Makes the file; empty: make_disk_file().
  std::function<std::unique_ptr<DiskFile>(const std::string& folder, int64_t bytes)> make_file = {};

  bool is_on() const { return !folder.empty(); }
  bool operator==(const DiskSpace& other) const {
    return folder == other.folder && buffers == other.buffers && block_numel == other.block_numel;
  }
};

/// Memory for transfers: `bytes` that begin at a multiple of kDiskAlignment.
class DiskBuffer {
 public:
  explicit DiskBuffer(int64_t bytes);
  std::byte* data() const { return data_.get(); }
  std::span<std::byte> first(int64_t bytes) const { return {data_.get(), static_cast<size_t>(bytes)}; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte[], Free> data_;
};

/// Bytes of a transfer that goes through aligned memory.
constexpr int64_t kDiskPieceBytes = int64_t{4} << 20;

/// read() and write() of a DiskFile at any place, from and to any memory: in pieces through `scratch`, which has
/// kDiskPieceBytes. Of the first and the last block that a write touches, what is beside it is read and written again:
/// one thread at a time writes there.
void read_bytes(DiskFile& file, int64_t offset, std::span<std::byte> to, const DiskBuffer& scratch);
void write_bytes(DiskFile& file, int64_t offset, std::span<const std::byte> from, const DiskBuffer& scratch);

/// How much of a disk is taken, what went to and fro, and how long the program waited for it.
struct DiskUse {
  int64_t bytes = 0;
  int64_t read_bytes = 0;  ///< so far, as the two below
  int64_t written_bytes = 0;
  double wait_s = 0;
};
inline DiskUse operator+(const DiskUse& a, const DiskUse& b) {
  return {a.bytes + b.bytes, a.read_bytes + b.read_bytes, a.written_bytes + b.written_bytes, a.wait_s + b.wait_s};
}

/// Several transfers as one. Their memory is theirs until wait() or get(), or until this is destroyed, which waits.
class DiskTransfer {
 public:
  DiskTransfer() = default;  ///< of nothing
  DiskTransfer(DiskTransfer&&) noexcept = default;
  DiskTransfer& operator=(DiskTransfer&& other) noexcept;
  ~DiskTransfer() { wait(); }

  /// Waits for all, then throws what the first that failed has thrown. It is of nothing afterwards.
  void get();
  void wait() noexcept;

 private:
  friend class DiskQueue;
  std::vector<std::future<void>> parts_;
  std::shared_ptr<std::atomic<int64_t>> waited_ns_;  // shared with the queue, which may end before get()
};

/// Transfers of a file by threads beside the program, begun in the order in which they are asked for.
class DiskQueue {
 public:
  /// `file` outlives it. `threads` transfers run at a time. In a forked child, which has no such threads, read() and
  /// write() throw StateError.
  DiskQueue(DiskFile& file, int threads);
  /// Waits for all transfers.
  ~DiskQueue();
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

  /// In pieces of kDiskPieceBytes, which several threads move at a time. DiskTransfer::get() throws what the file
  /// throws.
  DiskTransfer read(int64_t offset, std::span<std::byte> to);  ///< into any memory
  DiskTransfer write(int64_t offset, std::span<const std::byte> from);

  /// `bytes` is 0.
  DiskUse use() const;

 private:
  using Task = std::packaged_task<void(const DiskBuffer& scratch)>;
  template <class Memory>
  DiskTransfer move(int64_t offset, Memory memory);
  Task task(int64_t offset, std::span<std::byte> to);
  Task task(int64_t offset, std::span<const std::byte> from);
  std::future<void> enqueue(Task task);
  void run();

  DiskFile& file_;
  const pid_t process_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> waiting_;
  bool ends_ = false;
  std::atomic<int64_t> read_bytes_ = 0, written_bytes_ = 0;
  const std::shared_ptr<std::atomic<int64_t>> waited_ns_ = std::make_shared<std::atomic<int64_t>>(0);
  std::vector<Worker> threads_;
};

}  // namespace trireme
