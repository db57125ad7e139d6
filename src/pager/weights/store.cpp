#include "pager/weights/store.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "trireme/comm/agreement.h"

namespace trireme {

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
  const std::vector<ParameterPlace>& places = unit(index).parameters;
  return std::any_of(places.begin(), places.end(),
                     [&](const ParameterPlace& at) { return parameter(at.index).written; });
}

int64_t WeightStore::written_digest(int index) const {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  return parameter(index).written ? digest_of(parameter(index).flat()) : 0;
}

void copy_values(const ManagedParameter& parameter, const at::Tensor& target) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  // An Init scope may hold the values as shards: the owner makes them whole first.
  if (ManagedStorage* owner = StorageHandle::owner_of(parameter.storage())) owner->before_access(Access::kRead);
  target.copy_(parameter.flat());
}

}  // namespace trireme
