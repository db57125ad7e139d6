// The zip archives of torch.save(): a pickle, and the tensors' storages as they are. Read without reading storages,
// written one storage after the other.
#pragma once

#include <caffe2/serialize/inline_container.h>

#include <cstddef>
#include <exception>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>

#include "trireme/base/file.h"
#include "trireme/formats/pickle/value.h"

namespace trireme::pickle {

/// An archive opened for reading.
class TorchArchive {
 public:
  /// Throws    IoError (not there); CheckpointError naming the file: no such archive, damaged, compressed, big-endian,
  ///           or as parse().
  explicit TorchArchive(const std::filesystem::path& path);
  /// The same for an archive that is bytes [begin, begin + bytes) of a file.
  TorchArchive(const std::filesystem::path& path, int64_t begin, int64_t bytes);

  const Value& root() const { return document_.root(); }
  const std::filesystem::path& path() const { return path_; }
  int64_t bytes() const { return bytes_; }

  /// Where in the file the first element of `tensor` (kTensor) stands; its elements follow in row-major order.
  /// `what` names it in messages.
  /// Throws    CheckpointError: not contiguous, or its record is missing, too short or beyond the end of the file.
  int64_t offset_of(const Value& tensor, const std::string& what);
  /// The only element of a tensor of float or integer dtype. Throws likewise.
  double item(const Value& tensor, const std::string& what);

 private:
  int64_t record_offset(const std::string& name, const std::string& what);

  const std::filesystem::path path_;
  const std::unique_ptr<ReadableFile> file_;
  const int64_t begin_;  ///< of the archive in the file
  const int64_t bytes_;  ///< of the archive
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
  Document document_;
};

/// An archive being written.
class TorchArchiveWriter {
 public:
  using Sink = std::function<void(const void* data, size_t bytes)>;

  /// `sink` takes the file's bytes in order; what it throws comes out of the call that led to it.
  explicit TorchArchiveWriter(Sink sink);

  /// The record of storage `name`. Throws what `sink` throws.
  void storage(const std::string& name, const void* data, size_t bytes);
  /// The pickle and the end, after the last storage. Throws likewise; CheckpointError as dump().
  void finish(const Document& document);

 private:
  size_t write(const void* data, size_t bytes) noexcept;
  void rethrow() const;

  Sink sink_;
  std::exception_ptr error_;
  caffe2::serialize::PyTorchStreamWriter archive_;  // last: it writes as it is destroyed
};

}  // namespace trireme::pickle
