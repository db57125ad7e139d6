#include "cli/explain.h"

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <new>
#include <stdexcept>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

const std::string kFix =
    "; lower the micro-batch (--batch, or train_micro_batch_size_per_gpu in the configuration) or --seq, or take a "
    "smaller "
    "model";

TEST(Explain, NamesMemoryThatRanOutWhoeverFoundIt) {
  EXPECT_EQ(explain(std::bad_alloc()), "out of memory" + kFix);
  try {
    at::empty({int64_t{1} << 55});
    FAIL() << "2^57 bytes were given out";
  } catch (const std::exception& error) {
    EXPECT_EQ(explain(error), "out of memory: 144.1 PB were asked for at once" + kFix);
  }
}

TEST(Explain, LeavesStackTracesOutAndOurOwnTextsWhole) {
  EXPECT_EQ(explain(std::runtime_error("no\nframe #0: somewhere")), "no");
  EXPECT_EQ(explain(ConfigError("first\nsecond")), "first\nsecond");
}

}  // namespace
}  // namespace trireme::cli
