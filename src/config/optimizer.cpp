#include <limits>

#include "config/read_parts.h"
#include "config/read_type.h"

namespace trireme {
namespace {

const std::vector<std::string> kOptimizers = {"Adam", "AdamW", "SGD"};
// DeepSpeed's own, then torch.optim's.
const std::vector<std::string> kOptimizersNotThereYet = {
    "Adagrad", "Lamb",  "OneBitAdam", "OneBitLamb", "ZeroOneAdam", "MuAdam",    "MuAdamW",
    "MuSGD",   "Lion",  "Muon",       "Adadelta",   "Adafactor",   "Adamax",    "ASGD",
    "LBFGS",   "NAdam", "RAdam",      "RMSprop",    "Rprop",       "SparseAdam"};

void refuse_unless(Section& params, const char* key, bool normal, const char* fix) {
  if (params.flag_or(key, normal) != normal) params.not_there_yet(key, fix);
}

/// Taken by the optimizers there, and without effect on the result here.
void ignore_flags(Section& params, std::initializer_list<const char*> keys) {
  for (const char* key : keys) {
    if (!params.has(key)) continue;
    params.flag_or(key, false);
    params.notes().without_meaning.push_back(params.path_of(key));
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
  const std::string type = read_type(section, kOptimizers, kOptimizersNotThereYet);
  refuse_unless(section, "legacy_fusion", false, "remove it or set it to false");
  Section params = section.section("params");
  section.finish();

  if (params.has("max_grad_norm"))
    params.refuse(str("`", params.path_of("max_grad_norm"),
                      "` is not an option of an optimizer here; remove it and set "
                      "`gradient_clipping` instead"));
  OptimizerOptions options;
  options.kind = type == "Adam" ? OptimizerKind::kAdam : type == "AdamW" ? OptimizerKind::kAdamW : OptimizerKind::kSgd;
  options.lr = params.number_or("lr", options.lr, kNonNegative);
  if (options.kind == OptimizerKind::kSgd) {
    read_sgd(params, options);
  } else {
    read_adam(params, options);
  }
  params.finish();
  return options;
}

}  // namespace trireme
