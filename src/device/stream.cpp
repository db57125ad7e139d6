#include "trireme/device/stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>

namespace trireme {

c10::Stream current_stream(c10::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

void wait_quietly(c10::Device device) noexcept {
  try {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  } catch (const std::exception&) {
    // An error here was told to whoever used the device.
  }
}

Event Event::record(c10::Device device) { return is_host(device) ? Event() : record(current_stream(device)); }

Event Event::record(const c10::Stream& stream) {
  auto event = std::make_shared<c10::Event>(stream.device_type());
  event->record(stream);
  return Event(std::move(event));
}

void Event::stream_wait() const {
  if (event_) stream_wait(current_stream(event_->device()));
}

void Event::stream_wait_quietly() const noexcept {
  try {
    stream_wait();
  } catch (const std::exception&) {
    // An error here was told to whoever used the device.
  }
}

void Event::synchronize() const {
  if (event_) event_->synchronize();
}

SideStream::SideStream(c10::Device device) : device_(device) {
  if (!is_host(device)) stream_ = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
}

}  // namespace trireme
