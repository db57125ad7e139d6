#include "optim/device_adam.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/full.h>
#include <torch/library.h>

#include <initializer_list>
#include <mutex>
#include <optional>

#include "optim/adam_element_text.h"
#include "optim/adam_kernel.h"
#include "optim/adam_kernel_text.h"
#include "optim/moments_text.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/parallel.h"

namespace trireme {

namespace {

AdamType type_of(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16:
      return kAdamBFloat16;
    case at::kHalf:
      return kAdamFloat16;
    default:
      TRIREME_CHECK(tensor.scalar_type() == at::kFloat, "fp32, bf16 or fp16 expected, got ",
                    at::toString(tensor.scalar_type()));
      return kAdamFloat;
  }
}

DeviceKernel& adam_kernel() {
  static DeviceKernel kernel(adam_kernel_text());
  return kernel;
}

struct OnCuda {
  static void launch(const AdamCall& call, int blocks, c10::Device device) {
    adam_kernel().launch(device, blocks, AdamCall::kThreads, &call);
  }
};

/// A device's work on the host, its threads one after the other.
struct OnHost {
  static void launch(const AdamCall& call, int blocks, c10::Device) {
    if (is_skipped(call)) return;
    parallel_for(0, blocks, /*grain_size=*/4, [&](int64_t begin, int64_t end) {
      for (int block = static_cast<int>(begin); block < end; ++block) {
        const AdamRun& run = run_of(call, block);
        const AdamFactors factors = factors_of(call, run);
        for (int thread = 0; thread < AdamCall::kThreads; ++thread)
          update_block(run, block, thread, AdamCall::kThreads, factors);
      }
    });
  }
};

const float* number_of(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->const_data_ptr<float>() : nullptr;
}

// A kernel sees addresses alone.
void check_numbers(const at::Tensor& lr, std::initializer_list<at::Tensor> numbers) {
  for (const at::Tensor& number : numbers)
    TRIREME_CHECK(number.device() == lr.device() && number.numel() == 1, "one number on ", lr.device().str(),
                  " expected, got ", number.numel(), " on ", number.device().str());
}
void check_range(const at::Tensor& lr, std::initializer_list<at::Tensor> tensors) {
  for (const at::Tensor& tensor : tensors)
    TRIREME_CHECK(
        tensor.device() == lr.device() && tensor.is_contiguous() && tensor.numel() == tensors.begin()->numel(),
        tensors.begin()->numel(), " neighbours on ", lr.device().str(), " expected, got ", tensor.numel(), " on ",
        tensor.device().str());
}

/// The operator's kernel: ranges go by calls of as many as one takes.
template <class Place>
void run_adam(at::TensorList masters, at::TensorList weights, at::TensorList gradients, at::TensorList first,
              at::TensorList second, at::TensorList steps, const at::Tensor& lr,
              const std::optional<at::Tensor>& gradient_factor, const std::optional<at::Tensor>& skip, double beta1,
              double beta2, double eps, double weight_decay, bool is_decoupled) {
  AdamCall call{.lr = lr.const_data_ptr<float>(),
                .gradient_factor = number_of(gradient_factor),
                .skip = number_of(skip),
                .beta1 = beta1,
                .beta2 = beta2,
                .eps = eps,
                .weight_decay = weight_decay,
                .is_decoupled = is_decoupled,
                .count = 0,
                .runs = {}};
  int blocks = 0;
  const auto launch = [&] {
    if (blocks > 0) Place::launch(call, blocks, lr.device());
    call.count = blocks = 0;
  };
  check_numbers(lr, {lr, gradient_factor.value_or(lr), skip.value_or(lr)});
  for (const at::TensorList list : {weights, gradients, first, second, steps})
    TRIREME_CHECK(list.size() == masters.size(), masters.size(), " ranges, and a list of ", list.size());
  for (size_t i = 0; i < masters.size(); ++i) {
    check_range(lr, {masters[i], weights[i], gradients[i], first[i], second[i]});
    check_numbers(lr, {steps[i]});
    const AdamType type = type_of(weights[i]);
    TRIREME_CHECK(type != kAdamFloat, "weights of 16 bits expected");
    const int64_t numel = masters[i].numel();
    call.runs[call.count++] = {.master = masters[i].data_ptr<float>(),
                               .weights = weights[i].data_ptr(),
                               .gradients = gradients[i].const_data_ptr(),
                               .first = first[i].data_ptr<float>(),
                               .second = second[i].data_ptr<float>(),
                               .step = steps[i].const_data_ptr<float>(),
                               .numel = numel,
                               .begin = blocks,
                               .weights_type = static_cast<unsigned char>(type),
                               .gradients_type = static_cast<unsigned char>(type_of(gradients[i]))};
    blocks += static_cast<int>((numel + AdamCall::kBlock - 1) / AdamCall::kBlock);
    if (call.count == AdamCall::kMaxRuns) launch();
  }
  launch();
}

using AdamSignature = decltype(run_adam<OnHost>);

const c10::TypedOperatorHandle<AdamSignature>& adam_operator() {
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("trireme::adam_", "").typed<AdamSignature>();
  return handle;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(trireme, library) {
  library.def(
      "adam_(Tensor(a!)[] masters, Tensor(b!)[] weights, Tensor[] gradients, Tensor(c!)[] first, Tensor(d!)[] second, "
      "Tensor[] steps, Tensor lr, Tensor? gradient_factor, Tensor? skip, float beta1, float beta2, float eps, "
      "float weight_decay, bool is_decoupled) -> ()");
}

// By the dispatcher, so that whatever stands for a device in tests comes here as it comes to ATen's kernels.
TORCH_LIBRARY_IMPL(trireme, CPU, library) { library.impl("adam_", &run_adam<OnHost>); }
TORCH_LIBRARY_IMPL(trireme, CUDA, library) { library.impl("adam_", &run_adam<OnCuda>); }

const KernelText& adam_kernel_text() {
  static const KernelText text{
      .function = "trireme_adam",
      .text = kAdamKernelText,
      .headers = {{"optim/moments.h", kMomentsText}, {"optim/adam_element.h", kAdamElementText}}};
  return text;
}

bool has_adam_kernel(c10::Device device) {
  if (!device.is_cuda()) return adam_operator().hasKernelForDispatchKey(at::TensorOptions(device).computeDispatchKey());
  const std::string& problem = adam_kernel().prepare(device);
  if (problem.empty()) return true;
  static std::once_flag told;
  std::call_once(told, [&] {
    log(LogLevel::kWarning,
        str("Adam on ", device.str(), " takes ATen's kernels and a pass more to round weights: ", problem));
  });
  return false;
}

bool is_true_on_all(Group& group, bool own) {
  const at::Tensor all = at::full({1}, own ? 1 : 0, at::kInt);
  group.all_reduce(all, ReduceOp::kMin).wait();
  return all.item<int>() == 1;
}

void adam_on_device(const AdamLists& lists, const OptimizerOptions& optimizer, const at::Tensor& lr,
                    const at::Tensor& gradient_factor, const at::Tensor& skip) {
  const at::AutoDispatchBelowADInplaceOrView below;  // there is nothing to differentiate
  adam_operator().call(lists.masters, lists.weights, lists.gradients, lists.first, lists.second, lists.steps, lr,
                       if_defined(gradient_factor), if_defined(skip), optimizer.beta1, optimizer.beta2, optimizer.eps,
                       optimizer.weight_decay, optimizer.kind == OptimizerKind::kAdamW);
}

}  // namespace trireme
