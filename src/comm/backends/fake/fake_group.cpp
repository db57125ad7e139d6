#include "comm/backend.h"
#include "trireme/base/error.h"
#include "trireme/comm/fake.h"

namespace trireme {
namespace comm {
namespace {

class FakeState final : public GroupState {
 public:
  using GroupState::GroupState;
  bool has_peers() const override { return false; }

 private:
  void tell_peers(ErrorCode, const std::string&) noexcept override {}
};

class FakeBackend final : public Backend {
 public:
  explicit FakeBackend(GroupInfo group) : Backend(std::make_shared<FakeState>(std::move(group))) {}

  Pending<void> submit(Request request) override {
    state()->throw_if_failed();
    request.call.seq = ++calls_;
    FlightRecorder& recorder = state()->recorder();
    recorder.end(recorder.begin(request.call));
    return {};
  }
  std::unique_ptr<Backend> split(const Split& split) override {
    submit({.call = split.call, .output = {}, .input = {}}).wait();
    return split.takes_part() ? std::make_unique<FakeBackend>(split.info) : nullptr;
  }

 private:
  int64_t calls_ = 0;
};

}  // namespace
}  // namespace comm

std::unique_ptr<Group> make_fake_group(int rank, int size) {
  if (rank < 0 || rank >= size)
    throw ShapeError(str("make_fake_group: expected a rank in [0, ", size, "), got ", rank));
  return std::make_unique<Group>(std::make_unique<comm::FakeBackend>(
      comm::GroupInfo{.name = "fake", .place = {rank, size}, .timeout = std::chrono::milliseconds::max()}));
}

}  // namespace trireme
