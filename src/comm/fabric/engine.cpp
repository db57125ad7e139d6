#include "comm/fabric/engine.h"

#include "trireme/base/log.h"

namespace trireme::comm {

void Engine::fail(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const FabricError& failure) {
    record_failure(failure.code(), failure.what(), failure.cause());
  } catch (const CommError& failure) {
    record_failure(failure.code(), failure.what(), failure.what());
  } catch (...) {
    // Not the fabric's failure (the group was destroyed under a wait): peers are told by the destructor.
  }
}

void Engine::abort(const std::string& reason) noexcept {
  const std::string message = str("rank ", place().rank, " gave up group '", fabric_.name(), "': ", reason);
  record_failure(ErrorCode::kPeerLost, message, message);
}

void Engine::record_failure(ErrorCode code, const std::string& message, const std::string& cause) noexcept {
  {
    std::lock_guard lock(mutex_);
    if (failed_.load(std::memory_order_relaxed)) return;
    code_ = code;
    message_ = message;
    failed_.store(true, std::memory_order_release);
  }
  fabric_.abort(code, cause);
  log(LogLevel::kDebug, str(message, "\nlast operations of rank ", place().rank, " in group '", fabric_.name(), "':\n",
                            recorder_.text()));
}

void Engine::throw_failure() const {
  std::lock_guard lock(mutex_);
  throw CommError(code_, message_);
}

}  // namespace trireme::comm
