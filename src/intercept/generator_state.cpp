#include "trireme/intercept/generator_state.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/ops/empty.h>

#include <mutex>

#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

constexpr char kDigits[] = "0123456789abcdef";

at::Generator generator_of_this_rank() {
  const RankContext* context = RankContext::current();
  return context != nullptr && context->has_own_generator() ? context->own_generator()
                                                            : at::detail::getDefaultCPUGenerator();
}

int digit(char character) {
  if (character >= '0' && character <= '9') return character - '0';
  if (character >= 'a' && character <= 'f') return character - 'a' + 10;
  throw CheckpointError(str("generator state: expected hexadecimal digits, found '", character, "'"));
}

std::string text_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const at::Tensor state = generator.get_state();
  const uint8_t* bytes = state.const_data_ptr<uint8_t>();
  std::string text;
  text.reserve(static_cast<size_t>(2 * state.numel()));
  for (int64_t i = 0; i < state.numel(); ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

void take_text(at::Generator generator, const std::string& text) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  const int64_t expected = generator.get_state().numel();
  if (static_cast<int64_t>(text.size()) != 2 * expected)
    throw CheckpointError(str("generator state: expected ", 2 * expected, " digits, found ", text.size(),
                              "; it was saved with another version of libtorch"));
  const at::Tensor state = at::empty({expected}, at::kByte);
  uint8_t* bytes = state.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < expected; ++i)
    bytes[i] = static_cast<uint8_t>(digit(text[2 * i]) * 16 + digit(text[2 * i + 1]));
  generator.set_state(state);
}

at::Generator generator_of(c10::Device device) { return at::globalContext().defaultGenerator(device); }

}  // namespace

std::string generator_state() { return text_of(generator_of_this_rank()); }
uint64_t generator_seed() { return generator_of_this_rank().current_seed(); }
void set_generator_state(const std::string& text) { take_text(generator_of_this_rank(), text); }

std::string device_generator_state(c10::Device device) { return device.is_cpu() ? "" : text_of(generator_of(device)); }

void set_device_generator_state(c10::Device device, const std::string& state) {
  if (!device.is_cpu() && !state.empty()) take_text(generator_of(device), state);
}

void manual_seed_device(c10::Device device, uint64_t seed) {
  if (device.is_cpu()) return;
  at::Generator generator = generator_of(device);
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_current_seed(seed);
}

}  // namespace trireme
