#include "cli/launch/hostfile.h"

#include <gtest/gtest.h>

#include "tests/cli/error_text.h"

namespace trireme::cli {
namespace {

const std::vector<HostSlots> kPool = {{"alpha", {0, 1, 2, 3}}, {"beta", {0, 1}}};

TEST(Hostfile, ReadsHostsInTheirOrderAndSkipsCommentsAndBlankLines) {
  const auto hosts = parse_hostfile("# the cluster\n\nbeta slots=2\n  alpha\tslots=4   # the big one\r\n", "hosts");
  EXPECT_EQ(hosts, (std::vector<HostSlots>{{"beta", {0, 1}}, {"alpha", {0, 1, 2, 3}}}));
}

TEST(Hostfile, RefusesAMalformedLineWithItsNumber) {
  const std::string expected = " is not `host slots=N` with N of at least 1";
  EXPECT_EQ(error_text([] { parse_hostfile("alpha slots=2\nbeta 2\n", "hosts"); }), "hosts:2: 'beta 2'" + expected);
  EXPECT_EQ(error_text([] { parse_hostfile("beta slots=0", "hosts"); }), "hosts:1: 'beta slots=0'" + expected);
  EXPECT_EQ(error_text([] { parse_hostfile("beta slots=two", "hosts"); }), "hosts:1: 'beta slots=two'" + expected);
  EXPECT_EQ(error_text([] { parse_hostfile("beta slots=2 x", "hosts"); }), "hosts:1: 'beta slots=2 x'" + expected);
}

TEST(Hostfile, RefusesAHostThatStandsTwice) {
  EXPECT_EQ(error_text([] { parse_hostfile("a slots=1\na slots=2", "hosts"); }),
            "hosts:2: host 'a' stands twice; give all its slots in one line");
}

TEST(Hostfile, RefusesMoreSlotsAndHostsThanThereAre) {
  EXPECT_EQ(error_text([] { parse_hostfile("a slots=1024\nb slots=100000000", "hosts"); }),
            "hosts:2: host 'b' has 100000000 slots, at most 1024 are known on one host; write how many ranks may run "
            "there");
  std::string many;
  for (int i = 0; i < 60'000; ++i) many += "host" + std::to_string(i) + " slots=8\n";
  EXPECT_EQ(error_text([&] { parse_hostfile(many, "hosts"); }),
            "hosts:20001: more than 20000 hosts; keep those of this job");
}

TEST(Hostfile, RefusesBytesThatAreNoUtf8) {
  EXPECT_EQ(error_text([] { parse_hostfile("a\xff slots=1", "hosts"); }), "hosts:1: 'a?' is no host's name: not UTF-8");
}

TEST(Hostfile, RefusesAFileWithoutHosts) {
  EXPECT_EQ(error_text([] { parse_hostfile("# nothing\n", "hosts"); }),
            "hosts: no host in this file; write lines of the form `host slots=N`");
}

TEST(SelectSlots, KeepsEverythingWithoutASelection) { EXPECT_EQ(select_slots(kPool, "", ""), kPool); }

TEST(SelectSlots, IncludesTheNamedSlotsInAscendingOrder) {
  EXPECT_EQ(select_slots(kPool, "beta@alpha:3,0", ""), (std::vector<HostSlots>{{"alpha", {0, 3}}, {"beta", {0, 1}}}));
  EXPECT_EQ(select_slots(kPool, "alpha:1@alpha:2", ""), (std::vector<HostSlots>{{"alpha", {1, 2}}}));
}

TEST(SelectSlots, ExcludesTheNamedSlotsAndHostsWithNoneLeft) {
  EXPECT_EQ(select_slots(kPool, "", "alpha:0,1@beta"), (std::vector<HostSlots>{{"alpha", {2, 3}}}));
}

TEST(SelectSlots, RefusesWhatThePoolDoesNotHave) {
  EXPECT_EQ(error_text([] { select_slots(kPool, "gamma", ""); }),
            "--include: there is no host 'gamma'; the hosts are: alpha, beta");
  EXPECT_EQ(error_text([] { select_slots(kPool, "", "beta:2"); }),
            "--exclude: host 'beta' has no slot 2; it has 2, counted from 0");
}

TEST(SelectSlots, RefusesMalformedText) {
  const std::string form = "; write it as host:0,2@other (a host without slots means all of them)";
  EXPECT_EQ(error_text([] { select_slots(kPool, "alpha:0,x", ""); }),
            "--include: 'x' in 'alpha:0,x' is no slot number" + form);
  EXPECT_EQ(error_text([] { select_slots(kPool, "alpha:", ""); }),
            "--include: '' in 'alpha:' is no slot number" + form);
  EXPECT_EQ(error_text([] { select_slots(kPool, "alpha@", ""); }), "--include: '' names no host" + form);
}

TEST(SelectSlots, RefusesBothSelectionsAtOnceAndAnEmptyResult) {
  EXPECT_EQ(error_text([] { select_slots(kPool, "alpha", "beta"); }),
            "--include and --exclude exclude each other; give one");
  EXPECT_EQ(error_text([] { select_slots(kPool, "", "alpha@beta"); }),
            "--exclude alpha@beta: no slot is left to run on");
}

}  // namespace
}  // namespace trireme::cli
