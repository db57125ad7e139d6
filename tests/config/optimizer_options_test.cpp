#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"

namespace trireme {
namespace {

OptimizerOptions optimizer(const std::string& type, const std::string& params = "{}") {
  return read_with("\"optimizer\": {\"type\": \"" + type + "\", \"params\": " + params + "}").optimizer.value();
}
Refusal optimizer_refusal(const std::string& type, const std::string& params = "{}") {
  return refusal_of("\"optimizer\": {\"type\": \"" + type + "\", \"params\": " + params + "}");
}
LrScheduleOptions scheduler(const std::string& type, const std::string& params = "{}") {
  return read_with("\"scheduler\": {\"type\": \"" + type + "\", \"params\": " + params + "}").scheduler.value();
}
Refusal scheduler_refusal(const std::string& type, const std::string& params = "{}") {
  return refusal_of("\"scheduler\": {\"type\": \"" + type + "\", \"params\": " + params + "}");
}

TEST(OptimizerOptions, AreAbsentWhenTheFileNamesNone) {
  EXPECT_FALSE(read_with("\"optimizer\": null").optimizer.has_value());
  EXPECT_FALSE(parse_config(R"({"train_batch_size": 1})", 1).optimizer.has_value());
}

TEST(OptimizerOptions, HaveDeepSpeedsDefaults) {
  EXPECT_EQ(optimizer("AdamW"), (OptimizerOptions{.kind = OptimizerKind::kAdamW,
                                                  .lr = 1e-3,
                                                  .beta1 = 0.9,
                                                  .beta2 = 0.999,
                                                  .eps = 1e-8,
                                                  .weight_decay = 0,
                                                  .momentum = 0,
                                                  .nesterov = false}));
  EXPECT_EQ(optimizer("SGD").lr, 1e-3);
}

TEST(OptimizerOptions, IgnoreTheCaseOfTheType) {
  EXPECT_EQ(optimizer("adamw").kind, OptimizerKind::kAdamW);
  EXPECT_EQ(optimizer("sgd").kind, OptimizerKind::kSgd);
}

TEST(OptimizerOptions, ReadEveryParameterOfAdam) {
  EXPECT_EQ(optimizer("Adam",
                      R"({"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "adam_w_mode": false})"),
            (OptimizerOptions{.kind = OptimizerKind::kAdam,
                              .lr = 0.01,
                              .beta1 = 0.8,
                              .beta2 = 0.95,
                              .eps = 1e-6,
                              .weight_decay = 0.1,
                              .momentum = 0,
                              .nesterov = false}));
}

TEST(OptimizerOptions, DecoupleWeightDecayOfAdamUnlessToldOtherwise) {
  EXPECT_EQ(optimizer("Adam").kind, OptimizerKind::kAdamW);
  EXPECT_EQ(optimizer("Adam", R"({"adam_w_mode": false})").kind, OptimizerKind::kAdam);
  EXPECT_EQ(optimizer("AdamW", R"({"adam_w_mode": false})").kind, OptimizerKind::kAdamW);
}

TEST(OptimizerOptions, TakeTorchsWeightDecayWithTorchAdam) {
  EXPECT_EQ(optimizer("AdamW", R"({"torch_adam": true})").weight_decay, 0.01);
  EXPECT_EQ(optimizer("Adam", R"({"torch_adam": true, "adam_w_mode": false})").weight_decay, 0.0);
  EXPECT_EQ(optimizer("AdamW", R"({"torch_adam": true, "weight_decay": 0.2})").weight_decay, 0.2);
}

TEST(OptimizerOptions, ReadEveryParameterOfAdagradAndLion) {
  EXPECT_EQ(optimizer("Adagrad"), (OptimizerOptions{.kind = OptimizerKind::kAdagrad, .lr = 1e-2, .eps = 1e-10}));
  EXPECT_EQ(optimizer("adagrad", R"({"lr": 0.5, "eps": 1e-6, "weight_decay": 0.1})"),
            (OptimizerOptions{.kind = OptimizerKind::kAdagrad, .lr = 0.5, .eps = 1e-6, .weight_decay = 0.1}));
  EXPECT_EQ(optimizer("Lion"), (OptimizerOptions{.kind = OptimizerKind::kLion}));
  EXPECT_EQ(optimizer("Lion", R"({"lr": 0.5, "betas": [0.9, 0.99], "weight_decay": 0.1})"),
            (OptimizerOptions{.kind = OptimizerKind::kLion, .lr = 0.5, .beta2 = 0.99, .weight_decay = 0.1}));
}

TEST(OptimizerOptions, ReadEveryParameterOfLamb) {
  EXPECT_EQ(optimizer("Lamb"), (OptimizerOptions{.kind = OptimizerKind::kLamb}));
  EXPECT_EQ(optimizer("lamb", R"({"lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1, "max_coeff": 5,
                                  "min_coeff": 0.5, "bias_correction": false})"),
            (OptimizerOptions{.kind = OptimizerKind::kLamb,
                              .lr = 0.5,
                              .beta1 = 0.8,
                              .beta2 = 0.9,
                              .eps = 1e-6,
                              .weight_decay = 0.1,
                              .min_coeff = 0.5,
                              .max_coeff = 5,
                              .bias_correction = false}));
  EXPECT_EQ(optimizer_refusal("Lamb", R"({"max_coeff": 0.001})"),
            wrong("`optimizer.params.max_coeff` is 0.001; expected `min_coeff`, which is 0.01, or more"));
  EXPECT_EQ(optimizer_refusal("Lamb", R"({"eps_inside_sqrt": true})"),
            not_there("`optimizer.params.eps_inside_sqrt` = true is not there yet; remove it or set it to false"));
}

