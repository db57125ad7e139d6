#include "trireme/formats/pickle/torch_archive.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "formats/pickle/zip_directory.h"
#include "trireme/base/error.h"
#include "trireme/formats/pickle/pickle.h"

namespace trireme::pickle {
namespace {

constexpr char kPickleName[] = "data.pkl";

std::string first_line(const std::exception& error) {
  const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
  const std::string text = torch_error ? torch_error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

/// A part of a file, as the archive's reader reads it.
class PartOfFile final : public caffe2::serialize::ReadAdapterInterface {
 public:
  PartOfFile(ReadableFile& file, size_t begin, size_t bytes) : file_(file), begin_(begin), bytes_(bytes) {}

  size_t size() const override { return bytes_; }
  size_t read(uint64_t position, void* buffer, size_t bytes, const char* /*what*/) const override {
    if (position >= bytes_) return 0;
    const size_t count = std::min<size_t>(bytes, bytes_ - position);
    file_.read(begin_ + position, buffer, count);
    return count;
  }

 private:
  ReadableFile& file_;
  const size_t begin_;
  const size_t bytes_;
};

/// Calls the archive's reader, whose own errors say neither file nor what to do.
template <class Work>
auto reading(const std::filesystem::path& path, const Work& work) {
  try {
    return work();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CheckpointError(
        str(path.string(), ": damaged, or not written by torch.save() of PyTorch 1.6 or newer: ", first_line(error)));
  }
}

}  // namespace

TorchArchive::TorchArchive(const std::filesystem::path& path)
    : TorchArchive(path, 0, static_cast<int64_t>(posix_file_system().size(path))) {}

TorchArchive::TorchArchive(const std::filesystem::path& path, int64_t begin, int64_t bytes)
    : path_(path), file_(posix_file_system().open(path)), begin_(begin), bytes_(bytes) {
  const auto file_bytes = static_cast<int64_t>(file_->bytes());
  if (begin < 0 || bytes < 0 || begin > file_bytes - bytes)
    throw CheckpointError(str(path.string(), ": expected an archive of ", bytes, " bytes from byte ", begin,
                              " on, the file has ", file_bytes, ": it is truncated"));
  check_zip_directory(*file_, static_cast<size_t>(begin), static_cast<size_t>(bytes), path.string());
  const std::string origin = path.string() + ": " + kPickleName;
  reading(path, [&] {
    reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(
        std::make_shared<PartOfFile>(*file_, static_cast<size_t>(begin), static_cast<size_t>(bytes)));
    if (reader_->hasRecord("byteorder")) {
      const auto [order, size] = reader_->getRecord("byteorder");
      const std::string_view found(static_cast<const char*>(order.get()), size);
      if (found != "little")
        throw CheckpointError(str(path.string(), ": byte order \"", found, "\", this reader knows \"little\""));
    }
    const size_t size = reader_->getRecordSize(kPickleName);
    if (size > kMostBytes)
      throw CheckpointError(str(origin, " has ", size, " bytes, at most ", kMostBytes, " are read"));
    const auto [data, found] = reader_->getRecord(kPickleName);
    document_ = parse({static_cast<const char*>(data.get()), found}, origin);
  });
}

int64_t TorchArchive::record_offset(const std::string& name, const std::string& what) {
  return reading(path_, [&] {
    if (!reader_->hasRecord(name))
      throw CheckpointError(str(path_.string(), ": ", what, ": there is no record ", name));
    // A record's own header begins with "PK\3\4"; bytes 8 and 9 say how it is compressed, 26 and 27 how long its name
    // is. torch.save() compresses nothing, other programs that rewrite an archive may. The data stands behind this
    // header, so damage in it would move all elements.
    const auto header = static_cast<int64_t>(reader_->getRecordHeaderOffset(name));
    std::array<uint8_t, 30> bytes{};
    if (header < 0 || header > bytes_ - static_cast<int64_t>(bytes.size()))
      throw CheckpointError(str(path_.string(), ": ", what, ": record ", name, " begins beyond the end of the file"));
    file_->read(begin_ + header, bytes.data(), bytes.size());
    std::string own_name(std::min<int64_t>(bytes[26] | bytes[27] << 8, bytes_ - header - 30), '\0');
    file_->read(begin_ + header + 30, own_name.data(), own_name.size());
    if (std::memcmp(bytes.data(), "PK\3\4", 4) != 0 || !own_name.ends_with("/" + name))
      throw CheckpointError(
          str(path_.string(), ": ", what, ": the header of record ", name, " is damaged; use another checkpoint"));
    if (bytes[8] != 0 || bytes[9] != 0)
      throw CheckpointError(str(path_.string(), ": ", what, ": record ", name,
                                " is compressed; load the file with torch.load() and save it again"));
    return static_cast<int64_t>(reader_->getRecordOffset(name));
  });
}

int64_t TorchArchive::offset_of(const Value& tensor, const std::string& what) {
  const std::string where = path_.string() + ": " + what;
  if (!tensor.is(Kind::kTensor))
    throw CheckpointError(str(where, ": expected a tensor, found ", kind_name(tensor.kind)));
  const TensorPlace& place = *tensor.place;
  if (!place.is_contiguous())
    throw CheckpointError(str(where, " is not contiguous; save it again after .contiguous()"));
  const auto itemsize = static_cast<int64_t>(c10::elementSize(place.dtype));
  const std::string name = "data/" + place.storage;
  const int64_t offset = record_offset(name, what);
  const auto size = static_cast<int64_t>(reading(path_, [&] { return reader_->getRecordSize(name); }));
  if (size / itemsize < place.storage_numel || size < 0 || offset < 0 || offset > bytes_ - size) {
    throw CheckpointError(str(where, ": record ", name, " of ", size, " bytes at ", offset, " of a file of ", bytes_,
                              " does not hold ", place.storage_numel, " elements: the file is truncated or damaged"));
  }
  return begin_ + offset + place.begin * itemsize;
}

double TorchArchive::item(const Value& tensor, const std::string& what) {
  const int64_t offset = offset_of(tensor, what);
  if (tensor.place->numel() != 1)
    throw CheckpointError(str(path_.string(), ": ", what, ": expected one element, found ", tensor.place->numel()));
  std::array<std::byte, 16> bytes{};
  file_->read(offset, bytes.data(), c10::elementSize(tensor.place->dtype));
  return at::from_blob(bytes.data(), {}, at::TensorOptions().dtype(tensor.place->dtype)).item().toDouble();
}

TorchArchiveWriter::TorchArchiveWriter(Sink sink)
    : sink_(std::move(sink)), archive_([this](const void* data, size_t bytes) { return write(data, bytes); }) {}

// The archive's own way of failing ends the process in its destructor: it is told that all is well, and we throw.
size_t TorchArchiveWriter::write(const void* data, size_t bytes) noexcept {
  try {
    if (!error_) sink_(data, bytes);
  } catch (...) {
    error_ = std::current_exception();
  }
  return bytes;
}

void TorchArchiveWriter::rethrow() const {
  if (error_) std::rethrow_exception(error_);
}

void TorchArchiveWriter::storage(const std::string& name, const void* data, size_t bytes) {
  archive_.writeRecord("data/" + name, data, bytes);
  rethrow();
}

void TorchArchiveWriter::finish(const Document& document) {
  const std::string pickle = dump(document);
  archive_.writeRecord(kPickleName, pickle.data(), pickle.size());
  archive_.writeEndOfFile();
  rethrow();
}

}  // namespace trireme::pickle
