#include "training/precision_table.h"

#include <set>
#include <string>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/state_names.h"

namespace trireme {

namespace {

bool is_16_bit(at::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf; }

std::string names_of(const DtypeBytes& bytes) {
  std::set<std::string> names;
  for (const auto& [dtype, count] : bytes) names.insert(short_name(dtype));
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : "+") + name;
  return text.empty() ? "none" : text;
}

int64_t total(const DtypeBytes& bytes) {
  int64_t sum = 0;
  for (const auto& [dtype, count] : bytes) sum += count;
  return sum;
}

struct Row {
  const char* stage;
  std::string dtype;
  std::string size;
  std::string remark;
};

std::string line_of(const Row& row) {
  return without_trailing_spaces(formatted("\n  {:<18}{:<10}{:>12}  {}", row.stage, row.dtype, row.size, row.remark));
}

/// Masters and states that this rank keeps.
struct OptimizerBytes {
  DtypeBytes masters;
  DtypeBytes states;
};

OptimizerBytes optimizer_bytes(const ShardedOptimizer& optimizer) {
  OptimizerBytes bytes;
  for (const TensorSlice& slice : optimizer.own_state()) {
    const bool is_master = parse_state_name(slice.name).kind == StateKind::kMaster;
    const at::ScalarType dtype = slice.store ? slice.store->dtype() : slice.data.scalar_type();
    const int64_t numel = slice.store ? slice.store->numel() : slice.data.numel();
    (is_master ? bytes.masters : bytes.states)[dtype] += numel * static_cast<int64_t>(c10::elementSize(dtype));
  }
  return bytes;
}

/// Dtypes of gradients: as backward makes them or as they are summed, and as they travel.
struct GradientDtypes {
  DtypeBytes sums;
  DtypeBytes sent;
};

GradientDtypes gradient_dtypes(const Pager& pager) {
  const PagerPolicy& policy = pager.policy();
  // Where peers read gradients in place, these stand in the weights' dtype.
  const bool reads_in_place = policy.stage == 3 && policy.gather == GatherPolicy::kShared && !policy.deterministic;
  GradientDtypes dtypes;
  for (const OwnedSlice& slice : pager.owned()) {
    const UnitLayout& unit = pager.layout().units[slice.unit];
    const at::ScalarType kept = reads_in_place ? unit.dtype : slice.gradients.scalar_type();
    dtypes.sums[slice.gradients.scalar_type()];
    dtypes.sent[is_16_bit(unit.communication_dtype) ? unit.communication_dtype : kept];
  }
  return dtypes;
}

DtypeBytes weight_dtypes(const Pager& pager) {
  DtypeBytes dtypes;
  for (const UnitLayout& unit : pager.layout().units) dtypes[unit.dtype];
  return dtypes;
}

DtypeBytes buffer_dtypes(const Buffers& buffers) {
  DtypeBytes dtypes;
  for (const TensorSlice& buffer : buffers.slices())
    if (at::isFloatingType(buffer.data.scalar_type())) dtypes[buffer.data.scalar_type()];
  return dtypes;
}

std::string mode_of(const Config& config, const OptimizerBytes& optimizer) {
  if (config.precision.update_dtype != at::kFloat) return "low";
  return optimizer.masters.empty() && !config.precision.autocast.enabled ? "full" : "mixed";
}

std::string scale_text(const Config& config, TrainStep& step) {
  const auto scale = step.loss_scale();
  if (!scale) return "";
  return str("loss scale ", *scale, config.precision.loss_scale.loss_scale == 0 ? " (dynamic)" : " (fixed)");
}

std::string precision_table(const DtypeBytes& loaded, const Config& config, const Pager& pager, const Buffers& buffers,
                            TrainStep& step) {
  const PagerMemory memory = pager.memory();
  const DtypeBytes weights = weight_dtypes(pager);
  const int64_t on_disk = pager.disk_use().bytes;
  std::vector<Row> rows = {{"load", names_of(loaded), size_text(total(loaded)), ""},
                           {"preparation", names_of(weights), size_text(memory.weight_bytes + on_disk),
                            str("buffers ", names_of(buffer_dtypes(buffers)), on_disk > 0 ? ", weights on disk" : "")}};
  std::string title = "precision";
  if (const ShardedOptimizer* optimizer = step.optimizer()) {
    const OptimizerBytes kept = optimizer_bytes(*optimizer);
    const GradientDtypes gradients = gradient_dtypes(pager);
    const AutocastOptions& autocast = config.precision.autocast;
    DtypeBytes updated = kept.masters;
    for (const auto& [dtype, count] : weights)
      if (kept.masters.empty() || dtype == at::kFloat) updated[dtype];
    title += ": " + mode_of(config, kept);
    rows.push_back({"optimizer init", names_of(updated), size_text(total(kept.masters) + total(kept.states)),
                    str("masters ", names_of(kept.masters), ", states ", names_of(kept.states),
                        config.disk.is_on() ? ", on disk" : "")});
    rows.push_back({"forward, backward", autocast.enabled ? short_name(autocast.dtype) : names_of(weights),
                    size_text(memory.gradient_bytes),
                    str("gradients summed in ", names_of(gradients.sums), ", sent in ", names_of(gradients.sent))});
    rows.push_back({"optimizer step", names_of(updated), "",
                    config.precision.stochastic_rounding ? "rounded stochastically" : scale_text(config, step)});
  }
  std::string text = title + "; dtypes, and bytes on rank 0";
  for (const Row& row : rows) text += line_of(row);
  return text;
}

std::string upcast_warning(const DtypeBytes& loaded, const TrainStep& step) {
  const ShardedOptimizer* optimizer = step.optimizer();
  DtypeBytes low;
  for (const auto& [dtype, count] : loaded)
    if (is_16_bit(dtype)) low[dtype] = count;
  if (optimizer == nullptr || low.empty()) return "";
  const OptimizerBytes kept = optimizer_bytes(*optimizer);
  const int64_t masters = total(kept.masters), states = total(kept.states);
  if (masters == 0) return "";
  return str("precision: parameters that came in ", names_of(low), " are cast up to fp32 masters, ", size_text(masters),
             " on rank 0, and their optimizer states take ", size_text(states / 2), " more than in 16 bits",
             low.contains(at::kBFloat16)
                 ? "; for updates in bf16 set bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states to true"
                 : "");
}

}  // namespace

DtypeBytes bytes_by_dtype(const std::vector<NamedParameter>& parameters) {
  DtypeBytes bytes;
  for (const NamedParameter& parameter : parameters)
    bytes[parameter.tensor.scalar_type()] += parameter.tensor.numel() * parameter.tensor.element_size();
  return bytes;
}

void log_precision(const DtypeBytes& loaded, const Config& config, const Pager& pager, const Buffers& buffers,
                   TrainStep& step) {
  log(LogLevel::kDebug, precision_table(loaded, config, pager, buffers, step));
  if (const std::string warning = upcast_warning(loaded, step); !warning.empty()) log(LogLevel::kWarning, warning);
}

}  // namespace trireme
