// The order of work on a device: streams, and points in them that others wait for. On the host everything runs in the
// order of the program, so all of this is nothing there.
//
// Works with every accelerator that libtorch has streams for; what is CUDA's alone is in device.h and in backends.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace trireme {

inline bool is_host(c10::Device device) { return device.is_cpu(); }
inline bool is_host(const at::Tensor& tensor) { return is_host(tensor.device()); }

/// The stream on which this thread enqueues now. Requires  `device` is no host.
c10::Stream current_stream(c10::Device device);

/// The host waits for all work on `device`. For releasing memory at the end, never within a step.
void wait_quietly(c10::Device device) noexcept;

/// A point in the work of one stream: all that was enqueued on it before. Copies share it. A default one, and any on
/// the host, is complete already.
class Event {
 public:
  Event() = default;
  /// Behind what this thread has enqueued on its current stream of `device`.
  static Event record(c10::Device device);
  static Event record(const c10::Stream& stream);

  /// Makes later work of this thread's current stream wait for the event. The host does not wait.
  void stream_wait() const;
  /// The same for what is enqueued on `stream`.
  void stream_wait(const c10::Stream& stream) const {
    if (event_) event_->block(stream);
  }
  /// stream_wait() for destructors: ignores the errors of a device that has failed.
  void stream_wait_quietly() const noexcept;
  /// The host waits for the event. For results that a user reads, never within a step.
  void synchronize() const;
  bool is_complete() const { return !event_ || event_->query(); }

 private:
  explicit Event(std::shared_ptr<c10::Event> event) : event_(std::move(event)) {}
  std::shared_ptr<c10::Event> event_;  // shared: several streams may wait for one point
};

/// A stream beside the one that computes. On the host there is none, and OnStream does nothing.
class SideStream {
 public:
  explicit SideStream(c10::Device device);
  c10::Device device() const { return device_; }
  const std::optional<c10::Stream>& stream() const { return stream_; }

 private:
  c10::Device device_;
  std::optional<c10::Stream> stream_;
};

/// While it lives, this thread enqueues on `side`.
class [[nodiscard]] OnStream {
 public:
  explicit OnStream(const SideStream& side) {
    if (side.stream()) guard_.emplace(*side.stream());
  }

 private:
  std::optional<c10::StreamGuard> guard_;
};

}  // namespace trireme
