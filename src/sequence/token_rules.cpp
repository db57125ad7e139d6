#include "sequence/token_rules.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

namespace trireme::sequence {
namespace {

using Rules = std::unordered_map<std::string_view, TokenRule>;

const Rules& named_rules() {
  static const Rules rules = [] {
    Rules made;
    const auto name = [&](TokenRule rule, std::initializer_list<std::string_view> names) {
      for (const std::string_view one : names) made[one] = rule;
    };
    name(TokenRule::kProduct, {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm"});
    name(TokenRule::kPart, {"slice", "select", "narrow", "split", "split_with_sizes", "chunk", "unbind", "unfold",
                            "tensor_split", "unsafe_chunk", "unsafe_split", "diagonal", "as_strided"});
    name(TokenRule::kLookup, {"embedding", "one_hot"});
    name(TokenRule::kNorm, {"layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"});
    name(TokenRule::kAttention, {"scaled_dot_product_attention"});
    name(TokenRule::kLoss, {"cross_entropy_loss"});
    name(TokenRule::kPad, {"pad", "constant_pad_nd"});
    name(TokenRule::kMixes, {"group_norm", "batch_norm", "instance_norm", "einsum", "tensordot", "bilinear", "cdist",
                             "mv", "dot", "lstm", "gru", "rnn_tanh", "rnn_relu", "addbmm", "addmv", "outer", "kron"});
    return made;
  }();
  return rules;
}

bool returns_views(const c10::FunctionSchema& schema) {
  if (schema.returns().size() != 1 || schema.arguments().empty()) return false;
  const c10::AliasInfo* result = schema.returns()[0].alias_info();
  return result != nullptr && !result->isWrite();
}

bool is_dim_argument(const std::string& name) {
  return name == "dim" || name == "dims" || name == "dim0" || name == "dim1" || name == "dimension";
}

}  // namespace

TokenRule token_rule_of(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return TokenRule::kMixes;
  name.remove_prefix(kNamespace.size());
  if (const auto found = named_rules().find(name); found != named_rules().end()) return found->second;
  if (name == "sum" || name == "mean") return TokenRule::kTotal;
  for (const std::string_view family : {"conv", "_conv", "fft_", "linalg_", "_scaled_dot", "_native_multi", "_flash"})
    if (name.starts_with(family)) return TokenRule::kMixes;
  return returns_views(op.schema()) ? TokenRule::kView : TokenRule::kEach;
}

std::vector<int64_t> named_dims(const OperatorCall& call, int64_t dims) {
  std::vector<int64_t> result;
  const auto& arguments = call.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!is_dim_argument(arguments[i].name())) continue;
    const c10::IValue& value = call.arguments()[i];
    if (value.isInt()) result.push_back(value.toInt());
    if (value.isIntList())
      for (const int64_t dim : value.toIntVector()) result.push_back(dim);
  }
  for (int64_t& dim : result)
    if (dim < 0) dim += dims;
  return result;
}

std::optional<int64_t> product_dim(const at::Tensor& left, int64_t left_dim, const at::Tensor& right,
                                   int64_t right_dim) {
  const int64_t left_sum = left.dim() - 1, right_sum = std::max<int64_t>(right.dim() - 2, 0);
  if (left_dim == left_sum || (right_dim >= 0 && right_dim == right_sum)) return {};
  const int64_t dims = std::max(left.dim(), right.dim());
  const int64_t left_at = left_dim < 0 ? -1 : left_dim + dims - left.dim();
  const int64_t right_at = right_dim < 0 ? -1 : right_dim + dims - right.dim();
  if (left_at >= 0 && right_at >= 0 && left_at != right_at) return {};
  return std::max(left_at, right_at);
}

}  // namespace trireme::sequence
