// The main() of every test executable.
#include <gtest/gtest.h>

#include "tests/support/processes.h"

int main(int argc, char** argv) {
  trireme::start_process_helper();  // before any thread
  ::testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
