// Signals as answers, in this process and in forked ones that they end.
#include "trireme/base/stop_signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <functional>

namespace trireme {
namespace {

// The wait status of a process that runs `body` and then ends with its result.
int status_of(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

void expect_exit(int code, const std::function<int()>& body) {
  const int status = status_of(body);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  EXPECT_EQ(WEXITSTATUS(status), code);
}

void expect_signal(int number, const std::function<int()>& body) {
  const int status = status_of(body);
  ASSERT_TRUE(WIFSIGNALED(status)) << "exit " << WEXITSTATUS(status);
  EXPECT_EQ(WTERMSIG(status), number);
}

TEST(StopSignals, AnswerWithTheFirstOne) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP})
    expect_exit(number, [number] {
      const StopSignals signals;
      if (signals.signal() != 0) return 100;
      std::raise(number);
      return signals.signal();
    });
}

TEST(StopSignals, EndTheProcessAtTheSecondOne) {
  expect_signal(SIGTERM, [] {
    const StopSignals signals;
    std::raise(SIGINT);
    std::raise(SIGTERM);
    return 0;
  });
}

TEST(StopSignals, LeaveAnIgnoredSignalIgnored) {
  expect_exit(0, [] {
    for (const int number : {SIGHUP, SIGUSR1}) std::signal(number, SIG_IGN);
    const StopSignals signals;
    for (const int number : {SIGHUP, SIGUSR1}) std::raise(number);
    return signals.signal() + (signals.take_save_request() ? 1 : 0);
  });
}

TEST(StopSignals, PutBackWhatWasThereWithTheLastOfThem) {
  for (const int number : {SIGINT, SIGUSR1}) {
    expect_exit(0, [number] {
      const StopSignals outer;
      { const StopSignals inner; }
      std::raise(number);
      return outer.signal() == number || outer.take_save_request() ? 0 : 1;
    });
    expect_signal(number, [number] {
      { const StopSignals signals; }
      std::raise(number);
      return 0;
    });
  }
}

TEST(StopSignals, AskForASaveAsOftenAsItIsTaken) {
  expect_exit(0, [] {
    const StopSignals signals;
    const bool before = signals.take_save_request();
    std::raise(SIGUSR1);
    std::raise(SIGUSR1);
    const bool first = signals.take_save_request(), second = signals.take_save_request();
    return !before && first && !second && signals.signal() == 0 ? 0 : 1;
  });
}

TEST(SaveSignal, LeavesAHandlerOfTheProgramsOwn) {
  static int seen;
  expect_exit(0, [] {
    std::signal(SIGUSR1, [](int) { ++seen; });
    const SaveSignal signal;
    std::raise(SIGUSR1);
    return seen == 1 && !signal.take_request() ? 0 : 1;
  });
}

TEST(StopRequested, CatchesSignalsFromItsFirstCall) {
  expect_signal(SIGTERM, [] {
    std::raise(SIGTERM);
    return 0;
  });
  expect_exit(0, [] {
    if (stop_requested() || take_save_request()) return 1;
    std::raise(SIGUSR1);
    if (stop_requested() || !take_save_request()) return 2;
    std::raise(SIGTERM);
    return stop_requested() && stop_requested() ? 0 : 3;
  });
}

}  // namespace
}  // namespace trireme
