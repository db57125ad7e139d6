// Waiting for what another process does.
#pragma once

#include <chrono>
#include <functional>
#include <thread>

namespace trireme::testing {

/// Whether `condition` holds within that time.
inline bool becomes_true(const std::function<bool()>& condition,
                         std::chrono::milliseconds within = std::chrono::seconds(60)) {
  using Clock = std::chrono::steady_clock;
  for (const auto deadline = Clock::now() + within; Clock::now() < deadline;) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  return condition();
}

}  // namespace trireme::testing
