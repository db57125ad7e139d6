// Helpers that the tests of observe share: a temporary folder and steps with simple numbers.
#pragma once

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "tests/support/temporary_folder.h"

#include "trireme/observe/metrics.h"

namespace trireme::observe_test {

using Folder = testing::TemporaryFolder;

inline std::string text_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// Step `step` of 8 samples of 100 tokens, with loss 10 / step.
inline StepMetrics step_metrics(int64_t step) {
  return {.step = step,
          .samples = 8 * step,
          .tokens = 800 * step,
          .loss = 10.0 / static_cast<double>(step),
          .learning_rate = 1e-3,
          .grad_norm = 0.5,
          .step_ms = 20,
          .tokens_per_s = 40000,
          .memory = {.pss_bytes = 3 << 20, .rss_bytes = 5 << 20},
          .skipped_steps = 0};
}

}  // namespace trireme::observe_test
