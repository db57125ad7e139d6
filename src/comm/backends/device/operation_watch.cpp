#include "comm/backends/device/operation_watch.h"

#include <pthread.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "comm/backends/device/enqueue_scope.h"
#include "comm/first_line.h"
#include "trireme/base/format.h"
#include "trireme/base/log.h"
#include "trireme/base/wait_hook.h"

namespace trireme::comm {
namespace {

/// The bound on how late a failure is noticed.
constexpr std::chrono::milliseconds kLookEvery{20};
constexpr std::chrono::milliseconds kLookEveryInClose{1};
/// How long the streams of a group that has failed may take to be free before they are left to themselves.
constexpr std::chrono::seconds kLongestRelease{10};

double seconds_between(std::chrono::steady_clock::time_point from, std::chrono::steady_clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}

std::string after_seconds(double elapsed_s) { return formatted("after {:.1f} s", elapsed_s); }

}  // namespace

std::shared_ptr<OperationWatch::DeviceCall> OperationWatch::begin(Request request) {
  check(request.call);
  const int64_t record = options_.state->recorder().begin(request.call);
  auto call = std::make_shared<DeviceCall>(shared_from_this(), std::move(request), record);
  std::vector<std::shared_ptr<DeviceCall>> retired;
  {
    const Lock lock(mutex_);
    retired.swap(retired_);
    calls_.push_back(call);
    worker_.start_once([this] { watch(); });
    if (calls_.size() == 1) changed_.notify_all();
  }
  release(std::move(retired));
  return call;
}

void OperationWatch::release(std::vector<std::shared_ptr<DeviceCall>> retired) {
  const Lock lock(mutex_);
  // A thread that frees memory must have seen itself that the device is through with it.
  for (const auto& call : retired)
    if (call.use_count() == 1) (void)is_reached(*call);
}

void OperationWatch::issue(const Calls& calls, const Event& inputs, const SideStream& stream,
                           const std::function<void(const Requests&)>& body) {
  try {
    Requests requests;
    for (const auto& call : calls) requests.push_back(&call->request_);
    options_.state->throw_if_failed();
    const EnqueueScope scope(stream);
    inputs.stream_wait();
    body(requests);
  } catch (const CommError&) {
    fail(std::current_exception());
    enqueued(calls, stream);  // the stream may hold a part of them
    options_.state->throw_if_failed();
  } catch (...) {
    fail(std::current_exception());
    enqueued(calls, stream);
    throw;
  }
  enqueued(calls, stream);
}

void OperationWatch::enqueued(const Calls& calls, const SideStream& stream) noexcept {
  Event end;
  try {
    end = Event::record(*stream.stream());
  } catch (const std::exception& error) {
    fail(std::make_exception_ptr(std::runtime_error(first_line(error))));
  }
  const Lock lock(mutex_);
  for (const auto& call : calls) {
    call->end_ = end;
    call->is_enqueued_ = true;
  }
  changed_.notify_all();
}

void OperationWatch::check(const Call& call) {
  options_.state->throw_if_failed();
  const auto what = [&call] { return describe(call); };
  if (const auto lost = options_.state->lost_peer(GroupState::Look::kFlags, what, 0)) fail(lost);
  options_.state->throw_if_failed();
}

void OperationWatch::fail(const std::exception_ptr& error) noexcept {
  options_.state->fail(error);
  give_up();
}

void OperationWatch::give_up() noexcept {
  std::shared_ptr<DeviceTransport> transport;
  {
    const Lock lock(mutex_);
    for (const auto& call : calls_) {
      if (call->outcome_ != DeviceCall::Outcome::kUnderWay) continue;
      call->outcome_ = DeviceCall::Outcome::kFailed;
      options_.state->recorder().fail(call->record_);
    }
    changed_.notify_all();
    transport = transport_;
  }
  if (transport) transport->release();
}

bool OperationWatch::is_reached(const DeviceCall& call) noexcept {
  try {
    return call.end_.is_complete();
  } catch (const std::exception& error) {  // the device itself has failed: nothing on it goes on
    device_problem_ = first_line(error);
    return true;
  }
}

void OperationWatch::retire() {
  const Lock lock(mutex_);
  std::vector<std::shared_ptr<DeviceCall>> ended;
  bool later_ones_wait = false;  // collectives end in their order
  for (const auto& call : calls_) {
    const bool is_message = call->call_.kind == CallKind::kSend || call->call_.kind == CallKind::kRecv;
    if (!call->is_enqueued_ || (later_ones_wait && !is_message)) continue;
    if (is_reached(*call))
      ended.push_back(call);
    else if (!is_message)
      later_ones_wait = true;
  }
  if (ended.empty()) return;
  last_end_ = Clock::now();
  for (const auto& call : ended) {
    note_end(*call);
    calls_.erase(std::find(calls_.begin(), calls_.end(), call));
    retired_.push_back(call);
  }
  changed_.notify_all();
}

void OperationWatch::note_end(DeviceCall& call) {
  if (call.outcome_ != DeviceCall::Outcome::kUnderWay) return;
  // A peer that fails says so before it frees its streams: what ended in good order did so before any peer had failed.
  const bool in_order = device_problem_.empty() && !options_.state->has_failed() &&
                        options_.state->lost_peer(
                            GroupState::Look::kFlags, [] { return std::string(); }, 0) == nullptr;
  call.outcome_ = in_order ? DeviceCall::Outcome::kOver : DeviceCall::Outcome::kFailed;
  in_order ? options_.state->recorder().end(call.record_) : options_.state->recorder().fail(call.record_);
}

void OperationWatch::watch() {
  (void)::pthread_setname_np(::pthread_self(), kWatchThreadName);
  Lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopped_ || !calls_.empty(); });
    if (stopped_) return;
    lock.unlock();
    look_around();
    lock.lock();
    changed_.wait_for(lock, closing_ ? kLookEveryInClose : kLookEvery,
                      [this, was = closing_] { return stopped_ || closing_ != was; });
  }
}

