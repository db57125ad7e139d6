#include "checkpoint/read/verify_files.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <tuple>

#include "checkpoint/checksum.h"
#include "checkpoint/shard.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme {
namespace {

/// A thread's share at a time: enough that disks read forward, little enough that all threads end together.
constexpr int64_t kBlocksPerTask = 16;

/// A block or a range of a slice that is not what was saved.
struct BadBytes {
  size_t tensor = 0;
  size_t slice = 0;
  int64_t begin = 0;  ///< bytes within the slice
  int64_t end = 0;
  std::string problem;

  auto place() const { return std::tie(tensor, slice, begin); }
};

struct VerifyTask {
  size_t tensor = 0;
  size_t slice = 0;
  int64_t begin = 0;  ///< bytes within the slice, a multiple of the block's
  int64_t end = 0;
};

class FileVerification {
 public:
  FileVerification(const CheckpointSource& source, const InspectOptions& options)
      : source_(source), manifest_(source.manifest), options_(options) {}

  VerifiedFiles run() {
    for (const SavedFile& file : manifest_.files) check_file(file);
    for (size_t i = 0; i < manifest_.tensors.size(); ++i)
      for (size_t j = 0; j < manifest_.tensors[i].slices.size(); ++j) check_presence(i, j);
    verify_tasks();
    report_bad_bytes();
    return std::move(result_);
  }

 private:
  bool has_checksums() const { return source_.layout == CheckpointLayout::kTrireme; }
  const SavedSlice& slice_of(const auto& part) const { return manifest_.tensors[part.tensor].slices[part.slice]; }
  std::filesystem::path path_of(const SavedSlice& slice) const {
    return source_.folder / manifest_.files[slice.file].name;
  }

  void check_file(const SavedFile& file) {
    int64_t bytes = 0;
    try {
      bytes = posix_file_system().exists(source_.folder / file.name)
                  ? static_cast<int64_t>(posix_file_system().size(source_.folder / file.name))
                  : -1;
    } catch (const IoError&) {
      bytes = -1;
    }
    bytes_of_file_.push_back(bytes);
    if (bytes < 0) return report_file(file, "the file is missing");
    if (bytes < file.bytes) report_file(file, str("truncated: it has ", bytes, " bytes, expected ", file.bytes));
    if (bytes > file.bytes) report_file(file, str("it has ", bytes, " bytes, expected ", file.bytes));
    if (options_.verify && has_checksums() && bytes >= file.header_bytes) check_header(file);
  }

  void check_header(const SavedFile& file) {
    try {
      std::string header(file.header_bytes, '\0');
      posix_file_system().open(source_.folder / file.name)->read(0, header.data(), header.size());
      if (checksum_of(header) != file.header_checksum) report_file(file, "the header is damaged: wrong checksum");
      result_.checksums += 1;
      result_.bytes += file.header_bytes;
    } catch (const IoError& error) {
      report_file(file, error.what());
    }
  }

  void report_file(const SavedFile& file, const std::string& problem) {
    result_.damages.push_back({.file = file.name, .tensor = {}, .begin = 0, .end = 0, .problem = problem});
  }

  /// Notes what of a slice the file does not have; the rest becomes tasks.
  void check_presence(size_t tensor, size_t index) {
    const SavedSlice& slice = manifest_.tensors[tensor].slices[index];
    const int64_t file_bytes = bytes_of_file_[slice.file];
    int64_t present = std::clamp<int64_t>(file_bytes - slice.offset, 0, slice.bytes);
    if (present < slice.bytes) {
      // A block that is there in part has no checksum to compare.
      if (has_checksums()) present -= present % kChecksumBlockBytes;
      bad_.push_back({tensor, index, present, slice.bytes, file_bytes < 0 ? "missing" : "missing: truncated"});
    }
    if (!options_.verify || !has_checksums()) return;
    constexpr int64_t kTaskBytes = kBlocksPerTask * kChecksumBlockBytes;
    for (int64_t begin = 0; begin < present; begin += kTaskBytes)
      tasks_.push_back({tensor, index, begin, std::min(begin + kTaskBytes, present)});
  }

