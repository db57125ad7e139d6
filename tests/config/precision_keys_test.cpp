// fp16, torch_autocast, data_types, and how gradients are reduced.
#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"

namespace trireme {
namespace {

TEST(Fp16, HasDeepSpeedsKeysAndDefaults) {
  const PrecisionOptions by_default = read_with(R"("fp16": {"enabled": true})").precision;
  EXPECT_EQ(by_default, PrecisionOptions{.weight_dtype = at::kHalf});
  EXPECT_TRUE(by_default.needs_loss_scale());
  const PrecisionOptions all =
      read_with(
          R"("fp16": {"enabled": true, "auto_cast": true, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 50,
                            "hysteresis": 4, "consecutive_hysteresis": true, "min_loss_scale": 0.25})")
          .precision;
  EXPECT_TRUE(all.casts_inputs);
  EXPECT_EQ(all.loss_scale, (LossScaleOptions{.initial_scale_power = 8,
                                              .loss_scale_window = 50,
                                              .hysteresis = 4,
                                              .consecutive_hysteresis = true,
                                              .min_loss_scale = 0.25}));
  EXPECT_EQ(read_with(R"("fp16": {"enabled": true, "loss_scale": 128})").precision.loss_scale.loss_scale, 128);
  EXPECT_FALSE(read_with(R"("fp16": {"loss_scale": 128})").precision.needs_loss_scale());
}

TEST(Fp16, RefusesByKeyWhatIsOutOfRange) {
  const auto refusal = [](const std::string& key, const std::string& value) {
    return refusal_of(R"("fp16": {"enabled": true, ")" + key + "\": " + value + "}").message;
  };
  EXPECT_EQ(refusal("loss_scale", "-1"), "`fp16.loss_scale` is -1; expected a finite number >= 0 (0: dynamic)");
  EXPECT_EQ(refusal("loss_scale", "true"), "`fp16.loss_scale` is true; expected a finite number >= 0 (0: dynamic)");
  EXPECT_EQ(refusal("loss_scale", "1e999"),
            "`fp16.loss_scale` is infinity; expected a finite number >= 0 (0: dynamic)");
  EXPECT_EQ(refusal("initial_scale_power", "127"),
            "`fp16.initial_scale_power` is 127; expected an integer from 0 to 126");
  EXPECT_EQ(refusal("loss_scale_window", "0"), "`fp16.loss_scale_window` is 0; expected an integer >= 1");
  EXPECT_EQ(refusal("hysteresis", "0"), "`fp16.hysteresis` is 0; expected an integer >= 1");
  EXPECT_EQ(refusal("min_loss_scale", "0"), "`fp16.min_loss_scale` is 0; expected a finite number > 0");
  // Where nobody looks at it, it may be anything of its type.
  EXPECT_EQ(refusal_of(R"("fp16": {"enabled": true, "loss_scale": 2, "loss_scale_window": 0, "min_loss_scale": 0})"),
            Refusal{});
  EXPECT_EQ(refusal_of(R"("fp16": {"loss_scale_window": 0})"), Refusal{});
}

TEST(Fp16, ExcludesTheOtherModes) {
  EXPECT_EQ(refusal_of(R"("fp16": {"enabled": true}, "bf16": {"enabled": true})"),
            wrong("`fp16.enabled` = true and `bf16.enabled` = true exclude each other; set one of the two to false"));
  EXPECT_EQ(
      refusal_of(R"("fp16": {"enabled": true}, "torch_autocast": {"enabled": true})"),
      wrong(
          "`torch_autocast.enabled` = true and `fp16.enabled` = true exclude each other; set one of the two to false"));
  EXPECT_EQ(
      refusal_of(R"("bf16": {"enabled": true}, "torch_autocast": {"enabled": true})"),
      wrong(
          "`torch_autocast.enabled` = true and `bf16.enabled` = true exclude each other; set one of the two to false"));
}

TEST(TorchAutocast, TakesTorchsNamesOfDtypes) {
  EXPECT_EQ(read_with(R"("torch_autocast": {"enabled": true})").precision.autocast, AutocastOptions{.enabled = true});
  for (const char* name : {"float16", "fp16", "torch.float16", "FP16"}) {
    const PrecisionOptions half =
        read_with(std::string(R"("torch_autocast": {"enabled": true, "dtype": ")") + name + "\"}").precision;
    EXPECT_EQ(half.autocast.dtype, at::kHalf) << name;
    EXPECT_TRUE(half.needs_loss_scale()) << name;
  }
  const AutocastOptions own =
      read_with(
          R"("torch_autocast": {"enabled": true, "dtype": "torch.bfloat16", "lower_precision_safe_modules": ["torch.nn.Bilinear"]})")
          .precision.autocast;
  EXPECT_EQ(own.dtype, at::kBFloat16);
  EXPECT_EQ(own.lower_precision_safe_modules, std::vector<std::string>{"torch.nn.Bilinear"});
  EXPECT_EQ(refusal_of(R"("torch_autocast": {"dtype": "float8"})").code, ErrorCode::kConfig);
}

TEST(DataTypes, FollowTheModeThatIsOn) {
  EXPECT_EQ(read_with(R"("fp16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp16", "param_dtype": "fp16"})")
                .pager.accumulation_dtype,
            at::kHalf);
  EXPECT_EQ(refusal_of(R"("data_types": {"grad_accum_dtype": "fp16"})"),
            wrong("`data_types.grad_accum_dtype` is \"fp16\"; expected \"fp32\", or fp16.enabled = true for \"fp16\""));
  EXPECT_EQ(refusal_of(R"("fp16": {"enabled": true}, "data_types": {"param_dtype": "bf16"})"),
            wrong("`data_types.param_dtype` is \"bf16\"; expected \"fp16\", the dtype that fp16.enabled chooses"));
  EXPECT_EQ(read_with(R"("data_types": {"buffer_dtype": "bf16"})").precision.buffer_dtype, at::kBFloat16);
}

TEST(CommunicationDataType, IsOneThatSumsCanBeRoundedTo) {
  EXPECT_EQ(read_with("\"steps_per_print\": 1").precision.communication_dtype, std::nullopt);
  EXPECT_EQ(read_with("\"communication_data_type\": \"fp16\"").precision.communication_dtype, at::kHalf);
  EXPECT_EQ(
      refusal_of(
          R"("bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "bf16"}, "communication_data_type": "fp16")"),
      wrong(
          "`communication_data_type` is \"fp16\"; expected \"fp32\" or \"bf16\", in which data_types.grad_accum_dtype "
          "has the sums"));
}

TEST(GradientReduction, DividesBeforeByAFactorOrByTheRanks) {
  EXPECT_EQ(read_with("\"gradient_allreduce_op\": \"sum\"", 4).pager.gradient_op, ReduceOp::kSum);
  EXPECT_EQ(read_with("\"gradient_predivide_factor\": 2.5", 4).pager.predivide_factor, 2.5);
  EXPECT_EQ(read_with("\"prescale_gradients\": true", 4).pager.predivide_factor, 4);
  EXPECT_EQ(refusal_of("\"gradient_predivide_factor\": 0"),
            wrong("`gradient_predivide_factor` is 0; expected a finite number > 0"));
  EXPECT_EQ(refusal_of("\"gradient_predivide_factor\": 2, \"prescale_gradients\": true"),
            wrong("`prescale_gradients` = true divides gradients by the number of ranks before they travel, and "
                  "`gradient_predivide_factor` by another number; keep one of the two"));
}

}  // namespace
}  // namespace trireme
