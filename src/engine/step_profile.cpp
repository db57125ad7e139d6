#include "engine/step_profile.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/notices.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/config/config.h"
#include "trireme/intercept.h"
#include "trireme/observe/progress.h"
#include "trireme/observe/step_timers.h"
#include "trireme/observe/work_count.h"
#include "trireme/training/training.h"

namespace trireme {
namespace {

constexpr double kFlopsPerMultiplyAdd = 2;
constexpr double kPercent = 100;

std::string flops_text(int64_t multiply_adds) {
  return short_quantity(kFlopsPerMultiplyAdd * static_cast<double>(multiply_adds), "FLOP");
}

std::string ms_text(double seconds) { return formatted("{:.2f} ms", 1e3 * seconds); }

std::string share_text(double part, double whole) {
  return whole > 0 ? formatted("{:.1f}%", kPercent * part / whole) : "–";
}

bool is_inside(const std::string& name, const std::string& outer) {
  return outer.empty() || name == outer || name.starts_with(outer + ".");
}

class StepProfile {
 public:
  /// Both outlive this. Before the first forward.
  StepProfile(const torch::nn::Module& module, const Training& training);
  ~StepProfile();
  StepProfile(const StepProfile&) = delete;
  StepProfile& operator=(const StepProfile&) = delete;

  /// A forward, or a schedule of passes, begins: counting begins where the step is due.
  void begin_passes();
  /// Those of a window are over.
  void end_passes();
  /// The step is over: rank 0 writes the report. Collective over the stages of a pipeline.
  void tell();

 private:
  /// Tells which module's parameters an operator uses.
  class ModuleCalls;
  struct Row {
    std::string name, type;
    int depth = 0;
    int64_t parameters = 0;
    int64_t forward = 0, backward = 0, recomputed = 0;  ///< multiply-adds, with those of modules inside
    double seconds = 0;                                 ///< of forward
  };

  std::vector<Row> rows() const;
  std::string text() const;
  std::string classes_by_depth(const std::vector<Row>& rows) const;

  const Training& training_;
  const FlopsProfilerConfig options_;
  std::vector<Row> modules_;  ///< outermost first, without what was counted
  std::unordered_map<const c10::StorageImpl*, int64_t> module_of_;
  std::shared_ptr<StepTimers> timers_;
  std::optional<Listening> hears_times_;
  std::unique_ptr<ModuleCalls> calls_;
  std::unique_ptr<InterceptScope> scope_;
  std::unique_ptr<WorkCount> count_;  ///< null: the step is not due
};

class StepProfile::ModuleCalls final : public Pass {
 public:
  ModuleCalls(const std::unordered_map<const c10::StorageImpl*, int64_t>& module_of, WorkCount& count)
      : module_of_(module_of), count_(count) {}

  /// Before the count, which is opened after it.
  PassOrder order() const override { return PassOrder::kTouch; }
  void run(OperatorCall& call, Next next) override {
    const std::optional<int64_t> module = module_in(call);
    if (!module) return next(call);
    count_.enter(*module);
    try {
      next(call);
    } catch (...) {
      count_.leave(*module);
      throw;
    }
    count_.leave(*module);
  }

 private:
  std::optional<int64_t> module_in(const OperatorCall& call) const {
    std::optional<int64_t> module;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
      if (module || !tensor.defined() || !tensor.has_storage()) return;
      if (const auto found = module_of_.find(tensor.storage().unsafeGetStorageImpl()); found != module_of_.end())
        module = found->second;
    });
    return module;
  }

  const std::unordered_map<const c10::StorageImpl*, int64_t>& module_of_;
  WorkCount& count_;
};

StepProfile::StepProfile(const torch::nn::Module& module, const Training& training)
    : training_(training),
      options_(training.config().flops_profiler),
      timers_(std::make_shared<StepTimers>(StepTimers::Ended())) {
  const auto add = [this](const std::string& name, const torch::nn::Module& one) {
    const auto number = static_cast<int64_t>(modules_.size());
    Row row{.name = name, .type = one.name(), .depth = name.empty() ? 0 : 1};
    row.depth += static_cast<int>(std::ranges::count(name, '.'));
    for (const auto& parameter : one.named_parameters(/*recurse=*/false)) {
      if (!parameter.value().defined()) continue;
      const auto* const storage = parameter.value().storage().unsafeGetStorageImpl();
      if (module_of_.emplace(storage, number).second) row.parameters += parameter.value().numel();
    }
    modules_.push_back(std::move(row));
  };
  add("", module);
  for (const auto& inner : module.named_modules(std::string(), /*include_self=*/false))
    add(inner.key(), *inner.value());
  const Group& world = training.groups().model;
  timers_->follow(&training.pager());
  hears_times_.emplace(world.world_rank(world.rank()), timers_);
}

StepProfile::~StepProfile() { end_passes(); }

void StepProfile::begin_passes() {
  if (scope_ != nullptr || training_.step().known_progress().global_steps != options_.profile_step) return;
  count_ = std::make_unique<WorkCount>();
  calls_ = std::make_unique<ModuleCalls>(module_of_, *count_);
  scope_ = std::make_unique<InterceptScope>(InterceptScope::Watch::kWrites, calls_.get());
  count_->start();
}

void StepProfile::end_passes() {
  if (scope_ == nullptr) return;
  count_->stop();
  scope_.reset();
}

