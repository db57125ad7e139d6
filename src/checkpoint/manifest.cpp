#include "trireme/checkpoint/manifest.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "checkpoint/checksum.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

constexpr char kFormatName[] = "trireme-checkpoint";
constexpr std::string_view kChecksumKey = "  \"manifest_checksum\": \"";
constexpr std::string_view kChecksumEnd = "\"\n}\n";
constexpr size_t kChecksumDigits = 16;

Json to_json(const SavedFile& file) {
  return {{"name", file.name},
          {"bytes", file.bytes},
          {"header_bytes", file.header_bytes},
          {"header_checksum", checksum_text(file.header_checksum)}};
}

Json to_json(const SavedSlice& slice) {
  Json checksums = Json::array();
  for (const uint64_t checksum : slice.checksums) checksums.push_back(checksum_text(checksum));
  Json json = {{"file", slice.file},     {"begin", slice.begin}, {"numel", slice.numel},
               {"offset", slice.offset}, {"bytes", slice.bytes}, {"checksums", std::move(checksums)}};
  if (slice.part > 0) json["part"] = slice.part;
  return json;
}

Json to_json(const TensorPart& part) {
  Json intervals = Json::array();
  for (const Interval& interval : part.intervals) intervals.push_back({interval.begin, interval.end});
  return {{"dim", part.dim}, {"intervals", std::move(intervals)}};
}

Json to_json(const SavedTensor& tensor) {
  Json slices = Json::array();
  for (const auto& slice : tensor.slices) slices.push_back(to_json(slice));
  Json json = {{"name", tensor.name},
               {"shape", tensor.shape},
               {"dtype", safetensors_dtype(tensor.dtype)},
               {"slices", std::move(slices)}};
  for (const TensorPart& part : tensor.parts) json["parts"].push_back(to_json(part));
  if (!tensor.values.empty()) json["values"] = parse_own_json(tensor.values);
  return json;
}

/// `"key": [` with one item per line: a manifest is read by people too, and compared with diff.
template <class Items>
std::string array_lines(const char* key, const Items& items) {
  std::string text = str("  \"", key, "\": [");
  for (size_t i = 0; i < items.size(); ++i) text += (i ? ",\n    " : "\n    ") + to_json(items[i]).dump();
  return text + (items.empty() ? "],\n" : "\n  ],\n");
}

[[noreturn]] void damaged(const std::string& origin, const std::string& what) {
  throw CheckpointError(str(origin, ": ", what, "; load another checkpoint"));
}

/// Empty when the text ends as a manifest of ours does and its checksum is right, otherwise what is wrong.
std::string checksum_problem(std::string_view text) {
  const size_t tail = kChecksumKey.size() + kChecksumDigits + kChecksumEnd.size();
  if (text.size() < tail) return str("truncated: it has only ", text.size(), " bytes");
  const std::string_view body = text.substr(0, text.size() - tail);
  const std::string found(text.substr(text.size() - tail));
  const std::string expected = str(kChecksumKey, checksum_text(checksum_of(body)), kChecksumEnd);
  if (found == expected) return "";
  if (!found.starts_with(kChecksumKey) || !found.ends_with(kChecksumEnd))
    return "truncated or damaged: it does not end with its checksum";
  return str("damaged: its checksum is ", expected.substr(kChecksumKey.size(), kChecksumDigits), ", it says ",
             found.substr(kChecksumKey.size(), kChecksumDigits));
}

uint64_t checksum_from(const Json& json, const std::string& where) {
  if (const auto checksum = parse_checksum(json.get<std::string>())) return *checksum;
  throw CheckpointError(str(where, ": \"", json.get<std::string>(), "\" is no checksum"));
}

SavedFile file_from(const Json& json, const std::string& origin) {
  SavedFile file{.name = json.at("name").get<std::string>(),
                 .bytes = json.at("bytes").get<int64_t>(),
                 .header_bytes = json.at("header_bytes").get<int64_t>(),
                 .header_checksum = checksum_from(json.at("header_checksum"), origin)};
  if (file.name.empty() || file.name.find('/') != std::string::npos || file.name[0] == '.')
    throw CheckpointError(str(origin, ": file name \"", file.name, "\" does not stay in the checkpoint's directory"));
  if (file.header_bytes < 0 || file.bytes < file.header_bytes)
    throw CheckpointError(
        str(origin, ": file \"", file.name, "\" of ", file.bytes, " bytes with a header of ", file.header_bytes));
  return file;
}

