#include "comm/backends/device/device_group.h"

#include <exception>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

std::shared_ptr<GroupState> state_of(const Group* host) {
  const auto* stateful = dynamic_cast<const StatefulGroup*>(host);
  if (stateful == nullptr)
    throw ConfigError(
        "a group over devices: expected a group of ranks that are there beneath it, got none, or a fake "
        "one");
  return stateful->state();
}

c10::Device checked(c10::Device device) {
  if (device.is_cpu() || !device.has_index())
    throw ConfigError(str("a group over devices: expected a device with a number, such as cuda:0, got ", device.str()));
  return device;
}

}  // namespace

DeviceGroup::DeviceGroup(std::unique_ptr<Group> host, c10::Device device, TransportMaker make_transport)
    : host_(std::move(host)),
      state_(state_of(host_.get())),
      device_(checked(device)),
      make_transport_(std::move(make_transport)),
      board_(host_->shares_memory() ? std::make_shared<CallBoard>(*host_) : nullptr),
      transport_(make_transport_({*host_, *state_, device_})),
      watch_(std::make_shared<OperationWatch>(OperationWatch::Options{state_, board_, host_->timeout()}, transport_)),
      stream_(device_),
      lanes_(2 * static_cast<size_t>(state_->place().size)) {}

DeviceGroup::~DeviceGroup() {
  if (state_->is_forked()) {
    abandon(transport_, watch_, lanes_);
    return;
  }
  if (std::uncaught_exceptions() > 0) abort("it was destroyed while an exception was thrown");
  watch_->close();
  for (const auto& lane : lanes_)
    if (lane) lane->shutdown();
  if (state_->has_failed())
    transport_->release();
  else
    transport_->close();
}

bool DeviceGroup::is_for_host(CallKind kind, const at::Tensor& first, const at::Tensor& second) const {
  const at::Tensor& any = first.defined() ? first : second;
  if (!any.defined()) return true;  // refused there
  if (first.defined() && second.defined() && first.device() != second.device())
    throw ShapeError(str(name_of(kind), ": expected output and input on one device, got ", first.device().str(),
                         " and ", second.device().str()));
  if (any.device().is_cpu()) return true;
  if (any.device() != device_)
    throw ShapeError(str(name_of(kind), ": expected tensors on ", device_.str(), ", the device of group '", name(),
                         "', or on the host, got ", any.device().str()));
  return false;
}

Pending<void> DeviceGroup::submit(Request request) { return std::move(submit_all({std::move(request)}).front()); }

std::vector<Pending<void>> DeviceGroup::submit_all(std::vector<Request> requests) {
  OperationWatch::Calls calls;
  for (Request& request : requests) {
    request.call.device = device_.type();
    request.call.seq = next_seq_;
    request.call.is_registered = transport_->is_registered(request);
    calls.push_back(watch_->begin(std::move(request)));
    ++next_seq_;
  }
  watch_->issue(calls, Mark::here(device_), stream_, [this](const OperationWatch::Requests& collectives) {
    OperationWatch::Requests moving;
    for (const Request* collective : collectives) {
      if (board_) board_->post(collective->call);
      if (collective->call.numel > 0) moving.push_back(collective);
    }
    if (moving.size() == 1) transport_->collect(*moving.front());
    if (moving.size() > 1) transport_->gather_all(moving);
  });
  return {calls.begin(), calls.end()};
}

Pending<void> DeviceGroup::submit_message(Request request) {
  const int direction = request.call.kind == CallKind::kSend ? 0 : size();
  auto& lane = lanes_[static_cast<size_t>(request.call.root + direction)];
  if (!lane)
    lane = std::make_unique<MessageLane>(watch_, device_, [this](const Request& message) {
      if (board_) board_->post_message(message.call);
      if (message.call.numel > 0) transport_->pass(message);
    });
  request.call.device = device_.type();
  request.call.seq = lane->next_seq;
  const auto pending = watch_->begin(std::move(request));
  ++lane->next_seq;
  lane->submit(pending, Mark::here(device_));
  return Pending<void>(pending);
}