TEST(OptimizerOptions, ReadEveryParameterOfMuon) {
  EXPECT_EQ(
      optimizer("Muon"),
      (OptimizerOptions{.kind = OptimizerKind::kMuon, .beta2 = 0.95, .eps = 1e-10, .momentum = 0.95, .adam_lr = 1e-3}));
  EXPECT_EQ(optimizer("Muon", R"({"lr": 0.5, "muon_lr": 0.25, "momentum": 0.9, "weight_decay": 0.1, "ns_steps": 3,
                                  "betas": [0.8, 0.9], "eps": 1e-6, "ns_method": "standard"})"),
            (OptimizerOptions{.kind = OptimizerKind::kMuon,
                              .lr = 0.25,
                              .beta1 = 0.8,
                              .beta2 = 0.9,
                              .eps = 1e-6,
                              .weight_decay = 0.1,
                              .momentum = 0.9,
                              .ns_steps = 3,
                              .adam_lr = 0.5}));
  EXPECT_EQ(optimizer("Muon", R"({"adam_lr": 0.5})").adam_lr, 0.5);
  EXPECT_EQ(optimizer_refusal("Muon", R"({"momentum": 1})"),
            wrong("`optimizer.params.momentum` is 1; expected a number from 0 up to, but not including, 1"));
  EXPECT_EQ(optimizer_refusal("Muon", R"({"ns_steps": 0})"),
            wrong("`optimizer.params.ns_steps` is 0; expected an integer >= 1"));
}

TEST(OptimizerOptions, SurviveBeingWrittenAndReadAgain) {
  for (const char* text : {R"({"type": "Lamb", "params": {"lr": 0.5, "max_coeff": 5, "bias_correction": false}})",
                           R"({"type": "Muon", "params": {"lr": 0.5, "muon_lr": 0.25, "ns_steps": 3}})"}) {
    const Config config = read_with(std::string("\"optimizer\": ") + text);
    EXPECT_EQ(parse_config(to_text(config), 1), config) << text;
  }
}

TEST(OptimizerOptions, ReadEveryParameterOfSgd) {
  const auto options = optimizer("SGD", R"({"lr": 0.1, "momentum": 0.9, "nesterov": true, "weight_decay": 0.5})");
  EXPECT_EQ(options.lr, 0.1);
  EXPECT_EQ(options.momentum, 0.9);
  EXPECT_TRUE(options.nesterov);
  EXPECT_EQ(options.weight_decay, 0.5);
}

TEST(OptimizerOptions, ReadAutoAsTheDefault) {
  EXPECT_EQ(optimizer("AdamW", R"({"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"})"),
            optimizer("AdamW"));
}

