// Weights stream from the checkpoint's files into the output's, a piece at a time.
#include "trireme/checkpoint/consolidate.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isinf.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "checkpoint/export/convert.h"
#include "checkpoint/export/export_format.h"
#include "checkpoint/export/model_files.h"
#include "checkpoint/export/weights_plan.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"
#include "trireme/base/new_file.h"
#include "trireme/checkpoint/training_values.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

/// The base of a sharded model's names: "model" and ".safetensors".
struct BaseName {
  std::string stem;
  std::string extension;

  explicit BaseName(const std::string& file_name)
      : stem(Path(file_name).stem().string()), extension(Path(file_name).extension().string()) {}

  std::string whole() const { return stem + extension; }
  std::string index() const { return stem + extension + ".index.json"; }
  std::string shard(size_t i, size_t count) const {
    return count == 1 ? whole() : formatted("{}-{:05}-of-{:05}{}", stem, i + 1, count, extension);
  }

  /// Whether `name` is a file that an output of this base may have.
  bool owns(const std::string& name) const {
    if (name == whole() || name == index()) return true;
    const std::string open = stem + "-", of = "-of-";
    const auto is_number = [&](size_t at) {
      return name.size() >= at + 5 && std::all_of(name.begin() + static_cast<std::ptrdiff_t>(at),
                                                  name.begin() + static_cast<std::ptrdiff_t>(at) + 5,
                                                  [](unsigned char c) { return std::isdigit(c) != 0; });
    };
    return name.starts_with(open) && name.ends_with(extension) &&
           name.size() == open.size() + 5 + of.size() + 5 + extension.size() && is_number(open.size()) &&
           name.compare(open.size() + 5, of.size(), of) == 0 && is_number(open.size() + 5 + of.size());
  }
};

bool is_found_by_huggingface(const ConsolidateOptions& options) {
  return options.file_name == "model.safetensors" || options.file_name == "pytorch_model.bin";
}

void check_options(const ConsolidateOptions& options) {
  check_export_format(options.file_name);
  if (Path(options.file_name).has_parent_path())
    throw ConfigError(str("file name '", options.file_name, "' has a slash; name the folder as the output"));
  if (options.dtype && !c10::isFloatingType(*options.dtype))
    throw ConfigError(
        str("dtype ", c10::toString(*options.dtype), " is no floating-point one; use fp32, bf16 or fp16"));
  if (options.max_shard_bytes < 1)
    throw ConfigError(str("a shard size of ", options.max_shard_bytes, " bytes holds nothing; use for example 5GB"));
  if (!options.model_folder.empty() && (!is_found_by_huggingface(options) || options.exclude_frozen_parameters))
    throw ConfigError(str("--model ", options.model_folder.string(), ": from_pretrained() takes model.safetensors or ",
                          "pytorch_model.bin with all parameters, and here is ", options.file_name,
                          options.exclude_frozen_parameters ? " without frozen ones" : "", "; leave one of them out"));
}

/// A tensor that is filled over and over. A new one each time would be taken from malloc, whose aligned blocks fit no
/// later request of the same size (glibc < 2.38): memory would grow to the size of the model.
class Scratch {
 public:
  /// `numel` elements, whatever is in them; they last until the next call.
  at::Tensor take(int64_t numel, at::ScalarType dtype) {
    const int64_t bytes = numel * static_cast<int64_t>(c10::elementSize(dtype));
    if (!bytes_.defined() || bytes_.numel() < bytes) bytes_ = at::empty({bytes}, at::kByte);
    return bytes_.narrow(0, 0, bytes).view(dtype);
  }

 private:
  at::Tensor bytes_;
};

class Consolidation {
 public:
  Consolidation(const CheckpointSource& source, const Path& folder, const ConsolidateOptions& options)
      : source_(source),
        folder_(folder),
        options_(options),
        files_(options.files ? *options.files : posix_file_system()),
        base_(options.file_name),
        plan_(plan_weights(source, {options.dtype, options.exclude_frozen_parameters})),
        reader_(source),
        new_files_(files_) {
    for (const PlannedWeight& weight : plan_.weights) total_bytes_ += weight.bytes();
    progress_.emplace(options.progress, total_bytes_);
  }

