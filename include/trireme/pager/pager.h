// ZeRO as demand paging: a parameter keeps its full shape, only its bytes come and go.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/base/exact_sum.h"
#include "trireme/base/state_tree.h"
#include "trireme/base/tensor_part.h"
#include "trireme/comm/group.h"
#include "trireme/pager/layout/layout.h"
#include "trireme/pager/layout/policy.h"
#include "trireme/pager/layout/shard_mesh.h"
#include "trireme/pager/storage/owned_slice.h"
#include "trireme/pager/storage/pager_memory.h"

namespace trireme {

/// A parameter to manage.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
  at::ScalarType communication_dtype = at::ScalarType::Undefined;  ///< as ParameterSpec's
  int mesh = 0;                                                    ///< number of its ShardMesh
  TensorPart part = {};                                            ///< as ParameterSpec's
  bool is_counted = true;                                          ///< as ParameterSpec's
  TensorPart counted = {};                                         ///< as ParameterSpec's
};

/// Counts of gradients from this rank's backward passes since the window opened.
struct GradientsSoFar {
  int64_t count = 0;   ///< gradients that parameters got
  int64_t passes = 0;  ///< the most that one parameter got
};

class ClosedWindow;

/// The base of objects for Pager::set_companion().
class PagerCompanion {
 public:
  virtual ~PagerCompanion() = default;
};

/// Manages the storages of a model's parameters over one or more meshes of ranks. Lives as long as training does.
///
/// From construction to destruction every operator of this thread (and of autograd's threads working for it) that
/// touches one of the parameters finds it whole. Gradients leave `parameter.grad()` as backward produces them.
class Pager {
 public:
  /// Takes the parameters over: rank 0's values become everybody's. Collective.
  ///
  /// Requires  `parameters` distinct tensors (ties already removed), floating point, on one device; `group`, of that
  ///           device where it has several ranks, outlives the pager.
  /// Throws    ConfigError: a parameter that cannot be managed (named), a policy that the group cannot serve.
  Pager(Group& group, std::vector<NamedParameter> parameters, const PagerPolicy& policy);
  /// The same with parameters of several meshes. `group` has the ranks of all meshes, and is the group in which ranks
  /// agree.
  /// Throws    ConfigError (kUnsupported) too: replicas with `deterministic`, states over replicas with offloading.
  Pager(Group& group, std::vector<ShardMesh> meshes, std::vector<NamedParameter> parameters, const PagerPolicy& policy);
  /// Local, on the thread that constructed it. Parameters that are whole stay readable; released ones throw an error
  /// that names them when their data is read.
  ~Pager();
  Pager(const Pager&) = delete;
  Pager& operator=(const Pager&) = delete;

  const Layout& layout() const;
  const std::vector<ParameterSpec>& parameters() const;
  const std::vector<ShardMesh>& meshes() const;
  const ShardMesh& mesh_of(int unit) const { return meshes()[layout().units[unit].mesh]; }
  /// The policy in force: `gather` is never kAuto here.
  const PagerPolicy& policy() const;
  c10::Device device() const;  ///< of all parameters

  /// One per trainable unit, in layout order. Stable over the pager's life.
  const std::vector<OwnedSlice>& owned() const;
  /// Like owned() for the frozen units (gradients undefined).
  const std::vector<OwnedSlice>& owned_frozen() const;

  /// Gradients are divided by `steps`, as a rule the micro-batches of a window, and under gradient_op kMean by
  /// ShardMesh::divisor(). At first 1. Set it only between windows.
  void set_accumulation_steps(int64_t steps);

  /// `check` is called with each gradient that backward produces, before it is taken. What it throws ends the backward
  /// pass, and the gradient is dropped.
  void set_gradient_check(std::function<void()> check);

  /// Says that the next backward pass reaches only parameters of `units` (by unit; empty: all), so that other units are
  /// not sent before its end. If another unit gets a gradient nevertheless, the ranks agree to send it at the end of
  /// the pass. Local; the same on every rank. Without effect where end_backward() sends nothing.
  void expect_units(const std::vector<bool>& units);

  /// Says that a backward pass has ended: buckets that are incomplete, since some parameters were not used, are
  /// reduced. Collective at ZeRO stages 2 and 3. Without it close_window() does the same.
  void end_backward();

  /// While true, gradients are summed on this rank alone, whole and in the accumulation dtype, and end_backward()
  /// reduces nothing. The sum is reduced with the first backward pass afterwards, or by close_window(). Local; the same
  /// on every rank. Without effect where a window is reduced only once anyway, as at ZeRO stages 0 and 1.
  void defer_reductions(bool defer);
  bool defers_reductions() const;
  /// While reductions are deferred: the gradients of `parameter` that this rank has summed since the last reduction,
  /// divided by the accumulation steps, [numel of the parameter] in fp32; nothing where its backward passes gave none.
  /// Local.
  std::optional<at::Tensor> sum_of_this_rank(int parameter) const;

  /// Completes the reductions of the backward passes so far, inside a window: `owned().gradients` hold their mean until
  /// the next backward, which adds to it. Collective.
  ///
  /// Throws    StateError: reductions are deferred; as close_window().
  void reduce_now();
  GradientsSoFar gradients_so_far() const;
  /// After reduce_now(): whether some rank produced a gradient of `parameter`.
  bool has_gradient(int parameter) const;
  /// To call after reduce_now() on every rank when the caller has written the owned gradients of `parameter`, for which
  /// has_gradient() is true.
  void gradient_written(int parameter);