TEST(OptimizerOptions, RefuseMaxGradNorm) {
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"max_grad_norm": 1.0})"),
            wrong("`optimizer.params.max_grad_norm` is not an option of an optimizer here; remove it and set "
                  "`gradient_clipping` instead"));
}

TEST(OptimizerOptions, RefuseOtherOptimizersByName) {
  EXPECT_EQ(optimizer_refusal("OneBitAdam"), not_there("`optimizer.type` = \"OneBitAdam\" is not there yet; use one of "
                                                       "Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD"));
  EXPECT_EQ(
      optimizer_refusal("rmsprop"),
      not_there(
          "`optimizer.type` = \"rmsprop\" is not there yet; use one of Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD"));
}

TEST(OptimizerOptions, SuggestANameForAnUnknownType) {
  EXPECT_EQ(optimizer_refusal("AdmaW"), wrong("`optimizer.type` is \"AdmaW\"; expected one of Adam, AdamW, Adagrad, "
                                              "Lamb, Lion, Muon, SGD. Did you mean `AdamW`?"));
  EXPECT_EQ(refusal_of(R"("optimizer": {"params": {}})"),
            wrong("`optimizer.type` is missing; it is one of Adam, AdamW, Adagrad, Lamb, Lion, Muon, SGD"));
}

TEST(OptimizerOptions, NameParametersOutOfRange) {
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"lr": -1})"),
            wrong("`optimizer.params.lr` is -1; expected a finite number >= 0"));
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"lr": 1e999})"),
            wrong("`optimizer.params.lr` is infinity; expected a finite number >= 0"));
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"lr": "1e-3"})"),
            wrong("`optimizer.params.lr` is \"1e-3\"; expected a finite number >= 0; write it without quotes"));
  const std::string betas = "; expected a list of two numbers, each from 0 up to, but not including, 1";
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"betas": [0.9, 1]})"), wrong("`optimizer.params.betas` is [0.9,1]" + betas));
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"betas": [0.9]})"), wrong("`optimizer.params.betas` is [0.9]" + betas));
  EXPECT_EQ(optimizer_refusal("SGD", R"({"nesterov": true})"),
            wrong("`optimizer.params.nesterov` is true; expected false, or a momentum above 0"));
}

TEST(OptimizerOptions, RefuseWhatIsNotThereYet) {
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"amsgrad": true})"),
            not_there("`optimizer.params.amsgrad` = true is not there yet; remove it or set it to false"));
  EXPECT_EQ(optimizer_refusal("SGD", R"({"dampening": 0.1, "momentum": 0.9})"),
            not_there("`optimizer.params.dampening` = 0.1 is not there yet; remove it or set it to 0"));
}

TEST(OptimizerOptions, NameUnknownParameters) {
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"weight_deacy": 0.1})"),
            wrong("unknown key `optimizer.params.weight_deacy`. Did you mean `weight_decay`?"));
  EXPECT_EQ(optimizer_refusal("AdamW", R"({"momentum": 0.9})"),
            wrong("unknown key `optimizer.params.momentum`. Remove it; `trireme docs config` lists all keys."));
}

TEST(SchedulerOptions, HaveDeepSpeedsDefaults) {
  EXPECT_EQ(scheduler("WarmupLR"), (LrScheduleOptions{.kind = LrScheduleKind::kWarmup}));
  EXPECT_EQ(scheduler("WarmupDecayLR", R"({"total_num_steps": 10})"),
            (LrScheduleOptions{.kind = LrScheduleKind::kWarmupDecay, .warmup_max_lr = 0.001, .total_num_steps = 10}));
  EXPECT_EQ(scheduler("WarmupCosineLR", R"({"total_num_steps": 10})"),
            (LrScheduleOptions{.kind = LrScheduleKind::kWarmupCosine, .total_num_steps = 10}));
  EXPECT_EQ(scheduler("constant"), LrScheduleOptions{});
}

