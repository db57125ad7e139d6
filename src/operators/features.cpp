// Norms over features or groups of them, and convolutions of groups: a dim of channels is (groups, channels of each).
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/ones.h>

#include <algorithm>

#include "operators/families.h"

namespace trireme::rows {
namespace {

/// The arguments that are vectors over channels or features.
void set_vectors(Row& row, const RowCall& call, const TensorFactors& dims, std::initializer_list<const char*> names) {
  row.arguments.resize(call.tensors());
  for (const char* const name : names)
    if (const auto tensor = call.tensor_of(name); tensor && call.is_defined(*tensor)) row.arguments[*tensor] = dims;
}

/// A list of integers by spatial dim, of which one value stands for all.
int64_t of_dim(const std::vector<int64_t>& values, size_t i, int64_t otherwise) {
  if (values.empty()) return otherwise;
  return values.size() == 1 ? values[0] : values[i];
}

/// A convolution along one spatial dim.
struct Window {
  int64_t width, stride, padding, dilation, more;  ///< `more`: elements added at the end (transposed)
  bool is_transposed, keeps_size;
  bool is_each() const { return width == 1 && stride == 1 && padding == 0 && more == 0; }
  int64_t size_of_result(int64_t size) const {
    const int64_t reach = dilation * (width - 1);
    if (is_transposed) return (size - 1) * stride - 2 * padding + reach + more + 1;
    return keeps_size ? size : (size + 2 * padding - reach - 1) / stride + 1;
  }
};

Window window_of(const RowCall& call, size_t i, bool is_transposed) {
  const bool keeps_size = call.value("padding").isString() && call.value("padding").toStringRef() == "same";
  return {call.sizes(1)[i + 2],
          of_dim(call.integers("stride"), i, 1),
          of_dim(call.integers("padding"), i, 0),
          of_dim(call.integers("dilation"), i, 1),
          is_transposed ? of_dim(call.integers("output_padding"), i, 0) : 0,
          is_transposed,
          keeps_size};
}

bool is_transposed(const RowCall& call) {
  return call.name().starts_with("conv_transpose") || call.flag("transposed", false);
}

/// The parts of a convolution's row.
struct ChannelFactors {
  DimFactors groups, in, out;  ///< in, out: of each group
};
ChannelFactors channels_of(Row& row, const RowCall& call, bool transposed) {
  const int64_t groups = call.integer("groups", 1);
  const int64_t in = transposed ? call.sizes(1)[0] / groups : call.sizes(1)[1];
  const int64_t out = transposed ? call.sizes(1)[1] : call.sizes(1)[0] / groups;
  ChannelFactors made;
  made.groups = row.dim(groups);
  made.in = row.dim(in, FactorKind::kSum);
  made.out = row.dim(out);
  return made;
}

}  // namespace

Row layer_norm(const RowCall& call) {
  Row row;
  const int64_t kept = call.dims(0) - static_cast<int64_t>(call.integers("normalized_shape").size());
  TensorFactors dims, features, statistics;
  for (int64_t d = 0; d < call.dims(0); ++d) {
    dims.push_back(row.dim(call.sizes(0)[d], d < kept ? FactorKind::kEach : FactorKind::kWhole));
    statistics.push_back(d < kept ? dims[d] : DimFactors());
    if (d >= kept) features.push_back(dims[d]);
  }
  set_vectors(row, call, features, {"weight", "bias"});
  row.arguments[0] = dims;
  set_results(row, call, statistics);
  row.results[0] = dims;
  return row;
}

Row group_norm(const RowCall& call) {
  Row row;
  const int64_t groups = call.integer(call.name() == "group_norm" ? "num_groups" : "group", 1);
  const DimFactors group = row.dim(groups);
  const DimFactors channels = nested(group, row.dim(call.sizes(0)[1] / groups, FactorKind::kWhole));
  TensorFactors dims{row.dim(call.sizes(0)[0]), channels};
  for (int64_t d = 2; d < call.dims(0); ++d) dims.push_back(row.dim(call.sizes(0)[d], FactorKind::kWhole));
  set_vectors(row, call, {channels}, {"weight", "bias"});
  row.arguments[0] = dims;
  set_results(row, call, {dims[0], group});
  row.results[0] = dims;
  return row;
}

void localise_group_norm(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (!is_any_cut(local)) return;
  // The groups are the outer factor of the channels.
  const int64_t whole = call.integer(call.name() == "group_norm" ? "num_groups" : "group", 1);
  const TensorFactors& dims = local.row->arguments[0];
  const int64_t groups = whole == 1 ? 1 : local.sizes[dims[1][0]];
  if (call.name() == "group_norm") {
    here.arguments[call.index_of("num_groups")] = groups;
    return;
  }
  here.arguments[call.index_of("group")] = groups;
  here.arguments[call.index_of("N")] = local.size_of(dims[0]);
  here.arguments[call.index_of("C")] = local.size_of(dims[1]);
}

Row batch_norm(const RowCall& call) {
  Row row;
  const bool is_instance = call.name() == "instance_norm";
  const bool mixes = call.flag(is_instance ? "use_input_stats" : "training", false);
  TensorFactors dims{row.dim(call.sizes(0)[0], mixes && !is_instance ? FactorKind::kWhole : FactorKind::kEach),
                     row.dim(call.sizes(0)[1])};
  for (int64_t d = 2; d < call.dims(0); ++d)
    dims.push_back(row.dim(call.sizes(0)[d], mixes ? FactorKind::kWhole : FactorKind::kEach));
  // Statistics of instances are a mean over the batch, which a call with part of it would write.
  if (is_instance && mixes && call.tensor_of("running_mean") && !dims[0].empty())
    row.factors[dims[0][0]].kind = FactorKind::kWhole;
  set_vectors(row, call, {dims[1]}, {"weight", "bias", "running_mean", "running_var"});
  row.arguments[0] = dims;
  row.results = {dims};
  return row;
}

Row convolution(const RowCall& call) {
  Row row;
  const bool transposed = is_transposed(call);
  const ChannelFactors channels = channels_of(row, call, transposed);
  const int64_t spatial = call.dims(1) - 2, lead = call.dims(0) - spatial;
  TensorFactors input, result, weight;
  if (lead == 2) input.push_back(row.dim(call.sizes(0)[0]));
  result = input;
  const DimFactors in = nested(channels.groups, channels.in), out = nested(channels.groups, channels.out);
  input.push_back(in);
  result.push_back(out);
  weight = transposed ? TensorFactors{in, channels.out} : TensorFactors{out, channels.in};
  for (int64_t i = 0; i < spatial; ++i) {
    const Window window = window_of(call, i, transposed);
    const int64_t size = call.sizes(0)[lead + i];
    input.push_back(row.dim(size, window.is_each() ? FactorKind::kEach : FactorKind::kWhole));
    result.push_back(window.is_each() ? input.back() : row.dim(window.size_of_result(size), FactorKind::kWhole));
    weight.push_back(row.dim(window.width, FactorKind::kWhole));
    for (const uint8_t factor : window.is_each() ? DimFactors() : (transposed ? result : input).back())
      row.windowed |= uint64_t{1} << factor;
  }
  set_vectors(row, call, {out}, {"bias"});
  row.arguments[0] = input;
  row.arguments[1] = weight;
  row.results = {result};
  return row;
}

void localise_convolution(const RowCall& call, const LocalRow& local, LocalCall& here) {
  if (!is_any_cut(local)) return;
  const TensorFactors &input = local.row->arguments[0], &weight = local.row->arguments[1];
  const DimFactors& channels = input[input.size() + 1 - weight.size()];
  if (call.integer("groups", 1) > 1) here.arguments[call.index_of("groups")] = local.sizes[channels[0]];
  if (channels.empty() || !call.tensor_of("bias")) return;
  // The bias goes along dim 1, so it is no term: the rank that has the first of the summed channels adds it. Others add
  // 0, and take part in the exchange of its gradient.
  const uint8_t summed = channels.back();
  if (local.row->factors[summed].kind != FactorKind::kSum || !local.is_cut(summed)) return;
  const auto& owned = local.owned[summed];
  if (!owned.empty() && owned[0].begin == 0) return;
  const at::Tensor bias = tensor_in(here.arguments, call, "bias");
  here.arguments[call.index_of("bias")] = bias.masked_fill(at::ones({}, bias.options().dtype(at::kBool)), 0);
}

}  // namespace trireme::rows

namespace trireme {

bool writes_statistics(const RowCall& call, size_t tensor) {
  const bool is_trained = call.flag("training", false) || call.flag("use_input_stats", false);
  return is_trained && (call.tensor_of("running_mean") == tensor || call.tensor_of("running_var") == tensor);
}

}  // namespace trireme
