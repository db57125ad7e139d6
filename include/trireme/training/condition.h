// Whether a Training can still be used, and the errors of calls when it cannot.
#pragma once

#include <string>
#include <utility>

namespace trireme {

/// The condition of a Training.
class Condition {
 public:
  /// Throws StateError that names `call`: destroy() was called.
  void require_there(const char* call) const;
  /// Throws as require_there(), and where fail() has ended it.
  void require_alive(const char* call) const;
  /// Throws as require_alive(), and while its weights are a mixture of two checkpoints.
  void require_intact(const char* call) const;

  void mark_destroyed() { is_destroyed_ = true; }
  /// Nothing but destroy() works from now on.
  void fail(std::string why) { failure_ = std::move(why); }
  /// The error that ended it; empty: none did.
  const std::string& failure() const { return failure_; }
  /// Records that a load ended half-way; mend() records a complete one.
  void tear(std::string why) { torn_load_ = std::move(why); }
  void mend() { torn_load_.clear(); }

 private:
  bool is_destroyed_ = false;
  std::string failure_, torn_load_;
};

}  // namespace trireme
