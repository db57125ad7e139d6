// Operators that must know where in the whole a rank's elements are, and no more: triangles, attention of grouped
// heads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>

#include "operators/families.h"

namespace trireme::rows {
namespace {

at::Tensor positions_of(const LocalRow& local, const DimFactors& dim, const at::Tensor& beside) {
  const at::Tensor found = dim.empty() ? at::arange(1, at::kLong) : local.positions(dim[0]);
  return found.to(beside.device());
}

/// By row and column, how many columns an element is behind the diagonal.
at::Tensor ahead_of(const LocalRow& local, const DimFactors& rows, const DimFactors& columns,
                    const at::Tensor& beside) {
  return positions_of(local, columns, beside).unsqueeze(0) - positions_of(local, rows, beside).unsqueeze(1);
}

/// The factors of heads, those of queries as (heads of keys, queries of each).
struct HeadFactors {
  DimFactors queries, keys;
};
HeadFactors heads_of(Row& row, int64_t queries, int64_t keys) {
  HeadFactors heads;
  heads.keys = row.dim(keys);
  heads.queries = nested(heads.keys, row.dim(queries / keys));
  return heads;
}

}  // namespace

Row triangle(const RowCall& call) {
  Row row;
  row.arguments = {dims_of(row, call.sizes(0))};
  row.results = row.arguments;
  return row;
}

void localise_triangle(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const TensorFactors& dims = local.row->arguments[0];
  const DimFactors &rows = dims[dims.size() - 2], &columns = dims.back();
  if (!is_dim_cut(local, rows) && !is_dim_cut(local, columns)) return;
  const at::Tensor ahead = ahead_of(local, rows, columns, here.arguments[0].toTensor());
  const int64_t diagonal = call.integer("diagonal", 0);
  const at::Tensor goes = plain_name(call) == "tril" ? ahead > diagonal : ahead < diagonal;
  here.run = [goes, in_place = writes_in_place(call)](const std::vector<c10::IValue>& arguments) {
    at::Tensor x = arguments[0].toTensor();
    return std::vector<at::Tensor>{in_place ? x.masked_fill_(goes, 0) : x.masked_fill(goes, 0)};
  };
}

Row attention(const RowCall& call) {
  Row row;
  std::vector<int64_t> lead;
  for (size_t i = 0; i < 3; ++i) lead = broadcast(lead, call.sizes(i).slice(0, call.dims(i) - 2));
  const bool is_grouped = call.flag("enable_gqa", false) && lead.size() > 0;
  if (is_grouped) lead.pop_back();
  TensorFactors batch = dims_of(row, lead), scores = batch;
  const at::IntArrayRef query = call.sizes(0), key = call.sizes(1), value = call.sizes(2);
  const DimFactors s = row.dim(query[query.size() - 2]), t = row.dim(key[key.size() - 2], FactorKind::kWhole);
  const DimFactors d = row.dim(query.back(), FactorKind::kWhole), e = row.dim(value.back());
  HeadFactors heads;
  if (is_grouped) {
    heads = heads_of(row, query[query.size() - 3], key[key.size() - 3]);
    scores.push_back(heads.queries);
  }
  scores.push_back(s);
  const auto dims_behind = [&](size_t i, const DimFactors& tokens, const DimFactors& width) {
    const int64_t own = call.dims(i) - 2 - (is_grouped ? 1 : 0);
    TensorFactors dims = from_the_right(row, batch, call.sizes(i).slice(0, own));
    if (is_grouped) dims.push_back(i == 0 ? heads.queries : heads.keys);
    dims.push_back(tokens);
    dims.push_back(width);
    return dims;
  };
  row.arguments = {dims_behind(0, s, d), dims_behind(1, t, d), dims_behind(2, t, e)};
  row.results = {scores};
  row.results[0].push_back(e);
  scores.push_back(t);
  if (call.tensors() > 3) row.arguments.push_back(from_the_right(row, scores, call.sizes(3)));
  return row;
}

void localise_attention(const RowCall& call, const LocalRow& local, LocalCall& here) {
  const TensorFactors &query = local.row->arguments[0], &key = local.row->arguments[1];
  const DimFactors &rows = query[query.size() - 2], &columns = key[key.size() - 2];
  if (!call.flag("is_causal", false) || !is_dim_cut(local, rows)) return;
  here.arguments[call.index_of("attn_mask")] = ahead_of(local, rows, columns, here.arguments[0].toTensor()) <= 0;
  here.arguments[call.index_of("is_causal")] = false;
}

}  // namespace trireme::rows