  void verify_tasks() {
    std::sort(tasks_.begin(), tasks_.end(), [&](const VerifyTask& a, const VerifyTask& b) {
      const SavedSlice &x = slice_of(a), &y = slice_of(b);
      return std::tuple(x.file, x.offset, a.begin) < std::tuple(y.file, y.offset, b.begin);
    });
    const int cores = static_cast<int>(std::thread::hardware_concurrency());
    const int wanted = options_.threads > 0 ? options_.threads : std::max(cores, 1);
    const size_t count = std::min(static_cast<size_t>(wanted), std::max<size_t>(tasks_.size(), 1));
    std::vector<std::vector<BadBytes>> bad_of_thread(count);
    {
      std::vector<std::jthread> threads;
      for (size_t i = 1; i < count; ++i) threads.emplace_back([&, i] { take_tasks(bad_of_thread[i]); });
      take_tasks(bad_of_thread[0]);
    }
    for (auto& bad : bad_of_thread) bad_.insert(bad_.end(), bad.begin(), bad.end());
    for (const VerifyTask& task : tasks_) {
      result_.checksums += (task.end - task.begin + kChecksumBlockBytes - 1) / kChecksumBlockBytes;
      result_.bytes += task.end - task.begin;
    }
  }

  void take_tasks(std::vector<BadBytes>& bad) {
    std::vector<std::byte> block(kChecksumBlockBytes);
    for (size_t i = next_task_++; i < tasks_.size(); i = next_task_++) {
      const VerifyTask& task = tasks_[i];
      try {
        const auto file = posix_file_system().open(path_of(slice_of(task)));
        for (int64_t begin = task.begin; begin < task.end; begin += kChecksumBlockBytes)
          verify_block(task, begin, *file, block, bad);
      } catch (const IoError& error) {
        bad.push_back({task.tensor, task.slice, task.begin, task.end, error.what()});
      }
    }
  }

  void verify_block(const VerifyTask& task, int64_t begin, ReadableFile& file, std::vector<std::byte>& block,
                    std::vector<BadBytes>& bad) const {
    const SavedSlice& slice = slice_of(task);
    const int64_t bytes = std::min(kChecksumBlockBytes, task.end - begin);
    const auto complain = [&](const std::string& problem) {
      bad.push_back({task.tensor, task.slice, begin, begin + bytes, problem});
    };
    try {
      file.read(slice.offset + begin, block.data(), bytes);
    } catch (const IoError& error) {  // a bad sector: what is behind it may be readable
      return complain(error.what());
    }
    if (checksum_of(block.data(), bytes) != slice.checksums[begin / kChecksumBlockBytes]) complain("wrong checksum");
  }

  void report_bad_bytes() {
    std::sort(bad_.begin(), bad_.end(), [](const BadBytes& a, const BadBytes& b) { return a.place() < b.place(); });
    const BadBytes* previous = nullptr;
    for (const BadBytes& bad : bad_) {
      const SavedTensor& tensor = manifest_.tensors[bad.tensor];
      const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
      const SavedSlice& slice = tensor.slices[bad.slice];
      const bool continues = previous && previous->tensor == bad.tensor && previous->slice == bad.slice &&
                             previous->end == bad.begin && previous->problem == bad.problem;
      previous = &bad;
      if (!continues)
        result_.damages.push_back({.file = manifest_.files[slice.file].name,
                                   .tensor = label_of(tensor, bad.slice),
                                   .begin = slice.begin + bad.begin / itemsize,
                                   .end = 0,
                                   .problem = bad.problem});
      result_.damages.back().end = slice.begin + bad.end / itemsize;
    }
    // By file: what is wrong with the file, then what is wrong in it.
    std::stable_sort(result_.damages.begin(), result_.damages.end(),
                     [](const DamagedPlace& a, const DamagedPlace& b) { return a.file < b.file; });
  }

  const CheckpointSource& source_;
  const Manifest& manifest_;
  const InspectOptions& options_;
  std::vector<int64_t> bytes_of_file_;  ///< -1: not there
  std::vector<VerifyTask> tasks_;
  std::atomic<size_t> next_task_{0};
  std::vector<BadBytes> bad_;
  VerifiedFiles result_;
};

}  // namespace

VerifiedFiles verify_files(const CheckpointSource& source, const InspectOptions& options) {
  return FileVerification(source, options).run();
}

}  // namespace trireme