  /// Ends the accumulation window: completes every reduction. Collective.
  ///
  /// Throws    StateError: the window before was left closed; parameters were given back by restore(); a parameter that
  ///           is in a zero::GatheredParameters scope, was given another storage, or was unfrozen.
  [[nodiscard]] ClosedWindow close_window();

  /// Takes user writes since the last step or call over into the owned weights, within a window; gradients stay as they
  /// are. Returns, by parameter index, whether this rank's user wrote it. Collective.
  std::vector<bool> settle_writes();

  /// For an offloaded unit: blocks the calling thread (any may call) until its gradients have arrived on the host and
  /// its former weights have been copied to the device.
  void await_owned(int unit);
  bool is_owned_there(int unit) const;  ///< whether await_owned() would return at once
  /// Ends a ClosedWindow::defer_publish() of `unit`, from any thread: its owned weights are final, or `problem` is the
  /// error that prevented the update.
  void publish_deferred(int unit, const std::exception_ptr& problem = nullptr);
  /// Blocks until all that was deferred is published.
  void await_published();

  /// Releases gathered units (kCopy) and their buffers. Call it on every rank alike.
  void release_gathered();
  /// Throws StateError, naming a parameter, if a zero::GatheredParameters scope holds one.
  void require_free() const;

  /// Makes `parameter` whole for reading until the next operator of this thread. Collective under kCopy.
  at::Tensor whole(int parameter);
  /// Gives every parameter whole, private, unmanaged storage again. Collective. The pager manages nothing afterwards.
  void restore();

  PagerMemory memory() const;
  PagerCounters counters() const;
  DiskUse disk_use() const;  ///< by weights

  /// An object of the pager's owner, so that find_managed() of a parameter leads to it.
  void set_companion(PagerCompanion* companion) { companion_ = companion; }
  PagerCompanion* companion() const { return companion_; }

 private:
  friend class ClosedWindow;
  class Impl;
  std::unique_ptr<Impl> impl_;
  PagerCompanion* companion_ = nullptr;
};

/// A window that has ended, before the next one begins: its gradients are reduced and averaged, and the owned weights
/// can be updated.
///
///     ClosedWindow window = pager.close_window();
///     window.meet();  // or another collective of all ranks of the pager's group, then begin_update()
///     for (const OwnedSlice& slice : pager.owned()) {
///       ...  // writes slice.weights
///       window.publish(slice.unit);
///     }
///     window.open();
///
/// The methods come in this order; another one is a StateError. The pager outlives the window.
class [[nodiscard]] ClosedWindow {
 public:
  ClosedWindow(ClosedWindow&& other) noexcept;
  ClosedWindow& operator=(ClosedWindow&&) = delete;
  /// Local. Where neither open() nor abandon() ended the window, the pager's next call throws StateError.
  ~ClosedWindow();

  /// By parameter index: whether some rank of the pager's group produced a gradient. The same on all of them.
  const std::vector<bool>& touched() const { return touched_; }
  /// By parameter index: whether this rank's user wrote the parameter since the last step.
  const std::vector<bool>& written() const { return written_; }

  /// This rank's part of the sum of squares over all gradients: every element is counted by one rank of the pager's
  /// group, and by none where another group counts it (ParameterSpec::is_counted). Local; until the first
  /// publish(). For parameters on the host.
  ExactSum squares() const;
  /// squares() of parameters on a device, which the host does not read: [owned().size()] fp64 there, by unit.
  at::Tensor squares_on_device() const;

  /// To call when a collective of all ranks since close_window() has shown that each has closed its window, so that no
  /// peer reads weights any more. User writes go into the owned weights, which may be updated from here on. Local.
  void begin_update();
  /// Waits until every rank has closed its window, then begin_update(). Collective.
  void meet();

  /// Owned weights of `unit` are final for this step: others may have them. Once per trainable unit, in order; of a
  /// frozen one after its owned weights were written.
  void publish(int unit);
  /// In place of publish(), for an offloaded unit: another thread will call Pager::publish_deferred(), until which an
  /// operator that needs the unit waits.
  void defer_publish(int unit);

  /// Ends the step. Collective; on return every parameter has its new value everywhere, gradients are cleared, and
  /// version counters are bumped, so that backward through a graph kept across the step raises.
  void open();
  /// open() for a step that failed: publishes the remaining units as they are. Collective; peers whose step did not
  /// fail call open().
  void abandon();

 private:
  friend class Pager;
  enum class State { kClosed, kUpdating, kOpen };
  explicit ClosedWindow(Pager::Impl& pager);
  void require(State state, const char* call) const;

  Pager::Impl* pager_;  ///< null where another window was made of this one
  std::vector<bool> touched_, written_;
  State state_ = State::kClosed;
};

/// Makes the checks of Pager's constructor, except those of dtypes, and changes nothing.
///
/// Throws    ConfigError, as Pager::Pager.
void check_manageable(const Group& group, const std::vector<NamedParameter>& parameters, const PagerPolicy& policy);

/// The pager that manages a tensor, and its parameter index there.
struct ManagedPlace {
  Pager* pager = nullptr;
  int parameter = 0;
};

/// The place of `tensor`, or of the parameter that it is a view of; nothing if no pager manages it.
std::optional<ManagedPlace> find_managed(const at::Tensor& tensor);

}  // namespace trireme
