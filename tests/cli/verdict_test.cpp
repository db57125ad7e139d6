#include "cli/launch/verdict.h"

#include <gtest/gtest.h>

#include <csignal>

namespace trireme::cli {
namespace {

constexpr int exited(int code) { return code << 8; }
constexpr PeerFailure lost(int peer) { return {ErrorCode::kPeerLost, peer}; }

TEST(Verdict, IsSilentWhenEveryRankSucceeds) {
  const auto verdict = judge({{.rank = 0}, {.rank = 1, .order = 1}}, "launch");
  EXPECT_EQ(verdict.exit_code, 0);
  EXPECT_EQ(verdict.report, "");
}

TEST(Verdict, BlamesTheRankThatFailedFirstAndEndsWithItsLines) {
  const auto verdict =
      judge({{.rank = 0, .wait_status = SIGTERM, .order = 1, .ended_by_launcher = true, .tail = {"bye"}},
             {.rank = 1, .wait_status = exited(3), .order = 0, .tail = {"x = 1", "x is wrong"}}},
            "launch");
  EXPECT_EQ(verdict.exit_code, 3);
  EXPECT_EQ(verdict.report,
            "launch: after that: rank 0 ended by the launcher\n"
            "launch: rank 1 exited with code 3; its last lines:\n    x = 1\n    x is wrong\n");
}

TEST(Verdict, NamesTheSignalAndReturns128PlusItsNumber) {
  const auto verdict = judge({{.rank = 0, .wait_status = SIGSEGV}}, "launch");
  EXPECT_EQ(verdict.exit_code, 139);
  EXPECT_EQ(verdict.report, "launch: rank 0 was killed by SIGSEGV; it wrote nothing\n");
}

TEST(Verdict, ShowsOnceWhatRanksLeftToTheLauncherAndNothingOfThoseThatWereEndedForIt) {
  const auto verdict =
      judge({{.rank = 0, .wait_status = exited(1), .order = 1, .tail = {"noise"}, .refusal = "no\nway\n"},
             {.rank = 1, .wait_status = exited(1), .order = 0, .tail = {"noise"}, .refusal = "no\nway\n"},
             {.rank = 2, .wait_status = SIGTERM, .order = 2, .ended_by_launcher = true}},
            "launch");
  EXPECT_EQ(verdict.exit_code, 1);
  EXPECT_EQ(verdict.report, "launch: ranks 0, 1 ended with an error:\n    no\n    way\n");
}

TEST(Verdict, ShowsEveryTextThatRanksLeftToTheLauncher) {
  const auto verdict = judge({{.rank = 0, .wait_status = exited(1), .order = 0, .refusal = "b"},
                              {.rank = 1, .wait_status = exited(1), .order = 1, .refusal = "a"},
                              {.rank = 2, .wait_status = exited(7), .order = 2}},
                             "launch");
  EXPECT_EQ(verdict.report,
            "launch: after that: rank 2 exited with code 7\n"
            "launch: rank 1 ended with an error:\n    a\nlaunch: rank 0 ended with an error:\n    b\n");
}

TEST(Verdict, PrefersTheDeadRankOverTheSurvivorThatReportedIt) {
  const auto verdict =
      judge({{.rank = 0, .wait_status = exited(3), .order = 0, .tail = {"it is gone"}, .peer_failure = lost(1)},
             {.rank = 1, .wait_status = SIGKILL, .order = 1}},
            "launch");
  EXPECT_EQ(verdict.exit_code, 137);
  EXPECT_EQ(verdict.report,
            "launch: after that: rank 0 exited with code 3\n"
            "launch: rank 1 was killed by SIGKILL (not by the launcher; the kernel does this when memory runs out, see "
            "`dmesg`: then lower the micro-batch, raise zero_optimization.stage, or start fewer ranks); it wrote "
            "nothing\n");
}

TEST(Verdict, FollowsAChainOfBlameToItsRootAndSurvivesACircle) {
  const RankEnd zero{.rank = 0, .wait_status = exited(3), .order = 0, .peer_failure = lost(1)};
  const RankEnd one{.rank = 1, .wait_status = exited(3), .order = 1, .peer_failure = lost(2)};
  EXPECT_EQ(judge({zero, one, {.rank = 2, .wait_status = exited(7), .order = 2}}, "l").exit_code, 7);
  EXPECT_EQ(judge({zero, {.rank = 1, .wait_status = exited(4), .order = 1, .peer_failure = lost(0)}}, "l").exit_code,
            3);
}

TEST(Verdict, KeepsToTheReportingRankWhenTheOtherHadToBeEnded) {
  const auto verdict =
      judge({{.rank = 0,
              .wait_status = exited(3),
              .order = 0,
              .tail = {"rank 1 did not come"},
              .peer_failure = PeerFailure{ErrorCode::kTimeout, 1}},
             {.rank = 1, .wait_status = SIGKILL, .order = 1, .ended_by_launcher = true, .was_stopped = true}},
            "launch");
  EXPECT_EQ(verdict.exit_code, 3);
  EXPECT_EQ(verdict.report,
            "launch: after that: rank 1 (it was stopped) ended by the launcher\n"
            "launch: rank 0 exited with code 3; its last lines:\n    rank 1 did not come\n");
}

TEST(Verdict, DoesNotReportRanksThatEndedAsTheUserAsked) {
  const RankEnd cleanly{.rank = 0, .wait_status = exited(130), .order = 0};
  const RankEnd killed{.rank = 1, .wait_status = SIGINT, .order = 1};
  EXPECT_EQ(judge({cleanly, killed}, "launch", SIGINT).report, "");
  EXPECT_EQ(judge({cleanly, killed}, "launch", SIGINT).exit_code, 130);
  EXPECT_NE(judge({{.rank = 0, .wait_status = exited(1)}}, "launch", SIGINT).report, "");
}

TEST(Verdict, IsNoSuccessWhenTheLauncherHadToKillARank) {
  const RankEnd killed{.rank = 1, .wait_status = SIGKILL, .order = 1, .ended_by_launcher = true};
  const std::string line = "launch: after SIGINT, rank 1 did not end by itself; the launcher ended it (SIGKILL)\n";
  // The other one has ended with 0, or as a program does that was interrupted.
  for (const int status : {0, exited(130), SIGINT}) {
    const auto verdict = judge({{.rank = 0, .wait_status = status}, killed}, "launch", SIGINT);
    EXPECT_EQ(verdict.exit_code, 130) << status;
    EXPECT_EQ(verdict.report, line) << status;
  }
  EXPECT_EQ(judge({killed}, "launch").exit_code, 137);
}

TEST(Verdict, DoesNotReadWhatRanksWrote) {
  const RankEnd zero{.rank = 0, .wait_status = exited(3), .order = 0, .tail = {"PeerLostError: rank 1 died"}};
  EXPECT_EQ(judge({zero, {.rank = 1, .wait_status = exited(7), .order = 1}}, "l").exit_code, 3);
}

TEST(Verdict, KeepsToTheFirstOfRanksThatCalledDifferentOperations) {
  const auto diverged = [](int rank, int order, int peer) {
    return RankEnd{.rank = rank,
                   .wait_status = exited(10 + rank),
                   .order = order,
                   .peer_failure = PeerFailure{ErrorCode::kDiverged, peer}};
  };
  EXPECT_EQ(judge({diverged(0, 1, 1), diverged(1, 0, 0), diverged(2, 2, 1)}, "l").exit_code, 11);
}

TEST(Verdict, TakesNoRankThatIsNotOfTheJob) {
  for (const int peer : {-1, 1, 1 << 30})
    EXPECT_EQ(judge({{.rank = 0, .wait_status = exited(3), .peer_failure = lost(peer)}}, "l").exit_code, 3) << peer;
}

}  // namespace
}  // namespace trireme::cli
