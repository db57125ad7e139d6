#include "recompute/recipe.h"

#include <ATen/ops/as_strided.h>
#include <torch/csrc/autograd/graph_task.h>

#include "recompute/save_hooks.h"

namespace trireme::detail {
namespace {

/// Calls `visit` with each tensor of `value`, which becomes what it returns.
template <class Visit>
void replace_tensors(c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    value = visit(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(visit(tensor));
    value = list;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(visit(*tensor)) : std::nullopt);
    value = list;
  }
}

std::vector<at::Tensor> tensors_in(const std::vector<c10::IValue>& arguments) {
  std::vector<at::Tensor> tensors;
  for (c10::IValue argument : arguments)
    replace_tensors(argument, [&](const at::Tensor& tensor) { return tensors.emplace_back(tensor); });
  return tensors;
}

/// Collects what autograd saves while a recipe runs.
class SavedCollector final : public SavePolicy {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(saved); }
  std::vector<at::Tensor> saved;

 private:
  // Nobody runs backward through the graph of a replay.
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(std::vector<at::Tensor>& saved) : saved_(saved) {}
    void call_pack_hook(const at::Tensor& tensor) override { saved_.push_back(tensor.detach()); }
    at::Tensor call_unpack_hook() override { return {}; }

   private:
    std::vector<at::Tensor>& saved_;
  };
};

}  // namespace

bool is_parameter(const at::Tensor& tensor) {
  if (tensor.has_storage() && StorageHandle::owner_of(*tensor.storage().unsafeGetStorageImpl()) != nullptr) return true;
  return tensor.requires_grad() && (tensor.is_view() ? tensor._base().is_leaf() : tensor.is_leaf());
}

View View::of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(), .strides = tensor.strides().vec(), .offset = tensor.storage_offset()};
}

at::Tensor View::apply(const at::Tensor& tensor) const {
  if (tensor.sizes() == at::IntArrayRef(sizes) && tensor.strides() == at::IntArrayRef(strides) &&
      tensor.storage_offset() == offset)
    return tensor.detach();
  const at::NoGradGuard no_grad;
  return tensor.as_strided(sizes, strides, offset);
}

Claim::Claim(std::shared_ptr<Recipe> recipe, Yield yield, View view)
    : recipe_(std::move(recipe)), yield_(yield), view_(std::move(view)) {
  recipe_->want(yield_);
}

Claim::~Claim() { recipe_->forget(*this); }

at::Tensor Claim::fetch() { return recipe_->fetch(*this); }

Recipe::Recipe(std::shared_ptr<RecipeShop> shop, const OperatorCall& call)
    : shop_(std::move(shop)),
      op_(call.op),
      arguments_(call.arguments().vec()),
      surroundings_(std::in_place, tensors_in(arguments_), call.traits.random),
      is_random_(call.traits.random),
      stream_(call.stream),
      seed_(call.seed) {
  for (c10::IValue& argument : arguments_)
    replace_tensors(argument, [&](const at::Tensor& tensor) {
      Ingredient ingredient;
      if (tensor.defined()) {
        ingredient.held = tensor.detach();
        ingredient.version = tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor._version());
        ingredient.requires_grad = tensor.requires_grad();
        ingredient.is_parameter = is_parameter(tensor);
      }
      ingredients_.push_back(std::move(ingredient));
      return at::Tensor();
    });
}

void Recipe::want(const Yield& yield) {
  const std::lock_guard lock(shop_->mutex);
  ++claims_;
  wants_saved_ = wants_saved_ || yield.kind == Yield::Kind::kSaved;
}

void Recipe::forget(const Claim& claim) noexcept {
  const std::lock_guard lock(shop_->mutex);
  --claims_;
  if (claim.served_run_ != runs_ && --unserved_ == 0) given_.clear();
}

at::Tensor Recipe::fetch(Claim& claim) {
  const std::lock_guard lock(shop_->mutex);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (given_.empty() || graph_task != graph_task_ || graph_task == -1) {
    run();
    graph_task_ = graph_task;
    ++runs_;
    unserved_ = claims_;
  }
  const auto found = given_.find(claim.yield_);
  if (found == given_.end())
    throw RecomputeError(str("selective recomputation: ", op_.schema().name(),
                             " saves other tensors when it runs again; name it in `keep`"));
  at::Tensor tensor = claim.view_.apply(found->second);
  if (claim.served_run_ != runs_) {
    claim.served_run_ = runs_;
    --unserved_;
  }
  if (unserved_ == 0 || graph_task == -1) given_.clear();
  return tensor;
}

void Recipe::run() {
  given_.clear();
  auto ingredient = ingredients_.begin();
  torch::jit::Stack stack;
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& argument : arguments_) {
    c10::IValue value = argument;
    replace_tensors(value, [&](const at::Tensor&) {
      Ingredient& next = *ingredient++;
      at::Tensor tensor = next.claim ? next.claim->fetch() : next.held.defined() ? next.held.detach() : next.held;
      if (!next.claim && tensor.defined() && !tensor.is_inference() &&
          static_cast<uint32_t>(tensor._version()) != next.version)
        throw RecomputeError(str("selective recomputation: an argument ", tensor.sizes(), " of ", op_.schema().name(),
                                 " was written between forward and backward"));
      if (wants_saved_ && next.requires_grad) tensor.requires_grad_();
      tensors.push_back(tensor);
      return tensor;
    });
    stack.push_back(std::move(value));
  }
  const SurroundingsScope surroundings(*surroundings_, tensors, is_random_);
  SavedCollector collector;
  const SaveScope scope(collector);
  const at::AutoGradMode grad_mode(wants_saved_);
  // Passes of the orders before have had their part in the arguments.
  const ChainFrom chain(PassOrder::kTouch, stream_, seed_);
  op_.callBoxed(&stack);
  ++shop_->counters.recomputed;
  for (size_t i = 0; i < collector.saved.size(); ++i) given_[{Yield::Kind::kSaved, i}] = collector.saved[i];
  collect_results(stack);
}

void Recipe::collect_results(const torch::jit::Stack& stack) {
  size_t index = 0;
  for (const c10::IValue& result : stack) {
    c10::IValue value = result;
    replace_tensors(value, [&](const at::Tensor& tensor) {
      if (tensor.defined()) given_[{Yield::Kind::kResult, index}] = tensor.detach();
      ++index;
      return tensor;
    });
  }
}

}  // namespace trireme::detail
