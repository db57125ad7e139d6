// The parts that a DeepSpeed checkpoint is read in. Its optimizer files hold, by parameter group, one flat fp32 tensor
// of weights and one of each optimizer state, of what their rank updates:
//
//   ZeRO 1, 2   the group's parameters end to end, padded to 2 * ranks, cut into equal parts: parameters do not end
//               where parts do
//   ZeRO 3      of each parameter, padded to ranks, one part; these end to end
//
// Source        runtime/zero/stage_1_and_2.py, runtime/zero/stage3.py and utils/zero_to_fp32.py of DeepSpeed 0.19.8.
#pragma once

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/checkpoint/source.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/formats/pickle/torch_archive.h"

namespace trireme::deepspeed {

/// Files of one checkpoint, by data-parallel rank.
struct FileNames {
  std::vector<std::string> model;      ///< one, or with ZeRO stage 3 one of each rank
  std::vector<std::string> optimizer;  ///< none with ZeRO stage 0
  bool weights_are_sharded = false;    ///< ZeRO stage 3
};

/// Throws    CheckpointError: a rank's file is missing; model or pipeline parallelism, experts.
FileNames find_files(const std::filesystem::path& folder);

/// Elements that stand together in a file.
struct Piece {
  int file = 0;  ///< of Manifest::files
  int64_t offset = 0;
  int64_t numel = 0;
};

/// Pieces end to end.
class FlatSpace {
 public:
  void append(const Piece& piece);
  int64_t numel() const { return numel_; }
  /// Where [begin, begin + numel) stands, as elements from `tensor_begin` on of a tensor with elements of `itemsize`.
  /// Requires  begin + numel <= this->numel().
  std::vector<SavedSlice> cut(int64_t begin, int64_t numel, int64_t tensor_begin, int64_t itemsize) const;

 private:
  std::vector<Piece> pieces_;
  std::vector<int64_t> begins_;
  int64_t numel_ = 0;
};

/// One flat tensor of weights and its states, on one rank.
struct FlatGroup {
  Piece weights;
  std::map<std::string, Piece> states;  ///< by torch's name: "exp_avg", …
  int64_t step = 0;
};

/// An optimizer file.
struct RankPart {
  int stage = 0;
  std::vector<FlatGroup> groups;
  std::vector<std::vector<int64_t>> paddings;  ///< by group and parameter, elements behind it; empty: none
  std::vector<std::vector<int64_t>> members;   ///< by parameter group of the user's, indices into `groups`
  Json group_options = Json::array();  ///< by parameter group, what the optimizer works with: "lr", "betas", …
  std::optional<LossScalerValues> loss_scaler;  ///< none: or a static one
};

/// Reads what the optimizer file of one rank says. Throws CheckpointError naming file and key.
RankPart read_rank(pickle::TorchArchive& archive, int file);

/// Groups of a torch optimizer's state_dict: members and options. Throws likewise.
void read_param_groups(const pickle::Value& optimizer, const std::string& where, RankPart& part);
/// States and step of one parameter (or flat tensor) of `numel` elements. Throws likewise.
void read_states(pickle::TorchArchive& archive, const pickle::Value& state, const std::string& where, FlatGroup& group);
/// optimizer["state"][index]; nullptr: none yet.
const pickle::Value* state_at(const pickle::Value& optimizer, int64_t index);
/// Nothing where `scaler` (nullptr: none) is static.
std::optional<LossScalerValues> loss_scaler_values(const pickle::Value* scaler);

struct Parameter {
  std::string name;
  std::vector<int64_t> shape;
  int64_t numel = 0;
};

/// A model file.
struct ModelPart {
  std::vector<std::vector<Parameter>> trained;  ///< by flat group; none with ZeRO stage 0
  std::vector<Parameter> frozen;                ///< those that the file lists: ZeRO stages 2 and 3
  std::map<std::string, std::string> aliases;
  std::vector<std::string> names;  ///< all parameters, in the model's order
  std::vector<std::string> buffers;
  std::map<std::string, const pickle::Value*> module;  ///< tensors; with ZeRO stage 3 those of parameters are empty
};
ModelPart read_model(const pickle::TorchArchive& archive, bool weights_are_sharded);

/// The manifest in the making.
struct Builder {
  CheckpointSource source;

  int file(const pickle::TorchArchive& archive);
  /// Adds a tensor; returns its index.
  size_t add(const std::string& name, const std::vector<int64_t>& shape, at::ScalarType dtype,
             std::vector<SavedSlice> slices);
  /// Adds a tensor that stands in one piece in `archive`, which is `file`.
  size_t add_whole(const std::string& name, pickle::TorchArchive& archive, const pickle::Value& tensor, int file);
};

/// The value of `key`; throws CheckpointError that opens with `where`: not there, or of another kind.
const pickle::Value& required(const pickle::Value& dict, const char* key, pickle::Kind kind, const std::string& where);
std::vector<int64_t> numbers_of(const pickle::Value& list, const std::string& where);

/// An optimizer part, and which parameters lie in each of its groups.
struct TrainedPart {
  RankPart part;
  std::vector<std::vector<Parameter>> trained;
};
/// The part that ZeRO stage 0 keeps in its model file: states by the number of a parameter, whose name has to be found
/// by its shape. Where that leaves a choice there are no groups, and a warning.
TrainedPart read_stage_zero(pickle::TorchArchive& archive, int file, const ModelPart& model);

/// Everything that is no tensor.
TrainingValues values_of(const pickle::TorchArchive& archive, const ModelPart& model, const RankPart& part,
                         const std::vector<std::vector<Parameter>>& trained);

}  // namespace trireme::deepspeed
