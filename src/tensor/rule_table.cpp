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

using Answer = std::optional<PartitionAnswer>;

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

size_t first_cut(const PartitionCall& call) {
  size_t index = 0;
  while (call.cut_dim(index) < 0) ++index;
  return index;
}

/// The only tensor that is cut is the first argument.
bool is_first_alone(const PartitionCall& call) {
  for (size_t i = 1; i < call.arguments(); ++i)
    if (call.cut_dim(i) >= 0) return false;
  return call.cut_dim(0) >= 0;
}

/// Element by element, with broadcasting: dims are counted from the right.
Answer each(const PartitionCall& call) {
  const size_t lead = first_cut(call);
  const int64_t place = call.dims(lead) - call.cut_dim(lead);
  const int64_t size = call.sizes(lead)[static_cast<size_t>(call.cut_dim(lead))];
  if (call.writes_first() && call.cut_dim(0) < 0) return {};
  PartitionAnswer answer;
  int64_t dims = 0;
  for (size_t i = 0; i < call.arguments(); ++i) {
    if (!call.is_tensor(i)) continue;
    dims = std::max(dims, call.dims(i));
    const int64_t dim = call.dims(i) - place;
    const int64_t own = dim < 0 ? 1 : call.sizes(i)[static_cast<size_t>(dim)];
    if (call.cut_dim(i) >= 0 && (call.cut_dim(i) != dim || own != size)) return {};
    if (own != 1 || call.cut_dim(i) >= 0) answer.arguments[i] = dim;
  }
  if (!call.writes_first()) answer.results.assign(call.results(), dims - place);
  return answer;
}

/// Over the last dims, which are not cut: weights and biases are the same for every slice.
Answer norm(const PartitionCall& call) {
  const int64_t normalized = static_cast<int64_t>(call.argument(1).toIntVector().size()), dim = call.cut_dim(0);
  if (!is_first_alone(call) || dim >= call.dims(0) - normalized) return {};
  return PartitionAnswer{.arguments = {{0, dim}}, .results = std::vector<int64_t>(call.results(), dim)};
}

Answer pad(const PartitionCall& call) {
  const std::vector<int64_t> pad = call.argument(1).toIntVector();
  const auto at = static_cast<size_t>(2 * (call.dims(0) - 1 - call.cut_dim(0)));
  if (!is_first_alone(call) || (at + 1 < pad.size() && (pad[at] != 0 || pad[at + 1] != 0))) return {};
  return PartitionAnswer{.arguments = {{0, call.cut_dim(0)}}, .results = {call.cut_dim(0)}};
}

/// By places in the last two dims.
Answer triangle(const PartitionCall& call) {
  const int64_t dim = call.cut_dim(0);
  if (dim > call.dims(0) - 3) return {};
  PartitionAnswer answer{.arguments = {{0, dim}}, .results = {}};
  if (!call.writes_first()) answer.results = {dim};
  return answer;
}

}  // namespace

const PartitionRule* rule_of_role(OperatorRole role) {
  static const std::map<OperatorRole, PartitionRule> rules = {{OperatorRole::kEach, each},
                                                              {OperatorRole::kNorm, norm},
                                                              {OperatorRole::kPad, pad},
                                                              {OperatorRole::kTriangle, triangle}};
  const auto found = rules.find(role);
  return found != rules.end() ? &found->second : nullptr;
}

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