SavedSlice slice_from(const Json& json, const std::string& where) {
  SavedSlice slice{.file = json.at("file").get<int>(),
                   .begin = json.at("begin").get<int64_t>(),
                   .numel = json.at("numel").get<int64_t>(),
                   .offset = json.at("offset").get<int64_t>(),
                   .bytes = json.at("bytes").get<int64_t>(),
                   .checksums = {},
                   .part = json.value("part", 0)};
  for (const auto& checksum : json.at("checksums")) slice.checksums.push_back(checksum_from(checksum, where));
  return slice;
}

void check_slice(const SavedSlice& slice, const std::vector<SavedFile>& files, int64_t itemsize,
                 const std::string& where) {
  if (slice.file < 0 || slice.file >= static_cast<int64_t>(files.size()))
    throw CheckpointError(str(where, ": there is no file ", slice.file));
  const SavedFile& file = files[slice.file];
  // Compared by division and subtraction: numbers from a file may be anything, and a sum could wrap around.
  const bool size_fits =
      slice.numel >= 0 && slice.bytes >= 0 && slice.bytes % itemsize == 0 && slice.bytes / itemsize == slice.numel;
  if (!size_fits || slice.offset < file.header_bytes || slice.bytes > file.bytes - slice.offset) {
    throw CheckpointError(str(where, ": ", slice.numel, " elements in bytes [", slice.offset, ", +", slice.bytes,
                              ") do not fit into \"", file.name, "\" of ", file.bytes, " bytes"));
  }
  const int64_t blocks = (slice.bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes;
  if (static_cast<int64_t>(slice.checksums.size()) != blocks)
    throw CheckpointError(str(where, ": ", slice.checksums.size(), " checksums, expected ", blocks));
}

/// The parts of a tensor, of a dim each; all of it where there are none.
std::vector<TensorPart> parts_from(const Json& json, const std::vector<int64_t>& shape, const std::string& where) {
  std::vector<TensorPart> parts;
  for (const auto& item : json.value("parts", Json::array())) {
    TensorPart part{shape, item.at("dim").get<int>()};
    for (const auto& interval : item.at("intervals"))
      part.intervals.push_back({interval.at(0).get<int64_t>(), interval.at(1).get<int64_t>()});
    if (const std::string problem = part.dim < 0 ? "a part without a dim" : part_problem(part); !problem.empty())
      throw CheckpointError(str(where, ": ", problem));
    parts.push_back(std::move(part));
  }
  if (!parts.empty()) check_parts(parts, where, [](size_t i) { return str("part ", i); });
  return parts;
}

SavedTensor tensor_from(const Json& json, const Manifest& manifest, const std::string& origin) {
  SavedTensor tensor;
  tensor.name = json.at("name").get<std::string>();
  const std::string where = str(origin, ": tensor \"", tensor.name, "\"");
  tensor.shape = json.at("shape").get<std::vector<int64_t>>();
  tensor.dtype = dtype_from_safetensors(json.at("dtype").get<std::string>(), where);
  (void)checked_numel(tensor.shape, tensor.name);
  tensor.parts = parts_from(json, tensor.shape, where);
  if (const auto values = json.find("values"); values != json.end()) tensor.values = values->dump();
  const auto itemsize = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  const auto part_count = static_cast<int>(std::max<size_t>(tensor.parts.size(), 1));
  int part = 0;
  int64_t end = 0, numel = local_numel(tensor.parts.empty() ? TensorPart{tensor.shape} : tensor.parts[0]);
  for (const auto& item : json.at("slices")) {
    SavedSlice slice = slice_from(item, where);
    check_slice(slice, manifest.files, itemsize, where);
    if (slice.part == part + 1 && slice.part < part_count && end == numel) {
      numel = local_numel(tensor.parts[++part]);
      end = 0;
    }
    if (slice.part != part || slice.begin != end || slice.numel > numel - end)
      throw CheckpointError(str(where, ": slice [", slice.begin, ", +", slice.numel, ") of part ", slice.part,
                                ", expected to begin at ", end, " of ", numel, " of part ", part));
    end += slice.numel;
    tensor.slices.push_back(std::move(slice));
  }
  if (end != numel || part + 1 != part_count)
    throw CheckpointError(
        str(where, ": its slices end at element ", end, " of ", numel, " of part ", part, " of ", part_count));
  return tensor;
}

/// Version 1 knew one axis.
std::vector<Axis> topology_from(const Json& json) {
  if (!json.contains("topology")) return {{"data", json.at("world_size").get<int>()}};
  std::vector<Axis> axes;
  for (const auto& axis : json.at("topology"))
    axes.push_back({axis.at("axis").get<std::string>(), axis.at("size").get<int>()});
  return axes;
}

void check_version(const Json& json, const std::string& origin, const std::string& problem) {
  const bool ours = json.is_object() && json.contains("format") && json["format"] == kFormatName &&
                    json.contains("version") && json["version"].is_number_integer();
  const int64_t version = ours ? json["version"].get<int64_t>() : 0;
  // A damaged digit must not pass for a newer version; a newer version may end in another way.
  if (version > kManifestVersion && !problem.starts_with("damaged")) {
    throw CheckpointError(str(origin, ": written in format version ", version, ", this program reads up to ",
                              kManifestVersion, "; load it with a newer Trireme"));
  }
  if (!problem.empty()) damaged(origin, problem);
  if (!ours || version < 1) throw CheckpointError(str(origin, ": not a ", kFormatName, " manifest"));
}

Manifest manifest_from(const Json& json, const std::string& origin) {
  Manifest manifest;
  manifest.version = json.at("version").get<int>();
  manifest.topology = topology_from(json);
  const auto& checksum = json.at("checksum");
  if (checksum.at("algorithm") != "xxh3-64" || checksum.at("block_bytes") != kChecksumBlockBytes)
    throw CheckpointError(
        str(origin, ": checksums ", checksum.dump(), ", expected xxh3-64 over blocks of ", kChecksumBlockBytes));
  manifest.software = json.at("software").dump();
  manifest.values = json.at("values").dump();
  for (const auto& values : json.at("rank_values")) manifest.rank_values.push_back(values.dump());
  if (manifest.rank_values.size() != static_cast<size_t>(manifest.world_size()))
    throw CheckpointError(
        str(origin, ": values of ", manifest.rank_values.size(), " ranks, world size ", manifest.world_size()));
  for (const auto& file : json.at("files")) manifest.files.push_back(file_from(file, origin));
  std::set<std::string> names;
  for (const auto& item : json.at("tensors")) {
    manifest.tensors.push_back(tensor_from(item, manifest, origin));
    if (!names.insert(manifest.tensors.back().name).second)
      throw CheckpointError(str(origin, ": tensor \"", manifest.tensors.back().name, "\" stands twice"));
  }
  return manifest;
}

}  // namespace

