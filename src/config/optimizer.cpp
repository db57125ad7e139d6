#include <limits>

#include "config/read_parts.h"
#include "config/read_type.h"

namespace trireme {
namespace {

constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kAdagrad,
                                    OptimizerKind::kLamb, OptimizerKind::kLion,  OptimizerKind::kMuon,
                                    OptimizerKind::kSgd};
// DeepSpeed's own, then torch.optim's.
const std::vector<std::string> kOptimizersNotThereYet = {
    "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam", "MuAdamW", "MuSGD",   "Adadelta", "Adafactor",
    "Adamax",     "ASGD",       "LBFGS",       "NAdam",  "RAdam",   "RMSprop", "Rprop",    "SparseAdam"};

std::vector<std::string> names_of_optimizers() {
  std::vector<std::string> names;
  for (const OptimizerKind kind : kKinds) names.emplace_back(optimizer_name(kind));
  return names;
}

void refuse_unless(Section& params, const char* key, bool normal, const char* fix) {
  if (params.flag_or(key, normal) != normal) params.not_there_yet(key, fix);
}

/// Taken by the optimizers there, and without effect on the result here.
void ignore_flags(Section& params, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (!params.has(key)) continue;
    params.flag_or(key, false);
    params.without_meaning(key);
  }
}

// An element whose gradient was always zero divides by eps alone.
constexpr NumberRange kAboveZero = {.min = std::numeric_limits<double>::denorm_min(),
                                    .max = std::numeric_limits<double>::max(),
                                    .words = "a finite number > 0, such as 1e-8"};

void read_betas(Section& params, OptimizerOptions& options) {
  const Json* betas = params.value("betas");
  if (!betas) return;
  const auto is_beta = [](const Json& beta) { return beta.is_number() && beta >= 0.0 && beta < 1.0; };
  if (!betas->is_array() || betas->size() != 2 || !is_beta(betas->at(0)) || !is_beta(betas->at(1)))
    params.fail("betas", "a list of two numbers, each from 0 up to, but not including, 1");
  options.beta1 = betas->at(0);
  options.beta2 = betas->at(1);
}

void read_adam(Section& params, OptimizerOptions& options) {
  read_betas(params, options);
  options.eps = params.number_or("eps", options.eps, kAboveZero);
  // As there: "Adam" too decouples weight decay unless told otherwise, and AdamW always does.
  if (params.flag_or("adam_w_mode", true)) options.kind = OptimizerKind::kAdamW;
  // torch.optim.AdamW's own default; DeepSpeed's fused ones decay nothing.
  const bool torch_default = params.flag_or("torch_adam", false) && options.kind == OptimizerKind::kAdamW;
  options.weight_decay = params.number_or("weight_decay", torch_default ? 0.01 : 0.0, kNonNegative);
  refuse_unless(params, "amsgrad", false, "remove it or set it to false");
  refuse_unless(params, "maximize", false, "remove it or set it to false");
  refuse_unless(params, "bias_correction", true, "remove it or set it to true");
  refuse_unless(params, "fp32_optimizer_states", true, "remove it or set it to true");
  ignore_flags(params, {"fused", "foreach", "capturable", "differentiable", "set_grad_none"});
}

void read_adagrad(Section& params, OptimizerOptions& options) {
  options.eps = params.number_or("eps", 1e-10, kAboveZero);
  options.weight_decay = params.number_or("weight_decay", options.weight_decay, kNonNegative);
  for (const char* key : {"lr_decay", "initial_accumulator_value"})
    if (params.number_or(key, 0, kNonNegative) != 0) params.not_there_yet(key, "remove it or set it to 0");
  refuse_unless(params, "maximize", false, "remove it or set it to false");
  refuse_unless(params, "fp32_optimizer_states", true, "remove it or set it to true");
  ignore_flags(params, {"amsgrad", "fused", "foreach", "differentiable"});
}

