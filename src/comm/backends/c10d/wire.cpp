#include "comm/backends/c10d/wire.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "comm/backends/c10d/group_numbers.h"
#include "comm/first_line.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

using Clock = std::chrono::steady_clock;

// MPI promises tags up to 32767 and takes lengths up to 2^31 - 1.
constexpr int kFirstTag = 16384;
constexpr int kFamilies = 8;
constexpr int kNumbers = GroupNumbers::kCount;
constexpr int kChannels = 4;
static_assert(kFirstTag + kFamilies * kNumbers * kChannels == 32768);
constexpr int64_t kLongestBytes = 1 << 30;
constexpr std::chrono::microseconds kPollEvery{20};

c10::intrusive_ptr<c10d::Backend> host_backend(c10d::ProcessGroup& process_group) {
  try {
    return process_group.getBackend(c10::DeviceType::CPU);
  } catch (const std::exception&) {
    throw ConfigError(str("the process group of torch.distributed (backend ", process_group.getBackendName(),
                          ") moves no tensors on the host, and others are not there yet; initialise it with a backend "
                          "that does, e.g. "
                          "torch.distributed.init_process_group(\"cpu:gloo,cuda:nccl\")"),
                      ErrorCode::kUnsupported);
  }
}

/// Messages that peers have yet to take from groups that failed. The one thing that is kept per process: a group that
/// has failed is soon destroyed, and a backend withdraws what nobody holds. Never destroyed, since libtorch may go
/// before.
struct Remains {
  std::mutex mutex;
  std::vector<c10::intrusive_ptr<c10d::Work>> transfers;  // guarded by mutex
};
Remains& remains() {
  static auto* const all = new Remains;
  return *all;
}

}  // namespace

Wire::Wire(c10::intrusive_ptr<c10d::ProcessGroup> process_group, Address address, std::chrono::milliseconds timeout)
    : process_group_(std::move(process_group)),
      backend_(host_backend(*process_group_)),
      address_(std::move(address)),
      timeout_(timeout),
      polls_(backend_->getBackendName() == "mpi") {}

int Wire::tag(Channel channel) const {
  const int group = address_.family % kFamilies * kNumbers + address_.number;
  return kFirstTag + group * kChannels + static_cast<int>(channel);
}

void Wire::cancel() noexcept {
  std::lock_guard lock(mutex_);
  cancelled_.store(true, std::memory_order_release);
  for (const auto& work : waited_for_) {
    try {
      work->abort();
    } catch (...) {
      // A backend that cannot: its wait ends with the timeout.
    }
  }
}

void Wire::wait(const Flight::Transfer& transfer) {
  const auto start = Clock::now();
  {
    std::lock_guard lock(mutex_);
    if (cancelled_.load()) throw WireError(WireError::Kind::kCancelled, transfer.peer, {}, "");
    waited_for_.push_back(transfer.work);
  }
  std::string reason;
  bool complete = false;
  try {
    finish(*transfer.work);
    complete = true;
  } catch (const std::exception& error) {
    reason = first_line(error);
  } catch (...) {
    reason = "the backend does not say why";
  }
  {
    std::lock_guard lock(mutex_);
    waited_for_.erase(std::find(waited_for_.begin(), waited_for_.end(), transfer.work));
  }
  if (complete) return;
  if (cancelled_.load()) throw WireError(WireError::Kind::kCancelled, transfer.peer, {}, reason);
  // Backends differ in what they throw and agree in when.
  const auto waited = Clock::now() - start;
  throw WireError(waited >= timeout_ ? WireError::Kind::kTimeout : WireError::Kind::kLost, transfer.peer, waited,
                  reason);
}

void Wire::finish(c10d::Work& work) {
  if (!polls_) {
    if (!work.wait(timeout_)) throw std::runtime_error("the transfer was given up");
    return;
  }
  // MPI's wait() knows no timeout, and holds a lock that every other operation of the process needs.
  const auto end = Clock::now() + timeout_;
  while (!work.isCompleted()) {
    if (cancelled_.load()) throw std::runtime_error("the transfer was given up");
    if (Clock::now() >= end) throw std::runtime_error("the transfer did not end in time");
    std::this_thread::sleep_for(kPollEvery);
  }
  if (!work.isSuccess()) std::rethrow_exception(work.exception());
}

Wire::Flight::~Flight() {
  std::lock_guard lock(wire_.mutex_);
  for (size_t index = landed_; index < transfers_.size(); ++index)
    wire_.left_over_.push_back(std::move(transfers_[index].work));
}

void Wire::Flight::send(Channel channel, const PeerBytes& data) { start(channel, data, Way::kSend); }

void Wire::Flight::receive(Channel channel, const PeerBytes& data) { start(channel, data, Way::kReceive); }

void Wire::Flight::start(Channel channel, const PeerBytes& data, Way way) {
  const int rank = wire_.address_.members[static_cast<size_t>(data.peer)];
  for (int64_t begin = 0; begin < data.bytes; begin += kLongestBytes) {
    const int64_t bytes = std::min(kLongestBytes, data.bytes - begin);
    std::vector<at::Tensor> tensors{at::from_blob(
        data.data + begin, {bytes}, [owner = data.owner](void*) {}, at::kByte)};
    try {
      auto work = way == Way::kSend ? wire_.backend_->send(tensors, rank, wire_.tag(channel))
                                    : wire_.backend_->recv(tensors, rank, wire_.tag(channel));
      transfers_.push_back({data.peer, std::move(work)});
    } catch (const std::exception& error) {
      throw WireError(WireError::Kind::kLost, data.peer, {}, first_line(error));
    }
  }
}

void Wire::Flight::leave() noexcept {
  std::lock_guard lock(remains().mutex);
  for (; landed_ < transfers_.size(); ++landed_) remains().transfers.push_back(std::move(transfers_[landed_].work));
}

void Wire::Flight::land() {
  for (; landed_ < transfers_.size(); ++landed_) {
    wire_.wait(transfers_[landed_]);
    transfers_[landed_].work.reset();
  }
}

}  // namespace trireme::comm
