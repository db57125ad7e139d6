#include "trireme/intercept/random_streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

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

/// The states of one generator of `each` bytes, or of several, as RandomStreams::state() gives them.
at::Tensor state_in(const std::string& text, int64_t each) {
  const auto expected = static_cast<int64_t>(text.size()) / 2;
  if (text.size() % 2 != 0 || (expected != each && expected % (each + 1) != 0))
    throw CheckpointError(str("generator state: expected ", 2 * each, " digits, found ", text.size(),
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

void RandomStreams::set_slices(std::vector<uint64_t> places) {
  places_ = std::move(places);
  slices_.clear();
}

void RandomStreams::seed(uint64_t seed) { this->seed(c10::kCPU, seed); }

void RandomStreams::seed(c10::Device device, uint64_t seed) {
  seed_generator(generator(RandomStream::kModel, device), seed);
  forget_slice(device);
}

uint64_t RandomStreams::seed_in(RandomStream stream, uint64_t seed) const {
  return stream == RandomStream::kModel ? seed : stream_seed(seed, places_.at(static_cast<size_t>(stream) - 1));
}

at::Generator RandomStreams::generator(RandomStream stream, c10::Device device) {
  if (stream == RandomStream::kModel)
    return device.is_cpu() && own_.defined() ? own_ : at::globalContext().defaultGenerator(device);
  for (const Slice& slice : slices_)
    if (slice.device == device && slice.stream == stream) return slice.generator;
  const at::Generator model = generator(RandomStream::kModel, device);
  at::Generator made = model.clone();
  seed_generator(made, seed_in(stream, model.current_seed()));
  slices_.push_back({device, stream, made});
  std::ranges::stable_sort(slices_, {}, &Slice::stream);
  return made;
}

/// A state of kSlice alone as it is; others each behind the number of its stream.
at::Tensor RandomStreams::state(RandomStream stream, c10::Device device) {
  if (stream == RandomStream::kModel) return state_of(generator(stream, device));
  const WithoutInterception own_operators;  // a program saves states wherever it recomputes
  std::vector<at::Tensor> states;
  bool is_first_alone = true;
  for (const Slice& slice : slices_) {
    if (slice.device != device) continue;
    is_first_alone = is_first_alone && slice.stream == RandomStream::kSlice;
    states.push_back(at::tensor({static_cast<uint8_t>(slice.stream)}, at::kByte));
    states.push_back(state_of(slice.generator));
  }
  if (states.empty()) return {};
  return is_first_alone ? states[1] : at::cat(states);
}

void RandomStreams::set_state(RandomStream stream, c10::Device device, const at::Tensor& state) {
  if (stream == RandomStream::kModel && state.defined()) return set_state_of(generator(stream, device), state);
  forget_slice(device);
  if (!state.defined()) return;
  const WithoutInterception own_operators;
  const int64_t bytes = state_of(generator(RandomStream::kModel, device)).numel();
  if (state.numel() == bytes) return set_state_of(generator(stream, device), state);
  for (int64_t at = 0; at + bytes < state.numel(); at += bytes + 1) {
    const auto number = state[at].item<uint8_t>();
    if (number == 0 || number > places_.size()) continue;  // saved where more axes cut activations
    set_state_of(generator(static_cast<RandomStream>(number), device), state.narrow(0, at + 1, bytes).clone());
  }
}

void RandomStreams::forget_slice(c10::Device device) {
  std::erase_if(slices_, [device](const Slice& slice) { return slice.device == device; });
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
