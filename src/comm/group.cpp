#include "trireme/comm/group.h"

#include <memory>
#include <numeric>
#include <optional>
#include <utility>

#include "comm/backend.h"
#include "trireme/base/error.h"

namespace trireme {

namespace {

/// An operation whose wait is told.
class HeardOperation final : public Pending<void>::Operation {
 public:
  HeardOperation(Pending<void> inner, const comm::GroupInfo& group, const comm::Call& call)
      : inner_(std::move(inner)), group_(group), call_(call) {}
  void wait() override {
    Notice notice = comm::notice_of(group_, call_, Notice::Kind::kWait);
    notice.begin = Notice::Clock::now();
    inner_.wait();
    notice.end = Notice::Clock::now();
    tell(notice);
  }
  bool done() noexcept override { return inner_.done(); }
  void drop() noexcept override { inner_ = {}; }

 private:
  Pending<void> inner_;
  const comm::GroupInfo group_;  // a copy: this may outlive the group
  const comm::Call call_;
};

Pending<void> heard(Pending<void> pending, const comm::GroupInfo& group, const comm::Call& call) {
  return Pending<void>(std::make_shared<HeardOperation>(std::move(pending), group, call));
}

}  // namespace

Group::Group(std::unique_ptr<comm::Backend> backend)
    : backend_(std::move(backend)),
      rank_(backend_->info().place.rank),
      size_(backend_->info().place.size),
      device_(backend_->device()) {}

Group::~Group() = default;

const std::string& Group::name() const { return backend_->info().name; }
std::chrono::milliseconds Group::timeout() const { return backend_->info().timeout; }
CommCounters Group::counters() const { return backend_->state()->counters(); }
std::string Group::flight_record() const { return backend_->state()->recorder().text(); }
void Group::abort(const std::string& reason) noexcept { backend_->abort(reason); }

int Group::world_rank(int rank) const {
  if (rank < 0 || rank >= size_)
    throw ShapeError(str("group '", name(), "' has ranks 0 to ", size_ - 1, ", got rank ", rank));
  return backend_->info().world_rank(rank);
}

MemorySharing* Group::memory_sharing() const { return backend_->memory_sharing(); }

BufferRegistration* Group::buffer_registration(c10::Device device) const {
  return device == device_ ? backend_->buffer_registration() : nullptr;
}

int64_t Group::check(const comm::Request& request) const {
  const char* const operation = comm::name_of(request.call.kind);
  if (request.output.defined() && request.input.defined() && request.output.device() != request.input.device())
    throw ShapeError(str(operation, ": expected output and input on one device, got ", request.output.device().str(),
                         " and ", request.input.device().str()));
  const at::Tensor& tensor = request.output.defined() ? request.output : request.input;
  if (tensor.defined() && !serves(tensor.device()))
    throw ShapeError(device_.is_cpu()
                         ? str(operation, ": expected tensors on the host, got one on ", tensor.device().str(),
                               "; a group over that device is made by make_nccl_group() or make_cuda_ipc_group()")
                         : str(operation, ": expected tensors on ", device_.str(), ", the device of group '", name(),
                               "', or on the host, got ", tensor.device().str()));
  return comm::bytes_sent({rank_, size_}, request.call);
}

Pending<void> Group::submit(comm::Request request) {
  const int64_t bytes = check(request);
  const std::optional<comm::Call> call = has_listeners() ? std::optional(request.call) : std::nullopt;
  Pending<void> pending = backend_->submit(std::move(request));
  backend_->state()->count(1, bytes);
  return call ? heard(std::move(pending), backend_->info(), *call) : std::move(pending);
}

Pending<void> Group::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  return submit(comm::all_reduce_request(tensor, op));
}

Pending<void> Group::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  return submit(comm::reduce_scatter_request({rank_, size_}, output, input, op));
}

Pending<void> Group::all_gather(const at::Tensor& output, const at::Tensor& input) {
  return submit(comm::all_gather_request({rank_, size_}, output, input));
}

std::vector<Pending<void>> Group::all_gather_coalesced(const std::vector<at::Tensor>& outputs,
                                                       const std::vector<at::Tensor>& inputs) {
  if (outputs.size() != inputs.size())
    throw ShapeError(
        str("all_gather_coalesced: expected an input for each output, got ", inputs.size(), " and ", outputs.size()));
  std::vector<comm::Request> requests;
  for (size_t i = 0; i < outputs.size(); ++i)
    requests.push_back(comm::all_gather_request({rank_, size_}, outputs[i], inputs[i]));
  int64_t bytes = 0;
  for (const comm::Request& request : requests) bytes += check(request);
  std::vector<comm::Call> calls;
  if (has_listeners())
    for (const comm::Request& request : requests) calls.push_back(request.call);
  auto pending = backend_->submit_all(std::move(requests));
  backend_->state()->count(static_cast<int64_t>(pending.size()), bytes);
  for (size_t i = 0; i < calls.size(); ++i) pending[i] = heard(std::move(pending[i]), backend_->info(), calls[i]);
  return pending;
}

Pending<void> Group::broadcast(const at::Tensor& tensor, int root) {
  return submit(comm::broadcast_request({rank_, size_}, tensor, root));
}

Pending<void> Group::all_to_all(const at::Tensor& output, const at::Tensor& input) {
  return submit(comm::all_to_all_request({rank_, size_}, output, input));
}

Pending<void> Group::gather(const at::Tensor& output, const at::Tensor& input, int root) {
  return submit(comm::gather_request({rank_, size_}, output, input, root));
}

Pending<void> Group::scatter(const at::Tensor& output, const at::Tensor& input, int root) {
  return submit(comm::scatter_request({rank_, size_}, output, input, root));
}

Pending<void> Group::send(const at::Tensor& tensor, int peer) {
  return submit(comm::send_request({rank_, size_}, tensor, peer));
}

Pending<void> Group::recv(const at::Tensor& tensor, int peer) {
  return submit(comm::recv_request({rank_, size_}, tensor, peer));
}

void Group::barrier() { submit({.call = {.kind = comm::CallKind::kBarrier}, .output = {}, .input = {}}).wait(); }

std::unique_ptr<Group> Group::split(const std::vector<std::vector<int>>& parts, const std::string& name) {
  const comm::Split split = comm::checked_split(backend_->info(), parts, name);
  auto backend = backend_->split(split);
  backend_->state()->count(1, 0);
  return backend ? std::make_unique<Group>(std::move(backend)) : nullptr;
}

std::unique_ptr<Group> Group::clone(const std::string& name) {
  std::vector<int> all(static_cast<size_t>(size_));
  std::iota(all.begin(), all.end(), 0);
  return split({all}, name);
}

}  // namespace trireme
