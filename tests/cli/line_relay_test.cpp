#include "cli/launch/line_relay.h"

#include <gtest/gtest.h>

namespace trireme::cli {
namespace {

TEST(LineRelay, PrefixesEveryLine) {
  LineRelay relay("[rank 1] ");
  EXPECT_EQ(relay.feed("one\ntwo\n\n"), "[rank 1] one\n[rank 1] two\n[rank 1] \n");
}

TEST(LineRelay, HoldsAPartialLineUntilItsEndComes) {
  LineRelay relay("> ");
  EXPECT_EQ(relay.feed("hel"), "");
  EXPECT_EQ(relay.feed("lo\nwor"), "> hello\n");
  EXPECT_EQ(relay.finish(), "> wor\n");
  EXPECT_EQ(relay.finish(), "");
}

TEST(LineRelay, CutsALineThatNeverEnds) {
  LineRelay relay("> ");
  const std::string text = relay.feed(std::string(LineSplitter::kMaxLineBytes + 3, 'x'));
  EXPECT_EQ(text, "> " + std::string(LineSplitter::kMaxLineBytes, 'x') + "\n");
  EXPECT_EQ(relay.finish(), "> xxx\n");
}

TEST(LineRelay, DropsWhatACarriageReturnOverwrites) {
  LineRelay relay("> ");
  EXPECT_EQ(relay.feed("10%\r20%\r"), "");
  EXPECT_EQ(relay.feed("30%\n"), "> 30%\n");
  EXPECT_EQ(relay.feed("windows\r\n"), "> windows\n");
}

TEST(LineRelay, PassesBytesUnchangedWithoutAPrefix) {
  LineRelay relay("");
  EXPECT_EQ(relay.feed("\r10%"), "\r10%");
  EXPECT_EQ(relay.finish(), "");
}

TEST(OutputTail, KeepsTheMessageAheadOfALibtorchStack) {
  OutputTail tail(2);
  tail.feed("  what():  mat1 and mat2 must have the same dtype\nException raised from addmm\n");
  for (int i = 0; i < 30; ++i)
    tail.feed("frame #" + std::to_string(i) + ": <unknown function> + 0x1 (0x2 in lib.so)\n");
  tail.finish();
  EXPECT_EQ(tail.lines(), (std::vector<std::string>{"  what():  mat1 and mat2 must have the same dtype",
                                                    "Exception raised from addmm"}));
}

TEST(OutputTail, KeepsTheLastLinesThatAreNotEmpty) {
  OutputTail tail(2);
  tail.feed("a\nb\n\nc\nd");
  tail.finish();
  EXPECT_EQ(tail.lines(), (std::vector<std::string>{"c", "d"}));
}

}  // namespace
}  // namespace trireme::cli
