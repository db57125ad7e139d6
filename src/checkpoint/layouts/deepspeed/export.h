// The plan of an export for DeepSpeed, made before the first byte is written.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "checkpoint/export/convert.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/formats/pickle/torch_archive.h"

namespace trireme::deepspeed {

/// The version whose layout is written, and whose loader accepts it.
inline constexpr char kWrittenVersion[] = "0.19.8";

struct ExportedParameter {
  std::string name;
  std::vector<int64_t> shape;
  int64_t numel = 0;
  size_t model = 0;                      ///< index of the source's tensor
  size_t weights = 0;                    ///< the fp32 one: the master, or the same
  std::map<std::string, size_t> states;  ///< by name, as the optimizer's
};

/// A parameter group of the user's.
struct ExportedGroup {
  std::vector<ExportedParameter> parameters;
  Json options;  ///< lr, betas, … as torch's optimizer keeps them
  int64_t step = 0;
};

/// The parameters of one flat tensor: those of one group.
struct FlatParameters {
  size_t group = 0;
  std::vector<const ExportedParameter*> parameters;
};

struct ExportPlan {
  int stage = 0;
  int ranks = 0;
  TrainingValues values;
  Json config;  ///< an object; empty: the source has none
  bool is_bf16 = false;
  std::vector<ExportedGroup> groups;
  std::vector<FlatParameters> flat;
  std::vector<std::string> states;
  std::vector<std::pair<std::string, size_t>> module;  ///< weights, in the model's order, then buffers
  std::vector<std::string> buffers;
  std::vector<std::pair<std::string, size_t>> frozen;
  int64_t tensor_bytes = 0;  ///< that will be read
};

/// Throws as write_deepspeed_checkpoint.
ExportPlan plan_export(const CheckpointSource& source, const DeepSpeedLayout& layout);

/// One range of a source's tensor, and zeros behind it.
struct PaddedRange {
  size_t tensor = 0;
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t zeros = 0;
};

/// Rank `rank`'s part of a flat tensor; `state` empty: of the weights, which ZeRO stages 1 and 2 save without the
/// padding at the end.
std::vector<PaddedRange> part_of_rank(const ExportPlan& plan, const FlatParameters& flat, int rank,
                                      const std::string& state);

/// An archive that is filled from a source, tensor by tensor.
class ArchiveFile {
 public:
  ArchiveFile(FileSystem& files, const std::filesystem::path& path, PieceReader& reader);

  pickle::Document& document() { return document_; }
  /// Writes the ranges as one storage and returns the tensor of it.
  pickle::Value* tensor(const std::vector<PaddedRange>& ranges, at::ScalarType dtype, std::vector<int64_t> shape);
  /// The same, fp32 and one-dimensional.
  pickle::Value* flat(const std::vector<PaddedRange>& ranges);
  pickle::Value* scalar(float value);
  /// With `root` as what torch.load() returns; synced.
  void finish(pickle::Value* root);

 private:
  pickle::Value* add(const void* data, size_t bytes, at::ScalarType dtype, std::vector<int64_t> shape);

  FileSystem& files_;
  const std::filesystem::path path_;
  PieceReader& reader_;
  std::unique_ptr<WritableFile> file_;
  pickle::Document document_;
  int storages_ = 0;
  pickle::TorchArchiveWriter archive_;
};

/// The model file of a rank (ZeRO stages 1 and 2: the only one).
void write_model_file(ArchiveFile& file, const ExportPlan& plan, const Manifest& manifest, int rank);
/// The optimizer file of a rank.
void write_optimizer_file(ArchiveFile& file, const ExportPlan& plan, int rank);

}  // namespace trireme::deepspeed
