#include "comm/backends/device/message_lane.h"

#include <utility>

namespace trireme::comm {

void MessageLane::submit(CallPointer call, Event inputs) {
  const std::lock_guard lock(mutex_);
  queue_.push_back({std::move(call), std::move(inputs)});
  worker_.start_once([this] { work(); });
  work_.notify_one();
}

void MessageLane::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
    if (queue_.empty()) return;
    const Item item = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    try {
      watch_->issue({item.call}, item.inputs, stream_,
                    [this](const OperationWatch::Requests& message) { body_(*message.front()); });
    } catch (const std::exception&) {
      // The group has failed of it; whoever waits for the message is told so.
    }
    lock.lock();
  }
}

void MessageLane::shutdown() noexcept {
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    work_.notify_one();
  }
  worker_.join();
}

}  // namespace trireme::comm
