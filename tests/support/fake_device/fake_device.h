// An accelerator made of host memory that checks the order of what runs on it.
//
// The main idea: streams are vector clocks. Each operator runs at once, on the host, with the CPU's kernel, so results
// are those of the CPU; and it is noted which bytes it read and wrote, on which stream, and what that stream had waited
// for. Two accesses to the same bytes, one of them a write, that no chain of streams and events orders are a race,
// whether or not a real device would have shown it in this run.
//
// Copies to pinned host memory arrive only when the host has waited for them; memory that is freed belongs to its
// allocation's stream again, as with libtorch's caching allocator; every wait of the host is counted.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace torch::nn {
class Module;
}

namespace trireme::testing {

/// Ranks that are threads take one each: autograd has one thread per device.
inline constexpr int kFakeDevices = 8;

inline c10::Device fake_device(int index = 0) {
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

/// An operation that ran; they stand in the order of their start.
struct FakeOperation {
  std::string name;  ///< "aten::addmm", or as enqueued
  int stream = 0;    ///< over all devices; streams of different devices differ
  int device = 0;
  uint64_t tick = 0;
  std::vector<uint64_t> clock;  ///< by stream: the last tick that it runs after; its own tick included
};

/// Whether some chain of streams and events lets `later` start only after `earlier` has ended.
bool runs_after(const FakeOperation& later, const FakeOperation& earlier);

/// Empties the record and starts it anew; it says what happened since. One at a time.
class FakeRecord {
 public:
  FakeRecord();
  ~FakeRecord();
  FakeRecord(const FakeRecord&) = delete;
  FakeRecord& operator=(const FakeRecord&) = delete;

  /// One line each: which bytes' accesses are in no order.
  std::vector<std::string> races() const;
  std::vector<FakeOperation> operations() const;
  /// Waits of the host for the device so far: for streams, events, the device, numbers and copies that block.
  int64_t host_waits() const;
  int64_t host_waits(std::thread::id thread) const;  ///< of one thread
  /// Calls of record_stream().
  int64_t recorded_streams() const;
  /// Bytes of device memory allocated now, and the most that there were since reset_peak().
  int64_t bytes(int device) const;
  int64_t peak_bytes(int device) const;
  void reset_peak();
};

/// Bytes that an operation reads or writes.
struct FakeBytes {
  const void* data = nullptr;
  size_t bytes = 0;
};

/// One rank's part in an operation of several streams, such as a collective.
struct FakePart {
  c10::Stream stream;
  std::vector<FakeBytes> reads;
  std::vector<FakeBytes> writes;
};

/// Something on several streams that runs once all of them have it: a collective. Operators behind it on a stream wait.
class FakeJoint {
 public:
  FakeJoint(std::string name, int parts);
  /// Never waits. `run` of the last one to come does it all.
  static void enqueue(const std::shared_ptr<FakeJoint>& joint, FakePart part, const std::function<void()>& run);
  /// Every part whose operators wait for it throws `reason`.
  static void fail(const std::shared_ptr<FakeJoint>& joint, const std::string& reason);
  /// The part on `device` ends without it: what is behind goes on, with whatever is in memory. The joint never runs.
  static void release(const std::shared_ptr<FakeJoint>& joint, c10::Device device);
  bool is_done() const;

  struct State;
  const std::shared_ptr<State>& state() const { return state_; }

 private:
  std::shared_ptr<State> state_;
};

/// A custom kernel: runs `kernel` at once, as the next operation of `stream`.
void fake_launch(const std::string& name, const FakePart& part, const std::function<void()>& kernel);

/// Words of the host's memory that streams wait for: what `stream` is told next starts when the word at `address` has
/// reached `value`, compared as CUDA does.
void fake_wait_for_flag(const c10::Stream& stream, uint32_t* address, uint32_t value);
/// Writes the word when all before it on `stream` is over; who has waited for it is behind that.
void fake_write_flag(const c10::Stream& stream, uint32_t* address, uint32_t value);
/// The memory is about to go.
void fake_forget_flags(const void* memory, size_t bytes);

/// Moves the module's parameters and buffers in place, which Module::to() does for libtorch's own devices only.
void move_to_fake(torch::nn::Module& module, c10::Device device);

/// The c10 stream behind a native handle.
c10::Stream fake_stream_of(void* native_handle);

}  // namespace trireme::testing
