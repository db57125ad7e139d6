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
    "smaller model";

TEST(Explain, NamesMemoryThatRanOutWhoeverFoundIt) {
  EXPECT_EQ(explain(std::bad_alloc(), "trireme train"), "out of memory" + kFix);
  try {
    at::empty({int64_t{1} << 55});
    FAIL() << "2^57 bytes were given out";
  } catch (const std::exception& error) {
    EXPECT_EQ(explain(error, "trireme train"), "out of memory: 144 PB were asked for at once" + kFix);
  }
}

TEST(Explain, SaysWhatToLowerInTheCommandThatRanOutOfMemory) {
  const auto advice = [](const char* command) { return explain(std::bad_alloc(), command); };
  EXPECT_NE(advice("trireme generate").find("fewer --tokens"), std::string::npos);
  EXPECT_NE(advice("trireme launch").find("--num_gpus"), std::string::npos);
  for (const char* command : {"trireme generate", "trireme launch", "trireme deepspeed", "trireme convert"})
    EXPECT_EQ(advice(command).find("--batch"), std::string::npos) << command;
}

TEST(Explain, LeavesStackTracesOutAndOurOwnTextsWhole) {
  EXPECT_EQ(explain(std::runtime_error("no\nframe #0: somewhere"), "trireme train"), "no");
  EXPECT_EQ(explain(ConfigError("first\nsecond"), "trireme train"), "first\nsecond");
}

}  // namespace
}  // namespace trireme::cli
