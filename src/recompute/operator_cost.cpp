#include "recompute/operator_cost.h"

#include <algorithm>
#include <array>

namespace trireme::detail {
namespace {

constexpr std::array<std::string_view, 5> kProducts = {"linear", "matmul", "mm", "addmm", "bmm"};

constexpr std::array<std::string_view, 22> kCostly = {
    "addbmm",    "addmv", "baddbmm", "bilinear",  "cdist",      "chain_matmul", "dot",      "einsum",
    "gru",       "inner", "kron",    "lstm",      "multi_head", "mv",           "rnn_relu", "rnn_tanh",
    "tensordot", "vdot",  "istft",   "embedding", "index_put",  "outer"};

// Families of names: convolutions, attention kernels, decompositions, Fourier transforms, 16-bit and quantized
// products.
constexpr std::array<std::string_view, 13> kCostlyPrefixes = {"conv",
                                                              "_conv",
                                                              "scaled_dot_product",
                                                              "_scaled_dot_product",
                                                              "_flash",
                                                              "_efficient_attention",
                                                              "linalg_",
                                                              "fft_",
                                                              "_fft",
                                                              "_native_multi_head",
                                                              "_transformer",
                                                              "_scaled_",
                                                              "_sparse"};

}  // namespace

OperatorCost cost_of(std::string_view name) {
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return OperatorCost::kCostly;
  name.remove_prefix(kNamespace.size());
  if (std::find(kProducts.begin(), kProducts.end(), name) != kProducts.end()) return OperatorCost::kProduct;
  if (std::find(kCostly.begin(), kCostly.end(), name) != kCostly.end()) return OperatorCost::kCostly;
  // In training it moves the running statistics, of which its schema says nothing.
  if (name.find("batch_norm") != name.npos) return OperatorCost::kCostly;
  const bool in_family = std::any_of(kCostlyPrefixes.begin(), kCostlyPrefixes.end(),
                                     [&](std::string_view prefix) { return name.starts_with(prefix); });
  return in_family ? OperatorCost::kCostly : OperatorCost::kCheap;
}

const at::Tensor& left_factor(std::string_view name, c10::ArrayRef<c10::IValue> arguments) {
  return arguments[name == "aten::addmm" ? 1 : 0].toTensor();
}

}  // namespace trireme::detail
