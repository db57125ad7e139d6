#include "trireme/base/launcher_channel.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>

#include "tests/support/launcher_ends.h"

namespace trireme {
namespace {

TEST(LauncherChannel, CarriesTheLastTextBesideTheLastFailure) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends), 0);
  setenv(kLauncherVariable, launcher_address(ends[1]).c_str(), 1);
  tell_launcher({ErrorCode::kTimeout, 3});
  EXPECT_TRUE(leave_to_launcher("first"));
  EXPECT_TRUE(leave_to_launcher("no way"));
  EXPECT_FALSE(leave_to_launcher(std::string(70'000, 'x')));
  const RankReport report = told_by_rank(ends[0]);
  EXPECT_EQ(report.refusal, "no way");
  EXPECT_EQ(report.failure.value().peer, 3);
  unsetenv(kLauncherVariable);
  EXPECT_FALSE(leave_to_launcher("nobody is there"));
  for (const int end : ends) close(end);
}

TEST(LauncherChannel, BringsTheLastFailureThatARankTellsOf) {
  const LauncherEnds ends;
  EXPECT_FALSE(ends.told());
  tell_launcher({ErrorCode::kTimeout, 3});
  tell_launcher({ErrorCode::kDiverged, 12});
  const auto told = ends.told();
  ASSERT_TRUE(told);
  EXPECT_EQ(told->code, ErrorCode::kDiverged);
  EXPECT_EQ(told->peer, 12);
}

TEST(LauncherChannel, KeepsWhatARankToldBeforeItEnded) {
  LauncherEnds ends;
  tell_launcher({ErrorCode::kPeerLost, 1});
  ends.close_ranks();
  EXPECT_TRUE(ends.told());
}

TEST(LauncherChannel, LetsARankGoOnWhoseLauncherIsGone) {
  LauncherEnds ends;
  ends.close_launchers();
  tell_launcher({ErrorCode::kPeerLost, 1});  // with SIGPIPE, the process would end here
}

TEST(LauncherChannel, LetsARankGoOnWhoseLauncherNeverReads) {
  const LauncherEnds ends;
  for (int i = 0; i < 100'000; ++i) tell_launcher({ErrorCode::kPeerLost, 1});
  EXPECT_TRUE(ends.told());
}

TEST(LauncherChannel, WritesIntoNoFileThatHasTakenTheSocketsNumber) {
  const LauncherEnds ends;
  int others[2];
  socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, others);
  dup2(others[1], ends.ranks());
  tell_launcher({ErrorCode::kPeerLost, 1});
  EXPECT_FALSE(told_by_rank(others[0]).failure);
  close(others[0]);
  close(others[1]);
}

TEST(LauncherChannel, IsNotNeeded) {
  const LauncherEnds ends;
  for (const char* address : {"", "here", "-1:5", "99999:7", "0:0"}) {
    setenv(kLauncherVariable, address, 1);
    tell_launcher({ErrorCode::kPeerLost, 1});
  }
  unsetenv(kLauncherVariable);
  tell_launcher({ErrorCode::kPeerLost, 1});
  EXPECT_FALSE(ends.told());
}

}  // namespace
}  // namespace trireme
