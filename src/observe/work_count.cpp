#include "trireme/observe/work_count.h"

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>

#include "trireme/base/error.h"

namespace trireme {
namespace {

uint64_t this_threads_number() { return at::RecordFunction::currentThreadId(); }

/// Whether all tensors have sizes that are numbers: nested and symbolic ones have not.
bool tells_sizes(const OperatorCall& call) {
  bool tells = true;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    if (tensor.defined() && (tensor.is_nested() || tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()))
      tells = false;
  });
  return tells;
}

}  // namespace

WorkCount::WorkCount() { reset(); }

WorkCount::~WorkCount() {
  // A scope that ends on another thread would leave its own thread with a dangling pass: let it live for ever.
  if (is_running() && runs_on_ != std::this_thread::get_id()) (void)scope_.release();
}

void WorkCount::reset() {
  const std::lock_guard lock(mutex_);
  calls_ = {WorkCall()};
  places_.clear();
  threads_.clear();
  uncounted_.clear();
}

void WorkCount::start() {
  if (is_running()) throw StateError("the work of operators is being counted already; stop that first");
  runs_on_ = std::this_thread::get_id();
  scope_ = std::make_unique<InterceptScope>(InterceptScope::Watch::kWrites, this);
}

void WorkCount::stop() {
  if (is_running() && runs_on_ != std::this_thread::get_id())
    throw StateError("counting the work of operators was started on another thread; stop it there");
  scope_.reset();
}

int WorkCount::called(int caller, int64_t module) {
  const auto [place, is_new] = places_.try_emplace({caller, module}, static_cast<int>(calls_.size()));
  if (is_new) calls_.push_back({.caller = caller, .module = module});
  return place->second;
}

int WorkCount::recorded_in(const torch::autograd::Node& node) const {
  const auto thread = threads_.find(node.thread_id());
  if (thread == threads_.end()) return 0;
  const std::vector<Change>& changes = thread->second.changes;
  const auto later = std::ranges::upper_bound(changes, node.sequence_nr(), {}, &Change::number);
  return later == changes.begin() ? 0 : std::prev(later)->call;
}

int WorkCount::caller_of(const Thread& thread, const torch::autograd::Node* node, int64_t module) const {
  if (!thread.open.empty() && thread.open.back().node == node) return thread.open.back().call;
  if (node == nullptr) return 0;
  // A module that backward calls again has the caller that it had in forward, one of those around the node.
  const int recorded = recorded_in(*node);
  for (int caller = recorded; caller >= 0; caller = calls_[caller].caller)
    if (places_.contains({caller, module})) return caller;
  return recorded;
}

void WorkCount::note_change(Thread& thread) {
  thread.changes.push_back({at::sequence_number::peek(), thread.open.empty() ? 0 : thread.open.back().call});
}

void WorkCount::enter(int64_t module) {
  const auto node = torch::autograd::get_current_node();
  const std::lock_guard lock(mutex_);
  Thread& thread = threads_[this_threads_number()];
  const int call = called(caller_of(thread, node.get(), module), module);
  if (node == nullptr) ++calls_[call].calls;
  thread.open.push_back({call, node.get(), Clock::now()});
  note_change(thread);
}

void WorkCount::leave(int64_t module) {
  const std::lock_guard lock(mutex_);
  Thread& thread = threads_[this_threads_number()];
  const auto is_it = [&](const Frame& frame) { return calls_[frame.call].module == module; };
  const auto found = std::ranges::find_if(thread.open.rbegin(), thread.open.rend(), is_it);
  if (found == thread.open.rend()) return;
  const size_t depth = static_cast<size_t>(thread.open.rend() - found);
  const Clock::time_point now = Clock::now();
  while (thread.open.size() >= depth) {
    const Frame frame = thread.open.back();
    thread.open.pop_back();
    if (frame.node == nullptr) calls_[frame.call].seconds += std::chrono::duration<double>(now - frame.begin).count();
  }
  note_change(thread);
}

void WorkCount::add(int64_t made) {
  const auto node = torch::autograd::get_current_node();
  const std::lock_guard lock(mutex_);
  const Thread& thread = threads_[this_threads_number()];
  if (!thread.open.empty() && thread.open.back().node == node.get()) {
    WorkSums& sums = calls_[thread.open.back().call].sums;
    (node == nullptr ? sums.forward : sums.recomputed) += made;
  } else if (node != nullptr) {
    calls_[recorded_in(*node)].sums.backward += made;
  } else {
    calls_[0].sums.forward += made;
  }
}

void WorkCount::run(OperatorCall& call, Next next) {
  // Its parts are counted. One that draws stays closed, among them attention, which counts as one.
  if (call.traits.composite && !call.traits.random) return next.open(call);
  Work work = Work::kNone;
  {
    const std::lock_guard lock(mutex_);
    const auto [known, is_new] = known_.try_emplace(call.op);
    if (is_new) known->second = work_of(call.op);
    work = known->second;
  }
  if (work == Work::kCounted && !tells_sizes(call)) work = Work::kUnknown;
  const int64_t made = work == Work::kCounted ? multiply_adds(RowCall(call.op, call.arguments())) : 0;
  next(call);
  if (work == Work::kCounted) add(made);
  if (work != Work::kUnknown) return;
  const std::lock_guard lock(mutex_);
  ++uncounted_[call.op.schema().name()];
}

std::vector<WorkCall> WorkCount::calls() const {
  const std::lock_guard lock(mutex_);
  return calls_;
}

std::unordered_map<std::string, int64_t> WorkCount::uncounted() const {
  const std::lock_guard lock(mutex_);
  return uncounted_;
}

}  // namespace trireme
