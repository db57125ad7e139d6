#include "trireme/checkpoint/inspect.h"

#include <algorithm>
#include <chrono>

#include "checkpoint/layouts/layout.h"
#include "checkpoint/read/verify_files.h"
#include "trireme/base/error.h"
#include "trireme/base/state_names.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

std::string kind_of(const StateName& name) {
  switch (name.kind) {
    case StateKind::kWeight:
      return "weights";
    case StateKind::kMaster:
      return "masters";
    case StateKind::kOptimizerState:
      return str("optimizer ", name.state);
    case StateKind::kOther:
      return "other";
  }
  TRIREME_CHECK(false, "kind ", static_cast<int>(name.kind));
}

std::vector<TensorKind> kinds_of(const Manifest& manifest) {
  std::vector<TensorKind> kinds;
  for (const SavedTensor& tensor : manifest.tensors) {
    const std::string name = kind_of(parse_state_name(tensor.name));
    const std::string dtype = safetensors_dtype(tensor.dtype);
    auto kind = std::find_if(kinds.begin(), kinds.end(),
                             [&](const TensorKind& known) { return known.name == name && known.dtype == dtype; });
    if (kind == kinds.end()) kind = kinds.insert(kind, {.name = name, .dtype = dtype});
    const int64_t numel = checked_numel(tensor.shape, tensor.name);
    kind->tensors += 1;
    kind->elements += numel;
    kind->bytes += numel * static_cast<int64_t>(c10::elementSize(tensor.dtype));
  }
  return kinds;
}

void add_neighbours(CheckpointReport& report) {
  const Path folder = report.source.folder.parent_path();
  report.tags = tags_in(folder);
  try {
    report.latest = latest_tag(folder);
  } catch (const Error& error) {
    report.damages.push_back({.file = "../latest", .tensor = {}, .begin = 0, .end = 0, .problem = error.what()});
  }
}

}  // namespace

CheckpointReport inspect_checkpoint(const Path& path, const std::string& tag, const InspectOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const Path checkpoint = resolve_checkpoint(path, tag);
  const LayoutEntry& layout = *layout_of(checkpoint);
  CheckpointReport report;
  try {
    report.source = layout.open(checkpoint);
  } catch (const CheckpointError& error) {
    report.source = {.layout = layout.layout, .folder = checkpoint, .tag = checkpoint.filename(), .manifest = {}};
    report.damages.push_back({.file = layout.layout == CheckpointLayout::kTrireme ? "manifest.json" : "",
                              .tensor = {},
                              .begin = 0,
                              .end = 0,
                              .problem = error.what()});
  }
  if (!report.source.tag.empty()) add_neighbours(report);
  report.kinds = kinds_of(report.source.manifest);
  for (const SavedFile& file : report.source.manifest.files) report.file_bytes += file.bytes;
  VerifiedFiles verified = verify_files(report.source, options);
  report.damages.insert(report.damages.end(), verified.damages.begin(), verified.damages.end());
  report.verified = verified.checksums > 0;
  report.checksums = verified.checksums;
  report.verified_bytes = verified.bytes;
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace trireme