  ConsolidatedWeights run() {
    const std::vector<std::string> former = former_files();
    if (!former.empty() && options_.existing == ExistingOutput::kRefuse)
      throw CheckpointError(str((folder_ / former.front()).string(),
                                ": this file exists already; give another folder, remove it first, or overwrite it "
                                "(`--overwrite` of `trireme consolidate`)"));
    const std::vector<ModelFile> companions = companion_files();
    warn_of_missing_frozen();
    files_.create_directories(folder_);
    const auto shards = spread_over_files(plan_.weights, options_.max_shard_bytes);
    for (size_t i = 0; i < shards.size(); ++i) write_shard_file(base_.shard(i, shards.size()), shards[i]);
    if (shards.size() > 1) write_index(shards);
    for (const ModelFile& file : companions) new_files_.add(folder_ / file.name, file.text);
    new_files_.commit();
    const std::vector<Path> paths = new_files_.paths();
    for (const std::string& name : former)
      if (std::find(paths.begin(), paths.end(), folder_ / name) == paths.end()) files_.remove_all(folder_ / name);
    return {.files = paths, .tensors = static_cast<int64_t>(plan_.weights.size()), .bytes = total_bytes_};
  }

 private:
  std::vector<std::string> former_files() {
    std::vector<std::string> names;
    if (!files_.exists(folder_)) return names;
    if (std::error_code unreadable; std::filesystem::is_regular_file(folder_, unreadable))
      throw ConfigError(folder_.string() + ": this is a file; name a folder for the weights");
    for (const std::string& name : files_.list(folder_))
      if (base_.owns(name)) names.push_back(name);
    return names;
  }

  bool lacks_frozen() const { return training_values(source_.manifest).exclude_frozen_parameters.value_or(false); }

  /// The files beside the weights that are to be written: without those that are there and say the same.
  std::vector<ModelFile> companion_files() {
    if (!options_.model_files || !is_found_by_huggingface(options_) || options_.exclude_frozen_parameters ||
        lacks_frozen())
      return {};
    std::vector<ModelFile> files = model_files(source_, {options_.model_folder, dtype_of_weights()});
    std::erase_if(files, [&](const ModelFile& file) {
      if (!files_.exists(folder_ / file.name)) return false;
      const std::string text = files_.read(folder_ / file.name);
      if (text == file.text) return true;
      const std::string difference =
          file.name == kModelConfigName ? model_difference(text, file.text) : "it has another content";
      if (options_.existing == ExistingOutput::kRefuse && !difference.empty())
        throw CheckpointError(
            str((folder_ / file.name).string(), ": this file is of another model: ", difference,
                "; give another folder, remove it first, or overwrite it (`--overwrite` of `trireme consolidate`)"));
      return difference.empty();
    });
    return files;
  }

  /// The dtype of all floating-point weights; nullopt where they have several.
  std::optional<at::ScalarType> dtype_of_weights() const {
    std::optional<at::ScalarType> dtype;
    for (const PlannedWeight& weight : plan_.weights) {
      if (!c10::isFloatingType(weight.dtype)) continue;
      if (dtype && *dtype != weight.dtype) return std::nullopt;
      dtype = weight.dtype;
    }
    return dtype;
  }

  void warn_of_missing_frozen() const {
    if (lacks_frozen() && !options_.exclude_frozen_parameters)
      log(LogLevel::kWarning,
          str(source_.folder.string(), ": this checkpoint was saved without frozen parameters; the output lacks them"));
  }

  ExportedTensor described(const PlannedWeight& weight) const {
    return {.name = weight.name,
            .shape = source_.manifest.tensors[weight.tensor].shape,
            .dtype = weight.dtype,
            .fetch = {}};
  }

