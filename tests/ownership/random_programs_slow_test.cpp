// A hundred random programs over stages have the bits of one process.
#include <gtest/gtest.h>

#include "tests/ownership/random_programs.h"

namespace trireme::testing {
namespace {

TEST(RandomPrograms, OfAHundredHaveTheBitsOfOneProcess) {
  const RandomPrograms found = compare_random_programs(1000, 100);
  EXPECT_GT(found.sequential_alone, 10);
  EXPECT_LT(found.sequential_alone, 90) << "no schedule but the sequential one is tried";
}

}  // namespace
}  // namespace trireme::testing
