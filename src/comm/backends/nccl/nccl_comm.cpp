#include "comm/backends/nccl/nccl_comm.h"

#include <chrono>
#include <thread>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

using Clock = std::chrono::steady_clock;

/// NCCL is polled for that long before the thread sleeps in between: a call that is connected takes some 10 µs, in a
/// thread of NCCL's, and one that connects takes long.
constexpr std::chrono::microseconds kPoll{1000};
constexpr std::chrono::microseconds kSleep{100};
/// How long close() waits for peers to part, too: each does when it is destroyed.
constexpr std::chrono::seconds kPart{2};

}  // namespace

NcclComm::NcclComm(const NcclApi& api, const ncclUniqueId& id, const Place& place, const Poll& poll) : api_(api) {
  ncclConfig_t config;
  config.blocking = 0;
  const ncclResult_t started = api_.comm_init_rank_config(&comm_, place.size, id, place.rank, &config);
  try {
    check(started, "the making of a communicator");
    settle("the making of a communicator", poll);
  } catch (...) {
    abort();
    throw;
  }
}

NcclComm::~NcclComm() { abort(); }

std::string NcclComm::text_of(ncclResult_t result) const {
  const char* last = api_.get_last_error(comm_);
  const std::string details = last != nullptr ? last : "";
  return str("NCCL says: ", api_.get_error_string(result), details.empty() ? "" : "; ", details,
             " (NCCL_DEBUG=INFO tells more)");
}

void NcclComm::check(ncclResult_t result, const char* what) const {
  if (result != ncclSuccess && result != ncclInProgress)
    throw CommError(ErrorCode::kPeerLost, str(what, " failed; ", text_of(result)));
}

void NcclComm::enqueue(const char* what, const std::function<void(ncclComm_t)>& calls) {
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) throw CommError(ErrorCode::kPeerLost, str(what, " comes after its communicator was aborted"));
    check(api_.group_start(), what);
    try {
      calls(comm_);
    } catch (...) {
      (void)api_.group_end();
      throw;
    }
    check(api_.group_end(), what);
  }
  settle(what, [] {});
}

void NcclComm::register_memory(const NcclMemory& memory) {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr)
    throw CommError(ErrorCode::kPeerLost, "ncclCommRegister comes after its communicator was aborted");
  void* handle = nullptr;
  check(api_.comm_register(comm_, memory.data(), static_cast<size_t>(memory.bytes()), &handle), "ncclCommRegister");
}

ncclResult_t NcclComm::progress() {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) throw CommError(ErrorCode::kPeerLost, "the communicator was aborted");
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.comm_get_async_error(comm_, &state);
  check(asked, "a look at the communicator");
  return state;
}

void NcclComm::settle(const char* what, const Poll& poll) {
  const auto start = Clock::now();
  ncclResult_t state = progress();
  while (state == ncclInProgress) {
    if (Clock::now() - start <= kPoll) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kSleep);
      poll();
    }
    state = progress();
  }
  check(state, what);
}

std::string NcclComm::problem() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return "";
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = api_.comm_get_async_error(comm_, &state);
  const ncclResult_t result = asked != ncclSuccess ? asked : state;
  return result == ncclSuccess || result == ncclInProgress ? "" : text_of(result);
}

void NcclComm::abort() noexcept {
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  (void)api_.comm_abort(comm_);
  comm_ = nullptr;
}

void NcclComm::close() noexcept {
  const auto deadline = Clock::now() + kPart;
  {
    const std::lock_guard lock(mutex_);
    if (comm_ == nullptr) return;
    ncclResult_t state = api_.comm_finalize(comm_);
    while (state == ncclInProgress && Clock::now() < deadline) {
      std::this_thread::sleep_for(kSleep);
      if (api_.comm_get_async_error(comm_, &state) != ncclSuccess) break;
    }
    if (state == ncclSuccess) {
      (void)api_.comm_destroy(comm_);
      comm_ = nullptr;
    }
  }
  abort();
}

}  // namespace trireme::comm
