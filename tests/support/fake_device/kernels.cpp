// Operators of the fake device: views as libtorch has them for every device, all else by the CPU's kernels over the
// same bytes.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <cstring>

#include "tests/support/fake_device/memory.h"
#include "tests/support/fake_device/order.h"
#include "trireme/base/error.h"

namespace trireme::testing {
namespace {

at::Tensor empty_fake(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                      std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &fake_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_fake(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                              std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &fake_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

FakePart part_of(const at::Tensor& tensor) { return {current_stream(tensor), {}, {}}; }

void host_waits_for(const at::Tensor& tensor) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  guard.synchronizeStream(current_stream(tensor));
}

int stream_number(const FakePart& part) {
  return part.stream.device_index() * kStreamsPerDevice + static_cast<int>(part.stream.id());
}

bool is_pinned(const at::Tensor& tensor) {
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  return order.pinned.contains(tensor.storage().data());
}

// Between the device and pinned memory nobody waits.
void copy_from_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  FakePart part = part_of(source);
  part.reads = {bytes_of(source)};
  if (!non_blocking || !is_pinned(target) || !target.is_contiguous()) {
    fake_launch("copy to host", part, [] {});
    host_waits_for(source);
    target.copy_(on_host(source));
    return;
  }
  fake_launch("copy to host", part, [] {});
  const at::Tensor values = on_host(source).to(target.scalar_type()).contiguous();
  const auto* bytes = static_cast<const std::byte*>(values.const_data_ptr());
  Order& order = Order::get();
  std::lock_guard lock(order.mutex);
  order.arrive(static_cast<std::byte*>(target.data_ptr()), {bytes, bytes + values.nbytes()}, stream_number(part));
}

void copy_to_device(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  FakePart part = part_of(target);
  part.writes = {bytes_of(target)};
  if (!non_blocking || !is_pinned(source)) {
    fake_launch("copy to device", part, [&] { on_host(target).copy_(source); });
    return host_waits_for(target);
  }
  fake_launch("copy to device", part, [&] {
    Order& order = Order::get();
    at::Tensor values = at::empty_like(source);
    {
      std::lock_guard lock(order.mutex);
      const auto bytes = order.depart({source.const_data_ptr(), source.nbytes()}, stream_number(part));
      std::memcpy(values.data_ptr(), bytes.data(), bytes.size());
    }
    on_host(target).copy_(values);
  });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (!is_fake(target)) {
    copy_from_device(source, target, non_blocking);
  } else if (!is_fake(source)) {
    copy_to_device(source.expand(target.sizes()).contiguous(), target, non_blocking && source.is_contiguous());
  } else {
    FakePart part = part_of(target);
    part.reads = {bytes_of(source)};
    part.writes = {bytes_of(target)};
    fake_launch("copy", part, [&] { on_host(target).copy_(on_host(source)); });
  }
  return target;
}

at::Scalar local_scalar(const at::Tensor& tensor) {
  FakePart part = part_of(tensor);
  part.reads = {bytes_of(tensor)};
  fake_launch("number to host", part, [] {});
  host_waits_for(tensor);
  return on_host(tensor).item();
}

// On a host tensor of the same place; what it is of comes from `kept`.
at::Tensor as_fake(const at::Tensor& result, const std::vector<at::Tensor>& arguments, FakePart& part) {
  if (!result.defined()) return result;
  for (const at::Tensor& argument : arguments) {
    const auto* begin = static_cast<const std::byte*>(argument.storage().data());
    const auto* data = static_cast<const std::byte*>(result.const_data_ptr());
    if (result.numel() == 0 || data < begin || data >= begin + argument.storage().nbytes()) continue;
    const int64_t offset = (data - begin) / static_cast<int64_t>(result.element_size());
    return at::native::as_strided_tensorimpl(argument, result.sizes(), result.strides(), offset);
  }
  at::Tensor made = at::empty_strided(result.sizes(), result.strides(),
                                      at::TensorOptions().dtype(result.scalar_type()).device(part.stream.device()));
  if (result.numel() > 0) std::memcpy(made.data_ptr(), result.const_data_ptr(), bytes_of(result).bytes);
  part.writes.push_back(bytes_of(made));
  return made;
}

/// Runs `op` on the host's view of its arguments.
class Kernel {
 public:
  Kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack) : op_(op), stack_(stack) {}

