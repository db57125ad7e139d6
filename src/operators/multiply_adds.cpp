#include "trireme/operators/multiply_adds.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace trireme {
namespace {

/// An entry of the table: the count of a call, and the names of the arguments that a product multiplies.
struct Counted {
  int64_t (*count)(const RowCall& call, const Counted& row);
  const char* left = "";
  const char* right = "";
};

int64_t numel(at::IntArrayRef sizes) {
  int64_t made = 1;
  for (const int64_t size : sizes) made *= size;
  return made;
}

at::IntArrayRef sizes_of(const RowCall& call, const char* name) {
  const auto tensor = call.tensor_of(name);
  return tensor ? call.sizes(*tensor) : at::IntArrayRef();
}

/// mm, bmm, mv, dot and those that add something.
int64_t product(const RowCall& call, const Counted& row) {
  const at::IntArrayRef right = sizes_of(call, row.right);
  return numel(sizes_of(call, row.left)) * (right.size() < 2 ? 1 : right.back());
}

/// Groups of rows by matrices of their own; the groups of [G, M, K] by [K, N] have some of the columns each.
int64_t grouped_product(const RowCall& call, const Counted& row) {
  const at::IntArrayRef left = sizes_of(call, row.left), right = sizes_of(call, row.right);
  const int64_t all = numel(left) * right.back();
  return left.size() == 3 && right.size() == 2 ? all / std::max<int64_t>(left[0], 1) : all;
}

/// At how many places of one channel a weight is applied, of all samples.
int64_t places(at::IntArrayRef activations) { return activations[0] * numel(activations.slice(2)); }

int64_t one_of(const std::vector<int64_t>& values, size_t dim) {
  return values.empty() ? 1 : values[std::min(dim, values.size() - 1)];
}

/// A convolution's result, by its samples and places; its channels are not read.
std::vector<int64_t> convolved(const RowCall& call, at::IntArrayRef input, at::IntArrayRef weight) {
  const std::vector<int64_t> stride = call.integers("stride"), dilation = call.integers("dilation"),
                             padding = call.integers("padding");
  std::vector<int64_t> sizes(input.begin(), input.begin() + 2);
  for (size_t d = 2; d < input.size(); ++d) {
    const int64_t pad = padding.empty() ? 0 : one_of(padding, d - 2);
    const int64_t free = input[d] + 2 * pad - one_of(dilation, d - 2) * (weight[d] - 1) - 1;
    sizes.push_back(free / one_of(stride, d - 2) + 1);
  }
  return sizes;
}

/// A weight [out, in / groups, …] is applied at each place of the result, one of a transposed convolution at each place
/// of the input.
int64_t convolution(const RowCall& call, const Counted&) {
  const at::IntArrayRef input = sizes_of(call, call.tensor_of("input") ? "input" : "self");
  const at::IntArrayRef weight = sizes_of(call, "weight");
  const bool is_transposed = call.flag("transposed", call.name().ends_with("_transpose"));
  return numel(weight) * places(is_transposed ? input : at::IntArrayRef(convolved(call, input, weight)));
}

/// Each gradient that is asked for, of the input and of the weight, takes as many as the convolution.
int64_t convolution_backward(const RowCall& call, const Counted&) {
  const bool is_transposed = call.flag("transposed", false);
  const int64_t once =
      numel(sizes_of(call, "weight")) * places(sizes_of(call, is_transposed ? "input" : "grad_output"));
  const auto asked = call.value("output_mask").toBoolList();
  return once * (int64_t{asked[0]} + int64_t{asked[1]});
}

/// Pairs of a query and a key, over samples and the heads of queries.
int64_t pairs(at::IntArrayRef query, at::IntArrayRef key) {
  return numel(query) / std::max<int64_t>(query.back(), 1) * key[key.size() - 2];
}

/// Scores, and values by them.
int64_t attention(const RowCall& call, const Counted&) {
  const at::IntArrayRef query = sizes_of(call, "query");
  return pairs(query, sizes_of(call, "key")) * (query.back() + sizes_of(call, "value").back());
}

/// The scores again, and gradients of values, scores, queries and keys.
int64_t attention_backward(const RowCall& call, const Counted&) {
  const at::IntArrayRef query = sizes_of(call, "query");
  return pairs(query, sizes_of(call, "key")) * (3 * query.back() + 2 * sizes_of(call, "value").back());
}

const std::unordered_map<std::string_view, Counted>& counted() {
  static const std::unordered_map<std::string_view, Counted> table = [] {
    std::unordered_map<std::string_view, Counted> made;
    const auto add = [&made](const Counted& row, std::initializer_list<std::string_view> names) {
      for (const std::string_view name : names) made[name] = row;
    };
    add({product, "self", "mat2"}, {"mm", "bmm", "_scaled_mm", "_scaled_mm_v2", "_int_mm"});
    add({product, "mat1", "mat2"}, {"addmm", "addmm_", "_addmm_activation"});
    add({product, "batch1", "batch2"}, {"baddbmm", "baddbmm_", "addbmm", "addbmm_"});
    add({product, "self", "vec"}, {"mv"});
    add({product, "mat", "vec"}, {"addmv", "addmv_"});
    add({product, "self", "tensor"}, {"dot"});
    add({product, "self", "other"}, {"vdot"});
    add({grouped_product, "self", "mat2"}, {"_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"});
    add({convolution}, {"convolution", "_convolution", "convolution_overrideable", "cudnn_convolution",
                        "cudnn_convolution_transpose", "mkldnn_convolution"});
    add({convolution_backward}, {"convolution_backward", "convolution_backward_overrideable"});
    add({attention}, {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
                      "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_efficient_attention",
                      "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"});
    add({attention_backward},
        {"_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu_backward",
         "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward",
         "_scaled_dot_product_fused_attention_overrideable_backward"});
    return made;
  }();
  return table;
}

/// Kernels with products in them of which nothing here tells how many.
constexpr std::string_view kUnknown[] = {"lstm",
                                         "gru",
                                         "rnn_tanh",
                                         "rnn_relu",
                                         "mkldnn_rnn_layer",
                                         "mkldnn_rnn_layer_backward",
                                         "_cudnn_rnn",
                                         "_cudnn_rnn_backward",
                                         "_trilinear",
                                         "_native_multi_head_attention",
                                         "_transformer_encoder_layer_fwd",
                                         "_flash_attention_forward",
                                         "_flash_attention_backward",
                                         "_efficient_attention_forward",
                                         "_efficient_attention_backward",
                                         "_convolution_double_backward",
                                         "_cdist_forward",
                                         "_cdist_backward",
                                         "linalg_inv_ex",
                                         "linalg_cholesky_ex",
                                         "linalg_lu_factor_ex",
                                         "_linalg_solve_ex",
                                         "_linalg_svd",
                                         "_linalg_eigh",
                                         "linalg_qr",
                                         "_sparse_mm",
                                         "sspaddmm",
                                         "smm",
                                         "_fft_c2c",
                                         "_fft_r2c",
                                         "_fft_c2r"};

bool is_library(std::string_view space) {
  constexpr std::string_view kSpaces[] = {"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "trireme"};
  return std::ranges::find(kSpaces, space) != std::end(kSpaces);
}

}  // namespace

Work work_of(const c10::OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  const size_t colons = name.find("::");
  if (!is_library(name.substr(0, colons))) return Work::kUnknown;
  const std::string_view base = name.substr(colons + 2);
  if (name.starts_with("aten::") && counted().contains(base)) return Work::kCounted;
  return std::ranges::find(kUnknown, base) != std::end(kUnknown) ? Work::kUnknown : Work::kNone;
}

int64_t multiply_adds(const RowCall& call) {
  if (work_of(call.op()) != Work::kCounted) return 0;
  const Counted& row = counted().at(call.name());
  return row.count(call, row);
}

}  // namespace trireme
