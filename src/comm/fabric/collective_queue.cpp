#include "comm/fabric/collective_queue.h"

#include <chrono>
#include <utility>

namespace trireme::comm {

struct CollectiveQueue::QueuedCall final : public Pending<void>::Operation {
  QueuedCall(std::shared_ptr<CollectiveQueue> queue, Request request, std::unique_ptr<Algorithm> algorithm)
      : queue(std::move(queue)), request(std::move(request)), algorithm(std::move(algorithm)) {}
  void wait() override { queue->complete(*this); }
  bool done() noexcept override { return queue->done_or_hurry(*this); }
  void drop() noexcept override { queue->done_or_hurry(*this); }

  const std::shared_ptr<CollectiveQueue> queue;  // shared: this may outlive the group
  Request request;
  const std::unique_ptr<Algorithm> algorithm;
  int64_t first_step = 0;
  int64_t record = -1;  ///< of the flight recorder; -1: not begun
  bool posted = false;  ///< its first step
  // Guarded by the queue's mutex:
  bool complete = false;
  std::exception_ptr error;
};

CollectiveQueue::CollectiveQueue(std::shared_ptr<FabricState> fabric_state)
    : fabric_state_(std::move(fabric_state)), runner_(fabric_state_->fabric()) {}

std::shared_ptr<Pending<void>::Operation> CollectiveQueue::submit(Request request,
                                                                  std::unique_ptr<Algorithm> algorithm) {
  auto call = std::make_shared<QueuedCall>(shared_from_this(), std::move(request), std::move(algorithm));
  std::vector<std::shared_ptr<QueuedCall>>
      retired;  // their tensors are released here, in the caller's thread, unlocked
  Lock lock(mutex_);
  retired.swap(retired_);
  fabric_state_->throw_if_failed();
  call->request.call.seq = next_seq_++;
  call->first_step = next_step_;
  next_step_ += call->algorithm->steps();
  const bool alone = queue_.empty();
  queue_.push_back(call);
  if (call->algorithm->steps() == 1 && alone) {
    call->record = fabric_state_->recorder().begin(call->request.call);
    call->posted = runner_.try_post({call->request.call, *call->algorithm, call->first_step});
    if (call->posted) return call;
  }
  want_background(lock);
  return call;
}

void CollectiveQueue::complete(QueuedCall& call) {
  constexpr std::chrono::milliseconds kSlice{20};
  const WaitScope host;  // outside of our lock: who has the host's may want ours
  Lock lock(mutex_);
  while (!call.complete) {
    if (!running_) {
      // An earlier call's failure is this one's too; if the host interrupted it, the host is waiting to hear so.
      if (const std::exception_ptr error = run_front(lock, Patience::kCaller)) std::rethrow_exception(error);
      continue;
    }
    ++waiters_;
    const bool moved = progress_.wait_for(lock, kSlice, [&] { return call.complete || !running_; });
    --waiters_;
    if (moved) continue;
    lock.unlock();
    fabric_state_->poll(host);
    lock.lock();
  }
  if (call.error) std::rethrow_exception(call.error);
}

bool CollectiveQueue::done_or_hurry(QueuedCall& call) noexcept {
  Lock lock(mutex_);
  if (!call.complete) want_background(lock);
  return call.complete;
}

void CollectiveQueue::want_background(const Lock&) {
  if (stopped_) return;
  background_ = true;
  worker_.start_once([this] { work(); });
  work_.notify_one();
}

std::exception_ptr CollectiveQueue::run_front(Lock& lock, Patience patience) {
  const std::shared_ptr<QueuedCall> call = queue_.front();
  running_ = true;
  lock.unlock();
  std::exception_ptr error;
  try {
    fabric_state_->throw_if_failed();
    if (call->record < 0) call->record = fabric_state_->recorder().begin(call->request.call);
    runner_.run({call->request.call, *call->algorithm, call->first_step}, call->posted, patience);
    fabric_state_->recorder().end(call->record);
  } catch (...) {
    error = std::current_exception();
    fabric_state_->fail(error);
  }
  lock.lock();
  running_ = false;
  call->complete = true;
  call->error = error;
  queue_.pop_front();
  if (queue_.empty()) background_ = false;
  if (call.use_count() == 1) retired_.push_back(call);  // dropped: its tensors must not be released in this thread
  if (waiters_ > 0) progress_.notify_all();
  if (background_) work_.notify_one();
  return error;
}

void CollectiveQueue::work() {
  Lock lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopped_ || (background_ && !running_ && !queue_.empty()); });
    if (stopped_) return;
    (void)run_front(lock, Patience::kBackground);
  }
}

void CollectiveQueue::shutdown() noexcept {
  {
    Lock lock(mutex_);
    stopped_ = true;
    work_.notify_all();
  }
  worker_.join();
  Lock lock(mutex_);
  for (const auto& call : queue_) {
    call->complete = true;
    call->error = fabric_state_->destroyed_before(call->request.call);
  }
  queue_.clear();
  retired_.clear();
}

}  // namespace trireme::comm