  void run() {
    const auto& schema = op_.schema();
    const size_t count = schema.arguments().size();
    const size_t first = stack_.size() - count;
    torch::jit::Stack host;
    for (size_t i = 0; i < count; ++i) {
      const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
      const c10::IValue& value = stack_[first + i];
      if (schema.arguments()[i].is_out() && value.isTensor() && is_fake(value.toTensor())) {
        fakes_.push_back(value.toTensor());
        outs_.push_back({value.toTensor(), on_host(value.toTensor()).clone()});  // which the kernel may resize
        host.push_back(outs_.back().host);
        continue;
      }
      host.push_back(host_value(value, alias != nullptr && alias->isWrite()));
    }
    if (fakes_.empty() && !device_) throw Error(ErrorCode::kInternal, "no fake tensor in " + schema.name());
    FakePart part{current(), std::move(reads_), std::move(writes_)};
    // Results are made on the host and then given device memory: one launch, whose writes are known at its end.
    wait_for(part.stream);
    op_.callBoxed(&host);
    for (const Out& out : outs_) take_out(out, part);
    torch::jit::Stack results;
    for (size_t i = 0; i < host.size(); ++i) {
      const c10::AliasInfo* alias = schema.returns()[i].alias_info();
      results.push_back(alias != nullptr && alias->isWrite() ? argument_of(*alias, first, schema)
                                                             : fake_value(host[i], part));
    }
    fake_launch(schema.name(), part, [] {});
    stack_.resize(first);
    for (c10::IValue& result : results) stack_.push_back(std::move(result));
  }

 private:
  static void wait_for(const c10::Stream& stream) {
    fake_launch("wait", {stream, {}, {}}, [] {});
  }

  struct Out {
    at::Tensor fake, host;
  };

  static void take_out(const Out& out, FakePart& part) {
    if (out.fake.sizes() != out.host.sizes()) {
      const at::Tensor made = at::empty_strided(out.host.sizes(), out.host.strides(), out.fake.options());
      out.fake.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
      out.fake.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides(), 0);
    }
    on_host(out.fake).copy_(out.host);
    part.writes.push_back(bytes_of(out.fake));
  }

  c10::Stream current() const {
    const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
    return guard.getStream(fakes_.empty() ? *device_ : fakes_.front().device());
  }

  at::Tensor host_tensor(const at::Tensor& tensor, bool written) {
    if (!is_fake(tensor)) {
      const std::string& name = op_.schema().name();
      // As CUDA's kernels, but for single numbers, and for the indices of these.
      if (tensor.defined() && tensor.dim() > 0 && !name.starts_with("aten::index") && name != "aten::_index_put_impl_")
        throw Error(ErrorCode::kShape, "expected all tensors on one device, and " + name + " got one on the host");
      return tensor;
    }
    fakes_.push_back(tensor);
    (written ? writes_ : reads_).push_back(bytes_of(tensor));
    return on_host(tensor);
  }

  c10::IValue host_value(const c10::IValue& value, bool written) {
    if (value.isTensor()) return host_tensor(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(host_tensor(tensor, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional(host_tensor(*tensor, written)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1) {
      device_ = value.toDevice();
      return c10::Device(c10::kCPU);
    }
    return value;
  }

  c10::IValue argument_of(const c10::AliasInfo& alias, size_t first, const c10::FunctionSchema& schema) const {
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const c10::AliasInfo* info = schema.arguments()[i].alias_info();
      if (info != nullptr && info->beforeSets() == alias.beforeSets()) return stack_[first + i];
    }
    throw Error(ErrorCode::kInternal, "a result that is no argument in " + schema.name());
  }

  c10::IValue fake_value(const c10::IValue& value, FakePart& part) const {
    if (value.isTensor()) return as_fake(value.toTensor(), fakes_, part);
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(as_fake(tensor, fakes_, part));
    return list;
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  std::vector<at::Tensor> fakes_;
  std::vector<Out> outs_;
  std::vector<FakeBytes> reads_, writes_;
  std::optional<c10::Device> device_;
};

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Kernel(op, *stack).run(); }

int64_t plain_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                        double, bool, std::optional<double>, bool) {
  return 0;  // made of products, as on a device without a fused kernel
}

void record_stream(at::Tensor& tensor, c10::Stream stream) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  guard.recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// The library's own operator has no kernel by the fallback: whether a device has one is asked.
TORCH_LIBRARY_IMPL(trireme, PrivateUse1, library) {
  library.impl("adam_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty_fake);
  library.impl("empty_strided", &empty_strided_fake);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("_copy_from", &copy_from);
  library.impl("_local_scalar_dense", &local_scalar);
  library.impl("_fused_sdp_choice", &plain_attention);
  library.impl("record_stream", &record_stream);
}

}  // namespace
}  // namespace trireme::testing
