#include "tests/support/fake_device/memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/nn/module.h>

#include <cstdlib>

#include "tests/support/fake_device/order.h"

namespace trireme::testing {
namespace {

const c10::impl::VirtualGuardImpl& guard() {
  static const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  return guard;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device = guard().getDevice();
    if (bytes == 0) return {nullptr, device};
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    const c10::Stream stream = guard().getStream(device);
    void* data = order.allocate(bytes, device.index() * kStreamsPerDevice + static_cast<int>(stream.id()));
    return {data, data, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }

  static void release(void* data) {
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    order.free(data);
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    order.pinned.emplace(data, bytes);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  static void release(void* data) {
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    const FakeBytes all{data, order.pinned.at(data)};
    order.pinned.erase(data);
    // Arrivals still under way have nowhere to go any more; libtorch's pinned allocator keeps the memory until then.
    std::erase_if(order.arrivals, [&](const Arrival& arrival) { return overlap(all, arrival.bytes()); });
    std::erase_if(order.departures, [&](const Departure& departure) { return overlap(all, departure.bytes()); });
    std::free(data);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kFakeDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return guard().getDevice().index(); }
  void setCurrentDevice(c10::DeviceIndex index) const override { guard().setDevice(fake_device(index)); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return guard().exchangeDevice(fake_device(index)).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  bool isPinnedPtr(const void* data) const override {
    Order& order = Order::get();
    std::lock_guard lock(order.mutex);
    return order.pinned.contains(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
};

const bool registered = [] {
  c10::register_privateuse1_backend("fake");
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace

c10::Allocator& fake_allocator() { return device_allocator; }

bool is_fake(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

c10::Stream current_stream(const at::Tensor& tensor) { return guard().getStream(tensor.device()); }

void move_to_fake(torch::nn::Module& module, c10::Device device) {
  // Handles elsewhere (a member `weight`) share the TensorImpl, so that it must become one of the device.
  struct Impl : c10::TensorImpl {
    static void become(c10::TensorImpl& impl, const c10::TensorImpl& other) {
      copy_tensor_metadata(&other, &impl, impl.version_counter(), /*allow_tensor_metadata_change=*/true);
    }
  };
  const at::NoGradGuard no_grad;
  const auto move = [&](const at::Tensor& tensor) {
    if (tensor.defined() && !is_fake(tensor))
      Impl::become(*tensor.unsafeGetTensorImpl(), *tensor.detach().to(device).unsafeGetTensorImpl());
  };
  for (const at::Tensor& parameter : module.parameters()) move(parameter);
  for (const at::Tensor& buffer : module.buffers()) move(buffer);
}

at::Tensor on_host(const at::Tensor& tensor) {
  void* data = tensor.numel() > 0 ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
  return at::from_blob(data, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.scalar_type()));
}

FakeBytes bytes_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {tensor.const_data_ptr(), static_cast<size_t>((last + 1) * tensor.element_size())};
}

}  // namespace trireme::testing
