#include "trireme/base/stop_signals.h"

#include <array>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <mutex>

namespace trireme {
namespace {

constexpr std::array<int, 3> kStops = {SIGINT, SIGTERM, SIGHUP};

// A signal handler can reach nothing but globals.
std::atomic<int> caught{0};
std::atomic<bool> save_requested{false};

// Objects that live, and what was there before the first of them.
std::mutex signals_mutex;
int stoppers = 0, savers = 0;
std::array<struct sigaction, kStops.size()> before_stops{};
struct sigaction before_save {};
bool catches_save = false;

void on_stop(int number) {
  int none = 0;
  if (caught.compare_exchange_strong(none, number)) return;
  std::signal(number, SIG_DFL);
  std::raise(number);
}

void on_save(int) { save_requested = true; }

struct sigaction action_of(void (*handler)(int)) {
  struct sigaction action {};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;  // a checkpoint that is being written must not see a write that was cut short
  return action;
}

// Signals of a program without an object of its own. Never destroyed: threads may ask while statics go.
const StopSignals& signals_of_process() {
  static const auto* const signals = new StopSignals();
  return *signals;
}

}  // namespace

SaveSignal::SaveSignal() {
  const std::lock_guard lock(signals_mutex);
  if (savers++ > 0) return;
  save_requested = false;
  sigaction(SIGUSR1, nullptr, &before_save);
  catches_save = (before_save.sa_flags & SA_SIGINFO) == 0 && before_save.sa_handler == SIG_DFL;
  const struct sigaction action = action_of(on_save);
  if (catches_save) sigaction(SIGUSR1, &action, nullptr);
}

SaveSignal::~SaveSignal() {
  const std::lock_guard lock(signals_mutex);
  if (--savers == 0 && catches_save) sigaction(SIGUSR1, &before_save, nullptr);
}

bool SaveSignal::take_request() const noexcept { return save_requested.exchange(false); }

StopSignals::StopSignals() {
  const std::lock_guard lock(signals_mutex);
  if (stoppers++ > 0) return;
  caught = 0;
  const struct sigaction action = action_of(on_stop);
  for (size_t i = 0; i < kStops.size(); ++i) {
    sigaction(kStops[i], nullptr, &before_stops[i]);
    if (before_stops[i].sa_handler != SIG_IGN) sigaction(kStops[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  const std::lock_guard lock(signals_mutex);
  if (--stoppers > 0) return;
  for (size_t i = 0; i < kStops.size(); ++i) sigaction(kStops[i], &before_stops[i], nullptr);
}

int StopSignals::signal() const noexcept { return caught.load(); }

bool stop_requested() { return signals_of_process().signal() != 0; }

bool take_save_request() { return signals_of_process().take_save_request(); }

}  // namespace trireme