std::vector<StepProfile::Row> StepProfile::rows() const {
  std::vector<Row> rows = modules_;
  for (Row& row : rows) row.parameters = 0;
  const auto add = [&rows](const std::string& name, const auto& change) {
    for (Row& row : rows)
      if (is_inside(name, row.name)) change(row);
  };
  for (const Row& module : modules_) add(module.name, [&](Row& row) { row.parameters += module.parameters; });
  for (const WorkCall& call : count_->calls()) {
    const std::string name = call.module < 0 ? "" : modules_[static_cast<size_t>(call.module)].name;
    add(name, [&](Row& row) {
      row.forward += call.sums.forward;
      row.backward += call.sums.backward;
      row.recomputed += call.sums.recomputed;
      row.seconds += call.seconds;
    });
  }
  return rows;
}

std::string StepProfile::classes_by_depth(const std::vector<Row>& rows) const {
  std::map<int, std::map<std::string, Row>> depths;
  for (const Row& row : rows) {
    Row& sum = depths[row.depth][row.type];
    sum.parameters += row.parameters;
    sum.forward += row.forward;
    sum.seconds += row.seconds;
  }
  const int deepest = depths.rbegin()->first;
  std::string text;
  for (const auto& [depth, classes] : depths) {
    if (options_.module_depth >= 0 && depth != std::min<int64_t>(options_.module_depth, deepest)) continue;
    text += str("depth ", depth, ":\n");
    const auto list = [&](const char* what, const auto& value, const auto& text_of) {
      std::vector<std::pair<std::string, Row>> sorted(classes.begin(), classes.end());
      std::ranges::stable_sort(sorted, [&](const auto& a, const auto& b) { return value(a.second) > value(b.second); });
      std::string line;
      for (size_t i = 0; i < std::min(sorted.size(), static_cast<size_t>(options_.top_modules)); ++i)
        line += str(i == 0 ? "" : ", ", sorted[i].first, " ", text_of(value(sorted[i].second)));
      text += formatted("    {:<12}{}\n", what, line);
    };
    list(
        "parameters", [](const Row& row) { return row.parameters; },
        [](int64_t count) { return short_count(static_cast<double>(count)); });
    list(
        "forward", [](const Row& row) { return row.forward; }, flops_text);
    list(
        "latency", [](const Row& row) { return row.seconds; }, ms_text);
  }
  return text;
}

std::string StepProfile::text() const {
  const std::vector<Row> all = rows();
  const Row& whole = all.front();
  const std::optional<StepTimes> times = timers_->last();
  const Group* const stages = training_.groups().stages;
  const std::string of_stage = stages != nullptr ? str(" of stage ", stages->rank()) : "";
  std::string text = str("FLOPs profile", of_stage, " at step ", options_.profile_step, "\n");
  text += str("Of this rank's operators in all ", training_.config().batch.gradient_accumulation_steps,
              " micro-batches: 2 FLOPs for each multiply-add of products, convolutions and attention.\n");
  const auto line = [&text](const char* what, const std::string& value) {
    text += formatted("{:<44}{}\n", str(what, ":"), value);
  };
  line("parameters", short_count(static_cast<double>(whole.parameters)));
  line("forward", flops_text(whole.forward));
  line("backward, recomputation included", flops_text(whole.backward + whole.recomputed));
  if (whole.recomputed > 0) line("recomputation, in backward", flops_text(whole.recomputed));
  if (times) {
    line("forward latency", ms_text(1e-3 * times->forward_ms));
    line("backward latency", ms_text(1e-3 * times->backward_ms));
    line("step latency (of a pipeline with all passes)", ms_text(1e-3 * times->step_ms));
  }
  std::string uncounted;
  for (const auto& [name, calls] : count_->uncounted())
    uncounted += str(uncounted.empty() ? "" : ", ", name, " (", calls, ")");
  if (!uncounted.empty()) line("NOT COUNTED (calls)", uncounted);
  text += "Most by depth, summed over modules of a class\n" + classes_by_depth(all);
  if (!options_.detailed) return text;
  text += "Every module with those inside of it: parameters, forward and backward FLOPs, latency of its operators\n";
  for (const Row& row : all)
    text += formatted(
        "{}{} {}: {} = {}, {} = {}, {}, {} = {}\n", std::string(2 * static_cast<size_t>(row.depth), ' '),
        row.name.empty() ? "(the model)" : row.name, row.type, short_count(static_cast<double>(row.parameters)),
        share_text(static_cast<double>(row.parameters), static_cast<double>(whole.parameters)), flops_text(row.forward),
        share_text(static_cast<double>(row.forward), static_cast<double>(whole.forward)),
        flops_text(row.backward + row.recomputed), ms_text(row.seconds), share_text(row.seconds, whole.seconds));
  return text;
}

void StepProfile::tell() {
  if (count_ == nullptr) return;
  end_passes();
  std::string report = text();
  count_.reset();
  const TrainingGroups& groups = training_.groups();
  if (groups.stages != nullptr) {
    const CallerScope caller("flops_profiler");
    const std::vector<std::string> texts = gather_or_throw(*groups.stages, [&] { return report; });
    report.clear();
    for (const std::string& text : texts) report += text;
  }
  if (groups.model.rank() != 0) return;
  if (!options_.output_file.empty()) {
    try {
      return write_file_atomically(posix_file_system(), options_.output_file, report);
    } catch (const IoError& error) {
      log(LogLevel::kWarning,
          str("`flops_profiler.output_file`: the report is in the log, and training goes on: ", error.what()));
    }
  }
  log(LogLevel::kInfo, report);
}

}  // namespace

PassWatch flops_profile(const torch::nn::Module& module, const Training& training) {
  const auto profile = std::make_shared<StepProfile>(module, training);
  return {.begin = [profile] { profile->begin_passes(); },
          .end = [profile] { profile->end_passes(); },
          .tell = [profile] { profile->tell(); }};
}

}  // namespace trireme
