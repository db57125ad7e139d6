// Notices of libtorch's operators.
#pragma once

namespace trireme {

/// While one lives, operators that no other operator called, and nodes of backward passes, are told as notices of the
/// thread that runs them.
class [[nodiscard]] OperatorNotices {
 public:
  OperatorNotices();
  ~OperatorNotices();
  OperatorNotices(const OperatorNotices&) = delete;
  OperatorNotices& operator=(const OperatorNotices&) = delete;
};

}  // namespace trireme
