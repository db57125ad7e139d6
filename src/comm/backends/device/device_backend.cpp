#include "comm/backends/device/device_backend.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

std::shared_ptr<GroupState> state_of(const Group* host) {
  if (host == nullptr || !host->backend().state()->has_peers())
    throw ConfigError(
        "a group over devices: expected a group of ranks that are there beneath it, got none, or a fake "
        "one");
  return host->backend().state();
}

c10::Device checked(c10::Device device) {
  if (device.is_cpu() || !device.has_index())
    throw ConfigError(str("a group over devices: expected a device with a number, such as cuda:0, got ", device.str()));
  return device;
}

}  // namespace

DeviceBackend::DeviceBackend(std::unique_ptr<Group> host, c10::Device device, TransportMaker make_transport)
    : Backend(state_of(host.get())),
      host_(std::move(host)),
      device_(checked(device)),
      make_transport_(std::move(make_transport)),
      board_(host_->memory_sharing() != nullptr ? std::make_shared<CallBoard>(*host_) : nullptr),
      transport_(make_transport_({*host_, *state(), device_})),
      watch_(std::make_shared<OperationWatch>(OperationWatch::Options{state(), board_}, transport_)),
      stream_(device_),
      lanes_(2 * static_cast<size_t>(info().place.size)) {}

DeviceBackend::~DeviceBackend() {
  if (state()->is_forked()) {
    abandon(transport_, watch_, lanes_);
    return;
  }
  if (std::uncaught_exceptions() > 0) abort("it was destroyed while an exception was thrown");
  watch_->close();
  for (const auto& lane : lanes_)
    if (lane) lane->shutdown();
  if (state()->has_failed())
    transport_->release();
  else
    transport_->close();
}

Pending<void> DeviceBackend::submit(Request request) {
  const at::Tensor& tensor = request.output.defined() ? request.output : request.input;
  if (!tensor.defined() || tensor.device().is_cpu()) return host_->backend().submit(std::move(request));
  const CallKind kind = request.call.kind;
  if (kind == CallKind::kSend || kind == CallKind::kRecv) return submit_message(std::move(request));
  return std::move(submit_collectives({std::move(request)}).front());
}

std::vector<Pending<void>> DeviceBackend::submit_all(std::vector<Request> requests) {
  const auto is_on_host = [](const Request& request) { return request.output.device().is_cpu(); };
  if (std::ranges::any_of(requests, is_on_host)) return Backend::submit_all(std::move(requests));
  return submit_collectives(std::move(requests));
}

std::vector<Pending<void>> DeviceBackend::submit_collectives(std::vector<Request> requests) {
  OperationWatch::Calls calls;
  for (Request& request : requests) {
    request.call.device = device_.type();
    request.call.seq = next_seq_;
    request.call.is_registered = transport_->is_registered(request);
    calls.push_back(watch_->begin(std::move(request)));
    ++next_seq_;
  }
  watch_->issue(calls, Event::record(device_), stream_, [this](const OperationWatch::Requests& collectives) {
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

Pending<void> DeviceBackend::submit_message(Request request) {
  const int direction = request.call.kind == CallKind::kSend ? 0 : info().place.size;
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
  lane->submit(pending, Event::record(device_));
  return Pending<void>(pending);
}

std::unique_ptr<Backend> DeviceBackend::split(const Split& split) {
  auto host = host_->backend().split(split);
  if (!host) return nullptr;
  return std::make_unique<DeviceBackend>(std::make_unique<Group>(std::move(host)), device_, make_transport_);
}

void DeviceBackend::abort(const std::string& reason) noexcept {
  state()->abort(reason);
  watch_->fail(std::make_exception_ptr(CommError(ErrorCode::kPeerLost, reason)));
}

}  // namespace trireme::comm