void OperationWatch::look_around() {
  retire();
  if (options_.state->has_failed()) return give_up();
  if (const auto problem = find_problem_of_device()) return fail(problem);
  const auto waited = oldest();
  if (!waited) return;
  warn_of_stopped(*waited);
  if (const auto failure = find_failure(*waited)) fail(failure);
}

std::exception_ptr OperationWatch::find_problem_of_device() {
  const Lock lock(mutex_);
  if (device_problem_.empty()) return nullptr;
  return std::make_exception_ptr(
      CommError(ErrorCode::kPeerLost, str("the device of ", options_.state->own_title(), " in group '",
                                          options_.state->name(), "' has failed: ", device_problem_)));
}

std::optional<OperationWatch::Oldest> OperationWatch::oldest() {
  const Lock lock(mutex_);
  if (calls_.empty()) return std::nullopt;
  const auto since = std::max(calls_.front()->begun_, last_end_);
  return Oldest{calls_.front()->call_, seconds_between(since, Clock::now()), transport_};
}

void OperationWatch::warn_of_stopped(const Oldest& oldest) {
  const auto& warn_after = options_.state->info().warn_after;
  const std::chrono::duration<double> elapsed(oldest.elapsed_s);
  if (elapsed < warn_after) {
    looks_for_stopped_after_ = warn_after;
    return;
  }
  if (elapsed < looks_for_stopped_after_) return;
  const bool has_warned =
      options_.state->warn_of_stopped([&oldest] { return describe(oldest.call); }, oldest.elapsed_s);
  looks_for_stopped_after_ = has_warned ? std::chrono::duration<double>::max() : elapsed + kLookForStoppedEvery;
}

