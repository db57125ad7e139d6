#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/plan/estimate.h"
#include "trireme/precision/precision.h"

namespace trireme {
namespace {

struct Unit {
  double size;
  const char* name;
};

/// The largest unit of which there is at least one.
Unit unit_for(double largest, std::initializer_list<Unit> units) {
  for (const Unit& unit : units)
    if (largest >= unit.size) return unit;
  return *(units.end() - 1);
}

/// One digit after the point from 1 on (none when it is 0), two below.
std::string figure(double value) {
  if (value == 0) return "0";
  std::string result = formatted("{:.{}f}", value, value < 1 ? 2 : 1);
  if (result.size() > 2 && result.ends_with(".0")) result.resize(result.size() - 2);
  return result;
}

std::string words_for(const OptimizerOptions& optimizer) {
  const bool has_momentum = optimizer.kind == OptimizerKind::kSgd && optimizer.momentum != 0;
  return str(optimizer_name(optimizer.kind), has_momentum ? " with momentum" : "");
}

Unit unit_for_bytes(int64_t largest) {
  return unit_for(static_cast<double>(largest), {{1e12, "TB"}, {1e9, "GB"}, {1e6, "MB"}, {1e3, "kB"}, {1, "bytes"}});
}

/// "7.5 B parameters, bf16 weights, AdamW: model states per rank"
std::string heading(const Estimate& estimate) {
  const auto parameters = static_cast<double>(estimate.parameters);
  const Unit count = unit_for(parameters, {{1e12, " T"}, {1e9, " B"}, {1e6, " M"}, {1e3, " k"}, {1, ""}});
  return str(figure(parameters / count.size), count.name, " parameters, ", short_name(estimate.request.weight_dtype),
             " weights, ", estimate.request.update_dtype != at::kFloat ? "mode low, " : "",
             words_for(estimate.request.optimizer), ": model states per rank");
}

std::string row_of(const EstimateRow& row, const std::vector<int64_t>& bytes, const Unit& unit) {
  std::string text = formatted("{:>6}{:>14}", row.world, short_name(row.accumulation_dtype));
  for (const int64_t one : bytes) text += formatted("{:>10}", figure(static_cast<double>(one) / unit.size));
  return text + "\n";
}

/// Every rank of N snapshots the same, whatever the stage.
std::string snapshot_line(const Estimate& estimate) {
  if (estimate.rows.empty()) return "";
  const EstimateRow& row = estimate.rows.front();
  const int64_t bytes = row.by_stage.front().snapshot_bytes * row.world;
  const Unit unit = unit_for_bytes(bytes);
  return str("\nWith checkpoint.async_save each rank holds a snapshot besides: ",
             figure(static_cast<double>(bytes) / unit.size), " ", unit.name, " / ranks.\n");
}

Json states_json(const ModelStates& states) {
  return {{"weight_bytes", states.weight_bytes}, {"gradient_bytes", states.gradient_bytes},
          {"master_bytes", states.master_bytes}, {"optimizer_bytes", states.optimizer_bytes},
          {"total_bytes", states.total()},       {"host_bytes", states.host_bytes},
          {"disk_bytes", states.disk_bytes},     {"async_save_snapshot_bytes", states.snapshot_bytes}};
}

bool offloads(const Estimate& estimate) { return estimate.request.offload_ratio > 0; }
bool uses_disk(const Estimate& estimate) { return estimate.request.on_disk != KeptOnDisk::kNothing; }

/// The heading of the last column: what is not where the model is.
const char* elsewhere(const Estimate& estimate) {
  if (uses_disk(estimate)) return "      disk\n";
  return offloads(estimate) ? "      host\n" : "\n";
}
std::optional<int64_t> bytes_elsewhere(const Estimate& estimate, const ModelStates& states) {
  if (uses_disk(estimate)) return states.disk_bytes;
  return offloads(estimate) ? std::optional(states.host_bytes) : std::nullopt;
}

/// The meaning of the last column, which without a stage is that of ZeRO stage 3.
std::string meaning_of_elsewhere(const Estimate& estimate, bool of_one_stage) {
  const EstimateRequest& request = estimate.request;
  if (uses_disk(estimate))
    return str("\nWith offload_optimizer",
               request.on_disk == KeptOnDisk::kStatesAndWeights ? " and, at stage 3, offload_param" : "",
               " of the device \"nvme\": \"disk\" is on disk", of_one_stage ? "" : " at stage 3",
               "; the rest is left in memory.\n");
  if (!offloads(estimate)) return "";
  return str("\nWith offload_optimizer", request.offload_ratio < 1 ? str(" (ratio ", request.offload_ratio, ")") : "",
             request.offload_parameters ? " and, at stage 3, offload_param" : "",
             ": \"host\" is in the host's memory, from stage 1 on; the rest is left on the device.\n");
}

}  // namespace

std::string to_table(const Estimate& estimate) {
  int64_t largest = 0;
  for (const EstimateRow& row : estimate.rows)
    for (const ModelStates& states : row.by_stage)
      largest = std::max({largest, states.total(), states.host_bytes, states.disk_bytes});
  const Unit unit = unit_for_bytes(largest);
  std::string table = str(heading(estimate), " in ", unit.name,
                          "\n\n ranks  accumulation   stage 0   stage 1   stage 2   stage 3", elsewhere(estimate));
  for (const EstimateRow& row : estimate.rows) {
    std::vector<int64_t> totals;
    for (const ModelStates& states : row.by_stage) totals.push_back(states.total());
    // On the host as at ZeRO stages 1 and 2, and frozen ones.
    if (const auto bytes = bytes_elsewhere(estimate, row.by_stage.back())) totals.push_back(*bytes);
    table += row_of(row, totals, unit);
  }
  return table + meaning_of_elsewhere(estimate, /*of_one_stage=*/false) + snapshot_line(estimate);
}

std::string to_table(const Estimate& estimate, int stage) {
  int64_t largest = 0;
  for (const EstimateRow& row : estimate.rows)
    largest = std::max(
        {largest, row.by_stage.at(stage).total(), row.by_stage[stage].host_bytes, row.by_stage[stage].disk_bytes});
  const Unit unit = unit_for_bytes(largest);
  std::string table =
      str(heading(estimate), " at ZeRO stage ", stage, " in ", unit.name,
          "\n\n ranks  accumulation   weights gradients   masters optimizer     total", elsewhere(estimate));
  for (const EstimateRow& row : estimate.rows) {
    const ModelStates& states = row.by_stage[stage];
    std::vector<int64_t> parts = {states.weight_bytes, states.gradient_bytes, states.master_bytes,
                                  states.optimizer_bytes, states.total()};
    if (const auto bytes = bytes_elsewhere(estimate, states)) parts.push_back(*bytes);
    table += row_of(row, parts, unit);
  }
  return table + meaning_of_elsewhere(estimate, /*of_one_stage=*/true) + snapshot_line(estimate);
}

Json to_json(const Estimate& estimate) {
  Json rows = Json::array();
  for (const EstimateRow& row : estimate.rows) {
    for (size_t stage = 0; stage < row.by_stage.size(); ++stage) {
      Json json = {{"world", row.world}, {"accumulation_dtype", short_name(row.accumulation_dtype)}, {"stage", stage}};
      json.update(states_json(row.by_stage[stage]));
      rows.push_back(std::move(json));
    }
  }
  return {{"parameters", estimate.parameters},
          {"weight_dtype", short_name(estimate.request.weight_dtype)},
          {"update_dtype", short_name(estimate.request.update_dtype)},
          {"optimizer", words_for(estimate.request.optimizer)},
          {"offload_ratio", estimate.request.offload_ratio},
          {"offload_parameters", estimate.request.offload_parameters},
          {"per_rank", std::move(rows)}};
}

}  // namespace trireme