Pending<void> DeviceGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  if (is_for_host(CallKind::kAllReduce, tensor)) return host_->all_reduce(tensor, op);
  return submit(all_reduce_request(tensor, op));
}

Pending<void> DeviceGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  if (is_for_host(CallKind::kReduceScatter, output, input)) return host_->reduce_scatter(output, input, op);
  return submit(reduce_scatter_request(state_->place(), output, input, op));
}

Pending<void> DeviceGroup::all_gather(const at::Tensor& output, const at::Tensor& input) {
  if (is_for_host(CallKind::kAllGather, output, input)) return host_->all_gather(output, input);
  return submit(all_gather_request(state_->place(), output, input));
}

std::vector<Pending<void>> DeviceGroup::gather_each(const std::vector<at::Tensor>& outputs,
                                                    const std::vector<at::Tensor>& inputs) {
  std::vector<Request> requests;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (is_for_host(CallKind::kAllGather, outputs[i], inputs[i])) return Group::gather_each(outputs, inputs);
    requests.push_back(all_gather_request(state_->place(), outputs[i], inputs[i]));
  }
  return submit_all(std::move(requests));
}

Pending<void> DeviceGroup::broadcast(const at::Tensor& tensor, int root) {
  if (is_for_host(CallKind::kBroadcast, tensor)) return host_->broadcast(tensor, root);
  return submit(broadcast_request(state_->place(), tensor, root));
}

Pending<void> DeviceGroup::all_to_all(const at::Tensor& output, const at::Tensor& input) {
  if (is_for_host(CallKind::kAllToAll, output, input)) return host_->all_to_all(output, input);
  return submit(all_to_all_request(state_->place(), output, input));
}

Pending<void> DeviceGroup::gather(const at::Tensor& output, const at::Tensor& input, int root) {
  if (is_for_host(CallKind::kGather, output, input)) return host_->gather(output, input, root);
  return submit(gather_request(state_->place(), output, input, root));
}

Pending<void> DeviceGroup::scatter(const at::Tensor& output, const at::Tensor& input, int root) {
  if (is_for_host(CallKind::kScatter, output, input)) return host_->scatter(output, input, root);
  return submit(scatter_request(state_->place(), output, input, root));
}

Pending<void> DeviceGroup::send(const at::Tensor& tensor, int peer) {
  if (is_for_host(CallKind::kSend, tensor)) return host_->send(tensor, peer);
  return submit_message(send_request(state_->place(), tensor, peer));
}

Pending<void> DeviceGroup::recv(const at::Tensor& tensor, int peer) {
  if (is_for_host(CallKind::kRecv, tensor)) return host_->recv(tensor, peer);
  return submit_message(recv_request(state_->place(), tensor, peer));
}

at::Tensor DeviceGroup::registered_zeros(int64_t bytes, c10::Device device) {
  if (device != device_) return host_->registered_zeros(bytes, device);
  state_->throw_if_failed();
  return transport_->registered_zeros(bytes, device);
}

std::unique_ptr<Group> DeviceGroup::split(const std::vector<int>& members, const std::string& name) {
  auto host = host_->split(members, name);
  return host ? std::make_unique<DeviceGroup>(std::move(host), device_, make_transport_) : nullptr;
}

std::shared_ptr<SharedMemory> DeviceGroup::share(size_t, Share) {
  throw StateError(str("share: what the ranks of group '", name(), "' have is on their devices (", device_.str(),
                       " here), which share no memory; ask shares_memory() first"));
}

void DeviceGroup::abort(const std::string& reason) noexcept {
  state_->abort(reason);
  watch_->fail(std::make_exception_ptr(CommError(ErrorCode::kPeerLost, reason)));
}

}  // namespace trireme::comm
