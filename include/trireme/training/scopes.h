// no_sync() and coalesce_grad_reduction() as scopes: backward passes in them sum gradients on their rank, and reduce
// them later.
#pragma once

namespace trireme {

class Training;

/// While one lives, backward passes reduce nothing: gradients are summed on their rank. The first backward after it, or
/// step(), reduces the sum. See Engine::no_sync().
class [[nodiscard]] NoSync {
 public:
  /// `training` outlives this. Throws StateError: inside another such scope; after destroy().
  explicit NoSync(Training& training);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  Training& training_;
};

/// As NoSync, but close() reduces the sum there and then. See Engine::coalesce_grad_reduction().
class [[nodiscard]] CoalescedReduction {
 public:
  /// As NoSync's.
  explicit CoalescedReduction(Training& training);
  /// Local. Without close() the next backward, or step(), reduces.
  ~CoalescedReduction();
  CoalescedReduction(const CoalescedReduction&) = delete;
  CoalescedReduction& operator=(const CoalescedReduction&) = delete;
  /// Ends the scope and reduces what it summed, and what the window held before it. Collective.
  void close();

 private:
  void end() noexcept;
  Training& training_;
  bool open_ = true;
};

}  // namespace trireme
