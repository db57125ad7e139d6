// The report that the section flops_profiler asks for, of a C++ program's engine.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "trireme/base/notices.h"
#include "trireme/config/config.h"
#include "trireme/intercept.h"
#include "trireme/observe/step_timers.h"
#include "trireme/observe/work_count.h"

namespace trireme {

class Training;

/// Counts the passes of one step, and reports them after it. A libtorch module has no hooks: an operator belongs to the
/// module of which it uses a parameter, in backward to that of the operator whose gradient it is.
///
/// Every rank counts alike, since counted operators are taken apart.
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

}  // namespace trireme