  void write_shard_file(const std::string& name, const std::vector<size_t>& indices) {
    std::vector<ExportedTensor> unordered, ordered;
    for (const size_t i : indices) unordered.push_back(described(plan_.weights[i]));
    const std::vector<size_t> order = safetensors_order(unordered);
    for (const size_t i : order) ordered.push_back(unordered[i]);
    ExportOptions aliases;
    for (const auto& [alias, target] : plan_.aliases)
      for (const ExportedTensor& tensor : ordered)
        if (tensor.name == target) aliases.aliases.emplace(alias, target);

    NewFile& file = new_files_.add(folder_ / name);
    const auto writer = make_export_writer(file, folder_ / name, ordered, aliases);
    for (const size_t i : order) write_weight(*writer, plan_.weights[indices[i]]);
    writer->finish();
    file.finish();
  }

  void write_weight(ExportWriter& writer, const PlannedWeight& weight) {
    at::Tensor whole;
    if (!writer.takes_pieces()) whole = whole_.take(weight.numel, weight.dtype);
    reader_.read(weight.tensor, 0, weight.numel, [&](const PieceReader::Piece& piece) {
      const at::Tensor values = converted(weight, piece);
      if (whole.defined())
        whole.narrow(0, piece.begin, piece.numel).copy_(values);
      else
        writer.append(values);
      progress_->add(static_cast<int64_t>(values.nbytes()));
    });
    if (whole.defined()) writer.append(whole);
  }

  /// The piece's values in the dtype of the output.
  at::Tensor converted(const PlannedWeight& weight, const PieceReader::Piece& piece) {
    const SavedTensor& saved = source_.manifest.tensors[weight.tensor];
    const at::Tensor values = at::from_blob(piece.bytes.data(), {piece.numel}, at::TensorOptions(saved.dtype));
    if (weight.dtype == saved.dtype) return values;
    const at::Tensor result = converted_.take(piece.numel, weight.dtype).copy_(values);
    if (weight.dtype == at::kHalf && at::isinf(result).sum().item<int64_t>() != at::isinf(values).sum().item<int64_t>())
      throw CheckpointError(str(source_.folder.string(), ": tensor \"", saved.name, "\", elements [", piece.begin, ", ",
                                piece.begin + piece.numel,
                                "): a value is beyond fp16's largest, 65504; use bf16 or fp32"));
    return result;
  }

  void write_index(const std::vector<std::vector<size_t>>& shards) {
    std::map<std::string, std::string> file_of;
    for (size_t i = 0; i < shards.size(); ++i)
      for (const size_t weight : shards[i]) file_of[plan_.weights[weight].name] = base_.shard(i, shards.size());
    const Json index = {{"metadata", {{"total_size", total_bytes_}}}, {"weight_map", file_of}};
    new_files_.add(folder_ / base_.index(), index.dump(2) + "\n");
  }

  const CheckpointSource& source_;
  const Path folder_;
  const ConsolidateOptions& options_;
  FileSystem& files_;
  const BaseName base_;
  const WeightsPlan plan_;
  PieceReader reader_;
  Scratch whole_, converted_;
  NewFiles new_files_;
  int64_t total_bytes_ = 0;
  std::optional<ByteProgress> progress_;
};

}  // namespace

ConsolidatedWeights consolidate(const CheckpointSource& source, const Path& folder, const ConsolidateOptions& options) {
  check_options(options);
  return Consolidation(source, folder, options).run();
}

int64_t parse_bytes(const std::string& text) {
  struct Unit {
    const char* name;
    double bytes;
  };
  constexpr Unit kUnits[] = {
      {"", 1},      {"b", 1},        {"kb", 1e3},        {"mb", 1e6},      {"gb", 1e9},
      {"tb", 1e12}, {"kib", 1024.0}, {"mib", 1048576.0}, {"gib", 1 << 30}, {"tib", 1099511627776.0}};
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string unit(end, static_cast<size_t>(text.data() + text.size() - end));
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const auto known =
      std::find_if(std::begin(kUnits), std::end(kUnits), [&](const Unit& candidate) { return unit == candidate.name; });
  if (error == std::errc() && known != std::end(kUnits)) {
    const double bytes = number * known->bytes;
    if (bytes >= 1 && bytes < 9e18) return static_cast<int64_t>(bytes);
  }
  throw ConfigError(str("'", text, "' is no size; write for example 5GB, 500MB or 2GiB"));
}

}  // namespace trireme
