// The zip archive that Python's torch.save() writes: a pickled dictionary, and one record per storage.
#include <map>
#include <string>

#include "checkpoint/export/export_format.h"
#include "trireme/base/error.h"
#include "trireme/formats/pickle/torch_archive.h"

namespace trireme {
namespace {

class TorchWriter final : public ExportWriter {
 public:
  TorchWriter(NewFile& file, const std::vector<ExportedTensor>& tensors, const ExportOptions& options)
      : tensors_(tensors),
        aliases_(options.aliases),
        archive_([&file](const void* data, size_t bytes) { file.write(data, bytes); }) {}

  void append(const at::Tensor& tensor) override {
    archive_.storage(std::to_string(appended_++), tensor.const_data_ptr(), tensor.nbytes());
  }
  bool takes_pieces() const override { return false; }

  void finish() override {
    pickle::Document document;
    pickle::Document::Pairs dictionary;
    std::map<std::string, pickle::Value*> by_name;
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const auto& [name, shape, dtype, fetch] = tensors_[i];
      dictionary.emplace_back(name, document.tensor(std::to_string(i), dtype, shape));
      if (!by_name.insert(dictionary.back()).second)
        throw CheckpointError(str("tensor name \"", name, "\" stands twice"));
    }
    for (const auto& [alias, name] : aliases_)
      if (const auto found = by_name.find(name); found != by_name.end()) dictionary.emplace_back(alias, found->second);
    document.set_root(document.dict(dictionary));
    archive_.finish(document);
  }

 private:
  const std::vector<ExportedTensor> tensors_;
  const std::map<std::string, std::string> aliases_;
  size_t appended_ = 0;
  pickle::TorchArchiveWriter archive_;
};

}  // namespace

std::unique_ptr<ExportWriter> make_torch_writer(NewFile& file, const std::vector<ExportedTensor>& tensors,
                                                const ExportOptions& options) {
  return std::make_unique<TorchWriter>(file, tensors, options);
}

}  // namespace trireme
