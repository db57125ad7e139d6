#include "recompute/tile_roles.h"

#include <algorithm>
#include <string>

#include "trireme/operators/rules.h"

namespace trireme::detail {
namespace {

bool returns_views(const c10::FunctionSchema& schema) {
  if (schema.returns().size() != 1 || schema.arguments().empty()) return false;
  const c10::AliasInfo* result = schema.returns()[0].alias_info();
  const c10::AliasInfo* argument = schema.arguments()[0].alias_info();
  return result != nullptr && argument != nullptr && !result->isWrite() && !argument->isWrite();
}

}  // namespace

TileRole tile_role_of(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  const auto has = [&](const auto& what) {
    return std::any_of(schema.arguments().begin(), schema.arguments().end(), what);
  };
  const auto is_written = [](const c10::Argument& argument) {
    return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
  };
  const auto is_generator = [](const c10::Argument& argument) { return argument.name() == "generator"; };
  const std::string& name = schema.name();
  // A reader of a tensor without its gradient wants its data, and may take them without an operator.
  if (name == "aten::detach" || has(is_written)) return TileRole::kOther;
  if (name == "aten::dropout") return TileRole::kDropout;
  if (name == "aten::to" || name == "aten::_to_copy") return TileRole::kCast;
  if (name == "aten::contiguous" || name == "aten::flatten" || name == "aten::reshape") return TileRole::kCopy;
  if (name == "aten::embedding") return TileRole::kLookup;
  if (name == "aten::cross_entropy_loss") return TileRole::kLoss;
  const OperatorRule* const rule = rule_of(op);
  if (rule != nullptr && rule->role == OperatorRole::kProduct) {
    const bool has_matrix_weight = name != "aten::bmm" && name != "aten::baddbmm" && name != "aten::mv";
    return has_matrix_weight ? TileRole::kProduct : TileRole::kOther;
  }
  if (returns_views(schema)) return TileRole::kView;
  const bool is_each = rule != nullptr && rule->role == OperatorRole::kEach && schema.returns().size() == 1 &&
                       !has(is_generator) && !name.ends_with("_like") && !op.hasTag(at::Tag::nondeterministic_seeded);
  return is_each ? TileRole::kPointwise : TileRole::kOther;
}

ProductShape product_shape_of(const c10::OperatorHandle& op) {
  const size_t rows = left_factor_index(op);
  return {.rows = rows, .weight = rows + 1, .is_transposed = op.schema().name() != "aten::linear"};
}

}  // namespace trireme::detail
