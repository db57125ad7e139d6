#include "comm/fabric/message_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace trireme::comm {

struct MessageQueue::Message final : public Pending<void>::Operation {
  Message(std::shared_ptr<MessageQueue> queue, Request message)
      : queue(std::move(queue)), request(std::move(message)), bytes(request.call.numel * request.itemsize()) {}
  void wait() override { queue->complete(*this); }
  bool done() noexcept override { return queue->done_or_hurry(*this); }
  void drop() noexcept override { queue->done_or_hurry(*this); }
  bool sends() const { return request.call.kind == CallKind::kSend; }

  const std::shared_ptr<MessageQueue> queue;  // shared: this may outlive the group
  Request request;
  const int64_t bytes;
  // Guarded by the queue's mutex:
  int64_t moved_bytes = 0;
  int64_t record = 0;  ///< of the flight recorder
  bool complete = false;
  std::exception_ptr error;
};

MessageQueue::MessageQueue(std::shared_ptr<FabricState> fabric_state)
    : fabric_state_(std::move(fabric_state)),
      chunk_bytes_(fabric_state_->fabric().layout().mailbox_chunk_bytes()),
      lanes_(2 * static_cast<size_t>(fabric_state_->place().size)) {}

std::shared_ptr<Pending<void>::Operation> MessageQueue::submit(Request request) {
  auto message = std::make_shared<Message>(shared_from_this(), std::move(request));
  std::vector<std::shared_ptr<Message>> retired;  // their tensors are released here, in the caller's thread, unlocked
  Lock lock(mutex_);
  retired.swap(retired_);
  fabric_state_->throw_if_failed();
  Call& call = message->request.call;
  Lane& lane = lanes_[static_cast<size_t>(call.root + (message->sends() ? 0 : fabric_state_->place().size))];
  call.seq = lane.next_seq++;
  message->record = fabric_state_->recorder().begin(call);
  lane.messages.push_back(message);
  try {
    move_all();
  } catch (...) {
    lock.unlock();
    fail_all(std::current_exception());
    throw;
  }
  // A message that fits the ring needs no helper: it lies there until it is taken.
  const bool fits = message->bytes <= chunk_bytes_ * kMailboxChunks;
  if (!message->complete && (message->sends() || !fits)) want_background(lock);
  return message;
}

bool MessageQueue::idle() const {
  return std::all_of(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.messages.empty(); });
}

bool MessageQueue::can_move(const Message& message) const {
  Fabric& fabric = fabric_state_->fabric();
  const int peer = message.request.call.root;
  if (message.sends()) {
    const Mailbox& box = fabric.mailbox(fabric_state_->place().rank, peer);
    return box.sent.load(std::memory_order_relaxed) - box.taken.load(std::memory_order_acquire) < kMailboxChunks;
  }
  const Mailbox& box = fabric.mailbox(peer, fabric_state_->place().rank);
  return box.sent.load(std::memory_order_acquire) > box.taken.load(std::memory_order_relaxed);
}

bool MessageQueue::can_move_any() const {
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [this](const Lane& lane) { return !lane.messages.empty() && can_move(*lane.messages.front()); });
}

void MessageQueue::move_all() {
  for (Lane& lane : lanes_) {
    while (!lane.messages.empty()) {
      const std::shared_ptr<Message> message = lane.messages.front();
      while (!message->complete && can_move(*message)) move(*message);
      if (!message->complete) break;
      fabric_state_->recorder().end(message->record);
      lane.messages.pop_front();
      if (message.use_count() == 1) retired_.push_back(message);
    }
  }
}

void MessageQueue::move(Message& message) {
  message.sends() ? send_chunk(message) : receive_chunk(message);
  message.complete = message.moved_bytes >= message.bytes;
  fabric_state_->fabric().notify();
}

void MessageQueue::send_chunk(Message& message) {
  const int from = fabric_state_->place().rank;
  const int to = message.request.call.root;
  Mailbox& box = fabric_state_->fabric().mailbox(from, to);
  const int64_t index = box.sent.load(std::memory_order_relaxed);
  MessageRecord& record = box.chunks[index % kMailboxChunks];
  record.seq.store(message.request.call.seq, std::memory_order_relaxed);
  record.numel.store(message.request.call.numel, std::memory_order_relaxed);
  record.dtype.store(static_cast<int64_t>(message.request.call.dtype), std::memory_order_relaxed);
  const int64_t bytes = std::min(chunk_bytes_, message.bytes - message.moved_bytes);
  if (bytes > 0)
    std::memcpy(fabric_state_->fabric().mailbox_chunk(from, to, index), message.request.in() + message.moved_bytes,
                static_cast<size_t>(bytes));
  message.moved_bytes += bytes;
  box.sent.store(index + 1, std::memory_order_release);
}

