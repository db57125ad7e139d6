// The record behind the fake device: clocks, accesses, memory. Everything in it is called under its lock.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "tests/support/fake_device/fake_device.h"

namespace trireme::testing {

inline constexpr int kStreamsPerDevice = 32;

/// By stream: the last tick that is known to be over.
using Clock = std::vector<uint64_t>;
void join(Clock& clock, const Clock& other);
bool knows(const Clock& clock, int stream, uint64_t tick);
bool overlap(const FakeBytes& a, const FakeBytes& b);

using JointState = std::shared_ptr<FakeJoint::State>;

struct FakeJoint::State {
  struct Part {
    FakePart part;
    int stream;
    uint64_t tick;
    std::vector<JointState> after;  // what must be over before it
  };
  std::string name;
  int missing = 0;
  bool done = false;
  std::string failure;
  std::set<int> released;  // devices whose parts ended without it
  Clock clock;             // of all parts, joined
  std::vector<Part> parts;
  std::function<void()> run;

  bool is_over_on(int device) const { return done || released.contains(device); }
};

/// Operations that are known to be over, and joints that must be over besides.
struct Knowledge {
  int device = 0;
  Clock clock;
  std::vector<JointState> open;

  /// Forgets the joints that are over, and knows what they knew.
  void settle_what_is_over();
};
using StreamState = Knowledge;
using EventState = Knowledge;

struct Access {
  int stream;
  uint64_t tick;
  std::string name;
};

struct Block {
  size_t bytes = 0;
  int device = 0;
  int stream = 0;  // of the allocation
  bool is_free = false;
  std::vector<JointState> freed_behind;  // what the stream of the allocation still waits for
  std::map<std::tuple<size_t, size_t, int, bool>, Access> accesses;  // by begin, end, stream, is a write: the last one
};

/// A copy from the device that the host has not waited for.
struct Arrival {
  int stream;
  uint64_t tick;
  std::vector<std::byte> values;
  std::byte* target;
  FakeBytes bytes() const { return {target, values.size()}; }
};

/// A copy to the device that the host has not waited for.
struct Departure {
  int stream;
  uint64_t tick;
  std::vector<std::byte> values;
  const std::byte* source;
  FakeBytes bytes() const { return {source, values.size()}; }
};

/// A word of memory that streams write and wait for.
struct FlagState {
  std::vector<std::pair<uint32_t, Clock>> writes;  ///< in their order, with what was over before each
  std::vector<std::pair<uint32_t, JointState>> waits;
};

struct Order {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<StreamState> streams = std::vector<StreamState>(kFakeDevices * kStreamsPerDevice);
  std::map<uint32_t*, FlagState> flags;
  std::vector<JointState> blocked;                              // joints that have all parts, and parts that must wait
  std::vector<Clock> hosts = std::vector<Clock>(kFakeDevices);  // what the host of each device has waited for
  std::map<const std::byte*, Block> blocks;                     // device memory, freed ones too
  std::map<const void*, size_t> pinned;                         // page-locked memory of the host, and its bytes
  std::vector<Arrival> arrivals;
  std::vector<Departure> departures;
  std::vector<std::string> races;
  std::vector<FakeOperation> operations;
  std::map<std::thread::id, int64_t> host_waits;
  int64_t recorded_streams = 0;
  std::vector<int64_t> bytes = std::vector<int64_t>(kFakeDevices);
  std::vector<int64_t> peak_bytes = std::vector<int64_t>(kFakeDevices);

  Order();
  static Order& get();
  static int device_of(int stream) { return stream / kStreamsPerDevice; }

  /// Blocks until what `known` depends on has run. Throws what made a joint fail.
  void settle(std::unique_lock<std::mutex>& lock, Knowledge& known);
  /// Runs the joints that nothing holds up any more.
  void run_joints();
  /// Ends the waits for flags that have the value by now; the host may have written it.
  void look_at_flags();
  /// The next tick of `stream`, which must be settled or only enqueue.
  uint64_t advance(int stream);
  void note(const std::string& name, int stream, uint64_t tick, const Clock& clock);
  /// `joint`: the one that this is a part of.
  void access(const FakeBytes& range, bool writes, int stream, uint64_t tick, const Clock& clock,
              const std::string& name, const JointState& joint = nullptr);
  /// `stream` copies `source` to the device, pinned memory of the host: its bytes when the copy runs, which what is
  /// still on its way there may change before.
  std::vector<std::byte> depart(const FakeBytes& source, int stream);
  /// `stream` copies `values` to pinned memory, which has them when the host has waited.
  void arrive(std::byte* target, std::vector<std::byte> values, int stream);
  /// The host of `device` has waited for all that `clock` knows.
  void host_knows(int device, const Clock& clock);
  void* allocate(size_t bytes, int stream);
  void free(void* data);
  /// The host takes memory from under what accesses it: a race with those it has not waited for. `by`: operations of
  /// that name alone, or all.
  void take_from_device(const FakeBytes& range, const std::string& name, const std::string& by = "");
};

}  // namespace trireme::testing
