#include "trireme/training/training.h"

#include "training/forward_checks.h"
#include "training/tensor_slices.h"
#include "trireme/access/parameter_access.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/observe/observation.h"
#include "trireme/observe/run_status.h"

namespace trireme {

Training::~Training() = default;

Pager& Training::pager() const {
  condition_.require_there("pager");
  return *pager_;
}

ForwardScope Training::begin_forward() {
  condition_.require_there("forward");
  forward_checks_->begin();
  return {*forward_checks_, config_.batch.train_micro_batch_size_per_gpu, config_.precision, pager_->device().type(),
          pager_.get()};
}

void Training::set_batch(const char* call, int64_t micro_batch_size, int64_t accumulation_steps) {
  condition_.require_there(call);
  step_->require_no_window(call);
  config_.batch = {.train_batch_size = micro_batch_size * accumulation_steps * config_.degrees.data,
                   .train_micro_batch_size_per_gpu = micro_batch_size,
                   .gradient_accumulation_steps = accumulation_steps};
  step_->set_batch(micro_batch_size, accumulation_steps);
}

DiskUse Training::disk_use() const {
  const ShardedOptimizer* optimizer = step_->optimizer();
  return pager().disk_use() + (optimizer != nullptr ? optimizer->disk_use() : DiskUse{});
}

void Training::destroy() {
  condition_.require_there("destroy");
  const CallerScope caller("destroy");
  pager_->require_free();
  passes_ = {};
  forward_checks_.reset();
  access_.reset();
  saver_.reset();
  step_->release();
  pager_->restore();
  pager_.reset();
  if (partition_) join_parameters(*groups_.slices, *partition_, slices_);
  slices_.clear();
  observation_.reset();
  told_status_.reset();
  condition_.mark_destroyed();
}

}  // namespace trireme
