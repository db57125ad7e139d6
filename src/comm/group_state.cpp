#include "comm/group_state.h"

#include "trireme/base/log.h"

namespace trireme::comm {

bool GroupState::remember_failure(ErrorCode code, const std::string& message) noexcept {
  std::lock_guard lock(mutex_);
  if (failed_.load(std::memory_order_relaxed)) return false;
  code_ = code;
  message_ = message;
  failed_.store(true, std::memory_order_release);
  return true;
}

void GroupState::log_failure(const std::string& message) noexcept {
  log(LogLevel::kDebug,
      str(message, "\nlast operations of rank ", place_.rank, " in group '", name_, "':\n", recorder_.text()));
}

void GroupState::throw_failure() const {
  std::lock_guard lock(mutex_);
  throw CommError(code_, message_);
}

}  // namespace trireme::comm
