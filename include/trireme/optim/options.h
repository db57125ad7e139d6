// The options of an optimizer: hyperparameters, and which parameters have some of their own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/pager/layout/layout.h"
#include "trireme/pager/layout/policy.h"

namespace torch::optim {
class Optimizer;
}

namespace trireme {

enum class OptimizerKind { kAdam, kAdamW, kAdagrad, kLamb, kLion, kMuon, kSgd, kClient };

/// Names and defaults are DeepSpeed's (and torch.optim's for SGD). In a configuration Adagrad has other defaults (lr
/// 1e-2, eps 1e-10), and so has Muon (momentum 0.95, betas 0.9 and 0.95, eps 1e-10); here set them yourself.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 1e-3;
  double beta1 = 0.9;    ///< Adam, AdamW, Lamb, Lion; of Muon's Adam
  double beta2 = 0.999;  ///< likewise
  double eps = 1e-8;     ///< Adam, AdamW, Adagrad, Lamb; of Muon's Adam
  double weight_decay = 0;
  double momentum = 0;  ///< SGD, Muon
  bool nesterov = false;
  double min_coeff = 0.01;             ///< Lamb: bounds of the trust ratio
  double max_coeff = 10;               ///< likewise
  bool bias_correction = true;         ///< Lamb
  int64_t ns_steps = 5;                ///< Muon: Newton-Schulz iterations
  std::optional<double> adam_lr = {};  ///< Muon: of the parameters that Adam updates; nothing: lr
  bool operator==(const OptimizerOptions&) const = default;
};

/// Throws    ConfigError: a hyperparameter out of its range.
void check_optimizer(const OptimizerOptions& options);
/// Throws    ConfigError: Lamb, Lion or Muon, where updates are not computed in fp32.
void check_update_dtype(OptimizerKind kind, at::ScalarType update_dtype);

/// The arithmetic of updates.
struct UpdateArithmetic {
  at::ScalarType dtype = at::kFloat;   ///< PrecisionOptions::update_dtype
  bool rounds_stochastically = false;  ///< PrecisionOptions::stochastic_rounding
};

/// The name of `kind` as the configuration's `type` has it.
const char* optimizer_name(OptimizerKind kind);
/// The states of each element, at most two, by the names that they have in checkpoints.
std::vector<std::string> optimizer_states(const OptimizerOptions& options);

/// The result of get_mom(): (beta1, beta2), for SGD and Muon (momentum, 0), (0, 0) for Adagrad and a client's.
struct Momentum {
  double first = 0;
  double second = 0;
};
Momentum momentum_of(const OptimizerOptions& options);
/// Sets the betas to a schedule's momentum, and `momentum` too unless it is 0.
void set_momentum(OptimizerOptions& options, const Momentum& momentum);

/// Makes an optimizer over `parts`, the elements that this rank updates: flat tensors in fp32 (bf16 where updates are
/// computed in it). parts[i] is a part, or all, of the parameter names[i]. An optimizer that works element by element
/// is right; one that looks at whole tensors sees only the part. `parts` may be empty; every rank must make as many
/// parameter groups. Called twice: the first time with one element for each trainable parameter, as a trial.
using ClientOptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<at::Tensor>& parts, const std::vector<std::string>& names)>;

/// Parameters with hyperparameters of their own. What is not given is the optimizer's.
struct ParameterGroup {
  /// Regular expressions; a parameter belongs to the first group of which one is found in its name.
  std::vector<std::string> patterns = {};
  /// Names of parameters that belong to it whatever the patterns say.
  std::vector<std::string> names = {};
  std::optional<double> lr = {};
  std::optional<double> beta1 = {};
  std::optional<double> beta2 = {};
  std::optional<double> eps = {};
  std::optional<double> weight_decay = {};
  std::optional<double> momentum = {};
  std::optional<bool> nesterov = {};
};

/// Every parameter in one group. Group 0 holds what no pattern matches, group i the i-th of the list. With Muon as many
/// groups follow, in the same order: their parameters that Adam updates, which are all but matrices, and the matrices
/// of embeddings and output layers (in the name "embed", "lm_head", "wte" or "wpe").
struct GroupedParameters {
  std::vector<OptimizerOptions> options;  ///< by group
  std::vector<int> group_of;              ///< by parameter index
};

/// Throws    ConfigError: a group whose patterns match no parameter, a pattern that is no regular expression, a
///           hyperparameter out of its range.
GroupedParameters group_parameters(const OptimizerOptions& options, const std::vector<ParameterGroup>& groups,
                                   const std::vector<ParameterSpec>& parameters);

}  // namespace trireme
