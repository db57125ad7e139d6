#include "comm/backends/c10d/call_queue.h"

#include <chrono>
#include <utility>

namespace trireme::comm {

struct CallQueue::QueuedCall final : public Pending<void>::Operation {
  QueuedCall(std::shared_ptr<CallQueue> queue, Request request, Body body)
      : queue(std::move(queue)), request(std::move(request)), body(std::move(body)) {}
  void wait() override {
    constexpr std::chrono::milliseconds kSlice{20};
    const WaitScope host;  // outside of the lock: who has the host's may want it
    const auto start = std::chrono::steady_clock::now();
    bool has_warned = false;
    Lock lock(queue->mutex_);
    while (!queue->progress_.wait_for(lock, kSlice, [this] { return complete; })) {
      lock.unlock();
      queue->link_->poll(host);
      const auto waited = std::chrono::steady_clock::now() - start;
      if (!has_warned && waited >= queue->link_->info().warn_after)
        has_warned = queue->link_->warn_of_late(request.call, waited);
      lock.lock();
    }
    if (error) std::rethrow_exception(error);
  }
  bool done() noexcept override {
    Lock lock(queue->mutex_);
    return complete;
  }
  void drop() noexcept override {}

  const std::shared_ptr<CallQueue> queue;  // shared: this may outlive the group
  Request request;
  const Body body;
  // Guarded by the queue's mutex:
  bool complete = false;
  std::exception_ptr error;
};

std::shared_ptr<Pending<void>::Operation> CallQueue::submit(Request request, Body body) {
  auto call = std::make_shared<QueuedCall>(shared_from_this(), std::move(request), std::move(body));
  std::vector<std::shared_ptr<QueuedCall>>
      retired;  // their tensors are released here, in the caller's thread, unlocked
  Lock lock(mutex_);
  retired.swap(retired_);
  link_->throw_if_failed();
  call->request.call.seq = next_seq_++;
  queue_.push_back(call);
  worker_.start_once([this] { work(); });
  work_.notify_one();
  return call;
}

void CallQueue::run_front(Lock& lock) {
  const std::shared_ptr<QueuedCall> call = queue_.front();
  lock.unlock();
  std::exception_ptr error;
  try {
    link_->throw_if_failed();
    const int64_t record = link_->recorder().begin(call->request.call);
    call->body(*link_, call->request);
    link_->recorder().end(record);
  } catch (...) {
    error = std::current_exception();
    link_->fail(error);
  }
  lock.lock();
  call->complete = true;
  call->error = error;
  queue_.pop_front();
  if (call.use_count() == 1) retired_.push_back(call);  // dropped: its tensors must not be released in this thread
  progress_.notify_all();
}

void CallQueue::work() {
  Lock lock(mutex_);
  while (true) {
    work_.wait(lock, [this] { return stopped_ || !queue_.empty(); });
    if (stopped_) return;
    run_front(lock);
  }
}

bool CallQueue::is_idle() {
  const Lock lock(mutex_);
  return queue_.empty();
}

void CallQueue::shutdown() noexcept {
  {
    Lock lock(mutex_);
    stopped_ = true;
    work_.notify_all();
  }
  worker_.join();
  Lock lock(mutex_);
  for (const auto& call : queue_) {
    call->complete = true;
    call->error = link_->destroyed_before(call->request.call);
  }
  queue_.clear();
  retired_.clear();
  progress_.notify_all();
}

}  // namespace trireme::comm