void read_lamb(Section& params, OptimizerOptions& options) {
  read_betas(params, options);
  options.eps = params.number_or("eps", options.eps, kAboveZero);
  options.weight_decay = params.number_or("weight_decay", options.weight_decay, kNonNegative);
  options.max_coeff = params.number_or("max_coeff", options.max_coeff, kNonNegative);
  options.min_coeff = params.number_or("min_coeff", options.min_coeff, kNonNegative);
  if (options.max_coeff < options.min_coeff)
    params.refuse(str("`", params.path_of("max_coeff"), "` is ", options.max_coeff, "; expected `min_coeff`, which is ",
                      options.min_coeff, ", or more"));
  options.bias_correction = params.flag_or("bias_correction", options.bias_correction);
  for (const char* key : {"amsgrad", "eps_inside_sqrt"})
    refuse_unless(params, key, false, "remove it or set it to false");
  ignore_flags(params, {"set_grad_none"});
}

void read_muon(Section& params, OptimizerOptions& options) {
  if (params.has("muon_lr")) options.lr = params.number_or("muon_lr", options.lr, kNonNegative);
  options.adam_lr = params.number_or("adam_lr", params.number_or("lr", 1e-3, kNonNegative), kNonNegative);
  // Those of the reference's Muon for the parameters that Adam updates.
  options.beta2 = 0.95;
  options.eps = 1e-10;
  read_betas(params, options);
  options.eps = params.number_or("eps", options.eps, kAboveZero);
  options.momentum = params.number_or("momentum", 0.95, kNonNegative);
  if (options.momentum >= 1) params.fail("momentum", "a number from 0 up to, but not including, 1");
  options.weight_decay = params.number_or("weight_decay", options.weight_decay, kNonNegative);
  options.ns_steps = params.integer_or("ns_steps", options.ns_steps, kPositive);
  if (params.has("ns_method")) {  // two ways to compute the same iteration
    params.choice_or("ns_method", "gram", {"gram", "standard"});
    params.without_meaning("ns_method");
  }
}

void read_lion(Section& params, OptimizerOptions& options) {
  read_betas(params, options);
  options.weight_decay = params.number_or("weight_decay", options.weight_decay, kNonNegative);
  refuse_unless(params, "fp32_optimizer_states", true, "remove it or set it to true");
  ignore_flags(params, {"set_grad_none"});
}

void read_sgd(Section& params, OptimizerOptions& options) {
  options.momentum = params.number_or("momentum", options.momentum, kNonNegative);
  options.nesterov = params.flag_or("nesterov", options.nesterov);
  options.weight_decay = params.number_or("weight_decay", options.weight_decay, kNonNegative);
  if (params.number_or("dampening", 0, kNonNegative) != 0)
    params.not_there_yet("dampening", "remove it or set it to 0");
  if (options.nesterov && options.momentum == 0) params.fail("nesterov", "false, or a momentum above 0");
  refuse_unless(params, "maximize", false, "remove it or set it to false");
  ignore_flags(params, {"fused", "foreach", "differentiable"});
}

}  // namespace

std::optional<OptimizerOptions> read_optimizer(Section& top) {
  if (!top.has("optimizer")) return std::nullopt;
  Section section = top.section("optimizer");
  const std::string type =
      read_type(section, {.supported = names_of_optimizers(), .not_there_yet = kOptimizersNotThereYet});
  refuse_unless(section, "legacy_fusion", false, "remove it or set it to false");
  Section params = section.section("params");
  section.finish();

  if (params.has("max_grad_norm"))
    params.refuse(str("`", params.path_of("max_grad_norm"),
                      "` is not an option of an optimizer here; remove it and set "
                      "`gradient_clipping` instead"));
  OptimizerOptions options;
  for (const OptimizerKind kind : kKinds)
    if (type == optimizer_name(kind)) options.kind = kind;
  options.lr = params.number_or("lr", options.kind == OptimizerKind::kAdagrad ? 1e-2 : options.lr, kNonNegative);
  switch (options.kind) {
    case OptimizerKind::kAdam:
    case OptimizerKind::kAdamW:
      read_adam(params, options);
      break;
    case OptimizerKind::kAdagrad:
      read_adagrad(params, options);
      break;
    case OptimizerKind::kLamb:
      read_lamb(params, options);
      break;
    case OptimizerKind::kMuon:
      read_muon(params, options);
      break;
    case OptimizerKind::kLion:
      read_lion(params, options);
      break;
    case OptimizerKind::kSgd:
      read_sgd(params, options);
      break;
    case OptimizerKind::kClient:
      break;  // has no name in a file
  }
  params.finish();
  return options;
}

}  // namespace trireme
