// The report of an inspection as text for people and as JSON for programs.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/words.h"
#include "trireme/checkpoint/inspect.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

constexpr size_t kLargestShown = 5;

std::string bytes_text(int64_t bytes) { return size_text(static_cast<double>(bytes), 2); }

std::string kind_row(const std::string& name, const std::string& dtype, const std::string& tensors,
                     const std::string& elements, const std::string& bytes) {
  return formatted("{:<26}{:<8}{:>8}{:>20}{:>12}\n", name, dtype, tensors, elements, bytes);
}

int64_t bytes_of(const SavedTensor& tensor) {
  int64_t bytes = 0;
  for (const SavedSlice& slice : tensor.slices) bytes += slice.bytes;
  return bytes;
}

std::vector<const SavedTensor*> listed(const Manifest& manifest, ListTensors list) {
  std::vector<const SavedTensor*> tensors;
  for (const SavedTensor& tensor : manifest.tensors) tensors.push_back(&tensor);
  if (list == ListTensors::kAll) return tensors;
  std::stable_sort(tensors.begin(), tensors.end(),
                   [](const auto* a, const auto* b) { return bytes_of(*a) > bytes_of(*b); });
  tensors.resize(std::min(tensors.size(), kLargestShown));
  return tensors;
}

/// "global_steps 3, …", as far as they are known.
std::string progress_line(const TrainingValues& values) {
  std::string text;
  const auto add = [&](const char* key, const auto& value) {
    if (value) text += str(text.empty() ? "" : ", ", key, " ", Json(*value).dump());
  };
  add("global_steps", values.global_steps);
  add("micro_steps", values.micro_steps);
  add("skipped_steps", values.skipped_steps);
  add("global_samples", values.global_samples);
  add("lr", values.lr);
  return text;
}

std::vector<std::string> keys_of(const Json& json) {
  std::vector<std::string> keys;
  if (!json.is_object()) return keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  return keys;
}

std::string tags_line(const CheckpointReport& report) {
  std::vector<std::string> tags;
  for (const std::string& tag : report.tags) tags.push_back(tag == report.latest ? tag + " (latest)" : tag);
  return joined(tags);
}

void add_line(std::string& text, const std::string& label, const std::string& value) {
  if (!value.empty()) text += formatted("{:<14}{}\n", label, value);
}

std::string software_line(const Manifest& manifest) {
  std::string text = str(manifest.world_size(), manifest.world_size() == 1 ? " rank" : " ranks");
  const Json software = parse_own_json(manifest.software);
  for (const auto& [name, version] : software.items())
    text += str(", ", name, " ", version.is_string() ? version.get<std::string>() : version.dump());
  return text;
}

std::string place_line(const DamagedPlace& place) {
  std::string text = "  " + place.file;
  if (!place.tensor.empty())
    text += str(": tensor \"", place.tensor, "\", elements [", place.begin, ", ", place.end, ")");
  return str(text, place.file.empty() ? "" : ": ", place.problem, "\n");
}

std::string health_lines(const CheckpointReport& report) {
  const std::string checked = formatted("{} checksums over {} in {:.2f} s", report.checksums,
                                        bytes_text(report.verified_bytes), report.seconds);
  if (!report.healthy()) {
    std::string text;
    add_line(text, "health",
             str("DAMAGED in ", report.damages.size(), report.damages.size() == 1 ? " place" : " places",
                 report.verified ? str(" (compared ", checked, ")") : ""));
    for (const DamagedPlace& place : report.damages) text += place_line(place);
    return text;
  }
  std::string text;
  const bool has_checksums = report.source.layout == CheckpointLayout::kTrireme;
  add_line(text, "health",
           report.verified ? "good: " + checked
           : has_checksums ? "all files are there and complete; checksums were not compared"
                           : "all files are there and complete; this layout has no checksums to compare");
  return text;
}

Json topology_json(const std::vector<Axis>& topology) {
  Json json = Json::array();
  for (const Axis& axis : topology) json.push_back({{"axis", axis.name}, {"size", axis.size}});
  return json;
}

Json place_json(const DamagedPlace& place) {
  Json json = {{"file", place.file}};
  if (!place.tensor.empty()) json.update({{"tensor", place.tensor}, {"begin", place.begin}, {"end", place.end}});
  json["problem"] = place.problem;
  return json;
}

Json kinds_json(const std::vector<TensorKind>& kinds) {
  Json json = Json::array();
  for (const TensorKind& kind : kinds)
    json.push_back({{"kind", kind.name},
                    {"dtype", kind.dtype},
                    {"tensors", kind.tensors},
                    {"elements", kind.elements},
                    {"bytes", kind.bytes}});
  return json;
}

}  // namespace

std::string to_text(const CheckpointReport& report, ListTensors list) {
  const Manifest& manifest = report.source.manifest;
  const TrainingValues values = training_values(manifest);
  std::string text = str(report.source.folder.string(), ": ", layout_name(report.source.layout), " checkpoint\n");
  add_line(text, "tags", tags_line(report));
  if (!manifest.tensors.empty()) {
    add_line(text, "saved by", software_line(manifest));
    add_line(text, "progress", progress_line(values));
    add_line(text, "client_state", joined(keys_of(parse_own_json(values.client_state.value_or("{}")))));
    add_line(text, "files", str(manifest.files.size(), ", ", bytes_text(report.file_bytes)));
    text += str("\n", kind_row("tensors of", "dtype", "number", "elements", "bytes"));
    for (const TensorKind& kind : report.kinds)
      text += kind_row(kind.name, kind.dtype, grouped(kind.tensors), grouped(kind.elements), bytes_text(kind.bytes));
    text += list == ListTensors::kAll ? "\nall tensors\n" : "\nlargest tensors\n";
    for (const SavedTensor* tensor : listed(manifest, list))
      text += str("  ", tensor->name, "  ", safetensors_dtype(tensor->dtype), " ", shape_text(tensor->shape), "  ",
                  bytes_text(bytes_of(*tensor)), "\n");
    text += "\n";
  }
  return text + health_lines(report);
}

Json to_json(const CheckpointReport& report, ListTensors list) {
  const Manifest& manifest = report.source.manifest;
  Json json = {{"path", report.source.folder.string()},
               {"layout", layout_name(report.source.layout)},
               {"tag", report.source.tag},
               {"tags", report.tags},
               {"latest", report.latest ? Json(*report.latest) : Json()},
               {"format_version", manifest.version},
               {"world_size", manifest.world_size()},
               {"topology", topology_json(manifest.topology)},
               {"software", parse_own_json(manifest.software)},
               {"files", manifest.files.size()},
               {"file_bytes", report.file_bytes},
               {"kinds", kinds_json(report.kinds)}};
  for (const SavedTensor* tensor : listed(manifest, list))
    json["tensors"].push_back({{"name", tensor->name},
                               {"dtype", safetensors_dtype(tensor->dtype)},
                               {"shape", tensor->shape},
                               {"bytes", bytes_of(*tensor)}});
  json["values"] = parse_own_json(to_text(training_values(manifest)));
  json["healthy"] = report.healthy();
  json["verified"] = report.verified;
  json["checksums"] = report.checksums;
  json["verified_bytes"] = report.verified_bytes;
  json["seconds"] = report.seconds;
  json["damages"] = Json::array();
  for (const DamagedPlace& place : report.damages) json["damages"].push_back(place_json(place));
  return json;
}

}  // namespace trireme
