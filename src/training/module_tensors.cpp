#include "training/module_tensors.h"

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <unordered_map>
#include <unordered_set>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/intercept.h"
#include "trireme/pager/init/init.h"

namespace trireme {

namespace {

void check_dense(const char* kind, const std::string& name, const at::Tensor& tensor) {
  if (tensor.device().is_meta())
    throw ConfigError(
        str(kind, " '", name, "' is on meta, without values: move the module to its device by to_empty() ",
            "before it gets values"),
        ErrorCode::kUnsupported);
  if (tensor.layout() != at::kStrided)
    throw ConfigError(str(kind, " '", name, "' is not dense; sparse tensors cannot be sharded: make it dense"));
}

void check_trainable_dtype(const std::string& name, const at::Tensor& parameter, const PrecisionOptions& precision) {
  const at::ScalarType dtype = parameter.scalar_type();
  if (!at::isFloatingType(dtype))
    throw ConfigError(str("parameter '", name, "' is ", short_name(dtype),
                          "; a parameter must be floating: register it as a buffer"));
  if (precision.weight_dtype == at::kFloat && dtype != at::kFloat && dtype != at::kBFloat16)
    throw ConfigError(str("parameter '", name, "' is ", short_name(dtype),
                          ", which is not there yet; cast the module to fp32, or switch ",
                          dtype == at::kHalf ? "fp16" : "bf16", ".enabled on"),
                      ErrorCode::kUnsupported);
}

/// Finds different tensor objects over the same memory: sharding one would pull it away from under the other.
class StorageOwners {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    if (tensor.numel() == 0) return;
    const auto [owner, is_new] = owners_.emplace(tensor.storage().unsafeGetStorageImpl(), name);
    if (!is_new)
      throw ConfigError(
          str("'", owner->second, "' and '", name,
              "' are different tensors over one storage, so they cannot be sharded apart: register the same tensor "
              "under both names to tie them, or clone() one"));
  }

 private:
  std::unordered_map<const void*, std::string> owners_;
};

/// The class itself: "torch.nn.Linear" and "torch::nn::LinearImpl" are both "Linear".
std::string class_in(std::string name) {
  name = name.substr(name.find_last_of(".:") + 1);
  if (name.ends_with("Impl")) name.resize(name.size() - 4);
  return name;
}

/// Parameters that modules of these classes hold themselves travel in autocast's dtype.
void send_in_autocast_dtype(torch::nn::Module& module, const AutocastOptions& autocast,
                            std::vector<NamedParameter>& parameters) {
  std::map<std::string, bool> is_found;
  for (const std::string& name : autocast.lower_precision_safe_modules) is_found[class_in(name)] = false;
  std::unordered_set<const void*> safe;
  module.apply([&](torch::nn::Module& part) {
    const auto found = is_found.find(class_in(part.name()));
    if (found == is_found.end()) return;
    found->second = true;
    for (const at::Tensor& parameter : part.parameters(/*recurse=*/false)) safe.insert(parameter.unsafeGetTensorImpl());
  });
  for (NamedParameter& parameter : parameters)
    if (safe.contains(parameter.tensor.unsafeGetTensorImpl())) parameter.communication_dtype = autocast.dtype;
  if (autocast.lower_precision_safe_modules == AutocastOptions{}.lower_precision_safe_modules) return;
  for (const auto& [name, found] : is_found)
    if (!found)
      log(LogLevel::kWarning, str("torch_autocast.lower_precision_safe_modules: the model has no module of class '",
                                  name, "'; names are those of classes, exactly"));
}

/// Same tensor object, other memory: the module and whoever else holds it see the change.
void cast_in_place(const at::Tensor& tensor, at::ScalarType dtype) {
  const bool casts = at::isFloatingType(tensor.scalar_type()) && tensor.scalar_type() != dtype;
  if (!casts && tensor.is_contiguous()) return;
  zero::make_whole(tensor);  // an Init scope may hold it as shards
  const at::Tensor data = tensor.detach();
  tensor.set_data(casts ? data.to(dtype).contiguous() : data.contiguous());
}

}  // namespace

