#include "pager/managed_parameter.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>

#include "pager/weight_store.h"

namespace trireme {

void ParameterStorage::before_access(Access access) {
  if (store_ == nullptr) return;
  refuse_write(access);
  store_->before_access(parameter_, access);
}

void ParameterStorage::after_write() {
  if (store_ != nullptr) store_->after_write(parameter_);
}

std::string ParameterStorage::label() const {
  return store_ != nullptr ? str("parameter '", store_->parameter(parameter_).name, "'") : "a parameter";
}

const ShardMesh* ParameterStorage::mesh() const {
  return store_ != nullptr ? &store_->mesh_of_parameter(parameter_) : nullptr;
}

void ParameterStorage::make_whole(Hold hold) { store_->hold(parameter_, hold == Hold::kModify); }
void ParameterStorage::release() noexcept { store_->let_go(parameter_); }
c10::StorageImpl& ParameterStorage::bytes() { return store_->parameter(parameter_).storage(); }

void ParameterStorage::settle() {
  store_->await_peers();  // nobody reads what is overwritten now
  store_->apply_writes();
  store_->settle_writes();
}

WeightStore::WeightStore(const StoreContext& context) : context_(context) {
  // Hung into the storages by the subclass, once it has read the initial values through the storages' present owners.
  for (size_t i = 0; i < context.parameters.size(); ++i)
    context.parameters[i].owner = std::make_shared<ParameterStorage>(*this, static_cast<int>(i));
}

WeightStore::~WeightStore() {
  for (const ManagedParameter& managed : context_.parameters)
    if (managed.owner) managed.owner->forget();
}

void WeightStore::await_peers() const {
  for (const ShardMesh& mesh : context_.meshes) barrier_over(mesh);
}

bool WeightStore::is_written(int index) const {
  const std::vector<Placement>& places = unit(index).parameters;
  return std::any_of(places.begin(), places.end(), [&](const Placement& at) { return parameter(at.index).written; });
}

at::Tensor flat_view(void* data, int64_t numel, at::ScalarType dtype, std::shared_ptr<void> keep) {
  return at::from_blob(
      data, {numel}, [keep = std::move(keep)](void*) {}, at::TensorOptions().dtype(dtype));
}

void copy_values(const ManagedParameter& parameter, const at::Tensor& target) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  // An Init scope may hold the values as shards: the owner makes them whole first.
  if (ManagedStorage* owner = StorageHandle::owner_of(parameter.storage())) owner->before_access(Access::kRead);
  target.copy_(parameter.flat());
}

}  // namespace trireme
