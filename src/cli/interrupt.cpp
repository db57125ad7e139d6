#include "cli/interrupt.h"

#include <atomic>

namespace trireme::cli {
namespace {

// A signal handler can reach nothing but globals.
std::atomic<int> caught{0};

void on_signal(int number) {
  int none = 0;
  if (caught.compare_exchange_strong(none, number)) return;
  std::signal(number, SIG_DFL);
  std::raise(number);
}

}  // namespace

InterruptFlag::InterruptFlag() {
  caught = 0;
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // a checkpoint that is being written must not see a write that was cut short
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

InterruptFlag::~InterruptFlag() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
}

int InterruptFlag::signal() const noexcept { return caught.load(); }

}  // namespace trireme::cli
