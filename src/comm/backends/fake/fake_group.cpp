#include <algorithm>
#include <string>
#include <utility>

#include "comm/call.h"
#include "comm/flight_recorder.h"
#include "comm/memory.h"
#include "trireme/base/error.h"
#include "trireme/comm/fake.h"

namespace trireme {
namespace {

using namespace comm;

class PrivateMemory final : public SharedMemory {
 public:
  PrivateMemory(size_t bytes, size_t parts) : bytes_(bytes) {
    for (size_t part = 0; part < parts; ++part) segments_.push_back(heap_memory()->create(bytes));
  }
  std::byte* of(int rank) const override { return segments_[static_cast<size_t>(rank) % segments_.size()]->data(); }
  size_t bytes() const override { return bytes_; }

 private:
  const size_t bytes_;
  std::vector<std::shared_ptr<Segment>> segments_;
};

class FakeGroup final : public Group {
 public:
  FakeGroup(const Place& place, std::string name) : place_(place), name_(std::move(name)) {}
  int rank() const override { return place_.rank; }
  int size() const override { return place_.size; }
  const std::string& name() const override { return name_; }

  Pending<void> all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return count(all_reduce_request(tensor, op));
  }
  Pending<void> reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) override {
    return count(reduce_scatter_request(place_, output, input, op));
  }
  Pending<void> all_gather(const at::Tensor& output, const at::Tensor& input) override {
    return count(all_gather_request(place_, output, input));
  }
  Pending<void> broadcast(const at::Tensor& tensor, int root) override {
    return count(broadcast_request(place_, tensor, root));
  }
  Pending<void> all_to_all(const at::Tensor& output, const at::Tensor& input) override {
    return count(all_to_all_request(place_, output, input));
  }
  Pending<void> gather(const at::Tensor& output, const at::Tensor& input, int root) override {
    return count(gather_request(place_, output, input, root));
  }
  Pending<void> scatter(const at::Tensor& output, const at::Tensor& input, int root) override {
    return count(scatter_request(place_, output, input, root));
  }
  Pending<void> send(const at::Tensor& tensor, int peer) override { return count(send_request(place_, tensor, peer)); }
  Pending<void> recv(const at::Tensor& tensor, int peer) override { return count(recv_request(place_, tensor, peer)); }
  void barrier() override { count({.call = {.kind = CallKind::kBarrier}, .output = {}, .input = {}}).wait(); }

  std::unique_ptr<Group> split(const std::vector<int>& members, const std::string& name) override {
    count({.call = {.kind = CallKind::kSplit}, .output = {}, .input = {}}).wait();
    const auto self = std::find(members.begin(), members.end(), place_.rank);
    if (self == members.end()) return nullptr;
    return std::make_unique<FakeGroup>(
        Place{static_cast<int>(self - members.begin()), static_cast<int>(members.size())}, name);
  }
  bool shares_memory() const override { return true; }
  std::shared_ptr<SharedMemory> share(size_t bytes, Share mode) override {
    count({.call = {.kind = CallKind::kShare}, .output = {}, .input = {}}).wait();
    return std::make_shared<PrivateMemory>(bytes, mode == Share::kOne ? 1 : static_cast<size_t>(place_.size));
  }

  void notify() noexcept override {}
  void abort(const std::string&) noexcept override {}
  std::chrono::milliseconds timeout() const override { return std::chrono::milliseconds::max(); }
  CommCounters counters() const override { return counters_; }
  std::string flight_record() const override { return recorder_.text(); }

 protected:
  void wait_slowly(const std::function<bool()>&, const WaitReason& reason) override {
    throw StateError(str("group '", name_, "' is fake: nobody will ever complete ", reason.operation));
  }

 private:
  Pending<void> count(Request request) {
    request.call.seq = ++counters_.calls;
    counters_.bytes_sent += bytes_sent(place_, request.call);
    recorder_.end(recorder_.begin(request.call));
    return {};
  }

  const Place place_;
  const std::string name_;
  CommCounters counters_;
  FlightRecorder recorder_;
};

}  // namespace

std::unique_ptr<Group> make_fake_group(int rank, int size) {
  if (rank < 0 || rank >= size)
    throw ShapeError(str("make_fake_group: expected a rank in [0, ", size, "), got ", rank));
  return std::make_unique<FakeGroup>(Place{rank, size}, "fake");
}

}  // namespace trireme
