#include "trireme/formats/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/tensor_part.h"

namespace trireme {
namespace {

struct DtypeName {
  at::ScalarType dtype;
  const char* name;
};

constexpr std::array kDtypes{
    DtypeName{at::ScalarType::Bool, "BOOL"},
    DtypeName{at::ScalarType::Byte, "U8"},
    DtypeName{at::ScalarType::Char, "I8"},
    DtypeName{at::ScalarType::Float8_e5m2, "F8_E5M2"},
    DtypeName{at::ScalarType::Float8_e4m3fn, "F8_E4M3"},
    DtypeName{at::ScalarType::Short, "I16"},
    DtypeName{at::ScalarType::UInt16, "U16"},
    DtypeName{at::ScalarType::Half, "F16"},
    DtypeName{at::ScalarType::BFloat16, "BF16"},
    DtypeName{at::ScalarType::Int, "I32"},
    DtypeName{at::ScalarType::UInt32, "U32"},
    DtypeName{at::ScalarType::Float, "F32"},
    DtypeName{at::ScalarType::Long, "I64"},
    DtypeName{at::ScalarType::UInt64, "U64"},
    DtypeName{at::ScalarType::Double, "F64"},
    DtypeName{at::ScalarType::ComplexFloat, "C64"},
};

constexpr int64_t kLengthBytes = 8;

/// The length of the header, as the file's first bytes say; may be nonsense.
uint64_t header_length(std::string_view file) {
  uint64_t length = 0;
  for (int64_t i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(file[i]);
  return length;
}

/// Metadata is text by the format; what is not is of no use to us.
std::map<std::string, std::string> parse_metadata(const Json& json) {
  std::map<std::string, std::string> metadata;
  if (!json.is_object()) return metadata;
  for (const auto& [name, value] : json.items())
    if (value.is_string()) metadata.emplace(name, value.get<std::string>());
  return metadata;
}

SafetensorsEntry parse_entry(const std::string& name, const Json& json, const std::string& origin) {
  SafetensorsEntry entry;
  entry.name = name;
  const std::string where = str(origin, ": tensor \"", name, "\"");
  try {
    entry.dtype = dtype_from_safetensors(json.at("dtype").get<std::string>(), where);
    entry.shape = json.at("shape").get<std::vector<int64_t>>();
    const auto& offsets = json.at("data_offsets");
    entry.offset = offsets.at(0).get<int64_t>();
    entry.bytes = offsets.at(1).get<int64_t>() - entry.offset;
  } catch (const Json::exception& error) {
    throw CheckpointError(str(where, ": the header's entry makes no sense: ", error.what()));
  }
  const int64_t numel = checked_numel(entry.shape, name);
  const auto itemsize = static_cast<int64_t>(c10::elementSize(entry.dtype));
  if (entry.bytes % itemsize != 0 || entry.bytes / itemsize != numel) {
    throw CheckpointError(
        str(where, ": its shape and dtype need ", numel, " x ", itemsize, " bytes, the header gives it ", entry.bytes));
  }
  return entry;
}

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype) {
  for (const auto& known : kDtypes)
    if (known.dtype == dtype) return known.name;
  throw CheckpointError(
      str("dtype ", c10::toString(dtype), " cannot be saved: the safetensors format does not have it"));
}

at::ScalarType dtype_from_safetensors(std::string_view name, const std::string& origin) {
  for (const auto& known : kDtypes)
    if (name == known.name) return known.dtype;
  throw CheckpointError(str(origin, ": dtype \"", name, "\" is not known here"));
}

std::string dump_safetensors_header(const std::vector<SafetensorsEntry>& entries,
                                    const std::map<std::string, std::string>& metadata, const std::string& origin) {
  Json json = {{"__metadata__", metadata}};
  for (const auto& entry : entries) {
    if (json.contains(entry.name))
      throw CheckpointError(str(origin, ": tensor name \"", entry.name, "\" stands twice or is reserved"));
    json[entry.name] = {{"dtype", safetensors_dtype(entry.dtype)},
                        {"shape", entry.shape},
                        {"data_offsets", {entry.offset, entry.offset + entry.bytes}}};
  }
  std::string text = json.dump();
  const auto unaligned = static_cast<int64_t>(text.size() + kLengthBytes) % kSafetensorsAlignment;
  if (unaligned != 0) text.append(kSafetensorsAlignment - unaligned, ' ');
  if (static_cast<int64_t>(text.size()) > kSafetensorsHeaderLimit)
    throw CheckpointError(str(origin, ": ", entries.size(), " tensors need a header of ", text.size(),
                              " bytes, the format allows ", kSafetensorsHeaderLimit, "; write several files"));
  std::string header(kLengthBytes, '\0');
  for (int64_t i = 0; i < kLengthBytes; ++i) header[i] = static_cast<char>(text.size() >> (8 * i) & 255);
  return header + text;
}

SafetensorsHeader parse_safetensors_header(std::string_view file, int64_t file_bytes, const std::string& origin) {
  if (file_bytes < kLengthBytes) throw CheckpointError(str(origin, ": ", file_bytes, " bytes are no safetensors file"));
  const uint64_t length = header_length(file);
  if (length > static_cast<uint64_t>(kSafetensorsHeaderLimit) ||
      static_cast<int64_t>(length) > file_bytes - kLengthBytes) {
    throw CheckpointError(str(origin, ": no safetensors file, or truncated: its header should have ", length,
                              " bytes, the file has ", file_bytes));
  }
  const auto json = parse_plain_json(file.substr(kLengthBytes, length));
  if (!json.is_object())
    throw CheckpointError(str(origin,
                              ": its safetensors header is not a JSON object, has a name twice, or nests deeper "
                              "than such headers do"));

  SafetensorsHeader header{.header_bytes = kLengthBytes + static_cast<int64_t>(length), .entries = {}};
  for (const auto& [name, value] : json.items()) {
    if (name == "__metadata__")
      header.metadata = parse_metadata(value);
    else
      header.entries.push_back(parse_entry(name, value, origin));
  }
  // Empty tensors share their offset with a neighbour, so they go first.
  std::sort(header.entries.begin(), header.entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  int64_t end = 0;
  for (const auto& entry : header.entries) {
    const std::string where = str(origin, ": tensor \"", entry.name, "\"");
    if (entry.offset != end) throw CheckpointError(str(where, " begins at byte ", entry.offset, ", expected ", end));
    end += entry.bytes;
    if (end > file_bytes - header.header_bytes) {
      throw CheckpointError(
          str(where, " ends at byte ", header.header_bytes + end, ", the file has ", file_bytes, ": it is truncated"));
    }
  }
  if (header.header_bytes + end != file_bytes)
    throw CheckpointError(str(origin, ": ", file_bytes - header.header_bytes - end, " bytes behind the last tensor"));
  return header;
}

SafetensorsHeader read_safetensors_header(FileSystem& files, const std::filesystem::path& path) {
  const auto file = files.open(path);
  const auto file_bytes = static_cast<int64_t>(file->bytes());
  std::string text(std::min(file_bytes, kLengthBytes), '\0');
  file->read(0, text.data(), text.size());
  if (file_bytes >= kLengthBytes) {
    const auto length = std::min<uint64_t>(header_length(text), kSafetensorsHeaderLimit);
    text.resize(std::min(file_bytes, kLengthBytes + static_cast<int64_t>(length)));
    file->read(0, text.data(), text.size());
  }
  return parse_safetensors_header(text, file_bytes, path.string());
}

std::map<std::string, std::string> read_safetensors_index(const std::filesystem::path& path) {
  const Json index = parse_plain_json(posix_file_system().read(path));
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    throw CheckpointError(str(path.string(), ": no Hugging Face index: \"weight_map\" is missing"));
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    const std::string where = str(path.string(), ": tensor \"", name, "\"");
    if (!file.is_string()) throw CheckpointError(str(where, ": its file is no text"));
    const auto file_name = file.get<std::string>();
    if (file_name.find('/') != std::string::npos)
      throw CheckpointError(str(where, ": file \"", file_name, "\" is in another folder"));
    files.emplace(name, file_name);
  }
  return files;
}

}  // namespace trireme
