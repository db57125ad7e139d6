// Dims that are made of pieces of others: slices, joins, shifts, reversals, constants at the ends.
//
// A dim of size 1 that is a piece, or is made of one, has a factor: without elements on some rank it is no cut that is
// chosen, but a rank must know that it has none.
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "operators/families.h"
#include "trireme/base/error.h"

namespace trireme::rows {
namespace {

/// The indices of a dim that a result has.
struct Stretch {
  int64_t begin = 0, end = 0, step = 1;
  bool goes = false;  ///< the dim goes (select)
  int64_t size() const { return end > begin ? (end - begin + step - 1) / step : 0; }
};

const std::vector<Piece>& pieces_here(const LocalRow& local, uint8_t factor) {
  for (const PiecedFactor& one : local.pieces)
    if (one.factor == factor) return one.pieces;
  throw Error(ErrorCode::kInternal, str("operators: factor ", int{factor}, " is not made of pieces"));
}

int64_t clamped(int64_t at, int64_t size) { return std::clamp<int64_t>(at < 0 ? at + size : at, 0, size); }

Stretch stretch_of(const RowCall& call, int64_t size) {
  const std::string_view name = call.name();
  if (name == "select") {
    const int64_t at = call.integer("index", 0);
    const int64_t begin = at < 0 ? at + size : at;
    return {begin, begin + 1, 1, true};
  }
  int64_t begin = call.integer("start", 0);
  if (name == "narrow") {
    if (begin < 0) begin += size;
    return {begin, begin + call.integer("length", 0)};
  }
  begin = clamped(begin, size);
  return {begin, std::max(begin, clamped(call.integer("end", size), size)), call.integer("step", 1)};
}

int64_t dim_of(const RowCall& call) { return RowCall::wrapped(call.integer("dim", 0), call.dims(0)); }

/// The dims of each result that has one of the stretches of the dim.
void set_stretches(Row& row, int64_t dim, const std::vector<Stretch>& stretches) {
  const TensorFactors& dims = row.arguments[0];
  const int64_t size = row.size_of(dims[dim]);
  const auto are = [&](auto condition) { return std::ranges::all_of(stretches, condition); };
  const bool are_ones = are([](const Stretch& one) { return one.size() == 1; });
  const bool are_pieces = are([](const Stretch& one) { return one.size() > 0 && one.step == 1; });
  const bool are_all = are([&](const Stretch& one) { return one.size() == size && one.step == 1; });
  Factor* const factor = dims[dim].empty() ? nullptr : &row.factors[dims[dim][0]];
  // One element is named as by a place: who has it gives it to all.
  if (factor && !are_all && !are_pieces) factor->kind = FactorKind::kWhole;
  if (factor && !are_all && are_ones) factor->kind = FactorKind::kPlaces;
  for (const Stretch& one : stretches) {
    TensorFactors result = row.arguments[0];
    if (one.goes) {
      result.erase(result.begin() + dim);
    } else if (are_ones) {
      result[dim] = {};
    } else if (!are_pieces) {
      result[dim] = row.dim(one.size(), FactorKind::kWhole);
    } else if (!are_all) {
      result[dim] = {row.add(one.size())};
      row.pieces.push_back({result[dim][0], {{0, row.arguments[0][dim][0], one.begin, one.end}}});
    }
    row.results.push_back(result);
  }
}

/// A rank's share of each result's stretch of the dim.
struct StretchHere {
  int64_t begin, end;
  bool is_here;
};
std::vector<StretchHere> stretches_here(const LocalRow& local, int64_t dim, const std::vector<Stretch>& stretches) {
  const Row& row = *local.row;
  const uint8_t factor = row.arguments[0][dim][0];
  std::vector<StretchHere> found;
  for (size_t i = 0; i < stretches.size(); ++i) {
    if (row.factors[factor].kind == FactorKind::kPlaces) {
      const auto [at, is_here] = local.find(factor, at::tensor(stretches[i].begin, at::kLong));
      found.push_back({at.item<int64_t>(), at.item<int64_t>() + 1, is_here.item<bool>()});
    } else {
      const Piece& piece = pieces_here(local, row.results[i][dim][0])[0];
      found.push_back({piece.begin, piece.end, true});
    }
  }
  return found;
}

at::Tensor zeroed(const at::Tensor& tensor) {
  return tensor.masked_fill(at::ones({}, tensor.options().dtype(at::kBool)), 0);
}

std::vector<Stretch> stretches_of(const RowCall& call, int64_t size) {
  const std::string_view name = call.name();
  std::vector<Stretch> made;
  const auto add_equal = [&](int64_t length) {
    for (int64_t at = 0; at < size || made.empty(); at += length) made.push_back({at, std::min(at + length, size)});
  };
  if (name == "unbind") {
    for (int64_t at = 0; at < size; ++at) made.push_back({at, at + 1, 1, true});
  } else if (name == "tensor_split") {
    const int64_t sections = call.integer("sections", 0);
    int64_t begin = 0;
    for (int64_t i = 0; i < sections; ++i, begin = made.back().end)
      made.push_back({begin, begin + size / sections + (i < size % sections)});
    if (sections > 0) return made;
    std::vector<int64_t> ends = call.integers("indices");
    ends.push_back(size);
    for (const int64_t end : ends) {
      made.push_back({begin, std::max(begin, clamped(end, size))});
      begin = made.back().end;
    }
  } else if (call.index_of("chunks") >= 0) {
    add_equal(std::max<int64_t>((size + call.integer("chunks", 1) - 1) / call.integer("chunks", 1), 1));
  } else {
    const char* const argument = call.index_of("split_sizes") >= 0 ? "split_sizes" : "split_size";
    if (call.value(argument).isInt()) {
      add_equal(std::max<int64_t>(call.integer(argument, 1), 1));
    } else {
      for (int64_t at = 0; const int64_t length : call.integers(argument)) {
        made.push_back({at, at + length});
        at += length;
      }
    }
  }
  return made;
}

/// A factor of the first argument's dim, also where its size is 1.
uint8_t factor_of(Row& row, TensorFactors& dims, int64_t dim) {
  if (dims[dim].empty()) dims[dim] = {row.add(1)};
  return dims[dim][0];
}

/// By dim, by how many elements roll() moves.
std::vector<int64_t> shifts_of(const RowCall& call) {
  std::vector<int64_t> by_dim(call.dims(0), 0);
  std::vector<int64_t> dims = call.integers("dims");
  const std::vector<int64_t> shifts = call.integers("shifts");
  if (dims.empty()) dims = {0};
  for (size_t i = 0; i < dims.size() && call.dims(0) > 0; ++i) {
    const int64_t dim = RowCall::wrapped(dims[i], call.dims(0)), size = std::max<int64_t>(call.sizes(0)[dim], 1);
    by_dim[dim] = ((by_dim[dim] + shifts[i]) % size + size) % size;
  }
  return by_dim;
}

}  // namespace

Row slice(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  const int64_t dim = dim_of(call);
  set_stretches(row, dim, {stretch_of(call, call.sizes(0)[dim])});
  return row;
}

void localise_slice(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const int64_t dim = dim_of(call);
  const DimFactors& factors = local.row->arguments[0][dim];
  if (!is_dim_cut(local, factors)) return;
  const Stretch whole = stretch_of(call, call.sizes(0)[dim]);
  if (whole.size() == call.sizes(0)[dim]) {
    if (call.name() == "narrow") here.arguments[call.index_of("length")] = local.size_of(factors);
    return;
  }
  const StretchHere one = stretches_here(local, dim, {whole})[0];
  here.arguments[call.index_of(whole.goes ? "index" : "start")] = one.begin;
  if (call.name() == "narrow") here.arguments[call.index_of("length")] = one.end - one.begin;
  if (call.name() == "slice") here.arguments[call.index_of("end")] = one.end;
  if (!one.is_here) here.mend = [](std::vector<at::Tensor>& results) { results[0] = zeroed(results[0]); };
}

Row split(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  const int64_t dim = dim_of(call);
  set_stretches(row, dim, stretches_of(call, call.sizes(0)[dim]));
  return row;
}

void localise_split(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const int64_t dim = dim_of(call);
  if (!is_dim_cut(local, local.row->arguments[0][dim])) return;
  const std::vector<Stretch> whole = stretches_of(call, call.sizes(0)[dim]);
  // One that has all of the dim.
  if (local.row->results[0].size() == local.row->arguments[0].size() && whole[0].size() == call.sizes(0)[dim]) {
    here.run = [](const std::vector<c10::IValue>& arguments) {
      const at::Tensor x = arguments[0].toTensor();
      return std::vector<at::Tensor>{x.view(x.sizes())};
    };
    return;
  }
  here.run = [dim, goes = whole[0].goes,
              stretches = stretches_here(local, dim, whole)](const std::vector<c10::IValue>& arguments) {
    std::vector<at::Tensor> results;
    for (const StretchHere& one : stretches) {
      at::Tensor part = arguments[0].toTensor().narrow(dim, one.begin, one.end - one.begin);
      if (goes) part = part.squeeze(dim);
      results.push_back(one.is_here ? part : zeroed(part));
    }
    return results;
  };
}

Row cat(const RowCall& call) {
  Row row;
  // Tensors of one dim and no element may stand among others of any dims.
  const auto counts = [&](size_t i) { return call.dims(i) != 1 || call.sizes(i)[0] != 0; };
  size_t first = 0, others = 0;
  while (first + 1 < call.tensors() && !counts(first)) ++first;
  for (size_t i = 0; i < call.tensors(); ++i) others += i != first && counts(i);
  const int64_t dim = RowCall::wrapped(call.integer("dim", 0), call.dims(first));
  TensorFactors dims;
  for (int64_t d = 0; d < call.dims(first); ++d)
    dims.push_back(d == dim && others ? DimFactors() : row.dim(call.sizes(first)[d]));
  PiecedFactor joined;
  int64_t size = 0;
  for (size_t i = 0; i < call.tensors(); ++i) {
    if (!counts(i)) {
      row.arguments.push_back({row.dim(0, FactorKind::kWhole)});
      continue;
    }
    TensorFactors own = dims;
    if (others) {
      const int64_t length = call.sizes(i)[dim];
      own[dim] = {row.add(length)};
      joined.pieces.push_back({static_cast<uint8_t>(i), own[dim][0], 0, length});
      size += length;
    }
    row.arguments.push_back(own);
  }
  if (others) {
    joined.factor = row.add(size);
    dims[dim] = {joined.factor};
    row.pieces.push_back(joined);
  }
  row.results = {dims};
  return row;
}

Row roll(const RowCall& call) {
  Row row;
  const bool is_flat = call.integers("dims").empty() && call.dims(0) > 1;
  TensorFactors dims = dims_of(row, call.sizes(0), is_flat ? FactorKind::kWhole : FactorKind::kEach);
  row.arguments = {dims};
  const std::vector<int64_t> shifts = shifts_of(call);
  for (int64_t d = 0; d < call.dims(0) && !is_flat; ++d) {
    if (shifts[d] == 0) continue;
    const int64_t size = call.sizes(0)[d];
    const uint8_t from = dims[d][0], to = row.add(size);
    row.pieces.push_back({to, {{0, from, size - shifts[d], size}, {0, from, 0, size - shifts[d]}}});
    dims[d] = {to};
  }
  row.results = {dims};
  return row;
}

void localise_roll(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (!is_any_cut(local)) return;
  std::vector<int64_t> dims, shifts;
  for (int64_t d = 0; d < call.dims(0); ++d) {
    const DimFactors& to = local.row->results[0][d];
    if (to.empty() || !local.row->pieces_of(to[0])) continue;
    const Piece& first = pieces_here(local, to[0])[0];
    dims.push_back(d);
    shifts.push_back(first.end - first.begin);
  }
  if (dims.empty()) dims = shifts = {0};  // by whole lengths, of which a part is none
  set_integers(call, here, "dims", dims);
  set_integers(call, here, "shifts", shifts);
}

Row flip(const RowCall& call) {
  Row row;
  TensorFactors dims = dims_of(row, call.sizes(0));
  row.arguments = {dims};
  std::vector<int64_t> flipped = call.integers("dims");
  if (call.name() == "fliplr") flipped = {1};
  if (call.name() == "flipud") flipped = {0};
  for (const int64_t one : flipped) {
    const int64_t d = RowCall::wrapped(one, call.dims(0));
    if (d >= call.dims(0) || dims[d].empty()) continue;
    const uint8_t from = dims[d][0], to = row.add(call.sizes(0)[d]);
    row.pieces.push_back({to, {{0, from, 0, call.sizes(0)[d], true}}});
    dims[d] = {to};
  }
  row.results = {dims};
  return row;
}

Row pad(const RowCall& call) {
  Row row;
  TensorFactors dims = dims_of(row, call.sizes(0)), result = dims;
  const std::vector<int64_t> pads = call.integers("pad");
  const bool is_constant = call.name() == "constant_pad_nd" || call.value("mode").toStringRef() == "constant";
  for (size_t i = 0; i + 1 < pads.size(); i += 2) {
    const int64_t d = call.dims(0) - 1 - static_cast<int64_t>(i / 2), before = pads[i], behind = pads[i + 1];
    const int64_t size = call.sizes(0)[d], begin = std::max<int64_t>(-before, 0),
                  end = size + std::min<int64_t>(behind, 0);
    if (before == 0 && behind == 0) continue;
    if (!is_constant || begin >= end) {
      if (!dims[d].empty()) row.factors[dims[d][0]].kind = FactorKind::kWhole;
      result[d] = row.dim(size + before + behind, FactorKind::kWhole);
      continue;
    }
    PiecedFactor made;
    const auto add_constant = [&](int64_t count) {
      if (count > 0) made.pieces.push_back({Piece::kConstant, row.add(count), 0, count});
    };
    add_constant(before);
    made.pieces.push_back({0, factor_of(row, dims, d), begin, end});
    add_constant(behind);
    made.factor = row.add(size + before + behind);
    result[d] = {made.factor};
    row.pieces.push_back(made);
  }
  row.arguments = {dims};
  row.results = {result};
  return row;
}

void localise_pad(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (local.row->pieces.empty() || !is_any_cut(local)) return;
  std::vector<int64_t> pads = call.integers("pad");
  for (size_t i = 0; i + 1 < pads.size(); i += 2) {
    const DimFactors& to = local.row->results[0][call.dims(0) - 1 - static_cast<int64_t>(i / 2)];
    if (to.empty() || !local.row->pieces_of(to[0])) continue;
    int64_t* side = &pads[i];
    pads[i] = pads[i + 1] = 0;
    for (const Piece& piece : pieces_here(local, to[0])) {
      if (piece.argument == Piece::kConstant) {
        *side += piece.end - piece.begin;
        continue;
      }
      pads[i] -= piece.begin;
      pads[i + 1] -= local.sizes[piece.factor] - piece.end;
      side = &pads[i + 1];
    }
  }
  set_integers(call, here, "pad", pads);
}

}  // namespace trireme::rows
