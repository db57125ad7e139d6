// The unfinished calls of a device group, from before they are enqueued until the device is through with them, and
// a thread that sees when they never will be.
//
// Nothing here makes a caller wait for the device. A call ends for its caller by an event on the stream; the thread
// looks at events, peers and clock every 20 ms while there is anything under way.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/backends/device/call_board.h"
#include "comm/backends/device/transport.h"
#include "comm/group_state.h"
#include "trireme/base/worker.h"
#include "trireme/device/stream.h"

namespace trireme::comm {

/// As a debugger shows it.
inline constexpr char kWatchThreadName[] = "comm watch";

class OperationWatch : public std::enable_shared_from_this<OperationWatch> {
 public:
  struct Options {
    std::shared_ptr<GroupState> state;
    std::shared_ptr<CallBoard> board;  ///< null: ranks share no memory
  };
  OperationWatch(Options options, std::shared_ptr<DeviceTransport> transport)
      : options_(std::move(options)), transport_(std::move(transport)) {}

  class DeviceCall;
  using Calls = std::vector<std::shared_ptr<DeviceCall>>;
  using Requests = std::vector<const Request*>;
  /// Records `request` and watches it from here on. Throws the error of a group that has failed.
  std::shared_ptr<DeviceCall> begin(Request request);
  /// Enqueues on `stream`, behind `inputs`, what `body` does for the calls' requests. What it throws ends the group.
  void issue(const Calls& calls, const Event& inputs, const SideStream& stream,
             const std::function<void(const Requests&)>& body);
  /// Throws if the group has failed, here or, as far as can be seen without asking the system, on a peer.
  void check(const Call& call);
  /// Marks the group dead here, tells peers, and frees the streams.
  void fail(const std::exception_ptr& error) noexcept;
  /// Blocks until the device is through with all calls, or the group has failed and its streams are free.
  void close() noexcept;

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = std::chrono::steady_clock;

  void watch();
  void look_around();
  /// Notes which calls are over.
  void retire();
  /// The same for `call`, which the device is through with.
  void note_end(DeviceCall& call);
  /// Lets go of the tensors of calls that are over. In a thread of the program.
  void release(std::vector<std::shared_ptr<DeviceCall>> retired);
  /// All that is not over has failed; may be repeated until the streams are free.
  void give_up() noexcept;
  void enqueued(const Calls& calls, const SideStream& stream) noexcept;
  bool is_reached(const DeviceCall& call) noexcept;
  void wait_for_issue(DeviceCall& call);
  /// Why the device has failed, if so.
  std::exception_ptr find_problem_of_device();
  /// The oldest call that is not over, and for how long it has been.
  struct Oldest {
    Call call;
    double elapsed_s;
    std::shared_ptr<DeviceTransport> transport;
  };
  std::optional<Oldest> oldest();
  /// Why it will never be over, if so.
  std::exception_ptr find_failure(const Oldest& oldest) const;
  std::exception_ptr timed_out(const Call& call, double elapsed_s) const;
  /// Names, once for the call, a peer whose process is stopped.
  void warn_of_stopped(const Oldest& oldest);

  const Options options_;
  std::mutex mutex_;  // guards everything below
  std::condition_variable changed_;
  std::shared_ptr<DeviceTransport> transport_;        // shared with the group; null after close()
  std::string device_problem_;                        // what a look at the device threw
  std::deque<std::shared_ptr<DeviceCall>> calls_;     // shared with Pending: either may go first
  std::vector<std::shared_ptr<DeviceCall>> retired_;  // over; their tensors are still held
  Clock::time_point last_end_ = Clock::now();
  bool closing_ = false;
  bool stopped_ = false;
  Worker worker_;

  std::chrono::duration<double> looks_for_stopped_after_{};  // of the oldest call's wait; of the watching thread alone
};

class OperationWatch::DeviceCall final : public Pending<void>::Operation {
 public:
  DeviceCall(std::shared_ptr<OperationWatch> watch, Request request, int64_t record)
      : watch_(std::move(watch)), call_(request.call), request_(std::move(request)), record_(record) {}
  /// The caller's current stream goes on behind the call. After it the tensors are the caller's alone.
  void wait() override;
  bool done() noexcept override;
  void drop() noexcept override {}

 private:
  friend class OperationWatch;
  enum class Outcome { kUnderWay, kOver, kFailed };

  const std::shared_ptr<OperationWatch> watch_;  // shared: this may outlive the group
  const Call call_;
  Request request_;
  const int64_t record_;  ///< of the flight recorder
  const Clock::time_point begun_ = Clock::now();
  // Guarded by the watch's mutex:
  Outcome outcome_ = Outcome::kUnderWay;
  bool is_enqueued_ = false;
  Event end_;
};

}  // namespace trireme::comm
