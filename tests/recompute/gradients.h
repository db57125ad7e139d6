// Comparing what backward computed.
#pragma once

#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <vector>

namespace trireme::testing {

using Gradients = std::vector<at::Tensor>;

inline void expect_equal(const Gradients& got, const Gradients& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::equal(got[i], expected[i])) << "gradient " << i;
}

}  // namespace trireme::testing