TEST(SchedulerOptions, WarnOfARunThatEndsBeforeItsWarmUp) {
  const auto log_of = [](const std::string& total) {
    CapturedLog log;
    (void)scheduler("WarmupDecayLR", R"({"warmup_num_steps": 10, "total_num_steps": )" + total + "}");
    return log.text();
  };
  EXPECT_EQ(log_of("10"), "");
  EXPECT_EQ(log_of("5"),
            "warning <string>: `scheduler.params.total_num_steps` 5 is less than `warmup_num_steps` 10: the learning "
            "rate is 0 after the warm-up; set it to the steps of the whole run\n");
}

TEST(SchedulerOptions, ReadEveryParameter) {
  EXPECT_EQ(
      scheduler("warmuplr",
                R"({"warmup_min_lr": 0.1, "warmup_max_lr": 0.2, "warmup_num_steps": 5, "warmup_type": "linear"})"),
      (LrScheduleOptions{.kind = LrScheduleKind::kWarmup,
                         .warmup_min_lr = 0.1,
                         .warmup_max_lr = 0.2,
                         .warmup_num_steps = 5,
                         .warmup_type = WarmupKind::kLinear}));
  const auto cosine =
      scheduler("WarmupCosineLR", R"({"total_num_steps": 9, "warmup_min_ratio": 0.1, "cos_min_ratio": 0.2})");
  EXPECT_EQ(cosine.warmup_min_ratio, 0.1);
  EXPECT_EQ(cosine.cos_min_ratio, 0.2);
}

TEST(SchedulerOptions, ReadEveryParameterOfLrRangeTestAndOneCycle) {
  EXPECT_EQ(scheduler("LRRangeTest"), (LrScheduleOptions{.kind = LrScheduleKind::kLrRangeTest}));
  EXPECT_EQ(
      scheduler("LRRangeTest", R"({"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_step_size": 5,
                                         "lr_range_test_step_rate": 3, "lr_range_test_staircase": true})")
          .lr_range_test,
      (LrRangeTestOptions{.min_lr = std::vector<double>{0.1, 0.2}, .step_size = 5, .step_rate = 3, .staircase = true}));
  EXPECT_EQ(scheduler("OneCycle", R"({"cycle_min_lr": [0, 0.1], "cycle_max_lr": [0.2, 0.3], "cycle_max_mom": [0.9, 0.8],
                                      "cycle_second_step_size": 0})")
                .one_cycle,
            (OneCycleOptions{.cycle_min_lr = std::vector<double>{0, 0.1},
                             .cycle_max_lr = std::vector<double>{0.2, 0.3},
                             .cycle_second_step_size = 0,
                             .cycle_max_mom = std::vector<double>{0.9, 0.8}}));
  EXPECT_EQ(scheduler("OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2})").one_cycle,
            (OneCycleOptions{.cycle_min_lr = 0.1, .cycle_max_lr = 0.2}));
  EXPECT_EQ(scheduler("OneCycle", R"({"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "decay_lr_rate": 0.3,
                                      "cycle_first_step_size": 4, "cycle_second_step_size": 5,
                                      "cycle_first_stair_count": 6, "cycle_second_stair_count": 7,
                                      "decay_step_size": 8, "cycle_momentum": false, "cycle_min_mom": 0.4,
                                      "cycle_max_mom": 0.5, "decay_mom_rate": 0.6})")
                .one_cycle,
            (OneCycleOptions{.cycle_min_lr = 0.1,
                             .cycle_max_lr = 0.2,
                             .decay_lr_rate = 0.3,
                             .cycle_first_step_size = 4,
                             .cycle_second_step_size = 5,
                             .cycle_first_stair_count = 6,
                             .cycle_second_stair_count = 7,
                             .decay_step_size = 8,
                             .cycle_momentum = false,
                             .cycle_min_mom = 0.4,
                             .cycle_max_mom = 0.5,
                             .decay_mom_rate = 0.6}));
}

TEST(SchedulerOptions, ReadEveryParameterOfOurOwn) {
  EXPECT_EQ(
      scheduler("wsd", R"({"warmup_num_steps": 2, "decay_num_steps": 3, "total_num_steps": 9, "min_ratio": 0.5})"),
      (LrScheduleOptions{.kind = LrScheduleKind::kWsd,
                         .warmup_num_steps = 2,
                         .total_num_steps = 9,
                         .decay_num_steps = 3,
                         .min_ratio = 0.5}));
  for (const LrScheduleKind kind : {LrScheduleKind::kLinear, LrScheduleKind::kCosine})
    EXPECT_EQ(scheduler(name_of(kind), R"({"warmup_num_steps": 2, "total_num_steps": 9})"),
              (LrScheduleOptions{.kind = kind, .warmup_num_steps = 2, .total_num_steps = 9}));
}

