// The files of a DeepSpeed checkpoint, filled from a source and put in place together.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "checkpoint/layouts/deepspeed/export.h"
#include "trireme/base/error.h"

namespace trireme {
namespace deepspeed {
namespace {

/// A larger storage goes through a file: the archive's writer wants each in one piece.
constexpr int64_t kMostInMemory = int64_t{32} << 20;

/// Takes the bytes of one storage.
class Spool {
 public:
  Spool(FileSystem& files, std::filesystem::path path, int64_t bytes) : files_(files), path_(std::move(path)) {
    if (bytes > kMostInMemory) file_ = files_.create(path_);
    if (!file_) memory_.reserve(bytes);
  }
  ~Spool() {
    mapped_.reset();
    std::error_code ignored;
    if (file_) std::filesystem::remove(path_, ignored);
  }
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  void append(std::span<const std::byte> block) {
    if (file_) return file_->write(block.data(), block.size());
    memory_.insert(memory_.end(), block.begin(), block.end());
  }

  void append_zeros(int64_t bytes) {
    static constexpr std::byte kZeros[4096]{};
    for (; bytes > 0; bytes -= sizeof kZeros)
      append({kZeros, static_cast<size_t>(std::min<int64_t>(bytes, sizeof kZeros))});
  }

  const void* data() {
    if (!file_) return memory_.data();
    file_->close();
    mapped_ = files_.map(path_);
    return mapped_->data();
  }

 private:
  FileSystem& files_;
  const std::filesystem::path path_;
  std::unique_ptr<WritableFile> file_;
  std::vector<std::byte> memory_;
  std::shared_ptr<const MappedFile> mapped_;
};

}  // namespace

ArchiveFile::ArchiveFile(FileSystem& files, const std::filesystem::path& path, PieceReader& reader)
    : files_(files),
      path_(path),
      reader_(reader),
      file_(files.create(path)),
      archive_([this](const void* data, size_t bytes) { file_->write(data, bytes); }) {}

pickle::Value* ArchiveFile::add(const void* data, size_t bytes, at::ScalarType dtype, std::vector<int64_t> shape) {
  static constexpr char kNothing = 0;
  const std::string storage = std::to_string(storages_++);
  archive_.storage(storage, bytes > 0 ? data : &kNothing, bytes);
  return document_.tensor(storage, dtype, std::move(shape));
}

pickle::Value* ArchiveFile::tensor(const std::vector<PaddedRange>& ranges, at::ScalarType dtype,
                                   std::vector<int64_t> shape) {
  const auto itemsize = static_cast<int64_t>(c10::elementSize(dtype));
  int64_t numel = 0;
  for (const PaddedRange& range : ranges) numel += range.numel + range.zeros;
  Spool spool(files_, path_.string() + ".part", numel * itemsize);
  for (const PaddedRange& range : ranges) {
    reader_.read(range.tensor, range.begin, range.numel,
                 [&](const PieceReader::Piece& piece) { spool.append(piece.bytes); });
    spool.append_zeros(range.zeros * itemsize);
  }
  return add(spool.data(), numel * itemsize, dtype, std::move(shape));
}

pickle::Value* ArchiveFile::flat(const std::vector<PaddedRange>& ranges) {
  int64_t numel = 0;
  for (const PaddedRange& range : ranges) numel += range.numel + range.zeros;
  return tensor(ranges, at::kFloat, {numel});
}

pickle::Value* ArchiveFile::scalar(float value) { return add(&value, sizeof value, at::kFloat, {}); }

void ArchiveFile::finish(pickle::Value* root) {
  document_.set_root(root);
  archive_.finish(document_);
  file_->sync();
  file_->close();
}

namespace {

/// A folder that appears under its name when it is complete.
class NewFolder {
 public:
  NewFolder(FileSystem& files, const std::filesystem::path& path)
      : files_(files),
        path_(path),
        temporary_(path.parent_path() / str(".tmp-", path.filename().string(), "-", ::getpid())) {
    if (files_.exists(path_)) throw CheckpointError(str(path_.string(), ": this tag exists already; choose another"));
    files_.create_directories(temporary_);
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!committed_) std::filesystem::remove_all(temporary_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::filesystem::path& temporary() const { return temporary_; }

  void commit() {
    files_.sync_directory(temporary_);
    files_.rename(temporary_, path_);
    committed_ = true;
    files_.sync_directory(path_.parent_path());
  }

 private:
  FileSystem& files_;
  const std::filesystem::path path_;
  const std::filesystem::path temporary_;
  bool committed_ = false;
};

}  // namespace
}  // namespace deepspeed

SavedCheckpoint write_deepspeed_checkpoint(const CheckpointSource& source, const std::filesystem::path& directory,
                                           const DeepSpeedLayout& layout, const ConvertOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  FileSystem& files = options.files ? *options.files : posix_file_system();
  const deepspeed::ExportPlan plan = deepspeed::plan_export(source, layout);
  SavedCheckpoint saved{.path = directory / tag_of_copy(source, options), .tensor_bytes = plan.tensor_bytes};
  deepspeed::NewFolder folder(files, saved.path);
  ByteProgress progress(options.progress, plan.tensor_bytes);
  PieceReader reader(source, &progress);
  for (int rank = 0; rank < plan.ranks; ++rank) {
    const std::string owner = str("zero_pp_rank_", rank, "_mp_rank_00_");
    if (rank == 0 || plan.stage == 3) {
      deepspeed::ArchiveFile model(
          files, folder.temporary() / ((plan.stage == 3 ? owner : "mp_rank_00_") + "model_states.pt"), reader);
      write_model_file(model, plan, source.manifest, rank);
    }
    deepspeed::ArchiveFile optimizer(
        files, folder.temporary() / str(plan.is_bf16 ? "bf16_" : "", owner, "optim_states.pt"), reader);
    write_optimizer_file(optimizer, plan, rank);
  }
  folder.commit();
  write_file_atomically(files, directory / "latest", saved.path.filename().string());
  progress.finish();
  saved.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return saved;
}

}  // namespace trireme
