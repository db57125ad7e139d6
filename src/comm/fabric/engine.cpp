#include "comm/fabric/engine.h"

namespace trireme::comm {

void Engine::fail(const std::exception_ptr& error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const RelayedError& failure) {
    record_failure(failure.code(), failure.what(), failure.cause());
  } catch (const CommError& failure) {
    record_failure(failure.code(), failure.what(), failure.what());
  } catch (const StateError&) {
    // The group was destroyed under a wait: peers are told by the destructor.
  } catch (const std::exception& interruption) {  // of the host: a WaitHook threw
    abort(interruption.what());
  }
}

void Engine::abort(const std::string& reason) noexcept {
  const std::string message = given_up(reason);
  record_failure(ErrorCode::kPeerLost, message, message);
}

void Engine::record_failure(ErrorCode code, const std::string& message, const std::string& cause) noexcept {
  if (!remember_failure(code, message)) return;
  fabric_.abort(code, cause);
  log_failure(message);
}

}  // namespace trireme::comm
