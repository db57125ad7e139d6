// Operators that give the same elements: under other sizes, in another order, with dims of size 1, or several times.
#include <ATen/core/Tensor.h>
#include <ATen/ops/squeeze.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "operators/families.h"

namespace trireme::rows {
namespace {

int64_t product_of(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

std::vector<int64_t> strides_of(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

/// Factors of the elements in memory order, by the stride of each: dims of both lists of sizes, cut where either is.
/// Where the lists do not fit between two strides that both have, there are none.
std::map<int64_t, uint8_t> common_factors(Row& row, at::IntArrayRef from, at::IntArrayRef to) {
  const std::vector<int64_t> a = strides_of(from), b = strides_of(to);
  std::set<int64_t> all{1, product_of(from)}, of_both = all;
  for (const int64_t stride : a)
    if (std::ranges::find(b, stride) != b.end()) of_both.insert(stride);
  all.insert(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  std::map<int64_t, uint8_t> factors;
  for (auto low = of_both.begin(), high = std::next(low); high != of_both.end(); low = high++) {
    const std::vector<int64_t> marks(all.find(*low), std::next(all.find(*high)));
    bool fits = true;
    for (size_t i = 1; i < marks.size(); ++i) fits = fits && marks[i] % marks[i - 1] == 0;
    for (size_t i = 1; fits && i < marks.size(); ++i) factors[marks[i - 1]] = row.add(marks[i] / marks[i - 1]);
  }
  return factors;
}

TensorFactors made_of(Row& row, const std::map<int64_t, uint8_t>& factors, at::IntArrayRef sizes) {
  const std::vector<int64_t> strides = strides_of(sizes);
  TensorFactors dims;
  for (size_t i = 0; i < sizes.size(); ++i) {
    DimFactors dim;
    for (auto one = factors.rbegin(); one != factors.rend(); ++one)
      if (strides[i] <= one->first && one->first < strides[i] * sizes[i]) dim.push_back(one->second);
    dims.push_back(row.size_of(dim) == sizes[i] ? dim : row.dim(sizes[i], FactorKind::kWhole));
  }
  return dims;
}

/// -1 as what is left of `elements`.
void fill_in(std::vector<int64_t>& sizes, int64_t elements) {
  const auto left = std::ranges::find(sizes, -1);
  if (left == sizes.end()) return;
  const int64_t others = -product_of(sizes);
  *left = others == 0 ? 0 : elements / others;
}

const char* name_of_sizes(const RowCall& call) { return call.index_of("shape") >= 0 ? "shape" : "size"; }

std::vector<int64_t> sizes_viewed(const RowCall& call) {
  const at::IntArrayRef from = call.sizes(0);
  const int64_t dims = call.dims(0);
  if (call.tensors() == 2) return call.sizes(1).vec();
  if (call.name() == "ravel") return {product_of(from)};
  if (call.name() == "flatten") {
    const int64_t begin = RowCall::wrapped(call.integer("start_dim", 0), dims);
    const int64_t end = RowCall::wrapped(call.integer("end_dim", -1), dims) + 1;
    if (dims == 0) return {1};
    std::vector<int64_t> to(from.begin(), from.begin() + begin);
    to.push_back(product_of(from.slice(begin, end - begin)));
    to.insert(to.end(), from.begin() + end, from.end());
    return to;
  }
  std::vector<int64_t> sizes = call.integers(call.name() == "unflatten" ? "sizes" : name_of_sizes(call));
  if (call.name() != "unflatten") {
    fill_in(sizes, product_of(from));
    return sizes;
  }
  const int64_t at = RowCall::wrapped(call.integer("dim", 0), dims);
  fill_in(sizes, from[at]);
  std::vector<int64_t> to = from.vec();
  to.erase(to.begin() + at);
  to.insert(to.begin() + at, sizes.begin(), sizes.end());
  return to;
}

/// The dims of the argument in the order in which the result has them.
std::vector<int64_t> order_of(const RowCall& call) {
  const int64_t dims = call.dims(0);
  const std::string_view name = plain_name(call);
  std::vector<int64_t> order(dims);
  std::iota(order.begin(), order.end(), 0);
  if (name == "permute") {
    order = call.integers("dims");
    for (int64_t& dim : order) dim = RowCall::wrapped(dim, dims);
  } else if (name == "numpy_T") {
    std::ranges::reverse(order);
  } else if (name == "movedim" || name == "moveaxis") {
    std::vector<int64_t> from = call.integers("source"), to = call.integers("destination"), placed(dims, -1);
    for (size_t i = 0; i < from.size(); ++i) {
      placed[RowCall::wrapped(to[i], dims)] = RowCall::wrapped(from[i], dims);
      std::erase(order, RowCall::wrapped(from[i], dims));
    }
    auto next = order.begin();
    for (int64_t& dim : placed)
      if (dim < 0) dim = *next++;
    order = placed;
  } else if (dims > 1) {
    const char* const first = call.index_of("dim0") >= 0 ? "dim0" : "axis0";
    const char* const second = call.index_of("dim1") >= 0 ? "dim1" : "axis1";
    std::swap(order[RowCall::wrapped(call.integer(first, -2), dims)],
              order[RowCall::wrapped(call.integer(second, -1), dims)]);
  }
  return order;
}

/// Dims of size 1 that squeeze() takes away.
std::vector<int64_t> dims_squeezed(const RowCall& call) {
  std::vector<int64_t> gone;
  const bool names_none = call.value("dim").isIntList() && call.integers("dim").empty();
  if (names_none) return gone;
  for (const int64_t dim : call.dims_named("dim", call.dims(0)))
    if (dim < call.dims(0) && call.sizes(0)[dim] == 1) gone.push_back(dim);
  return gone;
}

}  // namespace
}  // namespace trireme::rows

namespace trireme {

Row view_row(at::IntArrayRef from, at::IntArrayRef to) {
  Row row;
  std::map<int64_t, uint8_t> factors;
  if (rows::product_of(from) > 1) factors = rows::common_factors(row, from, to);
  row.arguments = {rows::made_of(row, factors, from)};
  row.results = {rows::made_of(row, factors, to)};
  return row;
}

}  // namespace trireme

namespace trireme::rows {

Row view(const RowCall& call) {
  Row row = view_row(call.sizes(0), sizes_viewed(call));
  if (call.tensors() == 2) row.arguments.push_back(row.results[0]);
  return row;
}

void localise_view(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (!is_any_cut(local) || call.tensors() == 2 || call.name() == "ravel" || call.name() == "flatten") return;
  std::vector<int64_t> sizes = local.sizes_of(local.row->results[0]);
  if (call.name() != "unflatten") return set_integers(call, here, name_of_sizes(call), sizes);
  const auto begin = sizes.begin() + RowCall::wrapped(call.integer("dim", 0), call.dims(0));
  set_integers(call, here, "sizes", {begin, begin + static_cast<int64_t>(call.integers("sizes").size())});
}

Row moved(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  TensorFactors result;
  for (const int64_t dim : order_of(call)) result.push_back(row.arguments[0][dim]);
  row.results = {result};
  return row;
}

Row squeezed(const RowCall& call) {
  Row row;
  const std::string_view name = plain_name(call);
  TensorFactors dims = dims_of(row, call.sizes(0));
  row.arguments = {dims};
  if (name == "unsqueeze") {
    dims.insert(dims.begin() + RowCall::wrapped(call.integer("dim", 0), call.dims(0) + 1), DimFactors());
  } else if (name == "squeeze") {
    std::vector<int64_t> gone = dims_squeezed(call);
    for (auto dim = gone.rbegin(); dim != gone.rend(); ++dim) dims.erase(dims.begin() + *dim);
  } else {  // atleast_3d and its kin
    const size_t least = name[8] - '0';
    if (least == 3 && dims.size() == 2) dims.push_back({});
    if (least == 3 && dims.size() == 1) dims = {DimFactors(), dims[0], DimFactors()};
    while (dims.size() < least) dims.insert(dims.begin(), DimFactors());
  }
  row.results = {dims};
  return row;
}

void localise_squeezed(const RowCall& call, const LocalRow& local, LocalCall& here) {
  // A dim of the whole may have size 1 here, so squeeze() is told which ones go.
  if (plain_name(call) != "squeeze" || !is_any_cut(local)) return;
  here.run = [gone = dims_squeezed(call), in_place = writes_in_place(call)](const std::vector<c10::IValue>& arguments) {
    at::Tensor x = arguments[0].toTensor();
    return std::vector<at::Tensor>{in_place ? x.squeeze_(gone) : at::squeeze(x, gone)};
  };
}

Row expanded(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  const std::vector<int64_t> to = call.tensors() == 2 ? call.sizes(1).vec() : call.integers("size");
  const int64_t lead = static_cast<int64_t>(to.size()) - call.dims(0);
  TensorFactors result;
  for (int64_t i = 0; i < static_cast<int64_t>(to.size()); ++i) {
    const bool is_kept = i >= lead && (to[i] == -1 || to[i] == call.sizes(0)[i - lead]);
    result.push_back(is_kept ? row.arguments[0][i - lead] : row.dim(to[i]));
  }
  if (call.tensors() == 2) row.arguments.push_back(result);
  row.results = {result};
  return row;
}

void localise_expanded(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (call.tensors() == 2 || !is_any_cut(local)) return;
  set_integers(call, here, "size", local.sizes_of(local.row->results[0]));
}

Row repeated(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  std::vector<int64_t> times = call.integers(call.name() == "tile" ? "dims" : "repeats");
  const int64_t dims = std::max<int64_t>(times.size(), call.dims(0));
  times.insert(times.begin(), dims - times.size(), 1);
  TensorFactors result;
  for (int64_t i = 0; i < dims; ++i) {
    const int64_t own = i - (dims - call.dims(0));
    result.push_back(nested(row.dim(times[i]), own < 0 ? DimFactors() : row.arguments[0][own]));
  }
  row.results = {result};
  return row;
}

void localise_repeated(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (!is_any_cut(local)) return;
  const TensorFactors &from = local.row->arguments[0], &to = local.row->results[0];
  std::vector<int64_t> times;
  for (size_t i = 0; i < to.size(); ++i) {
    const size_t lead = to.size() - from.size();
    const bool is_new = to[i].size() > (i < lead ? 0 : from[i - lead].size());
    times.push_back(is_new ? local.sizes[to[i][0]] : 1);
  }
  set_integers(call, here, call.name() == "tile" ? "dims" : "repeats", times);
}

Row interleaved(const RowCall& call) {
  Row row;
  TensorFactors dims = dims_of(row, call.sizes(0));
  const DimFactors times = row.dim(call.integer("repeats", 1));
  row.arguments = {dims};
  if (call.value("dim").isInt()) {
    if (dims.empty()) dims.push_back({});
    DimFactors& dim = dims[RowCall::wrapped(call.integer("dim", 0), call.dims(0))];
    dim = nested(dim, times);
  } else {
    DimFactors all;
    for (const DimFactors& dim : dims) all = nested(all, dim);
    dims = {nested(all, times)};
  }
  row.results = {dims};
  return row;
}

void localise_interleaved(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (!is_any_cut(local)) return;
  here.arguments[call.index_of("output_size")] = c10::IValue();
  if (call.integer("repeats", 1) == 1) return;
  // The new factor was made last.
  here.arguments[call.index_of("repeats")] = local.sizes.back();
}

Row stacked(const RowCall& call) {
  Row row;
  const TensorFactors dims = dims_of(row, call.sizes(0));
  for (size_t i = 0; i < call.tensors(); ++i) row.arguments.push_back(dims);
  TensorFactors result = dims;
  result.insert(result.begin() + RowCall::wrapped(call.integer("dim", 0), call.dims(0) + 1),
                row.dim(static_cast<int64_t>(call.tensors()), FactorKind::kWhole));
  row.results = {result};
  return row;
}

Row of_bits(const RowCall& call) {
  Row row;
  TensorFactors dims = dims_of(row, call.sizes(0));
  row.arguments = {dims};
  const int64_t from = call.itemsize(0);
  const auto to = static_cast<int64_t>(c10::elementSize(call.value("dtype").toScalarType()));
  if (from != to && !dims.empty()) {
    for (const uint8_t factor : dims.back()) row.factors[factor].kind = FactorKind::kWhole;
    dims.back() = row.dim(call.sizes(0).back() * from / to, FactorKind::kWhole);
  }
  row.results = {dims};
  return row;
}

Row of_pairs(const RowCall& call) {
  Row row;
  TensorFactors dims = dims_of(row, call.sizes(0));
  if (call.name() == "view_as_real") {
    row.arguments = {dims};
    dims.push_back(row.dim(2, FactorKind::kWhole));
  } else {
    row.factors[dims.back()[0]].kind = FactorKind::kWhole;
    row.arguments = {dims};
    dims.pop_back();
  }
  row.results = {dims};
  return row;
}

}  // namespace trireme::rows
