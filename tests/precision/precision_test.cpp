#include "trireme/precision/precision.h"

#include <gtest/gtest.h>

#include "trireme/base/error.h"

namespace trireme {
namespace {

std::string error_of(const PrecisionOptions& options) {
  try {
    check_precision(options);
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "";
}

TEST(Precision, WhatCanBeTrainedIsAccepted) {
  EXPECT_EQ(error_of({}), "");
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    EXPECT_EQ(error_of({.weight_dtype = dtype}), "");
    EXPECT_EQ(error_of({.weight_dtype = dtype, .accumulation_dtype = dtype, .communication_dtype = dtype}), "");
    EXPECT_EQ(error_of({.communication_dtype = dtype, .autocast = {.enabled = true, .dtype = dtype}}), "");
  }
}

TEST(Precision, UpdatesInBf16WhereWeightsAndSumsAreBf16) {
  constexpr at::ScalarType kBf16 = at::kBFloat16;
  EXPECT_EQ(error_of({.weight_dtype = kBf16, .accumulation_dtype = kBf16, .update_dtype = kBf16}), "");
  EXPECT_EQ(error_of({.stochastic_rounding = true}),
            "trireme.stochastic_rounding: it is for updates in bf16, and these are in fp32; set "
            "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states to true, or remove it");
  EXPECT_EQ(
      error_of({.update_dtype = kBf16}),
      "precision: masters, states and steps cannot be in bf16 when the weights are fp32; set bf16.enabled to true");
  EXPECT_EQ(error_of({.weight_dtype = kBf16, .update_dtype = kBf16}),
            "precision: masters, states and steps cannot be in bf16 when gradients are summed in fp32; set "
            "data_types.grad_accum_dtype to bf16");
  EXPECT_EQ(error_of({.weight_dtype = at::kHalf, .accumulation_dtype = at::kHalf, .update_dtype = at::kHalf}),
            "precision: masters, states and steps cannot be in fp16; use fp32, or bf16 with weights and sums in bf16");
}

TEST(Precision, NeedsALossScaleWhereSomethingComputesInFp16) {
  EXPECT_FALSE(PrecisionOptions{}.needs_loss_scale());
  EXPECT_FALSE(PrecisionOptions{.autocast = {.dtype = at::kHalf}}.needs_loss_scale());
  EXPECT_TRUE(PrecisionOptions{.weight_dtype = at::kHalf}.needs_loss_scale());
  EXPECT_TRUE((PrecisionOptions{.autocast = {.enabled = true, .dtype = at::kHalf}}.needs_loss_scale()));
  EXPECT_EQ(error_of({.loss_scale = {.hysteresis = 0}}), "");
  EXPECT_EQ(error_of({.weight_dtype = at::kHalf, .loss_scale = {.hysteresis = 0}}),
            "fp16.hysteresis=0: use 1 or more overflows");
}

TEST(Precision, DtypesThatDoNotFitAreRefused) {
  EXPECT_EQ(error_of({.weight_dtype = at::kInt}),
            "precision: weights in Int cannot be trained; use fp32, bf16 or fp16");
  EXPECT_EQ(
      error_of({.weight_dtype = at::kBFloat16, .accumulation_dtype = at::kHalf}),
      "data_types.grad_accum_dtype: gradients cannot be summed in fp16 when the weights are bf16; use fp32 or bf16");
  EXPECT_EQ(error_of({.accumulation_dtype = at::kBFloat16}),
            "data_types.grad_accum_dtype: gradients cannot be summed in bf16 when the weights are fp32; use fp32");
  EXPECT_EQ(error_of({.communication_dtype = at::kByte}),
            "communication_data_type: gradients cannot travel in Byte; use fp32, bf16 or fp16");
  EXPECT_EQ(
      error_of({.weight_dtype = at::kHalf, .accumulation_dtype = at::kHalf, .communication_dtype = at::kBFloat16}),
      "communication_data_type: gradients that are summed in fp16 cannot travel in bf16; use fp32 or fp16");
  EXPECT_EQ(error_of({.buffer_dtype = at::kInt}),
            "data_types.buffer_dtype: buffers cannot be Int; use fp32, bf16 or fp16");
  EXPECT_EQ(error_of({.autocast = {.enabled = true, .dtype = at::kFloat}}),
            "torch_autocast.dtype: operators cannot be cast to fp32; use bf16 or fp16");
  EXPECT_EQ(error_of({.weight_dtype = at::kHalf, .autocast = {.enabled = true}}),
            "torch_autocast.enabled: autocast is for fp32 weights, and these are fp16; switch one of the two off");
}

}  // namespace
}  // namespace trireme
