// Elements of a dim that another argument names: a rank reads or writes those that it has.
//
// A rank reads 0 where an element is not here, and ranks add up.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/where.h>

#include <algorithm>

#include "operators/families.h"
#include "trireme/base/error.h"

namespace trireme::rows {
namespace {

/// The named dim of the first argument; an argument of no dims has none.
int64_t place_dim(const RowCall& call) { return RowCall::wrapped(call.integer("dim", 0), call.dims(0)); }

/// The cut factor that places name; nothing: ranks have all of it.
std::optional<uint8_t> cut_places(const RowCall& call, const LocalRow& local, int64_t dim) {
  if (dim >= call.dims(0)) return std::nullopt;
  const DimFactors& factors = local.row->arguments[0][dim];
  if (factors.empty() || !local.is_cut(factors[0])) return std::nullopt;
  return factors[0];
}

/// Places become those here, and results 0 where these are not: `is_here` as it is broadcast to a result.
void read_places(LocalCall& here, int argument, at::Tensor places, at::Tensor is_here) {
  here.arguments[argument] = std::move(places);
  here.mend = [is_not = is_here.logical_not()](std::vector<at::Tensor>& results) {
    results[0] = results[0].masked_fill(is_not, 0);
  };
}

/// `is_here` of a vector of places as it stands beside `dim` of a tensor of `dims`.
at::Tensor beside_dim(const at::Tensor& is_here, int64_t dim, int64_t dims) {
  std::vector<int64_t> sizes(std::max<int64_t>(dims, 0), 1);
  if (!sizes.empty()) sizes[dim] = is_here.numel();
  return is_here.view(sizes);
}

/// Dims of a tensor that is read or written along `dim` where `places`, of `sizes`, say: those of which the places have
/// all are shared, others are whole on both.
struct AlongPlaces {
  TensorFactors self, places;
};
AlongPlaces along_places(Row& row, at::IntArrayRef self, at::IntArrayRef places, int64_t dim) {
  AlongPlaces made;
  for (int64_t d = 0; d < static_cast<int64_t>(self.size()); ++d) {
    const bool is_shared = d == dim || self[d] == places[d];
    made.self.push_back(row.dim(self[d], is_shared ? FactorKind::kEach : FactorKind::kWhole));
    const bool is_own = d == dim || !is_shared;
    made.places.push_back(!is_own ? made.self[d]
                                  : row.dim(places[d], is_shared ? FactorKind::kEach : FactorKind::kWhole));
  }
  return made;
}

void set_kind(Row& row, const DimFactors& dim, FactorKind kind) {
  for (const uint8_t factor : dim) row.factors[factor].kind = kind;
}

}  // namespace

Row embedding(const RowCall& call) {
  Row row;
  // Counts of how often a row is used are those of all places, and a sparse gradient names rows.
  const bool is_counted = call.flag("scale_grad_by_freq", false) || call.flag("sparse", false);
  const TensorFactors table{row.dim(call.sizes(0)[0], is_counted ? FactorKind::kWhole : FactorKind::kPlaces),
                            row.dim(call.sizes(0)[1])};
  const TensorFactors places = dims_of(row, call.sizes(1), is_counted ? FactorKind::kWhole : FactorKind::kEach);
  row.arguments = {table, places};
  row.results = {places};
  row.results[0].push_back(table[1]);
  return row;
}

void localise_embedding(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const auto factor = cut_places(call, local, 0);
  if (!factor) return;
  const auto [places, is_here] = local.find(*factor, tensor_in(here.arguments, call, "indices"));
  read_places(here, call.index_of("indices"), places, is_here.unsqueeze(-1));
  const int64_t padding = call.integer("padding_idx", -1);
  if (padding < 0) return;
  const auto [at, has_padding] = local.find(*factor, at::scalar_tensor(padding, at::kLong));
  here.arguments[call.index_of("padding_idx")] = has_padding.item<bool>() ? at.item<int64_t>() : -1;
}

Row one_hot(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  row.results = row.arguments;
  row.results[0].push_back(row.dim(std::max<int64_t>(call.integer("num_classes", -1), 0), FactorKind::kWhole));
  return row;
}

void localise_one_hot(const RowCall& call, const LocalRow&, LocalCall&) {
  if (call.integer("num_classes", -1) < 0)
    throw Error(ErrorCode::kUnsupported, "one_hot(): the classes are counted; give num_classes");
}

Row gather(const RowCall& call) {
  Row row;
  const bool broadcasts = call.name() == "take_along_dim";
  if (broadcasts && call.value("dim").isNone()) {
    // Elements of all dims in one row.
    row.arguments = {dims_of(row, call.sizes(0), FactorKind::kWhole), dims_of(row, call.sizes(1))};
    DimFactors all;
    for (const DimFactors& dim : row.arguments[1]) all = nested(all, dim);
    row.results = {{all}};
    return row;
  }
  const int64_t dim = place_dim(call);
  if (!broadcasts) {
    if (call.dims(0) != call.dims(1)) {  // one of them has no dims
      row.arguments = {dims_of(row, call.sizes(0), FactorKind::kWhole),
                       dims_of(row, call.sizes(1), FactorKind::kWhole)};
      row.results = {row.arguments[1]};
      return row;
    }
    const AlongPlaces made = along_places(row, call.sizes(0), call.sizes(1), dim);
    row.arguments = {made.self, made.places};
    row.results = {made.places};
  } else {
    TensorFactors self, places, result;
    for (int64_t d = 0; d < call.dims(0); ++d) {
      const int64_t own = call.sizes(0)[d], named = call.sizes(1)[d];
      result.push_back(row.dim(d == dim || own == 1 ? named : own));
      self.push_back(d == dim ? row.dim(own) : own == 1 ? DimFactors() : result[d]);
      places.push_back(named == 1 ? DimFactors() : result[d]);
    }
    row.arguments = {self, places};
    row.results = {result};
  }
  if (call.dims(0) > 0) set_kind(row, row.arguments[0][dim], FactorKind::kPlaces);
  return row;
}

void localise_gather(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (call.index_of("dim") >= 0 && call.value("dim").isNone()) return;
  const auto factor = cut_places(call, local, place_dim(call));
  if (!factor) return;
  const char* const name = call.name() == "gather" ? "index" : "indices";
  const auto [places, is_here] = local.find(*factor, tensor_in(here.arguments, call, name));
  read_places(here, call.index_of(name), places, is_here);
}

Row index_select(const RowCall& call) {
  Row row;
  TensorFactors self = dims_of(row, call.sizes(0));
  const TensorFactors places = dims_of(row, call.sizes(1));
  TensorFactors result = self;
  if (call.dims(0) > 0) {
    const int64_t dim = place_dim(call);
    set_kind(row, self[dim], FactorKind::kPlaces);
    result[dim] = places.empty() ? DimFactors() : places[0];
  }
  row.arguments = {self, places};
  row.results = {result};
  return row;
}

void localise_index_select(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const int64_t dim = place_dim(call);
  const auto factor = cut_places(call, local, dim);
  if (!factor) return;
  const auto [places, is_here] = local.find(*factor, tensor_in(here.arguments, call, "index"));
  read_places(here, call.index_of("index"), places, beside_dim(is_here, dim, call.dims(0)));
}

namespace {

/// Which dims index() takes elements of; their places in the result.
struct Indexed {
  std::vector<int64_t> dims;
  size_t first = 0;   ///< dim of the result at which the places stand
  size_t places = 0;  ///< number of their dims
};
Indexed indexed(const RowCall& call) {
  Indexed made;
  bool is_adjacent = true;
  for (size_t i = 1; i < call.tensors(); ++i) {
    if (!call.is_defined(i)) continue;
    const auto dim = static_cast<int64_t>(i) - 1;
    is_adjacent = is_adjacent && (made.dims.empty() || made.dims.back() + 1 == dim);
    made.dims.push_back(dim);
    made.places = std::max(made.places, call.sizes(i).size());
  }
  made.first = is_adjacent && !made.dims.empty() ? static_cast<size_t>(made.dims[0]) : 0;
  return made;
}

}  // namespace

Row index(const RowCall& call) {
  Row row;
  const Indexed at = indexed(call);
  std::vector<int64_t> sizes;
  for (size_t i = 1; i < call.tensors(); ++i)
    if (call.is_defined(i)) sizes = broadcast(sizes, call.sizes(i));
  const TensorFactors places = dims_of(row, sizes);
  row.arguments.resize(call.tensors());
  TensorFactors result;
  for (int64_t dim = 0; dim < call.dims(0); ++dim) {
    const bool is_indexed = std::ranges::find(at.dims, dim) != at.dims.end();
    const DimFactors own = row.dim(call.sizes(0)[dim], is_indexed ? FactorKind::kPlaces : FactorKind::kEach);
    row.arguments[0].push_back(own);
    if (!is_indexed) result.push_back(own);
  }
  for (size_t i = 1; i < call.tensors(); ++i)
    if (call.is_defined(i)) row.arguments[i] = from_the_right(row, places, call.sizes(i));
  result.insert(result.begin() + static_cast<int64_t>(at.first), places.begin(), places.end());
  row.results = {result};
  return row;
}

void localise_index(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const Indexed at = indexed(call);
  auto indices = here.arguments[1].toOptionalTensorList().vec();
  at::Tensor is_here;
  for (const int64_t dim : at.dims) {
    const auto factor = cut_places(call, local, dim);
    if (!factor) continue;
    std::optional<at::Tensor>& given = indices[static_cast<size_t>(dim)];
    const int64_t size = local.row->factors[*factor].size;
    const auto [places, is_own] = local.find(*factor, at::where(given->lt(0), *given + size, *given));
    given = places;
    is_here = is_here.defined() ? is_here.logical_and(is_own) : is_own;
  }
  if (!is_here.defined()) return;
  c10::List<std::optional<at::Tensor>> own;
  for (std::optional<at::Tensor>& one : indices) own.push_back(std::move(one));
  here.arguments[1] = std::move(own);
  const int64_t places = static_cast<int64_t>(at.places),
                behind = call.dims(0) - static_cast<int64_t>(at.dims.size()) - static_cast<int64_t>(at.first);
  here.mend = [is_not = is_here.logical_not(), places, behind](std::vector<at::Tensor>& results) {
    std::vector<int64_t> sizes(static_cast<size_t>(places - is_not.dim()), 1);
    sizes.insert(sizes.end(), is_not.sizes().begin(), is_not.sizes().end());
    sizes.insert(sizes.end(), static_cast<size_t>(behind), 1);
    results[0] = results[0].masked_fill(is_not.view(sizes), 0);
  };
}

Row index_write(const RowCall& call) {
  Row row;
  const TensorFactors self = dims_of(row, call.sizes(0));
  const int64_t dim = place_dim(call);
  const TensorFactors places = dims_of(row, call.sizes(1), FactorKind::kWhole);
  row.arguments = {self, places};
  if (call.tensor_of("source")) {
    TensorFactors source = call.dims(2) == 0 ? TensorFactors() : self;
    if (!source.empty()) source[dim] = places.empty() ? DimFactors() : places[0];
    row.arguments.push_back(source);
  } else if (call.tensors() > 2) {  // the value of index_fill
    row.arguments.push_back({});
  }
  row.results = {self};
  return row;
}

void localise_index_write(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const int64_t dim = place_dim(call);
  const auto factor = cut_places(call, local, dim);
  if (!factor) return;
  const at::Tensor index = tensor_in(here.arguments, call, "index");
  const auto [places, is_here] = local.find(*factor, index.reshape({-1}));
  const at::Tensor own = is_here.nonzero().flatten();
  here.arguments[call.index_of("index")] = places.index_select(0, own);
  if (call.index_of("source") < 0) return;
  const at::Tensor source = tensor_in(here.arguments, call, "source");
  here.arguments[call.index_of("source")] =
      source.dim() == 0 ? source.expand({1}).index_select(0, own) : source.index_select(dim, own);
}

Row scatter(const RowCall& call) {
  Row row;
  const auto index = call.tensor_of("index");
  const auto source = call.tensor_of("src");
  row.arguments.resize(call.tensors());
  if (call.dims(0) != call.dims(*index) || call.dims(0) == 0) {
    for (size_t i = 0; i < call.tensors(); ++i) row.arguments[i] = dims_of(row, call.sizes(i), FactorKind::kWhole);
    row.results = {row.arguments[0]};
    return row;
  }
  const int64_t dim = place_dim(call);
  AlongPlaces made = along_places(row, call.sizes(0), call.sizes(*index), dim);
  set_kind(row, made.places[dim], FactorKind::kWhole);
  row.arguments[0] = made.self;
  row.arguments[*index] = made.places;
  if (source)
    for (int64_t d = 0; d < call.dims(0); ++d) {
      const int64_t size = call.sizes(*source)[d];
      const bool is_shared = size == call.sizes(*index)[d];
      // The first elements are read of what is longer than the places.
      if (!is_shared) set_kind(row, made.places[d], FactorKind::kWhole);
      row.arguments[*source].push_back(is_shared ? made.places[d] : row.dim(size, FactorKind::kWhole));
    }
  row.results = {made.self};
  return row;
}

void localise_scatter(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const int64_t dim = place_dim(call);
  const auto factor = cut_places(call, local, dim);
  if (!factor) return;
  // Elements that are not here go to one more, which is dropped.
  const int64_t size = local.sizes[*factor];
  const auto [places, is_here] = local.find(*factor, tensor_in(here.arguments, call, "index"));
  here.arguments[call.index_of("index")] = at::where(is_here, places, size);
  const bool in_place = writes_in_place(call);
  std::string name(plain_name(call));
  const c10::OperatorHandle op = c10::Dispatcher::singleton().findSchemaOrThrow(
      ("aten::" + name).c_str(), call.op().schema().overload_name().c_str());
  here.run = [=](const std::vector<c10::IValue>& arguments) {
    const at::Tensor self = arguments[0].toTensor();
    std::vector<int64_t> sizes = self.sizes().vec();
    sizes[dim] = 1;
    torch::jit::Stack stack(arguments.begin(), arguments.end());
    stack[0] = at::cat({self, self.new_zeros(sizes)}, dim);
    op.callBoxed(stack);
    const at::Tensor result = stack[0].toTensor().narrow(dim, 0, size);
    return std::vector<at::Tensor>{in_place ? self.copy_(result) : result};
  };
}

}  // namespace trireme::rows
