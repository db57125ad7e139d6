#include "trireme/pager/layout/layout.h"

#include <c10/core/ScalarTypeToTypeMeta.h>

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "trireme/base/error.h"
#include "trireme/base/name_pattern.h"

namespace trireme {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// "layers.7.experts." of a parameter below that leaf, "" where the model itself is one; otherwise nothing.
std::optional<std::string> leaf_of(const std::string& name, const std::vector<std::string>& leaves) {
  std::optional<std::string> outermost;
  for (const std::string& leaf : leaves) {
    const std::string prefix = leaf.empty() ? "" : leaf + ".";
    if (name.starts_with(prefix) && (!outermost || prefix.size() < outermost->size())) outermost = prefix;
  }
  return outermost;
}

// The text that names a parameter's leaf or repeated block ("layers.7."), or else its module ("lm_head.").
std::string block_of(const std::string& name, const UnitRules& rules, const std::vector<NamePattern>& patterns) {
  if (const auto leaf = leaf_of(name, rules.leaves)) return *leaf;
  for (const NamePattern& pattern : patterns)
    if (const auto end = pattern.end_in(name)) return name.substr(0, *end);
  return name.substr(0, name.rfind('.') + 1);
}

// The properties that parameters must have in common to share a flat buffer.
struct UnitKey {
  std::string block;
  int mesh;
  at::ScalarType dtype;
  bool trainable;
  at::ScalarType communication_dtype;
  bool is_like(const UnitKey& other) const {
    return mesh == other.mesh && dtype == other.dtype && trainable == other.trainable &&
           communication_dtype == other.communication_dtype;
  }
  bool operator==(const UnitKey&) const = default;
};

struct Draft {
  UnitKey key;
  std::vector<int> parameters;
  int64_t bytes = 0;
};

// Units in the order of their first parameter.
std::vector<Draft> group_by_block(const std::vector<ParameterSpec>& parameters, const UnitRules& rules,
                                  const std::vector<NamePattern>& patterns) {
  std::vector<Draft> drafts;
  for (int i = 0; i < static_cast<int>(parameters.size()); ++i) {
    const ParameterSpec& spec = parameters[i];
    const UnitKey key{block_of(spec.name, rules, patterns), spec.mesh, spec.dtype, spec.trainable,
                      spec.communication_dtype};
    Draft* draft = nullptr;
    for (Draft& candidate : drafts)
      if (candidate.key == key) draft = &candidate;
    if (draft == nullptr) draft = &drafts.emplace_back(Draft{key, {}, 0});
    draft->parameters.push_back(i);
    draft->bytes += spec.numel() * static_cast<int64_t>(c10::elementSize(spec.dtype));
  }
  return drafts;
}

// Joins each unit that is too small to pay for a gather of its own with the small ones before it of the same kind.
std::vector<Draft> merge_small(std::vector<Draft> drafts, int64_t merge_below_bytes) {
  std::vector<Draft> merged;
  for (Draft& draft : drafts) {
    Draft* neighbour = nullptr;
    for (auto candidate = merged.rbegin(); candidate != merged.rend() && neighbour == nullptr; ++candidate)
      if (candidate->key.is_like(draft.key)) neighbour = &*candidate;
    if (neighbour != nullptr && neighbour->bytes < merge_below_bytes && draft.bytes < merge_below_bytes) {
      neighbour->parameters.insert(neighbour->parameters.end(), draft.parameters.begin(), draft.parameters.end());
      neighbour->bytes += draft.bytes;
    } else {
      merged.push_back(std::move(draft));
    }
  }
  return merged;
}

UnitLayout lay_out(const Draft& draft, const std::vector<ParameterSpec>& parameters, const MeshSize& size) {
  UnitLayout unit;
  const ParameterSpec& first = parameters[draft.parameters.front()];
  const std::string& block = draft.key.block;
  unit.name = block.empty() ? first.name : block.substr(0, block.find_last_not_of('.') + 1);
  unit.mesh = draft.key.mesh;
  unit.dtype = draft.key.dtype;
  unit.trainable = draft.key.trainable;
  unit.communication_dtype = draft.key.communication_dtype;
  unit.shards = size.shards;
  unit.pieces = size.pieces;
  int64_t end = 0;
  for (const int index : draft.parameters) {
    const int64_t numel = parameters[index].numel();
    unit.parameters.push_back({index, end, numel});
    unit.used_numel += numel;
    end = round_up(end + numel, kAlignment);
  }
  unit.shard_numel = round_up((end + size.shards - 1) / size.shards, kAlignment * size.pieces);
  return unit;
}

// Units that hold parameters of one leaf.
std::vector<std::vector<int>> find_leaf_mates(const std::vector<ParameterSpec>& parameters, const Layout& layout,
                                              const std::vector<std::string>& leaves) {
  std::map<std::string, std::set<int>> units_of;
  for (size_t i = 0; i < parameters.size(); ++i)
    if (const auto leaf = leaf_of(parameters[i].name, leaves)) units_of[*leaf].insert(layout.unit_of[i]);
  std::vector<std::vector<int>> mates(layout.units.size());
  for (const auto& [leaf, units] : units_of)
    for (const int unit : units)
      if (units.size() > 1) mates[unit].assign(units.begin(), units.end());
  return mates;
}

}  // namespace

int64_t ParameterSpec::numel() const {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

TensorPart ParameterSpec::model_part() const { return part.shape.empty() ? TensorPart{shape} : part; }

std::vector<ParameterRange> ranges_of(const UnitLayout& unit, int64_t begin, int64_t numel) {
  std::vector<ParameterRange> ranges;
  for (const ParameterPlace& placement : unit.parameters) {
    const int64_t low = std::max(placement.begin, begin);
    const int64_t high = std::min(placement.end(), begin + numel);
    if (low < high) ranges.push_back({placement.index, low - begin, low - placement.begin, high - low});
  }
  return ranges;
}

Layout make_layout(const std::vector<ParameterSpec>& parameters, int shards, const UnitRules& rules) {
  return make_layout(parameters, std::vector<MeshSize>{{.shards = shards}}, rules);
}

Layout make_layout(const std::vector<ParameterSpec>& parameters, const std::vector<MeshSize>& meshes,
                   const UnitRules& rules) {
  std::vector<NamePattern> patterns;
  for (const std::string& pattern : rules.patterns) patterns.emplace_back(pattern, "trireme.unit_patterns");
  Layout layout;
  layout.unit_of.resize(parameters.size());
  layout.placement_of.resize(parameters.size());
  for (const Draft& draft : merge_small(group_by_block(parameters, rules, patterns), rules.merge_below_bytes)) {
    const int unit = static_cast<int>(layout.units.size());
    layout.units.push_back(lay_out(draft, parameters, meshes.at(draft.key.mesh)));
    for (size_t i = 0; i < draft.parameters.size(); ++i) {
      layout.unit_of[draft.parameters[i]] = unit;
      layout.placement_of[draft.parameters[i]] = static_cast<int>(i);
    }
  }
  layout.leaf_mates = find_leaf_mates(parameters, layout, rules.leaves);
  return layout;
}

}  // namespace trireme
