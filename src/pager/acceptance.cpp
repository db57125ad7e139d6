#include "pager/acceptance.h"

#include <cmath>
#include <unordered_map>

#include "pager/weights/managed_parameter.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/pager/init/init.h"
#include "trireme/pager/layout/refusals.h"

namespace trireme {

c10::Device device_of(const std::vector<NamedParameter>& parameters) {
  if (parameters.empty()) return c10::Device(c10::kCPU);
  const NamedParameter& first = parameters.front();
  for (const NamedParameter& parameter : parameters)
    if (parameter.tensor.device() != first.tensor.device())
      throw ConfigError(str("parameter '", parameter.name, "' is on ", parameter.tensor.device().str(), " and '",
                            first.name, "' on ", first.tensor.device().str(),
                            "; move the module to one device, with to(), before initialize()"));
  return first.tensor.device();
}

GatherPolicy choose_gather(const PagerPolicy& policy, const Group& group, c10::Device device) {
  if (policy.disk.is_on()) {
    if (!is_host(device)) throw ConfigError(filled(kWeightsOnDiskOfDevice, {device.str()}), ErrorCode::kUnsupported);
    return GatherPolicy::kCopy;
  }
  if (policy.gather == GatherPolicy::kShared && !is_host(device))
    throw ConfigError(filled(kSharedOnDevice, {device.str()}));
  if (policy.gather == GatherPolicy::kShared && group.memory_sharing() == nullptr)
    throw ConfigError(filled(kSharedWithoutMemory, {group.name()}));
  if (policy.gather != GatherPolicy::kAuto) return policy.gather;
  return is_host(device) && group.memory_sharing() != nullptr ? GatherPolicy::kShared : GatherPolicy::kCopy;
}

GatherPolicy choose_gather(const PagerPolicy& policy, const std::vector<ShardMesh>& meshes, c10::Device device) {
  GatherPolicy gather = GatherPolicy::kShared;
  for (const ShardMesh& mesh : meshes) {
    if (choose_gather(policy, mesh.shards, device) == GatherPolicy::kCopy) gather = GatherPolicy::kCopy;
    if (mesh.replica_count() == 1) continue;
    const std::string which =
        str("a mesh with ", mesh.replica_count(), " replicas of group '", mesh.shards.name(), "'");
    if (policy.deterministic)
      throw ConfigError(
          str("deterministic: ", which,
              " adds within a replica first, so its sums depend on the number of replicas; shard over all "
              "ranks, or leave deterministic out"),
          ErrorCode::kUnsupported);
    if (policy.disk.is_on() && mesh.states_over_replicas)
      throw ConfigError(str("zero_optimization.offload_param.device: \"nvme\": ", which,
                            " cuts optimizer states over replicas, which is not there yet; leave one of the two out"),
                        ErrorCode::kUnsupported);
    if (policy.offload_ratio > 0 && mesh.states_over_replicas)
      throw ConfigError(str("zero_optimization.offload_optimizer: ", which,
                            " cuts optimizer states over replicas, and those stay on the device; leave offloading out, "
                            "or keep states whole in each replica"),
                        ErrorCode::kUnsupported);
  }
  return gather;
}

namespace {

bool is_trainable_dtype(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
}

}  // namespace

void check(const PagerPolicy& policy) {
  if (policy.stage < 0 || policy.stage > 3)
    throw ConfigError(str("zero_optimization.stage: ", policy.stage, " is no ZeRO stage; use 0, 1, 2 or 3"));
  if (policy.disk.is_on() && (policy.stage != 3 || policy.gather == GatherPolicy::kShared))
    throw ConfigError("PagerPolicy::disk: shards are on disk at ZeRO stage 3 with kCopy alone; set both");
  if (!is_trainable_dtype(policy.accumulation_dtype))
    throw ConfigError(
        str("data_types.grad_accum_dtype: ", policy.accumulation_dtype, " is not there yet; use fp32, bf16 or fp16"),
        ErrorCode::kUnsupported);
  if (policy.gradient_op != ReduceOp::kMean && policy.gradient_op != ReduceOp::kSum)
    throw ConfigError("gradient_allreduce_op: gradients are averaged or summed; use kMean or kSum");
  if (!(policy.predivide_factor > 0) || !std::isfinite(policy.predivide_factor))
    throw ConfigError(
        str("gradient_predivide_factor: ", policy.predivide_factor, " divides no gradient; use a number above 0"));
}

void check(const NamedParameter& parameter) {
  check_place(parameter);
  const at::Tensor& tensor = parameter.tensor;
  if (!is_trainable_dtype(tensor.scalar_type()))
    throw ConfigError(str("parameter '", parameter.name, "' is of dtype ", tensor.scalar_type(),
                          "; float32, bfloat16 and float16 can be trained: convert it, or make it a buffer"));
}

void check_place(const NamedParameter& parameter) {
  const at::Tensor& tensor = parameter.tensor;
  const auto refuse = [&](const auto&... why) { throw ConfigError(str("parameter '", parameter.name, "' ", why...)); };
  if (tensor.device().is_meta())
    refuse("is on meta, without values; move the module to its device by to_empty() and give it values");
  if (!tensor.is_leaf()) refuse("is no leaf of the autograd graph: it was computed from other tensors");
  if (!tensor.has_storage() || tensor.is_sparse()) refuse("has no dense storage");
  const auto* owner =
      dynamic_cast<ParameterStorage*>(StorageHandle::owner_of(*tensor.storage().unsafeGetStorageImpl()));
  if (owner != nullptr && owner->is_managed()) refuse("is managed by another engine already; destroy() that one first");
  if (const auto* held = dynamic_cast<HeldStorage*>(StorageHandle::owner_of(*tensor.storage().unsafeGetStorageImpl())))
    held->require_free("initialize");
}

namespace {

bool has_storage_of_its_own(const at::Tensor& tensor) {
  const size_t bytes = static_cast<size_t>(tensor.numel()) * tensor.element_size();
  return tensor.storage_offset() == 0 && tensor.is_non_overlapping_and_dense() && tensor.storage().nbytes() == bytes;
}

void normalise(const at::Tensor& tensor) {
  if (has_storage_of_its_own(tensor)) return;
  zero::make_whole(tensor);  // an Init scope may hold it as shards
  at::Tensor(tensor).set_data(tensor.detach().clone(at::MemoryFormat::Contiguous));
}

}  // namespace

ParameterSpec spec_of(const NamedParameter& parameter) {
  check(parameter);
  const at::Tensor& tensor = parameter.tensor;
  return {parameter.name,         tensor.sizes().vec(),          tensor.scalar_type(),
          tensor.requires_grad(), parameter.communication_dtype, parameter.mesh,
          parameter.part,         parameter.is_counted,          parameter.counted};
}

void check_manageable(const Group& group, const std::vector<NamedParameter>& parameters, const PagerPolicy& policy) {
  check(policy);
  std::vector<ParameterSpec> specs;
  for (const NamedParameter& parameter : parameters) {
    check_place(parameter);
    specs.push_back({parameter.name, parameter.tensor.sizes().vec()});
  }
  (void)choose_gather(policy, group, device_of(parameters));
  (void)make_layout(specs, group.size(), policy.units);
}

namespace {

/// In the flattened parameter.
std::vector<Interval> counted_elements(const NamedParameter& parameter) {
  if (!parameter.is_counted) return {};
  if (parameter.counted.shape.empty()) return {{0, parameter.tensor.numel()}};
  return places_in(parameter.part, parameter.counted);
}

}  // namespace

std::vector<ManagedParameter> take_over(std::vector<NamedParameter> parameters, const Layout& layout) {
  std::vector<ManagedParameter> managed;
  std::unordered_map<c10::StorageImpl*, std::string> names;
  for (size_t i = 0; i < parameters.size(); ++i) {
    NamedParameter& parameter = parameters[i];
    normalise(parameter.tensor);
    c10::StorageImpl* storage = parameter.tensor.storage().unsafeGetStorageImpl();
    const auto [first, is_new] = names.emplace(storage, parameter.name);
    if (!is_new)
      throw ConfigError(str("parameters '", first->second, "' and '", parameter.name,
                            "' are two tensors over the same memory; "
                            "tie them by registering one tensor under both names"));
    parameter.tensor.mutable_grad().reset();
    // resize_() would reallocate behind our back; libtorch refuses it by name where the storage is not resizable.
    storage->set_resizable(false);
    const ParameterPlace& placement = layout.placement(static_cast<int>(i));
    std::vector<Interval> counted = counted_elements(parameter);
    managed.push_back({std::move(parameter.name), std::move(parameter.tensor), layout.unit_of[i], placement.begin,
                       placement.numel, nullptr, /*written=*/false, std::move(counted),
                       /*is_of_cut_layers=*/!parameter.part.shape.empty()});
  }
  return managed;
}

}  // namespace trireme
