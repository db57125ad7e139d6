#include "trireme/pager/init/gathered.h"

#include <set>
#include <utility>

#include "pager/storage/held_storage.h"
#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"

namespace trireme::zero {

namespace {

std::shared_ptr<HeldStorage> held_storage_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  auto owner = StorageHandle::share_owner_of(*tensor.storage().unsafeGetStorageImpl());
  return std::dynamic_pointer_cast<HeldStorage>(std::move(owner));
}

void check_modifier(const HeldStorage& storage, int rank) {
  const Group& group = storage.mesh()->shards;
  if (rank < 0 || rank >= group.size())
    throw ConfigError(str("GatheredParameters: modifier_rank=", rank, " is no rank of group '", group.name(),
                          "', which has ", group.size(), "; use 0 to ", group.size() - 1));
}

/// Where layers are cut no rank has values for all ranks.
void refuse_slice(const HeldStorage& storage, int modifier_rank) {
  if (!storage.is_of_cut_layers()) return;
  throw StateError(str("GatheredParameters: modifier_rank=", modifier_rank, ": ", storage.label(),
                       " is of an engine with tensor_parallel, whose ranks have slices, so the values of one rank are "
                       "not everybody's; write it by safe_set_full_fp32_param(), or load a checkpoint"));
}

void check_parameter(const at::Tensor& tensor, const char* call) {
  const auto refuse = [&](const auto&... got) {
    throw ShapeError(str(call, ": expected a parameter (a floating leaf that a module registered), got ", got...));
  };
  if (!tensor.defined()) refuse("an undefined tensor");
  if (held_storage_of(tensor)) return;
  if (!at::isFloatingType(tensor.scalar_type())) refuse("a tensor of ", tensor.scalar_type());
  if (!tensor.is_leaf()) refuse("a tensor that was computed from others");
}

}  // namespace

/// One storage, held as long as this lives.
class GatheredParameters::Hold {
 public:
  Hold(at::Tensor tensor, HeldStorage::Hold kind)
      : tensor_(std::move(tensor)), storage_(held_storage_of(tensor_)), kind_(kind) {
    const WithoutInterception own_operators;
    storage_->hold(kind_);
  }
  ~Hold() {
    const WithoutInterception own_operators;
    storage_->let_go(kind_);
  }
  Hold(const Hold&) = delete;
  Hold& operator=(const Hold&) = delete;
  HeldStorage& storage() const { return *storage_; }

  void spread(int root) {
    const WithoutInterception own_operators;
    storage_->spread(root);
    // A graph that read the former values must not run backward over these without a word.
    if (!tensor_.is_inference()) tensor_.unsafeGetTensorImpl()->bump_version();
  }

 private:
  const at::Tensor tensor_;  // keeps what the storage's owner points into
  const std::shared_ptr<HeldStorage> storage_;
  const HeldStorage::Hold kind_;
};

GatheredParameters::GatheredParameters(const std::vector<at::Tensor>& parameters, const GatheredOptions& options)
    : options_(options) {
  if (!options.enabled) return;
  const auto kind = options.modifier_rank ? HeldStorage::Hold::kModify : HeldStorage::Hold::kRead;
  std::vector<at::Tensor> held;
  std::set<const HeldStorage*> seen;
  for (const at::Tensor& parameter : parameters) {
    const auto storage = held_storage_of(parameter);
    if (!storage || storage->mesh() == nullptr) {
      if (options.modifier_rank.value_or(0) != 0)
        throw StateError(str("GatheredParameters: a tensor ", parameter.sizes(),
                             " is sharded by nobody, so nothing spreads modifier_rank=", *options.modifier_rank,
                             "'s values; let rank 0 write it before initialize(), which gives everybody rank 0's"));
      continue;
    }
    if (!seen.insert(storage.get()).second) continue;  // tied
    storage->check(kind);
    if (options.modifier_rank) {
      check_modifier(*storage, *options.modifier_rank);
      refuse_slice(*storage, *options.modifier_rank);
    }
    held.push_back(parameter);
  }
  const CallerScope caller("GatheredParameters");
  scope_.emplace(InterceptScope::Watch::kWrites);
  for (at::Tensor& tensor : held) holds_.push_back(std::make_unique<Hold>(std::move(tensor), kind));
}

GatheredParameters::~GatheredParameters() = default;

void GatheredParameters::close() {
  if (options_.modifier_rank) {
    const CallerScope caller("GatheredParameters");
    std::set<const void*> settled;
    for (const auto& hold : holds_) hold->spread(*options_.modifier_rank);
    for (const auto& hold : holds_)
      if (settled.insert(hold->storage().manager()).second) hold->storage().settle();
  }
  holds_.clear();
  scope_.reset();
}

void register_external_parameter(const torch::nn::Module&, const at::Tensor& parameter) {
  check_parameter(parameter, "register_external_parameter");
}

void unregister_external_parameter(const torch::nn::Module&, const at::Tensor& parameter) {
  check_parameter(parameter, "unregister_external_parameter");
}

}  // namespace trireme::zero
