#include "trireme/checkpoint/export.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <optional>

#include "checkpoint/export/export_format.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/comm/agreement.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

enum class Format { kSafetensors, kTorch };

Format format_of(const std::filesystem::path& file) {
  const std::string extension = file.extension().string();
  if (extension == ".safetensors") return Format::kSafetensors;
  if (extension == ".bin" || extension == ".pt" || extension == ".pth") return Format::kTorch;
  throw ConfigError(str("'", file.filename().string(),
                        "' names no format; use a name that ends in .safetensors, or in "
                        ".bin, .pt or .pth for torch.load()"));
}

class SafetensorsWriter final : public ExportWriter {
 public:
  SafetensorsWriter(NewFile& file, const std::string& header) : file_(file) { file.write(header); }
  void append(const at::Tensor& tensor) override { file_.write(tensor.const_data_ptr(), tensor.nbytes()); }
  bool takes_pieces() const override { return true; }
  void finish() override {}

 private:
  NewFile& file_;
};

std::unique_ptr<ExportWriter> make_safetensors_writer(NewFile& file, const std::vector<ExportedTensor>& tensors,
                                                      const ExportOptions& options, const std::string& origin) {
  std::vector<SafetensorsEntry> entries;
  int64_t offset = 0;
  for (const ExportedTensor& tensor : tensors) {
    const int64_t bytes =
        checked_numel(tensor.shape, tensor.name) * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    entries.push_back({tensor.name, tensor.shape, tensor.dtype, offset, bytes});
    offset += bytes;
  }
  auto metadata = options.aliases;
  metadata.emplace("format", "pt");
  return std::make_unique<SafetensorsWriter>(file, dump_safetensors_header(entries, metadata, origin));
}

/// The part of an export that only rank 0 does. An error waits until all ranks have left the collective part.
class Export {
 public:
  Export(const std::filesystem::path& path, const std::vector<ExportedTensor>& tensors, const ExportOptions& options) {
    attempt([&] {
      FileSystem& files = options.files ? *options.files : posix_file_system();
      if (path.has_parent_path()) files.create_directories(path.parent_path());
      file_.emplace(files, path);
      writer_ = make_export_writer(*file_, path, tensors, options);
    });
  }

  void append(const ExportedTensor& expected, const at::Tensor& tensor) {
    attempt([&] {
      if (tensor.sizes() != expected.shape || tensor.scalar_type() != expected.dtype)
        throw CheckpointError(str("tensor \"", expected.name, "\": expected ", expected.dtype, " ",
                                  at::IntArrayRef(expected.shape), ", fetched ", tensor.scalar_type(), " ",
                                  tensor.sizes()));
      writer_->append(tensor.cpu().contiguous());
    });
  }

  void finish() {
    attempt([&] {
      writer_->finish();
      file_->commit();
    });
    writer_.reset();
    file_.reset();  // removes what was not committed
    if (error_) std::rethrow_exception(error_);
  }

 private:
  template <class Work>
  void attempt(const Work& work) {
    if (error_) return;
    try {
      work();
    } catch (...) {
      error_ = std::current_exception();
    }
  }

  std::optional<NewFile> file_;
  std::unique_ptr<ExportWriter> writer_;
  std::exception_ptr error_;
};

}  // namespace

std::vector<size_t> safetensors_order(const std::vector<ExportedTensor>& tensors) {
  // Wide dtypes first, so that each tensor is aligned without holes, which the format forbids.
  std::vector<size_t> order(tensors.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return c10::elementSize(tensors[a].dtype) > c10::elementSize(tensors[b].dtype);
  });
  return order;
}

std::unique_ptr<ExportWriter> make_export_writer(NewFile& file, const std::filesystem::path& path,
                                                 const std::vector<ExportedTensor>& tensors,
                                                 const ExportOptions& options) {
  return format_of(path) == Format::kSafetensors ? make_safetensors_writer(file, tensors, options, path.string())
                                                 : make_torch_writer(file, tensors, options);
}

void check_export_format(const std::filesystem::path& file) { (void)format_of(file); }

void export_tensors(Group& group, const std::filesystem::path& file, const std::vector<ExportedTensor>& tensors,
                    const ExportOptions& options) {
  check_export_format(file);
  std::vector<ExportedTensor> ordered;
  for (const size_t i : safetensors_order(tensors)) ordered.push_back(tensors[i]);
  std::optional<Export> work;
  if (group.rank() == 0) work.emplace(file, ordered, options);
  for (const ExportedTensor& tensor : ordered) {
    const at::Tensor whole = tensor.fetch();
    if (work) work->append(tensor, whole);
  }
  all_or_throw(group, [&] {
    if (work) work->finish();
  });
}

}  // namespace trireme