TEST(SchedulerOptions, SurviveBeingWrittenAndReadAgain) {
  for (const char* text :
       {R"({"type": "LRRangeTest", "params": {"lr_range_test_min_lr": [0.1, 0.2], "lr_range_test_staircase": true}})",
        R"({"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_second_step_size": 5,
            "cycle_second_stair_count": 7, "cycle_momentum": false, "decay_step_size": 3}})",
        R"({"type": "WarmupLR", "params": {"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [0.3, 0.4]}})",
        R"({"type": "linear", "params": {"total_num_steps": 2000, "min_ratio": 0.1}})",
        R"({"type": "cosine", "params": {"total_num_steps": 2000, "min_ratio": 0.1}})",
        R"({"type": "wsd", "params": {"total_num_steps": 2000, "decay_num_steps": 7}})"}) {
    const Config config = read_with(std::string("\"scheduler\": ") + text);
    EXPECT_EQ(parse_config(to_text(config), 1), config) << text;
  }
}

TEST(SchedulerOptions, ReadAutoAsTheOptimizersLearningRate) {
  EXPECT_EQ(scheduler("WarmupDecayLR", R"({"total_num_steps": 10, "warmup_max_lr": "auto"})").warmup_max_lr,
            LrScheduleOptions::kOptimizerLr);
}

TEST(SchedulerOptions, RefuseWhatDoesNotFit) {
  EXPECT_EQ(scheduler_refusal("WarmupDecayLR"),
            wrong("`scheduler.params.total_num_steps` is missing, or \"auto\", which only `trireme train` fills in; "
                  "set it to the number of optimizer steps of the whole run"));
  EXPECT_EQ(scheduler_refusal("StepLR"),
            not_there("`scheduler.type` = \"StepLR\" is not there yet; initialize() in Python makes it of "
                      "torch.optim.lr_scheduler; in C++ use one of WarmupLR, WarmupDecayLR, "
                      "WarmupCosineLR, LRRangeTest, OneCycle, constant, linear, cosine, wsd"));
  EXPECT_EQ(
      scheduler_refusal("StepsLR"),
      wrong("`scheduler.type` is \"StepsLR\"; expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, "
            "OneCycle, constant, linear, cosine, wsd, or in Python a scheduler of torch.optim.lr_scheduler. Did you "
            "mean `StepLR`?"));
  EXPECT_EQ(scheduler_refusal("OneCycle", R"({"cycle_min_lr": 0.1})"),
            wrong("`scheduler.params.cycle_max_lr` is missing; set it to a learning rate, a finite number >= 0"));
  EXPECT_EQ(scheduler_refusal("cosine", R"({"total_num_steps": 10, "warmup_num_steps": 11})"),
            wrong("scheduler.params.total_num_steps=10: warm-up takes 11 steps; use fewer, or a larger total"));
  EXPECT_EQ(scheduler_refusal("LRRangeTest", R"({"lr_range_test_min_lr": [0.1, -1]})"),
            wrong("`scheduler.params.lr_range_test_min_lr` is [0.1,-1]; expected a finite number >= 0, or a list of "
                  "them, one for each parameter group"));
  EXPECT_EQ(scheduler_refusal("WarmupLR", R"({"warmup_type": "cubic"})"),
            wrong("`scheduler.params.warmup_type` is \"cubic\"; expected one of \"log\", \"linear\"."));
  EXPECT_EQ(scheduler_refusal("WarmupLR", R"({"total_num_steps": 3})"),
            wrong("unknown key `scheduler.params.total_num_steps`. Remove it; `trireme docs config` lists all keys."));
  EXPECT_EQ(scheduler_refusal("WarmupLR", R"({"warmup_num_steps": -3})"),
            wrong("`scheduler.params.warmup_num_steps` is -3; expected an integer >= 0"));
}

}  // namespace
}  // namespace trireme
