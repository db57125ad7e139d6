// Which parameter stands where: units, flat buffers, shards. Pure data, computed without devices, processes or tensors.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "trireme/base/tensor_part.h"

namespace trireme {

/// The properties of a parameter that the layout depends on.
struct ParameterSpec {
  std::string name;
  std::vector<int64_t> shape;
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  /// A 16-bit dtype in which gradients travel between ranks; Undefined and fp32: the one in which they are kept.
  at::ScalarType communication_dtype = at::ScalarType::Undefined;
  int mesh = 0;  ///< index into the list of MeshSize
  /// The part of the model's parameter that this is; without a shape: all of it, and no layer of the model is cut.
  TensorPart part = {};
  /// Whether this rank counts it in norms of the whole model; false: another rank has the same elements and counts
  /// them.
  bool is_counted = true;
  /// If other ranks have some of its elements and count those: the part of the model's parameter that this rank counts.
  /// Without a shape: all of it or nothing, as `is_counted` says.
  TensorPart counted = {};
  int64_t numel() const;
  /// `part`, or all of `shape` where it has none.
  TensorPart model_part() const;
};

/// Over how many ranks the parameters of a ShardMesh are cut.
struct MeshSize {
  int shards = 1;  ///< of each unit's weights
  int pieces = 1;  ///< of each shard's gradients and optimizer states
};

/// Parameter `index` occupies elements [begin, begin + numel) of its unit's flat buffer.
struct ParameterPlace {
  int index = 0;  ///< into the list of specs
  int64_t begin = 0;
  int64_t numel = 0;
  int64_t end() const { return begin + numel; }
};

/// The parameters that are gathered together, in one flat buffer [numel()] of one dtype.
/// Every parameter begins at a multiple of kAlignment elements, every piece of a shard too; the gaps and the tail are
/// zero.
struct UnitLayout {
  std::string name;
  int mesh = 0;  ///< its parameters'
  at::ScalarType dtype = at::kFloat;
  bool trainable = true;
  at::ScalarType communication_dtype = at::ScalarType::Undefined;  ///< its parameters'
  int64_t shard_numel = 0;                                         ///< elements of one shard, a multiple of kAlignment
  int64_t shards = 1;
  int64_t pieces = 1;      ///< of each shard
  int64_t used_numel = 0;  ///< sum of the parameters' elements, without padding
  std::vector<ParameterPlace> parameters;

  int64_t numel() const { return shard_numel * shards; }
  int64_t piece_numel() const { return shard_numel / pieces; }
  int64_t padding() const { return numel() - used_numel; }
};

/// In elements: 64 bytes of bf16, the narrowest dtype here, 128 of fp32. Vector loads of a parameter are aligned in
/// every dtype.
inline constexpr int64_t kAlignment = 32;

/// Which parameters form a unit.
struct UnitRules {
  /// Parameters whose names share the text up to and including the first match of one of these are one unit; others are
  /// grouped by the module that holds them. Default: a repeated block such as `layers.7.`.
  std::vector<std::string> patterns = {"(^|\\.)[0-9]+\\."};
  /// Modules, by name, whose parameters are gathered all together, whatever the patterns say: for parts that a rank may
  /// use or not, such as the experts of a mixture. Of nested leaves only the outermost counts; "" is the model itself.
  std::vector<std::string> leaves = {};
  /// Neighbouring units smaller than this are merged, so that small layers do not cost a collective each.
  int64_t merge_below_bytes = 1 << 16;
  bool operator==(const UnitRules&) const = default;
};

/// All units of a model.
struct Layout {
  std::vector<UnitLayout> units;
  std::vector<int> unit_of;       ///< parameter index -> unit index
  std::vector<int> placement_of;  ///< parameter index -> position in its unit's `parameters`
  /// By unit: all units of its leaf, itself included (they differ in dtype or in being trainable); empty if it is the
  /// only one.
  std::vector<std::vector<int>> leaf_mates;

  const ParameterPlace& placement(int parameter) const {
    return units[unit_of[parameter]].parameters[placement_of[parameter]];
  }
};

/// The part of one parameter that lies in a slice of its unit's flat buffer.
struct ParameterRange {
  int parameter = 0;            ///< index into the list of specs
  int64_t slice_begin = 0;      ///< its first element, counted from the start of the slice
  int64_t parameter_begin = 0;  ///< and in the parameter's own flattening
  int64_t numel = 0;
};

/// The parameters of `unit` that have elements in [begin, begin + numel) of its flat buffer, in order.
std::vector<ParameterRange> ranges_of(const UnitLayout& unit, int64_t begin, int64_t numel);

/// Groups `parameters` into units (one mesh, dtype, trainability and communication dtype each) and lays each out for
/// its mesh.
/// Throws    ConfigError: a pattern that is no regular expression.
Layout make_layout(const std::vector<ParameterSpec>& parameters, const std::vector<MeshSize>& meshes,
                   const UnitRules& rules = {});
/// The same with one mesh, of `shards`.
Layout make_layout(const std::vector<ParameterSpec>& parameters, int shards, const UnitRules& rules = {});

}  // namespace trireme
