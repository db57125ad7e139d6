// Operators along dims: ranks join what reductions of a table give; all else needs such dims whole.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <array>
#include <utility>

#include "operators/families.h"

namespace trireme::rows {
namespace {

constexpr std::pair<std::string_view, FactorKind> kJoined[] = {
    {"sum", FactorKind::kSum},          {"nansum", FactorKind::kSum},       {"count_nonzero", FactorKind::kSum},
    {"mean", FactorKind::kMean},        {"amax", FactorKind::kMaximum},     {"amin", FactorKind::kMinimum},
    {"prod", FactorKind::kProduct},     {"any", FactorKind::kAny},          {"all", FactorKind::kAll},
    {"_is_any_true", FactorKind::kAny}, {"_is_all_true", FactorKind::kAll},
};

FactorKind kind_of(const RowCall& call) {
  // Those of no dim give a number alone; those of a dim an index, too.
  if (call.index_of("dim") < 0 && call.name() == "max") return FactorKind::kMaximum;
  if (call.index_of("dim") < 0 && call.name() == "min") return FactorKind::kMinimum;
  const auto* const found = std::ranges::find(kJoined, call.name(), &std::pair<std::string_view, FactorKind>::first);
  return found == std::end(kJoined) ? FactorKind::kWhole : found->second;
}

/// For each dim of the first argument whether the call goes along it.
std::vector<bool> named_dims(const RowCall& call) {
  std::vector<bool> named(call.dims(0), false);
  // An empty list: none for these two, all for others.
  const bool is_none =
      (call.name() == "any" || call.name() == "all") && call.value("dim").isIntList() && call.integers("dim").empty();
  if (is_none) return named;
  for (const int64_t dim : call.dims_named("dim", call.dims(0)))
    if (dim < call.dims(0)) named[dim] = true;
  return named;
}

TensorFactors dims_along(Row& row, at::IntArrayRef sizes, const std::vector<bool>& named, FactorKind kind) {
  TensorFactors dims;
  for (size_t i = 0; i < sizes.size(); ++i) dims.push_back(row.dim(sizes[i], named[i] ? kind : FactorKind::kEach));
  return dims;
}

}  // namespace

Row reduction(const RowCall& call) {
  Row row;
  const std::vector<bool> named = named_dims(call);
  const TensorFactors dims = dims_along(row, call.sizes(0), named, kind_of(call));
  TensorFactors result;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (!named[i])
      result.push_back(dims[i]);
    else if (call.flag("keepdim", false))
      result.push_back({});
  }
  row.arguments = {dims};
  if (call.tensors() > 1) {  // quantile's `q`: a result of each
    row.arguments.push_back(dims_along(row, call.sizes(1), std::vector<bool>(call.sizes(1).size()), FactorKind::kEach));
    result.insert(result.begin(), row.arguments[1].begin(), row.arguments[1].end());
  }
  set_results(row, call, result);
  return row;
}

Row scan(const RowCall& call) {
  Row row;
  std::vector<bool> named = named_dims(call);
  if (call.name() == "msort") std::fill(named.begin() + std::min<size_t>(1, named.size()), named.end(), false);
  if (call.name() == "renorm") named.flip();
  const TensorFactors dims = dims_along(row, call.sizes(0), named, FactorKind::kWhole);
  for (size_t i = 0; i < call.tensors(); ++i) row.arguments.push_back(from_the_right(row, dims, call.sizes(i)));
  set_results(row, call, dims);
  return row;
}

Row resized(const RowCall& call) {
  Row row;
  const std::string_view name = call.name();
  const int64_t dims = call.dims(0);
  const int64_t at = RowCall::wrapped(call.integer(name == "unfold" ? "dimension" : "dim", -1), dims);
  std::vector<bool> named(dims, false);
  if (dims > 0) named[at] = true;
  TensorFactors result = dims_along(row, call.sizes(0), named, FactorKind::kWhole);
  row.arguments = {result};
  int64_t size = dims > 0 ? call.sizes(0)[at] : 1;
  if (name == "topk") size = call.integer("k", 1);
  if (name == "glu") size /= 2;
  if (name == "diff") {
    for (const char* const more : {"prepend", "append"})
      if (const auto tensor = call.tensor_of(more)) {
        size += call.sizes(*tensor)[at];
        TensorFactors beside = result;
        beside[at] = row.dim(call.sizes(*tensor)[at], FactorKind::kWhole);
        row.arguments.push_back(beside);
      }
    size = std::max<int64_t>(size - call.integer("n", 1), 0);
  }
  const int64_t window = call.integer("size", 1);
  if (name == "unfold") size = (size - window) / call.integer("step", 1) + 1;
  if (dims > 0) result[at] = row.dim(size, FactorKind::kWhole);
  if (name == "unfold") result.push_back(row.dim(window, FactorKind::kWhole));
  set_results(row, call, result);
  return row;
}

}  // namespace trireme::rows
