// What writes one export: told of all tensors, then given one after the other, in order.
#pragma once

#include <memory>
#include <vector>

#include "checkpoint/new_file.h"
#include "trireme/checkpoint/export.h"

namespace trireme {

class ExportWriter {
 public:
  virtual ~ExportWriter() = default;
  /// `tensor` is contiguous, on the host.
  virtual void append(const at::Tensor& tensor) = 0;
  /// After the last one.
  virtual void finish() = 0;
};

/// The order in which a format wants its tensors: indices into `tensors`.
std::vector<size_t> safetensors_order(const std::vector<ExportedTensor>& tensors);

std::unique_ptr<ExportWriter> make_safetensors_writer(NewFile& file, const std::vector<ExportedTensor>& tensors,
                                                      const ExportOptions& options, const std::string& origin);
std::unique_ptr<ExportWriter> make_torch_writer(NewFile& file, const std::vector<ExportedTensor>& tensors,
                                                const ExportOptions& options);

}  // namespace trireme
