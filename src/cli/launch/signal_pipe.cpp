#include "cli/launch/signal_pipe.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

// A signal handler can reach nothing but globals.
std::atomic<int> write_end{-1};

void on_signal(int number) {
  const int saved = errno;
  const auto byte = static_cast<unsigned char>(number);
  // A full pipe means that plenty of signals wait already.
  [[maybe_unused]] const auto written = write(write_end.load(), &byte, 1);
  errno = saved;
}

}  // namespace

SignalPipe::SignalPipe() : pipe_(make_pipe()) {
  TRIREME_CHECK(write_end.load() == -1, "two signal pipes at once");
  for (const int fd : {pipe_.read_end.get(), pipe_.write_end.get()}) fcntl(fd, F_SETFL, O_NONBLOCK);
  write_end = pipe_.write_end.get();
  struct sigaction action {};
  action.sa_handler = on_signal;
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], nullptr, &before_[i]);
    if (before_[i].sa_handler != SIG_IGN) sigaction(kSignals[i], &action, nullptr);
  }
}

SignalPipe::~SignalPipe() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &before_[i], nullptr);
  write_end = -1;
}

int SignalPipe::next() noexcept {
  unsigned char byte = 0;
  return read(pipe_.read_end.get(), &byte, 1) == 1 ? byte : 0;
}

}  // namespace trireme::cli
