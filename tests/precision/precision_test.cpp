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
  EXPECT_EQ(error_of({.weight_dtype = at::kBFloat16}), "");
  EXPECT_EQ(error_of({.weight_dtype = at::kBFloat16, .accumulation_dtype = at::kBFloat16}), "");
}

TEST(Precision, WhatIsNotThereYetIsRefusedByNameWithAWayOut) {
  EXPECT_EQ(error_of({.weight_dtype = at::kHalf}),
            "fp16: training in fp16 needs loss scaling, which is not there yet; use bf16.enabled=true or fp32");
  try {
    check_precision({.weight_dtype = at::kHalf});
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
  }
}

TEST(Precision, WeightsAndSumsOfOtherDtypesAreRefused) {
  EXPECT_EQ(error_of({.weight_dtype = at::kInt}), "precision: weights in Int cannot be trained; use fp32 or bf16");
  EXPECT_EQ(
      error_of({.weight_dtype = at::kBFloat16, .accumulation_dtype = at::kHalf}),
      "data_types.grad_accum_dtype: gradients cannot be summed in fp16 when the weights are bf16; use fp32 or bf16");
  EXPECT_EQ(error_of({.accumulation_dtype = at::kBFloat16}),
            "data_types.grad_accum_dtype: gradients cannot be summed in bf16 when the weights are fp32; use fp32");
}

}  // namespace
}  // namespace trireme
