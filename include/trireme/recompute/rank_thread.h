// How a second thread of a rank saves tensors for backward: as the first one does.
#pragma once

namespace trireme {
namespace detail {
class SaveScope;
}

/// The scopes that decide, on the thread that makes this, which tensors are saved (docs/recompute.md).
class RankSaves {
 public:
  RankSaves();

  /// While it lives, they decide on this thread. They outlive it.
  class [[nodiscard]] Scope {
   public:
    explicit Scope(const RankSaves& saves);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;
  };

 private:
  detail::SaveScope* innermost_;
};

}  // namespace trireme
