#include <sstream>

#include "tensor/rules.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/tensor/partition.h"

namespace trireme {
namespace {

/// Parameters of other layers that are cut alike.
struct LikeParameters {
  const PartitionedParameter* first;
  std::string name;  ///< with "*" in place of numbers where there are several
  int count = 1;
};

std::vector<LikeParameters> alike(const PartitionPlan& plan) {
  std::vector<LikeParameters> kinds;
  for (const PartitionedParameter& parameter : plan.parameters) {
    const std::string name = tensor::generic(parameter.name);
    LikeParameters* found = nullptr;
    for (LikeParameters& kind : kinds)
      if (tensor::generic(kind.first->name) == name && kind.first->parts == parameter.parts &&
          kind.first->rule == parameter.rule)
        found = &kind;
    if (!found) {
      kinds.push_back({&parameter, parameter.name});
      continue;
    }
    found->name = name;
    ++found->count;
  }
  return kinds;
}

const char* name_of(TensorExchange exchange) {
  switch (exchange) {
    case TensorExchange::kNone:
      return "none";
    case TensorExchange::kAllReduce:
      return "all-reduce";
    case TensorExchange::kGather:
      return "gather";
    case TensorExchange::kSplit:
      return "split";
  }
  return "";
}

std::string exchanges_text(const TensorUse& use) {
  std::string text;
  for (const auto& [exchange, what] :
       {std::pair{use.input, "the input"}, std::pair{use.output, "the output"},
        std::pair{use.output_gradient, "the output's gradient"}, std::pair{use.input_gradient, "the input's gradient"}})
    if (exchange != TensorExchange::kNone) text += str(text.empty() ? "" : ", ", name_of(exchange), " of ", what);
  return text;
}

std::string row(const std::string& label, const std::string& text) { return formatted("    {:<11}{}\n", label, text); }

void print(std::ostream& text, const LikeParameters& kind) {
  const PartitionedParameter& one = *kind.first;
  text << "  " << kind.name << " " << shape_text(one.parts.front().shape);
  if (kind.count > 1) text << ", " << kind.count << " of them";
  text << "\n" << row("cut", str(name_of(one.kind), "; ", one.why)) << row("rule", one.rule);
  if (one.kind != PartitionKind::kReplicated)
    for (size_t rank = 0; rank < one.parts.size(); ++rank) {
      const std::string part = part_text(one.parts[rank]);
      text << row(str("rank ", rank), str(part.empty() ? "all" : part, ", ", shape_text(local_shape(one.parts[rank]))));
    }
  for (const TensorUse& use : one.uses) {
    const std::string exchanges = exchanges_text(use);
    if (exchanges.empty()) continue;
    text << row("exchanges", exchanges + (one.uses.size() > 1 ? " as " + use.name : ""));
  }
  if (one.sums_gradient) text << row("gradient", "added up over the ranks that have the same elements");
}

}  // namespace

std::string partition_text(const PartitionPlan& plan) {
  std::ostringstream text;
  text << "tensor axis of " << plan.ranks << (plan.ranks == 1 ? " rank" : " ranks") << "; rules of " << plan.source
       << "\n";
  for (const std::string& note : plan.notes) text << "  " << note << "\n";
  text << "\nparameters\n";
  int64_t all = 0;
  std::vector<int64_t> of_ranks(static_cast<size_t>(plan.ranks), 0);
  for (const PartitionedParameter& parameter : plan.parameters) {
    all += local_numel({parameter.parts.front().shape});
    for (size_t rank = 0; rank < of_ranks.size(); ++rank) of_ranks[rank] += local_numel(parameter.parts[rank]);
  }
  for (const LikeParameters& kind : alike(plan)) print(text, kind);
  for (const TensorUse& module : plan.modules)
    if (const std::string exchanges = exchanges_text(module); !exchanges.empty())
      text << "  " << module.name << "\n" << row("exchanges", exchanges);
  text << formatted("\nelements\n  {:<10}{}\n", "all", all);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank)
    text << formatted("  {:<10}{}\n", str("rank ", rank), of_ranks[rank]);
  return text.str();
}

}  // namespace trireme
