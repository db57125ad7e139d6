// Trains an unmodified module over the ranks of a group. The methods have DeepSpeed's names and meanings.
#pragma once

#include <ATen/core/Tensor.h>

#include "trireme/engine/engine_base.h"
#include "trireme/training/scopes.h"

namespace trireme {

/// A Training whose forward, backward and step a program calls.
class Engine : public EngineBase {
 public:
  /// As Training's. Collective.
  /// Throws    before the module is changed: ConfigError and IoError as read_config; as Training's.
  Engine(Group& group, torch::nn::Module& module, const InitializeOptions& options = {})
      : EngineBase(group, module, with_profile(options)) {}
  /// The same along the axes of a grid, as Training's. Collective over the world.
  Engine(const Grid& grid, torch::nn::Module& module, const InitializeOptions& options = {})
      : EngineBase(grid, module, with_profile(options)) {}

  /// Opens a forward of the module, for a caller that calls the module itself.
  /// Throws    StateError: at ZeRO stage 3 with gather="copy", in another thread than the engine's.
  ForwardScope begin_forward();
  /// Accumulates the gradients of `loss` and returns it detached, divided by the accumulation steps if scale_wrt_gas. A
  /// direct loss.backward() gives the same gradients. Collective at ZeRO stages 2 and 3.
  /// Throws    StateError: no optimizer, or after destroy(); ShapeError: not one floating element, or without a graph.
  at::Tensor backward(const at::Tensor& loss, const BackwardOptions& options = {});
  /// The tensor to call backward() on directly, of any shape: `output` in fp32 times loss_scale() where something
  /// computes in fp16 (a direct backward() of what was not scaled throws StateError there), else `output` itself.
  /// Throws    as backward().
  at::Tensor scale(const at::Tensor& output) const;
  /// Inside an accumulation window it only counts. At the window's end it reduces, checks and clips gradients, updates
  /// weights and advances the schedule; a gradient that is not finite skips the step on all ranks, except in bf16
  /// without check_grad_overflow. Collective.
  ///
  /// Returns what the host knows of the step without waiting for a device.
  /// Throws    StateError: no optimizer; no gradient on any rank since the last step, or
  ///           (ignore_unused_parameters=false) none for some parameter, named; an overflow at the smallest loss scale
  ///           (ZeRO stages 1 to 3; on a device it may be told one step late). Nothing is updated then, and the
  ///           window's gradients are dropped. They are also dropped where the optimizer throws; the weights that this
  ///           rank updates are then as the optimizer left them.
  StepReport step();

  /// From here on `is_boundary`, not the count, says whether step() ends a window. A micro-batch still weighs
  /// 1 / gradient_accumulation_steps().
  void set_gradient_accumulation_boundary(bool is_boundary);
  /// A scope in which backward passes reduce nothing, at every ZeRO stage; the first one after it, or step(), reduces
  /// the sum. Meanwhile a rank holds whole gradients: 4 bytes per parameter, 2 with a 16-bit accumulation dtype. Call
  /// it on every rank alike.
  ///
  /// Throws    StateError: no optimizer, inside another such scope. step() inside of it throws too.
  NoSync no_sync();
  /// As no_sync(), but close() of the scope reduces, once, at every stage. Throws as no_sync().
  CoalescedReduction coalesce_grad_reduction();
};

}  // namespace trireme