std::exception_ptr OperationWatch::find_failure(const Oldest& oldest) const {
  const auto& [call, elapsed_s, transport] = oldest;
  const GroupState& state = *options_.state;
  const auto what = [&oldest] { return describe(oldest.call); };
  if (auto lost = options_.state->lost_peer(GroupState::Look::kProcesses, what, elapsed_s)) return lost;
  if (const std::string problem = transport->problem(); !problem.empty())
    return std::make_exception_ptr(
        CommError(ErrorCode::kPeerLost, str(state.own_title(), " lost its peers in ", what(), " of group '",
                                            state.name(), "' ", after_seconds(elapsed_s), ": ", problem)));
  for (int peer = 0; options_.board && peer < state.place().size; ++peer)
    if (state.has_left(peer) && !options_.board->has_called(peer, call))
      return std::make_exception_ptr(PeerError(
          ErrorCode::kPeerLost,
          str(state.title(peer), " left while ", state.own_title(), " waited for it in ", what(), " of group '",
              state.name(), "' ", after_seconds(elapsed_s), "; ", options_.board->last_seen(peer)),
          peer));
  if (elapsed_s * 1000 < static_cast<double>(state.info().timeout.count())) return nullptr;
  return timed_out(call, elapsed_s);
}

std::exception_ptr OperationWatch::timed_out(const Call& call, double elapsed_s) const {
  const GroupState& state = *options_.state;
  const std::string where = str(" in ", describe(call), " of group '", state.name(), "' ", after_seconds(elapsed_s));
  const char* limit = "The limit is the timeout given at init, or TRIREME_TIMEOUT_S.";
  for (int peer = 0; options_.board && peer < state.place().size; ++peer)
    if (peer != state.place().rank && !options_.board->has_called(peer, call))
      return std::make_exception_ptr(
          PeerError(ErrorCode::kTimeout,
                    str(state.title(peer), " did not arrive while ", state.own_title(), " waited for it", where, "; ",
                        options_.board->last_seen(peer),
                        ". It may be stopped, stuck or slow, or not make this call, as all ranks must. ", limit),
                    peer));
  return std::make_exception_ptr(CommError(
      ErrorCode::kTimeout,
      str(state.own_title(), " waited", where,
          options_.board ? "; all ranks have called it, so a device or the link between them is stuck or very slow"
                         : "; which call its peers are in is unknown, because they share no memory",
          ". ", limit)));
}

void OperationWatch::close() noexcept {
  std::deque<std::shared_ptr<DeviceCall>> stuck;
  {
    Lock lock(mutex_);
    closing_ = true;
    changed_.notify_all();
    while (!options_.state->has_failed() && !calls_.empty()) changed_.wait_for(lock, kLookEvery);
    if (!changed_.wait_for(lock, kLongestRelease, [this] { return calls_.empty(); })) stuck.swap(calls_);
    stopped_ = true;
    changed_.notify_all();
  }
  worker_.join();
  if (!stuck.empty()) {
    log(LogLevel::kWarning, str("comm: the device does not end what group '", options_.state->name(),
                                "' had under way when it failed; its tensors are never freed"));
    transport_->abandon();
    (void)new auto(std::move(stuck));
  }
  std::vector<std::shared_ptr<DeviceCall>> retired;
  {
    const Lock lock(mutex_);
    retired.swap(retired_);
    transport_.reset();
  }
  release(std::move(retired));
}

void OperationWatch::wait_for_issue(DeviceCall& call) {
  const WaitScope host;  // outside of the lock: who has the host's may want it
  Lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookEvery, [&call] { return call.is_enqueued_; })) {
    lock.unlock();
    try {
      host.poll();
    } catch (...) {
      fail(std::current_exception());
      throw;
    }
    lock.lock();
  }
}

void OperationWatch::DeviceCall::wait() {
  const auto outcome = [this] {
    const Lock lock(watch_->mutex_);
    return is_enqueued_ ? std::optional(outcome_) : std::nullopt;
  };
  if (!outcome()) watch_->wait_for_issue(*this);
  if (outcome() != Outcome::kOver) watch_->check(call_);
  end_.stream_wait();
  request_ = {};
}

bool OperationWatch::DeviceCall::done() noexcept {
  const Lock lock(watch_->mutex_);
  if (is_enqueued_ && watch_->is_reached(*this)) watch_->note_end(*this);
  return outcome_ != Outcome::kUnderWay;
}

}  // namespace trireme::comm
