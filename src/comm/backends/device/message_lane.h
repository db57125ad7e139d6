// Messages with one peer in one direction: a stream of their own and a thread that enqueues them, since that may have
// to wait for the peer (to connect, or to make room), which neither the caller nor other messages may.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

#include "comm/backends/device/operation_watch.h"

namespace trireme::comm {

class MessageLane {
 public:
  using CallPointer = std::shared_ptr<OperationWatch::DeviceCall>;
  using Body = std::function<void(const Request&)>;
  MessageLane(std::shared_ptr<OperationWatch> watch, c10::Device device, Body body)
      : watch_(std::move(watch)), stream_(device), body_(std::move(body)) {}
  /// Enqueues `call` behind `inputs` and the messages before it.
  void submit(CallPointer call, Event inputs);
  /// Ends the thread. All messages are over, or the group has failed.
  void shutdown() noexcept;

  int64_t next_seq = 1;

 private:
  struct Item {
    CallPointer call;
    Event inputs;
  };
  void work();

  const std::shared_ptr<OperationWatch> watch_;
  const SideStream stream_;
  const Body body_;

  std::mutex mutex_;  // guards everything below
  std::condition_variable work_;
  std::deque<Item> queue_;
  bool stopped_ = false;
  Worker worker_;
};

}  // namespace trireme::comm
