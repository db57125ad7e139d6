#include "trireme/engine/engine.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/variable.h>

#include "trireme/intercept.h"
#include "trireme/observe/run_status.h"
#include "trireme/step/loss_checks.h"

namespace trireme {

ForwardScope Engine::begin_forward() {
  training().condition().require_intact("forward");
  training().step().tell_missing_step();
  events().begin_passes();
  return training().begin_forward();
}

at::Tensor Engine::backward(const at::Tensor& loss, const BackwardOptions& options) {
  require_optimizer("backward");
  check_loss(loss, "backward");
  training().passes().check_loss(loss);
  TrainStep& step = training().step();
  const at::Tensor scaled = step.scale(loss);
  // Gradients are divided by the accumulation steps. With scale_wrt_gas=false the loss was divided already: undo it.
  const int64_t accumulation_steps = gradient_accumulation_steps();
  const bool undoes = !options.scale_wrt_gas && accumulation_steps > 1;
  const at::Tensor seed = undoes ? at::full_like(scaled, accumulation_steps) : at::ones_like(scaled);
  step.tell_missing_step();
  training().counts().note_loss(loss);
  step.backward_from({torch::autograd::impl::gradient_edge(scaled)}, {seed},
                     {.retain_graph = options.retain_graph, .create_graph = options.create_graph});
  const WithoutInterception own_operators;
  const at::Tensor weighted = options.scale_wrt_gas ? loss.detach() / accumulation_steps : loss.detach();
  events().add_loss(weighted);
  return weighted;
}

at::Tensor Engine::scale(const at::Tensor& output) const {
  require_optimizer("scale");
  return training().step().scale(output);
}

StepReport Engine::step() {
  require_optimizer("step");
  events().begin_step();
  if (is_gradient_accumulation_boundary() || !config().managed_gradient_accumulation) events().end_passes();
  StepReport report;
  try {
    report = training().step().step();
  } catch (...) {
    events().drop();  // with the window's gradients
    throw;
  }
  if (report.ended_window) events().tell();
  return report;
}

void Engine::set_gradient_accumulation_boundary(bool is_boundary) {
  require_optimizer("set_gradient_accumulation_boundary");
  training().step().set_boundary(is_boundary);
}

NoSync Engine::no_sync() {
  require_optimizer("no_sync");
  return NoSync(training());
}

CoalescedReduction Engine::coalesce_grad_reduction() {
  require_optimizer("coalesce_grad_reduction");
  return CoalescedReduction(training());
}

}  // namespace trireme
