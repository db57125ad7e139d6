// The zip archive that Python's torch.save() writes: a pickled dictionary, and one record per storage.
#include <ATen/core/Dict.h>
#include <ATen/ops/from_blob.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <exception>
#include <unordered_map>

#include "checkpoint/export_format.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

class TorchWriter final : public ExportWriter {
 public:
  TorchWriter(NewFile& file, const std::vector<ExportedTensor>& tensors, const ExportOptions& options)
      : file_(file),
        tensors_(tensors),
        aliases_(options.aliases),
        archive_([this](const void* data, size_t bytes) { return write(data, bytes); }) {}

  void append(const at::Tensor& tensor) override {
    archive_.writeRecord(str("data/", appended_++), tensor.const_data_ptr(), tensor.nbytes());
    rethrow();
  }
  bool takes_pieces() const override { return false; }

  void finish() override {
    const std::string pickle = pickled();
    archive_.writeRecord("data.pkl", pickle.data(), pickle.size());
    archive_.writeEndOfFile();
    rethrow();
  }

 private:
  // The archive's own way of failing ends the process in its destructor: it is told that all is well, and we throw.
  size_t write(const void* data, size_t bytes) noexcept {
    try {
      if (!error_) file_.write(data, bytes);
    } catch (...) {
      error_ = std::current_exception();
    }
    return bytes;
  }

  void rethrow() const {
    if (error_) std::rethrow_exception(error_);
  }

  // The pickler reads names, dtypes, shapes and which storages are the same: it numbers them in the order of the
  // dictionary, which is that of the records. It never reads an element, so there are none.
  std::string pickled() const {
    static char nothing[64];
    c10::impl::GenericDict dictionary(c10::StringType::get(), c10::TensorType::get());
    std::unordered_map<std::string, at::Tensor> by_name;
    for (const ExportedTensor& tensor : tensors_) {
      const at::Tensor hollow = at::from_blob(nothing, tensor.shape, at::TensorOptions().dtype(tensor.dtype));
      if (!by_name.emplace(tensor.name, hollow).second)
        throw CheckpointError(str("tensor name \"", tensor.name, "\" stands twice"));
      dictionary.insert(tensor.name, hollow);
    }
    for (const auto& [alias, name] : aliases_)
      if (const auto found = by_name.find(name); found != by_name.end()) dictionary.insert(alias, found->second);
    std::string text;
    torch::jit::Pickler pickler([&](const char* data, size_t bytes) { text.append(data, bytes); }, nullptr, nullptr,
                                nullptr, nullptr, /*tag_aggregates=*/false);
    pickler.protocol();
    pickler.pushIValue(dictionary);
    pickler.stop();
    return text;
  }

  NewFile& file_;
  const std::vector<ExportedTensor> tensors_;
  const std::map<std::string, std::string> aliases_;
  std::exception_ptr error_;
  int64_t appended_ = 0;
  caffe2::serialize::PyTorchStreamWriter archive_;  // last: it writes as it is destroyed
};

}  // namespace

std::unique_ptr<ExportWriter> make_torch_writer(NewFile& file, const std::vector<ExportedTensor>& tensors,
                                                const ExportOptions& options) {
  return std::make_unique<TorchWriter>(file, tensors, options);
}

}  // namespace trireme