void MessageQueue::receive_chunk(Message& message) {
  const int from = message.request.call.root;
  const int to = fabric_state_->place().rank;
  const Call& call = message.request.call;
  Mailbox& box = fabric_state_->fabric().mailbox(from, to);
  const int64_t index = box.taken.load(std::memory_order_relaxed);
  const MessageRecord& record = box.chunks[index % kMailboxChunks];
  const Call sent{.kind = CallKind::kSend,
                  .dtype = static_cast<at::ScalarType>(record.dtype.load(std::memory_order_relaxed)),
                  .root = to,
                  .numel = record.numel.load(std::memory_order_relaxed),
                  .seq = record.seq.load(std::memory_order_relaxed)};
  if (sent.numel != call.numel || sent.dtype != call.dtype || sent.seq != call.seq) {
    throw PeerError(ErrorCode::kDiverged, describe_mismatch(fabric_state_->info(), {to, call}, {from, sent}), from);
  }
  const int64_t bytes = std::min(chunk_bytes_, message.bytes - message.moved_bytes);
  if (bytes > 0)
    std::memcpy(message.request.out() + message.moved_bytes, fabric_state_->fabric().mailbox_chunk(from, to, index),
                static_cast<size_t>(bytes));
  message.moved_bytes += bytes;
  box.taken.store(index + 1, std::memory_order_release);
}

void MessageQueue::complete(Message& message) {
  const std::function<std::string()> what = [&message] { return describe(message.request.call); };
  const auto may_move = [&] {
    Lock lock(mutex_);
    return message.complete || can_move_any();
  };
  try {
    while (true) {
      {
        Lock lock(mutex_);
        if (!message.complete) move_all();
        if (message.complete) break;
      }
      fabric_state_->throw_if_failed();
      fabric_state_->fabric().wait(may_move, {message.request.call.root, Patience::kCaller, what});
    }
  } catch (...) {
    fail_all(std::current_exception());
    throw;
  }
  if (message.error) std::rethrow_exception(message.error);
}

bool MessageQueue::done_or_hurry(Message& message) noexcept {
  try {
    Lock lock(mutex_);
    if (!message.complete) move_all();
    if (!message.complete) want_background(lock);
    return message.complete;
  } catch (...) {
    fail_all(std::current_exception());
    return true;
  }
}

void MessageQueue::fail_all(const std::exception_ptr& error) {
  fabric_state_->fail(error);
  Lock lock(mutex_);
  for (Lane& lane : lanes_) {
    for (const auto& message : lane.messages) {
      message->complete = true;
      message->error = error;
    }
    lane.messages.clear();
  }
}

void MessageQueue::want_background(const Lock&) {
  if (stopped_) return;
  background_ = true;
  worker_.start_once([this] { work(); });
  work_.notify_one();
}

void MessageQueue::work() {
  const std::function<std::string()> what = [] { return std::string("a message"); };
  const auto may_move = [this] {
    Lock lock(mutex_);
    return stopped_ || idle() || can_move_any();
  };
  while (true) {
    {
      Lock lock(mutex_);
      if (idle()) background_ = false;
      work_.wait(lock, [this] { return stopped_ || (background_ && !idle()); });
      if (stopped_) return;
    }
    try {
      fabric_state_->fabric().wait(may_move, {-1, Patience::kBackground, what});
      Lock lock(mutex_);
      move_all();
    } catch (...) {
      fail_all(std::current_exception());
    }
  }
}

void MessageQueue::shutdown() noexcept {
  {
    Lock lock(mutex_);
    stopped_ = true;
    work_.notify_all();
  }
  fabric_state_->fabric().cancel();
  worker_.join();
  fail_all(std::make_exception_ptr(
      StateError(str("group '", fabric_state_->name(), "' was destroyed before a message was complete"))));
  Lock lock(mutex_);
  retired_.clear();
}

}  // namespace trireme::comm
