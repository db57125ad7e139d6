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

namespace torch::optim {
class Optimizer;
}

namespace trireme {

enum class OptimizerKind { kAdam, kAdamW, kAdagrad, kLamb, kLion, kMuon, kSgd, kClient };

/// Names and defaults are DeepSpeed's (and torch.optim's for SGD). There Adagrad has lr 1e-2 and eps 1e-10 of its own,
/// Muon momentum 0.95, betas 0.9, 0.95 and eps 1e-10.
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

/// In what updates are computed.
struct UpdateArithmetic {
  at::ScalarType dtype = at::kFloat;   ///< PrecisionOptions::update_dtype
  bool rounds_stochastically = false;  ///< PrecisionOptions::stochastic_rounding
};

/// As the configuration's `type` writes it.
const char* optimizer_name(OptimizerKind kind);
/// The states of each element, at most two, by the names that they have in checkpoints.
std::vector<std::string> optimizer_states(const OptimizerOptions& options);

/// The result of get_mom(): (beta1, beta2), for SGD and Muon (momentum, 0), (0, 0) for Adagrad and a client's.
struct Momentum {
  double first = 0;
  double second = 0;
};
Momentum momentum_of(const OptimizerOptions& options);
/// Takes a schedule's momentum over; an optimizer that has none stays without.
void set_momentum(OptimizerOptions& options, const Momentum& momentum);

/// Makes an optimizer of `parts`: what this rank updates, flat tensors in fp32 (bf16 where updates are computed in it),
/// each a part of one parameter (or the whole of it), which `names` has at the same place. Right for optimizers that
/// work element by element; what looks at a whole tensor sees the part. May be empty; the parameter groups are as many
/// on every rank. Called twice: the first time with one element for each parameter that is trained, to see whether the
/// optimizer can be stepped.
using ClientOptimizerFactory = std::function<std::unique_ptr<torch::optim::Optimizer>(
    const std::vector<at::Tensor>& parts, const std::vector<std::string>& names)>;

/// Parameters with hyperparameters of their own. What is not given is the optimizer's.
struct ParameterGroup {
  /// Regular expressions; a parameter in whose name one is found belongs to the first such group.
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
