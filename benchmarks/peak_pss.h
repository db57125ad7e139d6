// Peak memory of a process that shares some of it with its peers.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <fstream>
#include <string>
#include <thread>

namespace benchmarks {

inline double pss_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(file, line))
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) / 1024;
  return 0;
}

/// Polls the proportional set size while it lives.
class PeakPss {
 public:
  PeakPss()
      : start_(pss_mib()), thread_([this] {
          while (!stop_) {
            peak_ = std::max(peak_.load(), pss_mib());
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
        }) {}
  double above_start() {
    stop_ = true;
    thread_.join();
    return peak_ - start_;
  }

 private:
  double start_;
  std::atomic<double> peak_ = 0;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

}  // namespace benchmarks