std::string dump_manifest(const Manifest& manifest) {
  Json rank_values = Json::array();
  for (const auto& values : manifest.rank_values) rank_values.push_back(parse_own_json(values));
  const Json checksum = {{"algorithm", "xxh3-64"}, {"block_bytes", kChecksumBlockBytes}};
  Json topology = Json::array();
  for (const Axis& axis : manifest.topology) topology.push_back({{"axis", axis.name}, {"size", axis.size}});
  std::string text = str("{\n  \"format\": \"", kFormatName, "\",\n  \"version\": ", kManifestVersion,
                         ",\n  \"topology\": ", topology.dump(), ",\n  \"checksum\": ", checksum.dump(),
                         ",\n  \"software\": ", parse_own_json(manifest.software).dump(),
                         ",\n  \"values\": ", parse_own_json(manifest.values).dump(),
                         ",\n  \"rank_values\": ", rank_values.dump(), ",\n");
  text += array_lines("files", manifest.files);
  text += array_lines("tensors", manifest.tensors);
  return text + str(kChecksumKey, checksum_text(checksum_of(text)), kChecksumEnd);
}

Manifest parse_manifest(std::string_view text, const std::string& origin) {
  const Json json = parse_plain_json(text);
  check_version(json, origin, checksum_problem(text));
  try {
    return manifest_from(json, origin);
  } catch (const ConfigError& error) {  // of Topology
    throw CheckpointError(str(origin, ": ", error.what()));
  } catch (const Json::exception& error) {
    throw CheckpointError(str(origin, ": a field is missing or of the wrong kind: ", error.what()));
  }
}

Manifest read_manifest(const std::filesystem::path& checkpoint) {
  FileSystem& files = posix_file_system();
  const auto path = checkpoint / "manifest.json";
  if (!files.exists(path)) throw CheckpointError(str(checkpoint.string(), ": no checkpoint: it has no manifest.json"));
  return parse_manifest(files.read(path), path.string());
}

}  // namespace trireme
