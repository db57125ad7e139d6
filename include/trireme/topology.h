// Which rank stands where: named axes and the coordinates of ranks on them. Pure; no processes needed.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace trireme {

/// One way to split the work, e.g. {"pipe", 2}.
struct Axis {
  std::string name;
  int size = 1;
  bool operator==(const Axis&) const = default;
};

/// Position on one axis, by name; a list of them selects ranks.
using Place = std::pair<std::string, int>;

/// A grid of ranks in row-major order: the last axis varies fastest, so its neighbours are neighbouring ranks.
/// The semantics are those of DeepSpeed's ProcessTopology. Small enough to copy.
class Topology {
 public:
  /// Throws    ConfigError: no axis, a name that is empty or stands twice, a size below 1.
  explicit Topology(std::vector<Axis> axes);

  /// The number of ranks.
  int size() const noexcept { return size_; }
  const std::vector<Axis>& axes() const noexcept { return axes_; }
  bool has(std::string_view axis) const noexcept;
  /// Throws ConfigError, with the nearest name, for an axis that is not there.
  void check_has(std::string_view axis) const { checked_index_of(axis); }
  /// Ranks along `axis`; 1 for an axis that is not there, as nothing is split that way.
  int size_of(std::string_view axis) const noexcept;

  /// The rank at a full coordinate: every axis exactly once, in any order.
  /// Throws    ConfigError: an axis that is missing, unknown or named twice, a position outside its axis.
  int rank_of(const std::vector<Place>& coordinate) const;
  /// Positions of `rank`, in the order of the axes.
  std::vector<int> coordinate_of(int rank) const;
  /// Position of `rank` on `axis`; 0 for an axis that is not there.
  int position_of(int rank, std::string_view axis) const;

  /// The groups along `axis`: lists of ranks that differ in their position on it alone. Every rank stands in exactly
  /// one; each group ascends. Empty for an axis that is not there, as in DeepSpeed.
  std::vector<std::vector<int>> groups_along(std::string_view axis) const;
  /// The same along several axes: lists of ranks that differ in their positions on these alone, in the order of their
  /// first ranks.
  /// Throws    ConfigError: an axis that is unknown.
  std::vector<std::vector<int>> groups_along_all(const std::vector<std::string>& axes) const;
  /// The group of groups_along(axis) that `rank` is in; just `rank` for an axis that is not there.
  std::vector<int> group_of(int rank, std::string_view axis) const;
  /// The ranks whose positions are those in `places`, ascending. Throws ConfigError: an axis that is unknown.
  std::vector<int> ranks_at(const std::vector<Place>& places) const;

  /// "pipe_00-model_01": axis and position of `rank`, without the axes in `omitted`. Used in names of files.
  std::string label_of(int rank, const std::vector<std::string>& omitted = {"data", "pipe"}) const;

  bool operator==(const Topology& other) const { return axes_ == other.axes_; }

 private:
  int index_of(std::string_view axis) const noexcept;
  int checked_index_of(std::string_view axis) const;
  void check_rank(int rank) const;

  std::vector<Axis> axes_;
  std::vector<int> strides_;  ///< ranks between neighbours on each axis
  int size_ = 1;
};

/// The degree of each kind of parallelism.
struct Degrees {
  int data = 1;      ///< ranks that take different samples through the same parameters
  int pipe = 1;      ///< stages of layers
  int tensor = 1;    ///< slices of a layer
  int sequence = 1;  ///< parts of a sample
  int expert = 1;    ///< groups of a layer's experts, within `data`
  int replicas = 1;  ///< copies of the sharded model states, within `data`
  int model = 1;     ///< slices of layers that the program has cut itself
  bool operator==(const Degrees&) const = default;
};

/// A rank's place among those that take different samples, on the axis "data".
struct DataPlace {
  int rank = 0;
  int size = 1;
};

}  // namespace trireme
