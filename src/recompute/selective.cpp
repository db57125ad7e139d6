#include "trireme/recompute/selective.h"

#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <variant>

#include "recompute/claim_hooks.h"
#include "recompute/save_hooks.h"
#include "trireme/intercept.h"
#include "trireme/intercept/storage_table.h"
#include "trireme/operators/row.h"
#include "trireme/operators/rules.h"

namespace trireme {
namespace {

using detail::Claim;
using detail::ClaimHooks;
using detail::Ingredient;
using detail::Recipe;
using detail::View;
using detail::Yield;

// The longest chain of recipes. The result of a longer one would be dear, in time and in the memory held
// meanwhile.
constexpr int kMaxDepth = 16;
// A tensor this much smaller than what it is computed from (a row's mean) costs much work and saves little memory.
constexpr int64_t kMuchSmaller = 16;
// Backward multiplies twice for each product of forward.
constexpr double kStepPerForward = 3;

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

/// The cost of computing a saved tensor again.
struct Price {
  int64_t bytes = 0;         // that would be held for it alone
  double multiply_adds = 0;  // of products
  bool possible = true;
  std::vector<const void*> counted;  // recipes and storages

  bool count(const void* thing) {
    if (std::find(counted.begin(), counted.end(), thing) != counted.end()) return false;
    counted.push_back(thing);
    return true;
  }
};

/// The facts that are known of a storage.
struct Known {
  std::shared_ptr<Recipe> recipe;  // null: held for backward anyway
  Yield yield;
  at::ScalarType dtype;
  bool dropped = false;
};

/// An operator that is running.
struct Running {
  bool is_own = true;              // else another model's
  bool is_open = false;            // its parts are looked at instead
  std::shared_ptr<Recipe> recipe;  // null: it is not to run again
  std::vector<const c10::StorageImpl*> inputs;
  OperatorCost cost = OperatorCost::kCostly;
  double multiply_adds = 0;  // of a product
  bool is_larger = true;     // a result, than the left factor
  size_t saved = 0;          // tensors so far
};

/// Lets `running` point at an operator while it lives.
class [[nodiscard]] RunningScope {
 public:
  RunningScope(Running*& running, Running* now) : running_(running), outer_(std::exchange(running, now)) {}
  ~RunningScope() { running_ = outer_; }
  RunningScope(const RunningScope&) = delete;
  RunningScope& operator=(const RunningScope&) = delete;

 private:
  Running*& running_;
  Running* const outer_;
};

}  // namespace

class SelectiveRecompute::Impl final : public Pass, public detail::SavePolicy {
 public:
  Impl(const SelectivePolicy& policy, IsParameter is_parameter)
      : policy_(policy),
        is_parameter_(std::move(is_parameter)),
        shop_(std::make_shared<detail::RecipeShop>()),
        intercept_scope_(InterceptScope::Watch::kWrites, this),
        save_scope_(*this) {}

  SelectiveCounters counters() const {
    const std::lock_guard lock(shop_->mutex);
    return shop_->counters;
  }

  PassOrder order() const override { return PassOrder::kRecompute; }

  void run(OperatorCall& call, Next next) override {
    if (call.traits.written != 0) next.run(call, [&] { expect_writes(call); });
    const bool is_forward = torch::autograd::get_current_graph_task_id() == -1 && at::GradMode::is_enabled();
    if (!is_forward || !detail::SaveScope::reaches(*this)) return next(call);
    Running running = look_at(call);
    {
      const RunningScope scope(running_, running.is_open ? nullptr : &running);
      running.is_open ? next.open(call) : next(call);
    }
    if (running.is_own) finish(call, running);
  }

  bool may_decline() const override { return is_parameter_ != nullptr; }

  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
    if (running_ != nullptr && !running_->is_own) return nullptr;
    return std::make_unique<ClaimHooks>([this](const at::Tensor& tensor) { return choose(tensor); });
  }

