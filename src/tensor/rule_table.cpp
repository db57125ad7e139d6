#include "tensor/rule_table.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {

std::vector<int64_t> PartitionCall::sizes(size_t index) const {
  std::vector<int64_t> sizes = argument(index).toTensor().sizes().vec();
  if (cuts_[index].dim >= 0) sizes[static_cast<size_t>(cuts_[index].dim)] = cuts_[index].size;
  return sizes;
}

namespace tensor {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<const PartitionRule>> rules;
  std::atomic<size_t> registrations = 0;
};

/// Lives as long as the process: a rule may hold what ends before it.
Registry& registry() {
  static Registry& registry = *new Registry;
  return registry;
}

/// The answer of a program's rule, as a row with one factor; nothing: it has none, or the cut tensor is in a list.
std::optional<Row> row_of_rule(AxisPass& pass, int axis, const PartitionRule& rule, const OperatorCall& call,
                               const RowCall& of_wholes, const Operands& operands) {
  std::vector<PartitionCall::Cut> cuts(call.traits.arguments);
  for (const Operand& one : operands) {
    if (one.found == nullptr) continue;
    if (!call.arguments()[one.index].isTensor()) return std::nullopt;
    if (const Cut* const cut = pass.cut_of(*one.found->known, axis))
      cuts[one.index] = {.dim = cut->dim, .size = cut->whole()};
  }
  const std::optional<PartitionAnswer> answer = rule(PartitionCall(call, cuts));
  if (!answer) return std::nullopt;
  const auto dim_of = [&](const Operand& one) {
    const auto named = answer->arguments.find(one.index);
    return named != answer->arguments.end() ? named->second : -1;
  };
  const auto led = std::ranges::find_if(
      operands, [&](const Operand& one) { return cuts[one.index].dim >= 0 && dim_of(one) == cuts[one.index].dim; });
  const at::Tensor& lead =
      std::ranges::find_if(operands, [](const Operand& one) { return one.found != nullptr; })->tensor;
  const bool overwrites = writes_first(call);
  if (led == operands.end() || (overwrites && led->index != 0))
    pass.refuse(call, lead, "has a rule that does not name the dim which is cut",
                "name it in PartitionAnswer::arguments");
  const bool sums = std::ranges::count(answer->results, kSumOfRanks) > 0;
  Row row;
  const uint8_t cut = row.add(cuts[led->index].size, sums ? FactorKind::kSum : FactorKind::kEach);
  for (size_t i = 0; i < operands.size(); ++i) {
    const int64_t dim = dim_of(operands[i]);
    if (dim >= of_wholes.dims(i))
      pass.refuse(call, lead, str("has a rule that names dim ", dim, " of ", operands[i].tensor.sizes()),
                  "name a dim that there is");
    row.arguments.emplace_back();
    for (int64_t d = 0; d < of_wholes.dims(i); ++d)
      row.arguments[i].push_back(d == dim ? DimFactors{cut} : row.dim(of_wholes.sizes(i)[d], FactorKind::kWhole));
  }
  if (overwrites) {
    row.results = {row.arguments[0]};
    return row;
  }
  const size_t count = call.op.schema().returns().size();
  if (answer->results.size() != count)
    pass.refuse(call, lead, str("gives ", count, count == 1 ? " result" : " results", ", which its rule does not say"),
                "name the dim in which each result is cut in PartitionAnswer::results");
  for (const int64_t dim : answer->results) {  // sizes of other dims are the operator's
    row.results.emplace_back(std::max<int64_t>(dim, 0));
    if (dim >= 0) row.results.back().push_back({cut});
  }
  return row;
}

}  // namespace

std::shared_ptr<const OwnRow> RegisteredRules::operator()(AxisPass& pass, int axis, const c10::OperatorHandle& op) {
  const size_t registrations = registry().registrations.load(std::memory_order_acquire);
  if (registrations == 0) return nullptr;
  if (registrations != registrations_) known_.clear();
  registrations_ = registrations;
  if (const auto found = known_.find(op); found != known_.end()) return found->second;
  const std::lock_guard lock(registry().mutex);
  const auto of_name = [&](const std::string& name) -> std::shared_ptr<const PartitionRule> {
    const auto found = registry().rules.find(name);
    return found != registry().rules.end() ? found->second : nullptr;
  };
  const std::string &name = op.schema().name(), &overload = op.schema().overload_name();
  auto rule = overload.empty() ? nullptr : of_name(name + "." + overload);
  if (!rule) rule = of_name(name);
  if (!rule) return known_.emplace(op, nullptr).first->second;
  auto made =
      std::make_shared<const OwnRow>([&pass, axis, rule = std::move(rule)](
                                         const OperatorCall& call, const RowCall& of_wholes, const Operands& operands) {
        return row_of_rule(pass, axis, *rule, call, of_wholes, operands);
      });
  return known_.emplace(op, std::move(made)).first->second;
}

}  // namespace tensor

void register_partition_rule(const std::string& op, PartitionRule rule) {
  const size_t colons = op.find("::");
  if (colons == std::string::npos || colons == 0 || colons + 2 == op.size())
    throw ConfigError(str("register_partition_rule: \"", op,
                          "\" is no name of an operator; write its namespace, too, as in \"mine::product\""));
  if (!rule) throw ConfigError(str("register_partition_rule: the rule for \"", op, "\" is empty"));
  tensor::Registry& registry = tensor::registry();
  const std::lock_guard lock(registry.mutex);
  registry.rules[op] = std::make_shared<const PartitionRule>(std::move(rule));
  registry.registrations.fetch_add(1, std::memory_order_release);
}

}  // namespace trireme
