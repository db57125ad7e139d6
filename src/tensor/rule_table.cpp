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

}  // namespace

std::shared_ptr<const PartitionRule> RegisteredRules::operator()(const c10::OperatorHandle& op) {
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
  return known_.emplace(op, std::move(rule)).first->second;
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
