// The writer of one export: it is told of all tensors, then given one after the other, in order.
#pragma once

#include <memory>
#include <vector>

#include "trireme/base/new_file.h"
#include "trireme/checkpoint/export.h"

namespace trireme {

class ExportWriter {
 public:
  virtual ~ExportWriter() = default;
  /// `tensor` is contiguous, on the host. Where takes_pieces(): or the next elements of one, in any number of calls.
  virtual void append(const at::Tensor& tensor) = 0;
  virtual bool takes_pieces() const = 0;
  /// After the last one.
  virtual void finish() = 0;
};

/// The order in which a format wants its tensors: indices into `tensors`.
std::vector<size_t> safetensors_order(const std::vector<ExportedTensor>& tensors);

/// The format is the one that `path`'s extension names, `file` is where it is being written. `tensors` stand in the
/// order above; their fetch() is not called.
std::unique_ptr<ExportWriter> make_export_writer(NewFile& file, const std::filesystem::path& path,
                                                 const std::vector<ExportedTensor>& tensors,
                                                 const ExportOptions& options);
std::unique_ptr<ExportWriter> make_torch_writer(NewFile& file, const std::vector<ExportedTensor>& tensors,
                                                const ExportOptions& options);

}  // namespace trireme
