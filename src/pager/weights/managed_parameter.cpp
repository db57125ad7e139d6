#include "pager/weights/managed_parameter.h"

#include <ATen/ops/from_blob.h>

#include "pager/weights/store.h"

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

bool ParameterStorage::is_of_cut_layers() const {
  return store_ != nullptr && store_->parameter(parameter_).is_of_cut_layers;
}

void ParameterStorage::make_whole(Hold hold) { store_->hold(parameter_, hold == Hold::kModify); }
void ParameterStorage::release() noexcept { store_->let_go(parameter_); }
c10::StorageImpl& ParameterStorage::bytes() { return store_->parameter(parameter_).storage(); }

void ParameterStorage::settle() {
  store_->await_peers();  // nobody reads what is overwritten now
  store_->apply_writes();
  store_->settle_writes();
}

at::Tensor flat_view(void* data, int64_t numel, at::ScalarType dtype, std::shared_ptr<void> keep) {
  return at::from_blob(
      data, {numel}, [keep = std::move(keep)](void*) {}, at::TensorOptions().dtype(dtype));
}

}  // namespace trireme