ModuleTensors list_tensors(torch::nn::Module& module, const PrecisionOptions& precision,
                           const std::set<std::string>& unmanaged) {
  ModuleTensors tensors;
  StorageOwners owners;
  std::unordered_map<const void*, std::string> first_name;
  for (const auto& item : module.named_parameters()) {
    if (unmanaged.contains(item.key())) continue;
    const at::Tensor& parameter = item.value();
    const auto [first, is_new] = first_name.emplace(parameter.unsafeGetTensorImpl(), item.key());
    if (!is_new) {
      tensors.aliases.emplace(item.key(), first->second);
      continue;
    }
    check_dense("parameter", item.key(), parameter);
    check_trainable_dtype(item.key(), parameter, precision);
    owners.add(item.key(), parameter);
    tensors.parameters.push_back(
        {item.key(), parameter, precision.communication_dtype.value_or(at::ScalarType::Undefined)});
  }
  for (const auto& [name, buffer] : buffers_of(module)) {
    if (!buffer.defined() || !first_name.emplace(buffer.unsafeGetTensorImpl(), name).second) continue;
    check_dense("buffer", name, buffer);
    owners.add(name, buffer);
    tensors.buffers.push_back({name, buffer});
  }
  if (precision.autocast.enabled) send_in_autocast_dtype(module, precision.autocast, tensors.parameters);
  return tensors;
}

at::ScalarType dtype_of_weight(const at::Tensor& parameter, const PrecisionOptions& precision) {
  // Modules are made in fp32: a parameter that somebody made bf16 on purpose stays so, with an fp32 master.
  return precision.weight_dtype == at::kFloat ? parameter.scalar_type() : precision.weight_dtype;
}

void cast_tensors(const ModuleTensors& tensors, const PrecisionOptions& precision) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& parameter : tensors.parameters) {
    parameter.tensor.mutable_grad().reset();
    cast_in_place(parameter.tensor, dtype_of_weight(parameter.tensor, precision));
  }
  for (const NamedBuffer& buffer : tensors.buffers) zero::make_whole(buffer.tensor);  // rank 0 alone will read them
  for (const NamedBuffer& buffer : tensors.buffers)
    cast_in_place(buffer.tensor, precision.buffer_dtype.value_or(buffer.tensor.scalar_type()));
}

TensorSet parameters_of(const ModuleTensors& tensors) {
  TensorSet parameters;
  for (const NamedParameter& parameter : tensors.parameters) parameters.insert(parameter.tensor.unsafeGetTensorImpl());
  return parameters;
}

std::vector<NamedBuffer> present_buffers(const PresentBuffers& all, const TensorSet& parameters) {
  const at::NoGradGuard no_grad;
  const WithoutInterception own_operators;
  std::vector<NamedBuffer> present;
  TensorSet seen = parameters;
  for (const auto& [name, buffer] : all) {
    if (!buffer.defined() || !seen.insert(buffer.unsafeGetTensorImpl()).second) continue;
    if (buffer.device().is_meta() || buffer.layout() != at::kStrided)
      throw StateError(str("buffer '", name, "' is ", buffer.device().is_meta() ? "on meta" : "not dense",
                           " since initialize(), so ranks cannot share it: give it a dense tensor with values"));
    if (!buffer.has_storage()) {  // a part, which Buffers refuses by name
      present.push_back({name, buffer});
      continue;
    }
    if (StorageHandle::owner_of(*buffer.storage().unsafeGetStorageImpl()) != nullptr)
      throw StateError(str("buffer '", name,
                           "' is a view of a parameter since initialize(), and parameters are sharded: clone() it"));
    if (!buffer.is_contiguous()) buffer.set_data(buffer.detach().contiguous());
    present.push_back({name, buffer});
  }
  return present;
}

PresentBuffers buffers_of(const torch::nn::Module& module) {
  PresentBuffers buffers;
  for (const auto& item : module.named_buffers()) buffers.emplace_back(item.key(), item.value());
  return buffers;
}

}  // namespace trireme
