// Random programs over stages have the bits of one process.
#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "tests/ownership/random_programs.h"

namespace trireme::testing {
namespace {

/// PROGRAM_SEED and PROGRAMS choose others.
TEST(RandomPrograms, HaveTheBitsOfOneProcess) {
  const char* const seed = std::getenv("PROGRAM_SEED");
  const char* const count = std::getenv("PROGRAMS");
  const RandomPrograms found = compare_random_programs(seed != nullptr ? std::strtoull(seed, nullptr, 10) : 1,
                                                       count != nullptr ? std::atoi(count) : 12);
  std::cout << found.sequential_alone << " of the programs come back, " << found.rounded
            << " comparisons differ in the last bits\n";
}

}  // namespace
}  // namespace trireme::testing
