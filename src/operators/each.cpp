// Operators that work element by element, and what all families share.
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>

#include "operators/families.h"

namespace trireme::rows {

std::string_view plain_name(const RowCall& call) {
  std::string_view name = call.name();
  if (writes_in_place(call)) name.remove_suffix(1);
  return name;
}

bool writes_in_place(const RowCall& call) { return call.name().ends_with('_') && !call.name().ends_with("__"); }

TensorFactors dims_of(Row& row, at::IntArrayRef sizes, FactorKind kind) {
  TensorFactors dims;
  for (const int64_t size : sizes) dims.push_back(row.dim(size, kind));
  return dims;
}

std::vector<int64_t> broadcast(at::IntArrayRef a, at::IntArrayRef b) {
  if (a.size() < b.size()) std::swap(a, b);
  std::vector<int64_t> sizes = a.vec();
  const size_t lead = a.size() - b.size();
  for (size_t i = 0; i < b.size(); ++i)
    if (sizes[lead + i] == 1) sizes[lead + i] = b[i];
  return sizes;
}

TensorFactors from_the_right(const Row& row, const TensorFactors& result, at::IntArrayRef sizes) {
  TensorFactors dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const DimFactors& dim = result[result.size() - sizes.size() + i];
    dims.push_back(row.size_of(dim) == sizes[i] ? dim : DimFactors());
  }
  return dims;
}

DimFactors nested(const DimFactors& outer, const DimFactors& inner) {
  DimFactors dim = outer;
  dim.append(inner.begin(), inner.end());
  return dim;
}

void set_results(Row& row, const RowCall& call, const TensorFactors& dims) {
  for (size_t i = 0; i < call.op().schema().returns().size(); ++i) row.results.push_back(dims);
}

bool is_any_cut(const LocalRow& local) {
  for (size_t f = 0; f < local.sizes.size(); ++f)
    if (local.is_cut(static_cast<uint8_t>(f))) return true;
  return false;
}

bool is_dim_cut(const LocalRow& local, const DimFactors& dim) {
  return std::ranges::any_of(dim, [&](uint8_t factor) { return local.is_cut(factor); });
}

void set_integers(const RowCall& call, LocalCall& here, const char* name, std::vector<int64_t> values) {
  here.arguments[call.index_of(name)] = c10::IValue(std::move(values));
}

const at::Tensor& tensor_in(const std::vector<c10::IValue>& arguments, const RowCall& call, const char* name) {
  return arguments[call.index_of(name)].toTensor();
}

Row each(const RowCall& call) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < call.tensors(); ++i) sizes = broadcast(sizes, call.sizes(i));
  Row row;
  const TensorFactors dims = dims_of(row, sizes);
  for (size_t i = 0; i < call.tensors(); ++i) row.arguments.push_back(from_the_right(row, dims, call.sizes(i)));
  set_results(row, call, dims);
  return row;
}

Row of_first(const RowCall& call) {
  Row row;
  for (size_t i = 1; i < call.tensors(); ++i) row.unread |= uint64_t{1} << i;
  // A factor that no result has must be of a kind that says how ranks join.
  for (size_t i = 0; i < call.tensors(); ++i)
    row.arguments.push_back(dims_of(row, call.sizes(i), i == 0 ? FactorKind::kEach : FactorKind::kWhole));
  set_results(row, call, row.arguments[0]);
  return row;
}

Row channel_wise(const RowCall& call) {
  Row row;
  const TensorFactors dims = dims_of(row, call.sizes(0));
  const bool is_one = call.dims(1) == 0 || call.sizes(1)[0] == 1;
  TensorFactors weight;
  if (call.dims(1) > 0) weight.push_back(is_one ? DimFactors() : dims[1]);
  row.arguments = {dims, weight};
  row.results = {dims};
  return row;
}

Row find(const RowCall& call) {
  Row row;
  const std::string_view name = call.name();
  const auto elements = call.tensor_of(name == "isin" ? "elements" : "self");
  const auto set = call.tensor_of(name == "isin"        ? "test_elements"
                                  : name == "bucketize" ? "boundaries"
                                                        : "sorted_sequence");
  row.arguments.resize(call.tensors());
  TensorFactors found;
  if (elements) found = row.arguments[*elements] = dims_of(row, call.sizes(*elements));
  if (set) {
    // Sequences beside the elements: one for each index of the leading dims.
    const bool is_beside = name == "searchsorted" && elements && call.dims(*set) > 1;
    TensorFactors& dims = row.arguments[*set];
    if (is_beside) dims.assign(found.begin(), found.end() - 1);
    for (int64_t d = dims.size(); d < call.dims(*set); ++d)
      dims.push_back(row.dim(call.sizes(*set)[d], FactorKind::kWhole));
    if (const auto sorter = call.tensor_of("sorter")) row.arguments[*sorter] = dims;
  }
  row.results = {found};
  return row;
}

Row loss_of_each(const RowCall& call) {
  Row row = each(call);
  const int64_t reduction = call.integer("reduction", 1);
  if (reduction == 0) return row;
  for (Factor& factor : row.factors) factor.kind = reduction == 1 ? FactorKind::kMean : FactorKind::kSum;
  row.results[0].clear();
  return row;
}

}  // namespace trireme::rows
