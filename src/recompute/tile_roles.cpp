#include "recompute/tile_roles.h"

#include <string_view>
#include <unordered_map>

namespace trireme::detail {
namespace {

using Roles = std::unordered_map<std::string_view, TileRole>;

const Roles& named_roles() {
  static const Roles roles = [] {
    Roles made;
    for (const auto* name : {"linear", "matmul", "mm", "addmm"}) made[name] = TileRole::kProduct;
    for (const auto* name :
         {"abs",       "add",        "celu", "clamp",       "div",         "elu",      "exp",    "gelu",  "hardtanh",
          "hardswish", "leaky_relu", "mish", "mul",         "neg",         "pow",      "relu",   "relu6", "selu",
          "sigmoid",   "silu",       "sqrt", "log_sigmoid", "hardsigmoid", "softplus", "square", "sub",   "tanh"})
      made[name] = TileRole::kPointwise;
    for (const auto* name : {"to", "_to_copy"}) made[name] = TileRole::kCast;
    for (const auto* name : {"contiguous", "flatten", "reshape"}) made[name] = TileRole::kCopy;
    // A reader of a tensor without its gradient wants its data, and may take them without an operator.
    made["detach"] = TileRole::kOther;
    made["cross_entropy_loss"] = TileRole::kLoss;
    made["dropout"] = TileRole::kDropout;
    made["embedding"] = TileRole::kLookup;
    return made;
  }();
  return roles;
}

bool returns_views(const c10::FunctionSchema& schema) {
  if (schema.returns().size() != 1 || schema.arguments().empty()) return false;
  const c10::AliasInfo* result = schema.returns()[0].alias_info();
  const c10::AliasInfo* argument = schema.arguments()[0].alias_info();
  return result != nullptr && argument != nullptr && !result->isWrite() && !argument->isWrite();
}

}  // namespace

TileRole tile_role_of(const c10::OperatorHandle& op) {
  std::string_view name = op.schema().name();
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return TileRole::kOther;
  name.remove_prefix(kNamespace.size());
  for (const c10::Argument& argument : op.schema().arguments())
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) return TileRole::kOther;
  if (const auto found = named_roles().find(name); found != named_roles().end()) return found->second;
  return returns_views(op.schema()) ? TileRole::kView : TileRole::kOther;
}

ProductShape product_shape_of(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  if (name == "aten::addmm") return {.rows = 1, .weight = 2, .is_transposed = true};
  return {.is_transposed = name != "aten::linear"};
}

}  // namespace trireme::detail
