// One operator that can run again, and what needs its results.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/Storage.h>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "recompute/surroundings.h"
#include "trireme/intercept.h"
#include "trireme/recompute/selective.h"

namespace trireme::detail {

/// State that the recipes of one SelectiveRecompute share; lives as long as the last of them.
struct RecipeShop {
  std::recursive_mutex mutex;  // replaying one recipe replays others
  SelectiveCounters counters;
};

/// How a tensor lies in its storage.
struct View {
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;

  static View of(const at::Tensor& tensor);
  at::Tensor apply(const at::Tensor& tensor) const;
};

/// A parameter, or a view of one.
bool is_parameter(const at::Tensor& tensor);

/// Names one tensor that a recipe gives: its k-th result, or the k-th tensor that autograd saves while it runs.
struct Yield {
  enum class Kind : uint8_t { kResult, kSaved } kind = Kind::kResult;
  size_t index = 0;
  auto operator<=>(const Yield&) const = default;
};

class Recipe;

/// A claim on what a recipe gives. Backward passes come to it once each; the recipe keeps its results until all have.
class Claim {
 public:
  Claim(std::shared_ptr<Recipe> recipe, Yield yield, View view);
  ~Claim();
  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;
  at::Tensor fetch();

 private:
  friend class Recipe;
  const std::shared_ptr<Recipe> recipe_;
  const Yield yield_;
  const View view_;
  int64_t served_run_ = -1;
};

/// An argument of a recipe: a tensor that is held, or a claim.
struct Ingredient {
  at::Tensor held;       ///< detached
  uint32_t version = 0;  ///< of `held`
  bool requires_grad = false;
  bool is_parameter = false;       ///< or a view of one: held whether we do or not
  std::shared_ptr<Recipe> recipe;  ///< gives it too; null once the recipe is settled
  Yield yield;
  std::unique_ptr<Claim> claim;  ///< instead of `held`
};

class Recipe {
 public:
  /// The recipe of an operator that is about to run; the tensors among its arguments become ingredients, in order.
  Recipe(std::shared_ptr<RecipeShop> shop, const OperatorCall& call);

  std::vector<Ingredient>& ingredients() { return ingredients_; }
  /// Some saved tensor needs it: its ingredients are what they will be.
  bool settled = false;
  /// An ingredient was written before that: it gives something else now.
  bool spoiled = false;
  double multiply_adds = 0;
  int64_t largest_input = 0;  ///< bytes
  int depth = 0;              ///< recipes in a row that lead here

 private:
  friend class Claim;
  void want(const Yield& yield);
  at::Tensor fetch(Claim& claim);
  void forget(const Claim& claim) noexcept;
  void run();
  void collect_results(const torch::jit::Stack& stack);

  const std::shared_ptr<RecipeShop> shop_;
  const c10::OperatorHandle op_;
  std::vector<c10::IValue> arguments_;  // without tensors
  std::vector<Ingredient> ingredients_;
  const std::optional<Surroundings> surroundings_;
  const bool is_random_;
  const RandomStream stream_;
  const std::optional<uint64_t> seed_;

  int64_t claims_ = 0;
  bool wants_saved_ = false;
  int graph_task_ = -1;  // the backward pass that `given_` belongs to
  int64_t runs_ = 0;
  int64_t unserved_ = 0;  // claims that this pass has not come to
  std::map<Yield, at::Tensor> given_;
};

}  // namespace trireme::detail
