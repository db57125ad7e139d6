// Streams, events and launches of the fake device.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <string_view>

#include "comm/backends/device/operation_watch.h"
#include "tests/support/fake_device/order.h"
#include "trireme/base/error.h"

namespace trireme::testing {
namespace {

thread_local c10::DeviceIndex current_device = 0;
thread_local std::vector<int> current_streams = std::vector<int>(kFakeDevices, 0);

int key_of(const c10::Stream& stream) {
  return stream.device_index() * kStreamsPerDevice + static_cast<int>(stream.id());
}

c10::Stream stream_of(int key) {
  return c10::Stream(c10::Stream::UNSAFE, fake_device(key / kStreamsPerDevice), key % kStreamsPerDevice);
}

/// This thread's kind: is it the one that looks after a device group's calls?
bool is_watch_of_group() {
  char name[16] = {};
  return pthread_getname_np(pthread_self(), name, sizeof name) == 0 && std::string_view(name) == comm::kWatchThreadName;
}

c10::DeviceIndex index_of(c10::Device device) { return device.has_index() ? device.index() : current_device; }

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return fake_device(current_device); }
  void setDevice(c10::Device device) const override { current_device = index_of(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kFakeDevices; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return stream_of(index * kStreamsPerDevice + current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device) * kStreamsPerDevice);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    // A pool that is used in turns, as libtorch's: number 0 is the default stream.
    static std::vector<int> next(kFakeDevices, 0);
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    int& number = next[index_of(device)];
    number = number % (kStreamsPerDevice - 1) + 1;
    return stream_of(index_of(device) * kStreamsPerDevice + number);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    current_streams[stream.device_index()] = static_cast<int>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(key_of(stream) + 1));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    if (*event == nullptr) *event = new EventState;
    const int key = key_of(stream);
    (void)order.advance(key);
    order.streams[key].settle_what_is_over();
    *static_cast<EventState*>(*event) = order.streams[key];
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    EventState& known = *static_cast<EventState*>(event);
    known.settle_what_is_over();
    StreamState& waiting = order.streams[key_of(stream)];
    join(waiting.clock, known.clock);
    for (const JointState& joint : known.open)
      if (std::find(waiting.open.begin(), waiting.open.end(), joint) == waiting.open.end())
        waiting.open.push_back(joint);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    EventState& known = *static_cast<EventState*>(event);
    order.look_at_flags();
    known.settle_what_is_over();
    // The host that sees an event done knows all that was before it. A group's own watch tells nobody what it sees.
    if (known.open.empty() && !is_watch_of_group()) order.host_knows(known.device, known.clock);
    return known.open.empty();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    Order& order = Order::get();
    std::unique_lock lock(order.mutex);
    ++order.host_waits[std::this_thread::get_id()];
    EventState& known = *static_cast<EventState*>(event);
    order.settle(lock, known);
    order.host_knows(known.device, known.clock);
  }
  bool queryStream(const c10::Stream& stream) const override {
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    StreamState& known = order.streams[key_of(stream)];
    known.settle_what_is_over();
    return known.open.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Order& order = Order::get();
    std::unique_lock lock(order.mutex);
    ++order.host_waits[std::this_thread::get_id()];
    StreamState& state = order.streams[key_of(stream)];
    order.settle(lock, state);
    order.host_knows(stream.device_index(), state.clock);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Order& order = Order::get();
    std::unique_lock lock(order.mutex);
    ++order.host_waits[std::this_thread::get_id()];
    for (int i = 0; i < kStreamsPerDevice; ++i) {
      StreamState& state = order.streams[device * kStreamsPerDevice + i];
      order.settle(lock, state);
      order.host_knows(device, state.clock);
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    ++order.recorded_streams;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

}  // namespace

void fake_launch(const std::string& name, const FakePart& part, const std::function<void()>& kernel) {
  Order& order = Order::get();
  std::unique_lock lock(order.mutex);
  const int key = key_of(part.stream);
  order.settle(lock, order.streams[key]);
  const uint64_t tick = order.advance(key);
  const Clock clock = order.streams[key].clock;
  order.note(name, key, tick, clock);
  for (const FakeBytes& range : part.reads) order.access(range, false, key, tick, clock, name);
  for (const FakeBytes& range : part.writes) order.access(range, true, key, tick, clock, name);
  lock.unlock();
  kernel();
}

FakeJoint::FakeJoint(std::string name, int parts) : state_(std::make_shared<State>()) {
  state_->name = std::move(name);
  state_->missing = parts;
}

void FakeJoint::enqueue(const std::shared_ptr<FakeJoint>& joint, FakePart part, const std::function<void()>& run) {
  Order& order = Order::get();
  const std::lock_guard lock(order.mutex);
  State& state = *joint->state_;
  const int key = key_of(part.stream);
  StreamState& stream = order.streams[key];
  stream.settle_what_is_over();
  const uint64_t tick = order.advance(key);
  join(state.clock, stream.clock);
  state.parts.push_back({std::move(part), key, tick, stream.open});
  stream.open.push_back(joint->state_);
  if (--state.missing > 0) return;
  state.run = run;
  order.blocked.push_back(joint->state_);
  order.run_joints();
}

void FakeJoint::release(const std::shared_ptr<FakeJoint>& joint, c10::Device device) {
  Order& order = Order::get();
  const std::lock_guard lock(order.mutex);
  if (joint->state_->done) return;
  joint->state_->released.insert(device.index());
  order.run_joints();
}

void FakeJoint::fail(const std::shared_ptr<FakeJoint>& joint, const std::string& reason) {
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  if (!joint->state_->done) joint->state_->failure = reason;
  order.changed.notify_all();
}

bool FakeJoint::is_done() const {
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  return state_->done;
}

void fake_write_flag(const c10::Stream& stream, uint32_t* address, uint32_t value) {
  fake_launch("flag", {stream, {}, {}}, [] {});
  Order& order = Order::get();
  const std::lock_guard lock(order.mutex);
  order.flags[address].writes.emplace_back(value, order.streams[key_of(stream)].clock);
  std::atomic_ref(*address).store(value);
  order.look_at_flags();
}

void fake_wait_for_flag(const c10::Stream& stream, uint32_t* address, uint32_t value) {
  Order& order = Order::get();
  const std::lock_guard lock(order.mutex);
  const auto joint = std::make_shared<FakeJoint::State>();
  order.flags[address].waits.emplace_back(value, joint);
  order.streams[key_of(stream)].open.push_back(joint);
  order.look_at_flags();
}

void fake_forget_flags(const void* memory, size_t bytes) {
  Order& order = Order::get();
  const std::lock_guard lock(order.mutex);
  const auto* begin = static_cast<const std::byte*>(memory);
  std::erase_if(order.flags, [&](const auto& item) {
    const auto* address = reinterpret_cast<const std::byte*>(item.first);
    return address >= begin && address < begin + bytes;
  });
}

c10::Stream fake_stream_of(void* native_handle) {
  return stream_of(static_cast<int>(reinterpret_cast<intptr_t>(native_handle)) - 1);
}

}  // namespace trireme::testing
