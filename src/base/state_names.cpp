#include "trireme/base/state_names.h"

namespace trireme {
namespace {

constexpr std::string_view kWeight = "model.";
constexpr std::string_view kMaster = "master.";
constexpr std::string_view kOptimizer = "optimizer.";

}  // namespace

std::string weight_name(std::string_view parameter) { return std::string(kWeight).append(parameter); }

std::string master_name(std::string_view parameter) { return std::string(kMaster).append(parameter); }

std::string optimizer_state_name(std::string_view state, std::string_view parameter) {
  return std::string(kOptimizer).append(state).append(".").append(parameter);
}

StateName parse_state_name(std::string_view name) {
  if (name.starts_with(kWeight)) return {StateKind::kWeight, name.substr(kWeight.size()), {}};
  if (name.starts_with(kMaster)) return {StateKind::kMaster, name.substr(kMaster.size()), {}};
  if (!name.starts_with(kOptimizer)) return {};
  const size_t dot = name.find('.', kOptimizer.size());
  if (dot == std::string_view::npos) return {};
  return {StateKind::kOptimizerState, name.substr(dot + 1), name.substr(kOptimizer.size(), dot - kOptimizer.size())};
}

}  // namespace trireme
