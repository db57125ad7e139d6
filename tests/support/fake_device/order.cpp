#include "tests/support/fake_device/order.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "trireme/base/error.h"

namespace trireme::testing {

namespace {

/// Whether `joint` is one of `open`, or comes before one of them.
bool is_within(const JointState& joint, const std::vector<JointState>& open) {
  return joint != nullptr && std::any_of(open.begin(), open.end(), [&](const JointState& each) {
           return each == joint || std::any_of(each->parts.begin(), each->parts.end(),
                                               [&](const auto& part) { return is_within(joint, part.after); });
         });
}

}  // namespace

void join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

void Knowledge::settle_what_is_over() {
  std::erase_if(open, [this](const JointState& joint) {
    if (joint->done) join(clock, joint->clock);
    return joint->is_over_on(device);
  });
}

Order::Order() {
  for (size_t stream = 0; stream < streams.size(); ++stream)
    streams[stream].device = device_of(static_cast<int>(stream));
}

Order& Order::get() {
  static auto* order = new Order;  // storages may outlive main()
  return *order;
}

void Order::settle(std::unique_lock<std::mutex>& lock, Knowledge& known) {
  known.settle_what_is_over();
  while (!known.open.empty()) {
    const JointState joint = known.open.back();
    const auto ended = [&] { return joint->is_over_on(known.device) || !joint->failure.empty(); };
    while (!changed.wait_for(lock, std::chrono::milliseconds(2), ended)) look_at_flags();
    if (!joint->is_over_on(known.device)) throw std::runtime_error(joint->failure);
    known.settle_what_is_over();
  }
}

void Order::look_at_flags() {
  const auto reaches = [](uint32_t now, uint32_t value) { return static_cast<int32_t>(now - value) >= 0; };
  for (auto& [address, flag] : flags) {
    const uint32_t now = std::atomic_ref(*address).load();
    std::erase_if(flag.waits, [&](const auto& wait) {
      const auto& [value, joint] = wait;
      if (!reaches(now, value)) return false;
      // The first write that is enough is all that the wait is behind; there is none where the host wrote.
      const auto write = std::find_if(flag.writes.begin(), flag.writes.end(),
                                      [&](const auto& each) { return reaches(each.first, value); });
      if (write != flag.writes.end()) joint->clock = write->second;
      joint->done = true;
      return true;
    });
  }
  run_joints();
}

void Order::run_joints() {
  const auto is_free = [](const JointState& joint) {
    return std::all_of(joint->parts.begin(), joint->parts.end(), [](const FakeJoint::State::Part& part) {
      return std::all_of(part.after.begin(), part.after.end(),
                         [&](const JointState& earlier) { return earlier->is_over_on(device_of(part.stream)); });
    });
  };
  const auto next_free = [&] { return std::find_if(blocked.begin(), blocked.end(), is_free); };
  for (auto next = next_free(); next != blocked.end(); next = next_free()) {
    const JointState joint = *next;
    blocked.erase(next);
    if (!joint->released.empty()) continue;  // a part is gone: it never runs
    for (const auto& part : joint->parts)
      for (const JointState& earlier : part.after)
        if (earlier->done) join(joint->clock, earlier->clock);
    for (const auto& [part, stream, tick, after] : joint->parts) {
      note(joint->name, stream, tick, joint->clock);
      for (const FakeBytes& range : part.reads) access(range, false, stream, tick, joint->clock, joint->name, joint);
      for (const FakeBytes& range : part.writes) access(range, true, stream, tick, joint->clock, joint->name, joint);
    }
    joint->run();
    joint->done = true;
    joint->parts.clear();
    joint->run = nullptr;
  }
  changed.notify_all();
}

uint64_t Order::advance(int stream) {
  Clock& clock = streams[stream].clock;
  if (clock.size() <= static_cast<size_t>(stream)) clock.resize(stream + 1);
  join(clock, hosts[device_of(stream)]);
  return ++clock[stream];
}

void Order::note(const std::string& name, int stream, uint64_t tick, const Clock& clock) {
  operations.push_back({name, stream, device_of(stream), tick, clock});
}

void Order::access(const FakeBytes& range, bool writes, int stream, uint64_t tick, const Clock& clock,
                   const std::string& name, const JointState& joint) {
  if (range.bytes == 0) return;
  const auto* begin = static_cast<const std::byte*>(range.data);
  auto found = blocks.upper_bound(begin);
  if (found == blocks.begin()) return;  // host memory
  --found;
  Block& block = found->second;
  const auto offset = static_cast<size_t>(begin - found->first);
  if (offset >= std::max<size_t>(block.bytes, 1)) return;
  if (block.is_free && !is_within(joint, block.freed_behind))
    races.push_back(str(name, " on stream ", stream, " uses memory that was freed"));
  const size_t end = offset + range.bytes;
  for (const auto& [key, past] : block.accesses) {
    const auto& [past_begin, past_end, past_stream, past_writes] = key;
    if (past_stream == stream || past_begin >= end || past_end <= offset || (!writes && !past_writes)) continue;
    if (knows(clock, past_stream, past.tick)) continue;
    races.push_back(str(name, " on stream ", stream, writes ? " writes" : " reads", " what ", past.name, " on stream ",
                        past_stream, past_writes ? " writes" : " reads", ", in no order (bytes ",
                        std::max(offset, past_begin), " to ", std::min(end, past_end), " of ", block.bytes, ")"));
  }
  block.accesses[{offset, end, stream, writes}] = {stream, tick, name};
}

bool knows(const Clock& clock, int stream, uint64_t tick) {
  return static_cast<size_t>(stream) < clock.size() && clock[stream] >= tick;
}

bool overlap(const FakeBytes& a, const FakeBytes& b) {
  const auto *begin_a = static_cast<const std::byte*>(a.data), *begin_b = static_cast<const std::byte*>(b.data);
  return begin_a < begin_b + b.bytes && begin_b < begin_a + a.bytes;
}

std::vector<std::byte> Order::depart(const FakeBytes& source, int stream) {
  const auto* begin = static_cast<const std::byte*>(source.data);
  std::vector<std::byte> values(begin, begin + source.bytes);
  const Clock& clock = streams[stream].clock;
  for (const Arrival& arrival : arrivals) {
    if (!overlap(source, arrival.bytes())) continue;
    if (!knows(clock, arrival.stream, arrival.tick))
      races.push_back("host memory is copied to the device while a copy to it is under way");
    for (size_t i = 0; i < arrival.values.size(); ++i)
      if (const std::byte* at = arrival.target + i; at >= begin && at < begin + source.bytes)
        values[static_cast<size_t>(at - begin)] = arrival.values[i];
  }
  departures.push_back({stream, clock[stream], values, begin});
  return values;
}

void Order::arrive(std::byte* target, std::vector<std::byte> values, int stream) {
  const Clock& clock = streams[stream].clock;
  const FakeBytes bytes{target, values.size()};
  // Copies from there that this one is behind are over: what they read may change.
  std::erase_if(departures, [&](const Departure& departure) {
    if (!overlap(bytes, departure.bytes())) return false;
    if (!knows(clock, departure.stream, departure.tick))
      races.push_back("host memory is overwritten while it is being copied to the device");
    return true;
  });
  std::memset(target, 0xFF, values.size());  // until the host has waited
  arrivals.push_back({stream, clock[stream], std::move(values), target});
}

void Order::host_knows(int device, const Clock& clock) {
  join(hosts[device], clock);
  std::erase_if(arrivals, [&](const Arrival& arrival) {
    if (!knows(clock, arrival.stream, arrival.tick)) return false;
    std::memcpy(arrival.target, arrival.values.data(), arrival.values.size());
    return true;
  });
  std::erase_if(departures, [&](const Departure& departure) {
    if (!knows(clock, departure.stream, departure.tick)) return false;
    if (std::memcmp(departure.source, departure.values.data(), departure.values.size()) != 0)
      races.push_back("host memory was written while it was being copied to the device");
    return true;
  });
}

void* Order::allocate(size_t size, int stream) {
  const size_t rounded = std::max<size_t>((size + 511) / 512 * 512, 512);
  auto* data = static_cast<std::byte*>(std::aligned_alloc(512, rounded));
  std::memset(data, 0xFF, rounded);  // NaNs: whoever reads what nobody wrote shall see it
  Block block;
  block.bytes = size;
  block.device = device_of(stream);
  block.stream = stream;
  blocks[data] = std::move(block);
  bytes[device_of(stream)] += static_cast<int64_t>(size);
  peak_bytes[device_of(stream)] = std::max(peak_bytes[device_of(stream)], bytes[device_of(stream)]);
  return data;
}

void Order::free(void* data) {
  const auto found = blocks.find(static_cast<const std::byte*>(data));
  if (found == blocks.end()) return;
  Block& block = found->second;
  // The caching allocator may hand it out again at once, to operators on the stream of the allocation.
  Clock clock = streams[block.stream].clock;
  join(clock, hosts[block.device]);
  for (const JointState& joint : streams[block.stream].open) join(clock, joint->clock);
  const uint64_t tick = static_cast<size_t>(block.stream) < clock.size() ? clock[block.stream] : 0;
  access({data, block.bytes}, /*writes=*/true, block.stream, tick, clock, "its release");
  block.is_free = true;
  block.freed_behind = streams[block.stream].open;
  block.accesses.clear();
  bytes[block.device] -= static_cast<int64_t>(block.bytes);
}

void Order::take_from_device(const FakeBytes& range, const std::string& name, const std::string& by) {
  for (auto& [data, block] : blocks) {
    if (block.is_free || !overlap(range, {data, block.bytes})) continue;
    for (const auto& [key, access] : block.accesses)
      if ((by.empty() || access.name == by) && !knows(hosts[block.device], access.stream, access.tick))
        races.push_back(name + " of memory that " + access.name + " may still use");
  }
}

bool runs_after(const FakeOperation& later, const FakeOperation& earlier) {
  return knows(later.clock, earlier.stream, earlier.tick);
}

FakeRecord::FakeRecord() {
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  // Streams and events live on; what they know is only ever true.
  std::erase_if(order.blocks, [](const auto& item) {
    if (!item.second.is_free) return false;
    std::free(const_cast<std::byte*>(item.first));
    return true;
  });
  order.races.clear();
  order.operations.clear();
  order.arrivals.clear();
  order.departures.clear();
  order.host_waits.clear();
  order.recorded_streams = 0;
  order.peak_bytes = order.bytes;
}

FakeRecord::~FakeRecord() = default;

template <class Value>
static Value read(Value Order::*member) {
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  return order.*member;
}

std::vector<std::string> FakeRecord::races() const { return read(&Order::races); }
std::vector<FakeOperation> FakeRecord::operations() const { return read(&Order::operations); }
int64_t FakeRecord::host_waits() const {
  int64_t sum = 0;
  for (const auto& [thread, waits] : read(&Order::host_waits)) sum += waits;
  return sum;
}
int64_t FakeRecord::host_waits(std::thread::id thread) const { return read(&Order::host_waits)[thread]; }
int64_t FakeRecord::recorded_streams() const { return read(&Order::recorded_streams); }
int64_t FakeRecord::bytes(int device) const { return read(&Order::bytes)[device]; }
int64_t FakeRecord::peak_bytes(int device) const { return read(&Order::peak_bytes)[device]; }

void FakeRecord::reset_peak() {
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  order.peak_bytes = order.bytes;
}

}  // namespace trireme::testing
