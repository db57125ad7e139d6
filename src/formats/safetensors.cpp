#include "trireme/formats/safetensors.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <system_error>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/new_file.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

[[noreturn]] void fail(const Path& path, const char* operation) {
  throw IoError(
      str(path.string(), ": ", operation, " failed: ", std::error_code(errno, std::generic_category()).message()));
}

/// A private, writable mapping: tensors that alias it may be written like any other, the file keeps its bytes.
class PrivateMapping {
 public:
  explicit PrivateMapping(const Path& path) {
    (void)posix_file_system().size(path);  // no pipe, no device
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) fail(path, "open for reading");
    struct stat info {};
    const bool known = ::fstat(fd, &info) == 0;
    bytes_ = known ? static_cast<size_t>(info.st_size) : 0;
    void* start = bytes_ > 0 ? ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0) : nullptr;
    const int mapping_error = errno;
    ::close(fd);
    errno = mapping_error;
    if (!known || start == MAP_FAILED) fail(path, "map");
    data_ = static_cast<char*>(start);
  }
  ~PrivateMapping() {
    if (data_) ::munmap(data_, bytes_);
  }
  PrivateMapping(const PrivateMapping&) = delete;
  PrivateMapping& operator=(const PrivateMapping&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  size_t bytes_ = 0;
};

at::Tensor tensor_of(const std::shared_ptr<PrivateMapping>& mapping, const SafetensorsEntry& entry,
                     int64_t header_bytes) {
  if (entry.bytes == 0) return at::empty(entry.shape, entry.dtype);
  char* data = mapping->data() + header_bytes + entry.offset;
  const bool aligned = reinterpret_cast<uintptr_t>(data) % c10::elementSize(entry.dtype) == 0;
  // Every tensor holds the mapping: it ends with the last of them.
  auto tensor = at::from_blob(
      data, entry.shape, [mapping](void*) {}, at::TensorOptions(entry.dtype));
  return aligned ? tensor : tensor.clone();
}

NamedTensors read_file(const Path& path) {
  const auto mapping = std::make_shared<PrivateMapping>(path);
  const auto header = parse_safetensors_header({mapping->data(), mapping->bytes()},
                                               static_cast<int64_t>(mapping->bytes()), path.string());
  NamedTensors tensors;
  for (const auto& entry : header.entries) tensors.emplace(entry.name, tensor_of(mapping, entry, header.header_bytes));
  return tensors;
}

NamedTensors read_index(const Path& path) {
  std::map<std::string, NamedTensors> shards;
  NamedTensors tensors;
  for (const auto& [name, file] : read_safetensors_index(path)) {
    const auto [shard, is_new] = shards.try_emplace(file);
    if (is_new) shard->second = read_file(path.parent_path() / file);
    const auto found = shard->second.find(name);
    if (found == shard->second.end())
      throw CheckpointError(str(path.string(), ": tensor \"", name, "\" is not in ", file));
    tensors.emplace(name, found->second);
  }
  return tensors;
}

/// The entries in the order of their data: wide dtypes first, so that each tensor is aligned without holes, which the
/// format forbids.
std::vector<SafetensorsEntry> lay_out(std::vector<std::pair<std::string, at::Tensor>>& tensors) {
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto& a, const auto& b) { return a.second.element_size() > b.second.element_size(); });
  std::vector<SafetensorsEntry> entries;
  int64_t offset = 0;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back(
        {name, tensor.sizes().vec(), tensor.scalar_type(), offset, static_cast<int64_t>(tensor.nbytes())});
    offset += entries.back().bytes;
  }
  return entries;
}

}  // namespace

NamedTensors read_safetensors(const Path& path) {
  if (std::filesystem::is_directory(path)) {
    for (const char* name : {"model.safetensors.index.json", "model.safetensors"})
      if (std::filesystem::exists(path / name)) return read_safetensors(path / name);
    throw IoError(str(path.string(), ": neither model.safetensors nor model.safetensors.index.json is in this folder"));
  }
  return path.extension() == ".json" ? read_index(path) : read_file(path);
}

void write_safetensors(const Path& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  auto sorted = tensors;
  const auto entries = lay_out(sorted);
  auto all_metadata = metadata;
  all_metadata.emplace("format", "pt");
  const std::string header = dump_safetensors_header(entries, all_metadata, path.string());

  NewFile file(posix_file_system(), path);
  file.write(header);
  for (const auto& [name, tensor] : sorted) {
    const auto host = tensor.cpu().contiguous();
    file.write(host.const_data_ptr(), host.nbytes());
  }
  file.commit();
}

}  // namespace trireme
