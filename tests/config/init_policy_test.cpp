#include "trireme/config/init_policy.h"

#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"

namespace trireme {
namespace {

TEST(InitPolicy, IsOnAtStage3InTheDtypeOfTheWeights) {
  EXPECT_FALSE(init_policy(read_with(R"("zero_optimization": {"stage": 2})")).enabled);
  const zero::InitPolicy wide = init_policy(read_with(R"("zero_optimization": {"stage": 3})"));
  EXPECT_TRUE(wide.enabled);
  EXPECT_FALSE(wide.dtype.has_value());
  EXPECT_EQ(init_policy(read_with(R"("zero_optimization": {"stage": 3}, "bf16": {"enabled": true})")).dtype,
            at::kBFloat16);
}

TEST(Config, ReadsWhoManagesAccumulationAndWritesItBack) {
  EXPECT_TRUE(default_config(1).managed_gradient_accumulation);
  const Config config = read_with(R"("managed_gradient_accumulation": false)");
  EXPECT_FALSE(config.managed_gradient_accumulation);
  EXPECT_EQ(parse_config(to_text(config), 1), config);
}

}  // namespace
}  // namespace trireme