 private:
  Running look_at(const OperatorCall& call) {
    const std::lock_guard lock(shop_->mutex);
    Running running;
    running.is_own = is_own(call);
    if (!running.is_own) return running;
    running.cost = cost_here(call.op);
    const bool is_pure = !call.traits.random && call.traits.written == 0;
    // Only the needed parts of it run again then: a norm's last steps, not its reduction.
    running.is_open = running.cost == OperatorCost::kCheap && call.traits.composite && is_pure;
    if (running.is_open) return running;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
      if (const auto* storage = storage_of(tensor)) running.inputs.push_back(storage);
    });
    if (running.cost == OperatorCost::kProduct) {
      const Row row = rows_(call.op)->row(RowCall(call.op, call.arguments()));
      const at::Tensor& left = call.arguments()[left_factor_index(call.op)].toTensor();
      running.multiply_adds = row.multiply_adds();
      running.is_larger = c10::multiply_integers(row.sizes_of(row.results[0])) > left.numel();
    }
    const bool may_run_again =
        running.cost == OperatorCost::kCheap || (running.cost == OperatorCost::kProduct && policy_.extra_compute > 0);
    if (may_run_again && call.traits.written == 0 && !running.inputs.empty()) running.recipe = make_recipe(call);
    return running;
  }

  void finish(const OperatorCall& call, const Running& running) {
    const std::lock_guard lock(shop_->mutex);
    if (running.is_open) return known_.sweep();
    if (is_parameter_)
      for_each_tensor(call.results(), [this](const at::Tensor& tensor) {
        if (storage_of(tensor) != nullptr && own_.find(storage_of(tensor)) == nullptr) own_.set(tensor.storage(), {});
      });
    const auto results = call.results();
    if (running.cost == OperatorCost::kProduct && results[0].isTensor()) {
      if (results[0].toTensor().requires_grad()) forward_multiply_adds_ += running.multiply_adds;
      if (!running.is_larger) return;
      if (running.recipe) running.recipe->multiply_adds = running.multiply_adds;
    }
    if (running.recipe) learn(running, results);
  }

  bool is_own(const OperatorCall& call) {
    bool is_own = !is_parameter_;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) { is_own = is_own || this->is_own(tensor); });
    return is_own;
  }

  bool is_own(const at::Tensor& tensor) {
    if (storage_of(tensor) == nullptr) return false;
    return own_.find(storage_of(tensor)) != nullptr || is_parameter_(tensor);
  }

  OperatorCost cost_here(const c10::OperatorHandle& op) {
    if (const auto found = costs_.find(op); found != costs_.end()) return found->second;
    const std::string_view name = op.schema().name();
    const bool is_kept = std::ranges::count(policy_.keep, name.substr(name.find("::") + 2)) > 0;
    return costs_.emplace(op, is_kept ? OperatorCost::kCostly : cost_of(op)).first->second;
  }

  std::shared_ptr<Recipe> make_recipe(const OperatorCall& call) {
    auto recipe = std::make_shared<Recipe>(shop_, call);
    for (Ingredient& ingredient : recipe->ingredients()) {
      if (storage_of(ingredient.held) != nullptr && !ingredient.is_parameter)
        recipe->largest_input = std::max(recipe->largest_input, static_cast<int64_t>(ingredient.held.nbytes()));
      Known* known = known_.find(storage_of(ingredient.held));
      if (known == nullptr || known->recipe == nullptr || known->recipe->depth >= kMaxDepth ||
          known->dtype != ingredient.held.scalar_type())
        continue;
      ingredient.recipe = known->recipe;
      ingredient.yield = known->yield;
      recipe->depth = std::max(recipe->depth, known->recipe->depth + 1);
    }
    recipes_.push_back(recipe);
    if (recipes_.size() >= sweep_recipes_at_) {
      std::erase_if(recipes_, [](const std::weak_ptr<Recipe>& weak) { return weak.expired(); });
      sweep_recipes_at_ = std::max<size_t>(64, 2 * recipes_.size());
    }
    return recipe;
  }

  /// The results' storages are new: from now on the recipe gives them, where that can pay. Until it is settled, a
  /// recipe holds what it starts from, so one that would hold more than it gives (a loss) goes at once.
  void learn(const Running& running, c10::ArrayRef<c10::IValue> results) {
    size_t index = 0;
    for_each_tensor(results, [&](const at::Tensor& tensor) {
      const Yield yield{Yield::Kind::kResult, index++};
      const auto* storage = storage_of(tensor);
      if (storage == nullptr || known_.find(storage) != nullptr) return;
      if (std::find(running.inputs.begin(), running.inputs.end(), storage) != running.inputs.end()) return;
      if (!is_worth(*running.recipe, static_cast<int64_t>(storage->nbytes()))) return;
      known_.set(tensor.storage(), {.recipe = running.recipe, .yield = yield, .dtype = tensor.scalar_type()});
    });
  }

  /// Autograd saves `tensor`: a claim on the recipe that gives it, or nothing where it is to be held.
  std::unique_ptr<Claim> choose(const at::Tensor& tensor) {
    const std::lock_guard lock(shop_->mutex);
    const size_t nth = running_ ? running_->saved++ : 0;
    const c10::StorageImpl* storage = storage_of(tensor);
    if (storage == nullptr || detail::is_parameter(tensor)) return nullptr;
    if (is_parameter_ && running_ == nullptr && !is_own(tensor)) return nullptr;  // saved by no operator
    Known* known = known_.find(storage);
    std::shared_ptr<Recipe> recipe;
    Yield yield;
    if (known != nullptr && known->dtype == tensor.scalar_type()) {
      recipe = known->recipe;
      yield = known->yield;
    } else if (known == nullptr && running_ &&
               std::find(running_->inputs.begin(), running_->inputs.end(), storage) == running_->inputs.end()) {
      recipe = running_->recipe;
      yield = {Yield::Kind::kSaved, nth};
    }
    const auto bytes = static_cast<int64_t>(storage->nbytes());
    if (recipe == nullptr || tensor.is_conj() || tensor.is_neg() || !is_worth(*recipe, bytes)) {
      hold(tensor);
      return nullptr;
    }
    settle(*recipe);
    if (known == nullptr || !known->dropped) shop_->counters.dropped_bytes += bytes;
    if (known != nullptr) known->dropped = true;
    return std::make_unique<Claim>(std::move(recipe), yield, View::of(tensor));
  }

  bool is_held(const at::Tensor& tensor) {
    const Known* known = known_.find(storage_of(tensor));
    return known != nullptr && known->recipe == nullptr;
  }

  void hold(const at::Tensor& tensor) {
    if (is_held(tensor)) return;
    shop_->counters.kept_bytes += static_cast<int64_t>(tensor.storage().nbytes());
    known_.set(tensor.storage(), {.recipe = nullptr, .yield = {}, .dtype = tensor.scalar_type()});
  }

  void add_price(Recipe& recipe, Price& price) {
    price.possible = price.possible && !recipe.spoiled;
    if (recipe.settled || !price.count(&recipe) || !price.possible) return;
    price.multiply_adds += recipe.multiply_adds;
    for (Ingredient& ingredient : recipe.ingredients()) {
      const c10::StorageImpl* storage = storage_of(ingredient.held);
      if (storage == nullptr || ingredient.is_parameter || is_held(ingredient.held)) continue;
      if (comes_from_recipe(ingredient)) {
        add_price(*ingredient.recipe, price);
      } else if (price.count(storage)) {
        price.bytes += static_cast<int64_t>(storage->nbytes());
      }
    }
  }

  bool comes_from_recipe(Ingredient& ingredient) {
    return ingredient.recipe &&
           is_worth(*ingredient.recipe, static_cast<int64_t>(storage_of(ingredient.held)->nbytes()));
  }

  /// Whether computing `bytes` by `recipe` takes less memory than holding them, and products within the budget.
  bool is_worth(Recipe& recipe, int64_t bytes) {
    if (bytes * kMuchSmaller < recipe.largest_input) return false;
    Price price;
    add_price(recipe, price);
    const double budget = policy_.extra_compute * kStepPerForward * forward_multiply_adds_;
    return price.possible && price.bytes < bytes &&
           (price.multiply_adds == 0 || spent_multiply_adds_ + price.multiply_adds <= budget);
  }

  /// Decides where the ingredients come from, once the recipe is needed.
  void settle(Recipe& recipe) {
    if (recipe.settled) return;
    recipe.settled = true;
    spent_multiply_adds_ += recipe.multiply_adds;
    for (Ingredient& ingredient : recipe.ingredients()) {
      if (storage_of(ingredient.held) != nullptr && !ingredient.is_parameter && !is_held(ingredient.held)) {
        if (comes_from_recipe(ingredient)) {
          settle(*ingredient.recipe);
          ingredient.claim = std::make_unique<Claim>(ingredient.recipe, ingredient.yield, View::of(ingredient.held));
          ingredient.held.reset();
        } else {
          hold(ingredient.held);
        }
      }
      ingredient.recipe.reset();
    }
  }

  /// Recipes that start from what is about to be written keep a copy, or give up.
  void expect_writes(const OperatorCall& call) {
    const std::lock_guard lock(shop_->mutex);
    std::vector<const c10::StorageImpl*> written;
    for (uint32_t i = 0; i < call.traits.arguments && i < 64; ++i)
      if (call.traits.written >> i & 1)
        for_each_tensor(call.arguments().slice(i, 1),
                        [&](const at::Tensor& tensor) { written.push_back(storage_of(tensor)); });
    const auto is_written = [&](const c10::StorageImpl* storage) {
      return storage != nullptr && std::find(written.begin(), written.end(), storage) != written.end();
    };
    for (const auto* storage : written) {
      Known* known = known_.find(storage);
      if (known != nullptr && known->recipe != nullptr) known_.erase(storage);
    }
    for (const std::weak_ptr<Recipe>& weak : recipes_) {
      const auto recipe = weak.lock();
      if (!recipe) continue;
      for (Ingredient& ingredient : recipe->ingredients()) {
        if (!is_written(storage_of(ingredient.held))) continue;
        if (!recipe->settled) {
          recipe->spoiled = true;
          continue;
        }
        ingredient.held = ingredient.held.clone();
        ingredient.version = static_cast<uint32_t>(ingredient.held._version());
      }
    }
  }

  const SelectivePolicy policy_;
  const IsParameter is_parameter_;                  // null: all operators of the thread are its own
  const std::shared_ptr<detail::RecipeShop> shop_;  // recipes outlive the scope
  StorageTable<Known> known_;
  StorageTable<std::monostate> own_;  // results of the model's operators
  std::vector<std::weak_ptr<Recipe>> recipes_;
  std::unordered_map<c10::OperatorHandle, OperatorCost> costs_;
  OperatorRows rows_;
  size_t sweep_recipes_at_ = 64;
  Running* running_ = nullptr;  // of this thread's forward
  double forward_multiply_adds_ = 0;
  double spent_multiply_adds_ = 0;
  InterceptScope intercept_scope_;
  detail::SaveScope save_scope_;
};

void check(const SelectivePolicy& policy) {
  if (!(policy.extra_compute >= 0 && policy.extra_compute <= 1 / kStepPerForward))
    throw ConfigError(str("selective recomputation: extra_compute = ", policy.extra_compute,
                          "; expected a share of a step's multiply-adds from 0 to 0.333 (all of forward)"));
}

SelectiveRecompute::SelectiveRecompute(const SelectivePolicy& policy, IsParameter is_parameter) {
  check(policy);
  impl_ = std::make_unique<Impl>(policy, std::move(is_parameter));
}

SelectiveRecompute::~SelectiveRecompute() = default;

SelectiveCounters SelectiveRecompute::counters() const { return impl_->counters(); }

}  // namespace trireme
