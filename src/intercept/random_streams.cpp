#include "trireme/intercept/random_streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <mutex>

#include "trireme/base/error.h"
#include "trireme/base/mix64.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

constexpr char kDigits[] = "0123456789abcdef";

struct NamedStream {
  const char* name;
  RandomStream stream;
  bool on_device;
};
// As checkpoints name them; kModel stands before kSlice, as set_state() asks for.
constexpr std::array<NamedStream, 4> kNamedStreams = {{{"generator", RandomStream::kModel, false},
                                                       {"device_generator", RandomStream::kModel, true},
                                                       {"slice_generator", RandomStream::kSlice, false},
                                                       {"device_slice_generator", RandomStream::kSlice, true}}};

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_state_of(at::Generator generator, const at::Tensor& state) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

void seed_generator(at::Generator generator, uint64_t seed) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

int digit(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  throw CheckpointError(str("generator state: expected hexadecimal digits, found '", character, "'"));
}

std::string text_of(const at::Tensor& state) {
  const uint8_t* bytes = state.const_data_ptr<uint8_t>();
  std::string text;
  text.reserve(static_cast<size_t>(2 * state.numel()));
  for (int64_t i = 0; i < state.numel(); ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

at::Tensor state_in(const std::string& text, int64_t expected) {
  if (static_cast<int64_t>(text.size()) != 2 * expected)
    throw CheckpointError(str("generator state: expected ", 2 * expected, " digits, found ", text.size(),
                              "; it was saved with another version of libtorch"));
  const at::Tensor state = at::empty({expected}, at::kByte);
  uint8_t* bytes = state.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < expected; ++i)
    bytes[i] = static_cast<uint8_t>(digit(text[2 * i]) * 16 + digit(text[2 * i + 1]));
  return state;
}

}  // namespace

RandomStreams& RandomStreams::current() {
  RankContext* context = RankContext::current();
  return (context != nullptr ? *context : RankContext::to_be()).streams();
}

void RandomStreams::use_own_generator(uint64_t seed) {
  own_ = at::detail::createCPUGenerator(seed);
  forget_slice(c10::kCPU);
}

void RandomStreams::set_slice(uint64_t place) {
  place_ = place;
  slices_.clear();
}

void RandomStreams::seed(uint64_t seed) { this->seed(c10::kCPU, seed); }

void RandomStreams::seed(c10::Device device, uint64_t seed) {
  seed_generator(generator(RandomStream::kModel, device), seed);
  forget_slice(device);
}

uint64_t RandomStreams::seed_in(RandomStream stream, uint64_t seed) const {
  return stream == RandomStream::kSlice ? stream_seed(seed, place_) : seed;
}

at::Generator RandomStreams::generator(RandomStream stream, c10::Device device) {
  if (stream == RandomStream::kModel)
    return device.is_cpu() && own_.defined() ? own_ : at::globalContext().defaultGenerator(device);
  for (const auto& [made_for, slice] : slices_)
    if (made_for == device) return slice;
  const at::Generator model = generator(RandomStream::kModel, device);
  at::Generator slice = model.clone();
  seed_generator(slice, seed_in(stream, model.current_seed()));
  slices_.emplace_back(device, slice);
  return slice;
}

at::Tensor RandomStreams::state(RandomStream stream, c10::Device device) {
  const auto is_made = [device](const auto& slice) { return slice.first == device; };
  if (stream == RandomStream::kSlice && std::none_of(slices_.begin(), slices_.end(), is_made)) return {};
  return state_of(generator(stream, device));
}

void RandomStreams::set_state(RandomStream stream, c10::Device device, const at::Tensor& state) {
  if (!state.defined()) return forget_slice(device);
  set_state_of(generator(stream, device), state);
}

void RandomStreams::forget_slice(c10::Device device) {
  std::erase_if(slices_, [device](const auto& slice) { return slice.first == device; });
}

uint64_t stream_seed(uint64_t seed, uint64_t index) { return mix64(seed + index * 0x9e3779b97f4a7c15); }

void manual_seed(uint64_t seed) { RandomStreams::current().seed(seed); }

void manual_seed_device(c10::Device device, uint64_t seed) {
  if (!device.is_cpu()) RandomStreams::current().seed(device, seed);
}

uint64_t generator_seed() { return RandomStreams::current().generator(RandomStream::kModel, c10::kCPU).current_seed(); }

std::map<std::string, std::string> random_states(c10::Device device) {
  std::map<std::string, std::string> states;
  for (const NamedStream& named : kNamedStreams) {
    if (named.on_device && device.is_cpu()) continue;
    const at::Tensor state = RandomStreams::current().state(named.stream, named.on_device ? device : c10::kCPU);
    if (state.defined()) states.emplace(named.name, text_of(state));
  }
  return states;
}

void set_random_states(const std::map<std::string, std::string>& states, c10::Device device) {
  if (states.empty()) return;
  RandomStreams& streams = RandomStreams::current();
  for (const NamedStream& named : kNamedStreams) {
    if (named.on_device && device.is_cpu()) continue;
    const c10::Device of = named.on_device ? device : c10::kCPU;
    const auto text = states.find(named.name);
    if (text != states.end() && !text->second.empty()) {
      const int64_t bytes = state_of(streams.generator(named.stream, of)).numel();
      streams.set_state(named.stream, of, state_in(text->second, bytes));
    } else if (named.stream == RandomStream::kSlice) {
      streams.set_state(named.stream, of, {});
    }
  }
}

}  // namespace trireme
