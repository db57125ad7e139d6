// Where gradients go. A store of a mesh's gradients has three parts: the order in which they are sent, which is its
// class; how ranks reduce what was sent; and GradientHome, where the result stands.
#pragma once

#include <memory>
#include <vector>

#include "pager/gradients/gradient_scale.h"
#include "pager/gradients/home.h"
#include "pager/gradients/mesh_context.h"

namespace trireme {

class GradientStore {
 public:
  /// A store for the parameters of mesh number `mesh`.
  GradientStore(const StoreContext& context, int mesh)
      : context_(context, mesh),
        home_(context_),
        scale_(context_.policy, context_.ranks),
        touched_(context.parameters.size()) {}
  virtual ~GradientStore() = default;
  GradientStore(const GradientStore&) = delete;
  GradientStore& operator=(const GradientStore&) = delete;

  /// A `gradient` of `parameter`, flat in the parameter's memory order, in its dtype or the accumulation dtype.
  virtual void accept(int parameter, at::Tensor gradient) = 0;
  /// Whether gradients are summed on this rank over the whole window, and reduced at its end alone.
  virtual bool reduces_at_boundary() const { return false; }
  /// Where reduces_at_boundary(): what this rank has summed of `parameter` since the last finish(), flat; undefined:
  /// nothing.
  virtual at::Tensor unreduced(int) const { return {}; }
  /// By unit: what the next backward pass reaches; empty: every unit. Until end_backward().
  virtual void expect(const std::vector<bool>&) {}
  /// A backward pass is over. Collective where reductions are.
  virtual void end_backward() = 0;
  /// Completes every reduction of the window so far. Collective. What is accepted afterwards adds to it.
  virtual void finish() = 0;
  /// The window's gradients are used up.
  virtual void clear();

  /// After finish(): whether some rank produced a gradient of `parameter`.
  bool touched(int parameter) const { return touched_[parameter] != 0; }
  GradientHome& home() { return home_; }
  void add_to(PagerCounters& counters) const;
  const GradientScale& scale() const { return scale_; }
  void set_accumulation_steps(int64_t steps) { scale_.accumulation_steps = steps; }

 protected:
  /// This rank has given `message` to a reduction.
  void count(const at::Tensor& message);

  const MeshContext context_;
  GradientHome home_;
  GradientScale scale_;
  std::vector<uint8_t> touched_;  // by parameter; before finish() by this rank alone
  int64_t reductions_ = 0;
  int64_t reduced_bytes_ = 0;  // what this rank gave to them
};

/// Sums over the window, and reduces once at its end: ZeRO stages 0 and 1.
std::unique_ptr<GradientStore> make_window_gradients(const StoreContext& context, int mesh);
/// Reduces in each backward pass, and keeps this rank's shard: ZeRO stages 2 and 3, and at every stage what is
/// offloaded or summed in the deterministic order.
std::unique_ptr<GradientStore> make_backward_gradients(const StoreContext& context, int mesh);
/// Peers read each other's gradients where they were computed: ZeRO stage 3 in shared memory.
std::unique_ptr<GradientStore> make_one_sided_gradients(const StoreContext& context, int mesh);
/// The one of these that the policy asks for.
std::unique_ptr<GradientStore> make_gradients(const StoreContext& context, int mesh);

}  // namespace trireme
