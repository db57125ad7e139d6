#include "ownership/post.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <xxhash.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <string_view>
#include <thread>
#include <type_traits>

#include "trireme/base/wait_hook.h"
#include "trireme/intercept.h"

namespace trireme::ownership {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kBetweenPolls = 20ms;  // of the embedding program's hook
constexpr auto kForLeaving = 500ms;   // until what was sent has left, before the group ends

/// Text that fits into a header.
template <size_t kRoom>
std::string_view cut_to(const char (&)[kRoom], std::string_view text) {
  return text.substr(0, kRoom - 1);
}

}  // namespace

void Header::set_op(const std::string& name) { cut_to(op, name).copy(op, sizeof(op)); }
bool Header::has_op(const std::string& name) const { return cut_to(op, name) == op; }
bool Header::fits(const std::string& text) const { return cut_to(shape, text) == shape; }
uint64_t Header::own_checksum() const { return XXH3_64bits(this, offsetof(Header, checksum)); }

std::string shape_text(at::ScalarType dtype, at::IntArrayRef sizes) { return str(dtype, " ", sizes); }
std::string shape_text(const at::Tensor& tensor) {
  return tensor.defined() ? shape_text(tensor.scalar_type(), tensor.sizes()) : "nothing";
}

at::Tensor as_bytes(const at::Tensor& elements) {
  if (!elements.defined()) return {};
  TRIREME_CHECK(elements.is_contiguous() && !elements.is_conj() && !elements.is_neg(), "a message is contiguous");
  return elements.detach().view(-1).view(at::kByte);
}

Post::Post(Group& stages, c10::Device device, Reader& reader)
    : stages_(stages), device_(device), reader_(reader), lanes_(static_cast<size_t>(stages.size())) {
  static_assert(sizeof(Header) == 256 && std::is_trivially_copyable_v<Header>);
}

void Post::send(int stage, Header header, const at::Tensor& elements) {
  begin_step();
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = as_bytes(elements);
  header.bytes = bytes.defined() ? bytes.numel() : 0;
  header.is_on_device = bytes.defined() && !bytes.device().is_cpu();
  cut_to(header.shape, shape_text(elements)).copy(header.shape, sizeof(header.shape));
  header.checksum = header.own_checksum();
  const at::Tensor name = at::empty({sizeof(Header)}, at::kByte);
  std::memcpy(name.mutable_data_ptr(), &header, sizeof(Header));
  const auto start = [&](const at::Tensor& tensor) { leaving_.emplace_back(stages_.send(tensor, stage), tensor); };
  start(name);
  if (header.bytes > 0) start(bytes);
  (void)has_left();
}

bool Post::has_left() {
  while (!leaving_.empty() && leaving_.front().first.done()) {
    leaving_.front().first.wait();
    leaving_.pop_front();
  }
  return leaving_.empty();
}

void Post::begin_step() {
  if (!std::exchange(is_open_, true)) ++steps_;
}

void Post::send_finished() { send_to_all({.number = steps_, .kind = MessageKind::kFinished}); }

void Post::send_to_all(const Header& header) {
  for (int stage = 0; stage < size(); ++stage)
    if (stage != this->stage()) send(stage, header, {});
}

void Post::look() {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (int stage = 0; stage < size(); ++stage)
    if (stage != this->stage()) look(stage);
}

/// Every stage finishes every step, so until then something comes for certain.
void Post::look(int stage) {
  Lane& from = lanes_[static_cast<size_t>(stage)];
  while (from.arrives || !has_finished(stage)) {
    if (!from.arrives) {
      from.header = at::empty({sizeof(Header)}, at::kByte);
      from.arrives = stages_.recv(from.header, stage);
    }
    if (!from.arrives->done()) return;
    from.arrives->wait();
    from.arrives.reset();
    read(stage, from.header);
  }
}

void Post::read(int stage, const at::Tensor& bytes) {
  Letter letter;
  Header& header = letter.header;
  std::memcpy(&header, bytes.const_data_ptr(), sizeof(header));
  const auto damaged = [&](const char* how) {
    refuse(str("stage ", this->stage(), " got a message from stage ", stage, " that ", how));
  };
  if (header.mark != Header::kMark) damaged("does not begin as one of a step function");
  if (header.checksum != header.own_checksum()) damaged("is damaged: its header has another checksum");
  if (header.kind == MessageKind::kFinished) {
    lanes_[static_cast<size_t>(stage)].finished = header.number;
    return;
  }
  letter.elements = reader_.room(stage, header);
  if (!letter.elements.defined()) {
    const c10::Device device = header.is_on_device ? device_ : c10::Device(c10::kCPU);
    letter.elements = at::empty({header.bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  }
  if (header.bytes > 0) stages_.recv(letter.elements, stage).wait();
  reader_.read(stage, std::move(letter));
}

bool Post::wait_until(const std::function<bool()>& is_over) {
  const auto look_around = [&] {
    look();
    return is_over();
  };
  if (is_over() || look_around()) return false;
  const WaitScope host;  // a Python program's other threads go on, and Ctrl-C is heard
  const auto begun = Clock::now();
  auto polls_at = begun + kBetweenPolls;
  for (int round = 0; !look_around(); ++round) {
    const auto now = Clock::now();
    if (now >= polls_at) {
      polls_at = now + kBetweenPolls;
      try {
        host.poll();
      } catch (const std::exception& interruption) {
        abort(interruption.what());
        throw;
      }
    }
    if (round < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(now - begun < kBetweenPolls ? 50us : 500us);
  }
  return true;
}

void Post::refuse(const std::string& text, ErrorCode code) {
  abort(text);
  throw CommError(code, text);
}

void Post::abort(const std::string& text) noexcept {
  try {
    // A stage that is receiving elements may not hear of an abort that comes before them.
    const auto begun = Clock::now();
    while (!has_left() && Clock::now() - begun < kForLeaving) std::this_thread::sleep_for(1ms);
  } catch (const std::exception&) {
    // The group has failed already.
  }
  stages_.abort(text);
}

}  // namespace trireme::ownership
