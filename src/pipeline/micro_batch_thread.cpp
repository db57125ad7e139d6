#include "pipeline/micro_batch_thread.h"

#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalState.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/StreamGuard.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/wait_hook.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/recompute/rank_thread.h"

namespace trireme {
namespace {

using namespace std::chrono_literals;

constexpr auto kBetweenPolls = 20ms;
constexpr auto kToEnd = 1s;  ///< of a forward pass that was interrupted

thread_local MicroBatchThread* this_thread = nullptr;

/// The greatest number that a node of autograd has on any of these threads. Numbers are by thread; backward goes by
/// them.
std::atomic<uint64_t> newest_node = 0;

void note_newest_node() {
  const uint64_t here = at::sequence_number::peek();
  uint64_t newest = newest_node;
  while (newest < here && !newest_node.compare_exchange_weak(newest, here)) {
  }
}

/// Flags of libtorch that are not by thread, and that contexts of a program change while they last.
struct ProcessFlags {
  caffe2::TypeMeta dtype = c10::get_default_dtype();
  bool flash = at::globalContext().userEnabledFlashSDP();
  bool efficient = at::globalContext().userEnabledMemEfficientSDP();
  bool math = at::globalContext().userEnabledMathSDP();
  bool cudnn = at::globalContext().userEnabledCuDNNSDP();

  void set() const {
    if (c10::get_default_dtype() != dtype) c10::set_default_dtype(dtype);
    at::globalContext().setSDPUseFlash(flash);
    at::globalContext().setSDPUseMemEfficient(efficient);
    at::globalContext().setSDPUseMath(math);
    at::globalContext().setSDPUseCuDNN(cudnn);
  }
};

/// Nodes that are made here from now on are later than all before.
void number_nodes_after_all() {
  while (at::sequence_number::peek() < newest_node) (void)at::sequence_number::get_and_increment();
}

}  // namespace

struct MicroBatchThread::Inherited {
  explicit Inherited(c10::Device device) {
    if (!is_host(device)) stream = current_stream(device);
  }
  at::ThreadLocalState libtorch = {};
  RankContext& rank = RankContext::of_this_thread();
  RankSaves saves = {};
  const char* caller = CallerScope::current("step");
  std::optional<c10::Stream> stream;
  ProcessFlags flags = {};
};

MicroBatchThread::MicroBatchThread(c10::Device device) : device_(device) {}
MicroBatchThread::~MicroBatchThread() {
  give_up();
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  changed_.notify_all();
}

MicroBatchThread* MicroBatchThread::current() noexcept { return this_thread; }

// --- on the owner's thread -----------------------------------------------------------------------------------------

void MicroBatchThread::start(std::function<void()> body) {
  TRIREME_CHECK(has_ended(), "the micro-batch before has not ended");
  note_newest_node();
  inherited_ = std::make_unique<Inherited>(device_);
  body_ = std::move(body);
  is_given_up_ = false;
  worker_.start_once([this] { serve(); });
}

MicroBatchThread::Stop MicroBatchThread::go_on() {
  std::exception_ptr interruption;
  std::chrono::steady_clock::time_point heard;
  {
    const WaitScope host;  // a Python program's lock is for that thread, and Ctrl-C is heard
    std::unique_lock lock(mutex_);
    is_its_turn_ = true;
    changed_.notify_all();
    while (!changed_.wait_for(lock, kBetweenPolls, [&] { return !is_its_turn_; })) {
      if (interruption) {
        is_left_ = std::chrono::steady_clock::now() - heard > kToEnd;
        if (is_left_) break;
        continue;
      }
      lock.unlock();
      try {
        host.poll();
      } catch (...) {
        interruption = std::current_exception();
        heard = std::chrono::steady_clock::now();
        host.interrupt(handle_);
      }
      lock.lock();
    }
  }
  if (interruption) {
    give_up();
    std::rethrow_exception(interruption);
  }
  if (problem_) std::rethrow_exception(std::exchange(problem_, nullptr));
  return stop_;
}

void MicroBatchThread::give_up() noexcept {
  is_given_up_ = true;
  while (!is_left_ && !has_ended()) {
    const WaitScope host;
    std::unique_lock lock(mutex_);
    is_its_turn_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !is_its_turn_; });
  }
  problem_ = nullptr;
}

// --- on its own ----------------------------------------------------------------------------------------------------

void MicroBatchThread::stop(Stop why) {
  stop_ = why;
  note_newest_node();
  const ProcessFlags own;
  begun_->flags.set();
  {
    const WaitScope host;  // an operator that torch runs with Python's lock held may have led here
    std::unique_lock lock(mutex_);
    hand_over(lock);
  }
  own.set();
  if (is_given_up_) throw StateError("smp: this micro-batch is given up, as the step has failed");
}

void MicroBatchThread::hand_over(std::unique_lock<std::mutex>& lock) {
  is_its_turn_ = false;
  changed_.notify_all();
  changed_.wait(lock, [&] { return (is_its_turn_ && !is_left_) || is_over_; });
}

void MicroBatchThread::stay_if_left() {
  if (!is_left_) return;
  const WaitScope host;
  std::unique_lock lock(mutex_);
  hand_over(lock);
}

void MicroBatchThread::serve() {
  this_thread = this;
  std::unique_lock lock(mutex_);
  handle_ = pthread_self();
  changed_.wait(lock, [&] { return is_its_turn_ || is_over_; });
  while (!is_over_) {
    lock.unlock();
    run_body();
    lock.lock();
    body_ = nullptr;
    stop_ = Stop::kEnd;
    hand_over(lock);
  }
}

void MicroBatchThread::run_body() {
  const std::unique_ptr<Inherited> from = std::move(inherited_);
  begun_ = from.get();
  try {
    if (is_given_up_) return;
    const at::ThreadLocalStateGuard libtorch(from->libtorch);
    const RankThreadScope rank(from->rank);
    const RankSaves::Scope saves(from->saves);
    const CallerScope caller(from->caller);
    const c10::OptionalStreamGuard stream(from->stream);
    number_nodes_after_all();
    body_();
  } catch (...) {
    problem_ = std::current_exception();
  }
  note_newest_node();
}

}  // namespace trireme
