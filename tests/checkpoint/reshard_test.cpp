#include "trireme/checkpoint/reshard.h"

#include <gtest/gtest.h>

#include <map>

#include "tests/checkpoint/fixture.h"
#include "trireme/base/error.h"
#include "trireme/comm/group.h"

namespace trireme {
namespace {

using testing::named_error_of;

SliceSpec slice(const std::string& name, int64_t begin, int64_t numel, int64_t tensor_numel = 100) {
  return {.name = name, .part = {{tensor_numel}}, .dtype = at::kFloat, .begin = begin, .numel = numel};
}

/// A manifest with one tensor "t" of `numel` elements, saved evenly by `ranks` ranks.
Manifest saved_by(int ranks, int64_t numel) {
  Manifest manifest;
  SavedTensor tensor{.name = "t", .shape = {numel}, .dtype = at::kFloat, .slices = {}};
  for (int rank = 0; rank < ranks; ++rank) {
    const ShardRange range = shard_range(numel, ranks, rank);
    manifest.files.push_back({.name = "f" + std::to_string(rank), .bytes = 64 + 4 * range.numel(), .header_bytes = 64});
    if (range.numel() > 0)
      tensor.slices.push_back({.file = rank,
                               .begin = range.begin,
                               .numel = range.numel(),
                               .offset = 64,
                               .bytes = 4 * range.numel(),
                               .checksums = {}});
  }
  manifest.tensors.push_back(tensor);
  return manifest;
}

/// How often `to` ranks read each element of what `from` ranks saved; an element that would land elsewhere fails the
/// test.
std::map<int64_t, int> times_read(int64_t numel, int from, int to) {
  const Manifest manifest = saved_by(from, numel);
  std::map<int64_t, int> times;
  for (int rank = 0; rank < to; ++rank) {
    const ShardRange range = shard_range(numel, to, rank);
    for (const SliceRead& read : plan_reads(manifest, {slice("t", range.begin, range.numel(), numel)})) {
      const SavedSlice& source = manifest.tensors[read.tensor].slices[read.slice];
      for (const PartRun& run : read.runs) {
        EXPECT_EQ(run.count, 1);
        EXPECT_LE(run.a_end(), source.numel);
        EXPECT_EQ(source.begin + run.a, range.begin + run.b);
        for (int64_t i = 0; i < run.length; ++i) ++times[source.begin + run.a + i];
      }
    }
  }
  return times;
}

TEST(PlanReads, CoverEveryWantedElementOnceFromTheRightPlace) {
  for (int from = 1; from <= 9; ++from) {
    for (int to = 1; to <= 9; ++to) {
      const auto times = times_read(101, from, to);
      ASSERT_EQ(times.size(), 101u) << from << " to " << to;
      for (const auto& [element, count] : times) EXPECT_EQ(count, 1) << element << " from " << from << " to " << to;
    }
  }
}

TEST(PlanReads, SameWorldReadsOneWholeSliceEach) {
  const auto reads = plan_reads(saved_by(4, 100), {slice("t", 50, 25)});
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].slice, 2u);
  EXPECT_EQ(reads[0].runs, (std::vector<PartRun>{{0, 0, 25}}));
}

TEST(PlanReads, GoForwardThroughTheFiles) {
  const auto reads = plan_reads(saved_by(4, 100), {slice("t", 60, 40), slice("t", 0, 60)});
  ASSERT_EQ(reads.size(), 5u);
  for (size_t i = 1; i < reads.size(); ++i) EXPECT_LE(reads[i - 1].slice, reads[i].slice);
}

TEST(PlanReads, AnEmptyDestinationReadsNothing) {
  EXPECT_TRUE(plan_reads(saved_by(2, 100), {slice("t", 100, 0), slice("unknown", 0, 100)}).empty());
}

TEST(PlanReads, ADestinationOutsideOfItsTensorIsNamed) {
  const auto error = named_error_of([] { (void)plan_reads(saved_by(2, 100), {slice("t", 90, 11)}); });
  EXPECT_EQ(error, "CheckpointError: tensor \"t\": elements [90, 101) are outside of its 100");
}

TEST(PlanWrites, SpreadsEqualSlicesEvenly) {
  // Four replicated tensors on two ranks: two each, in order.
  std::vector<SliceSpec> table;
  for (const char* name : {"a", "b", "c", "d"}) table.push_back(slice(name, 0, 100));
  std::vector<int> ranks;
  for (const auto& tensor : plan_writes({table, table})) ranks.push_back(tensor.slices.at(0).rank);
  EXPECT_EQ(ranks, (std::vector<int>{0, 1, 0, 1}));
}

TEST(PlanWrites, KeepsTheOrderInWhichTensorsAreNamed) {
  std::vector<std::string> names;
  for (const auto& tensor : plan_writes({{slice("z", 0, 100), slice("a", 0, 100)}, {slice("b", 0, 100)}}))
    names.push_back(tensor.name);
  EXPECT_EQ(names, (std::vector<std::string>{"z", "a", "b"}));
}

TEST(PlanWrites, SortsSlicesByTheirBeginAndDropsEmptyOnes) {
  const auto writes = plan_writes({{slice("t", 60, 40)}, {slice("t", 0, 60)}, {slice("t", 100, 0)}});
  ASSERT_EQ(writes.at(0).slices.size(), 2u);
  EXPECT_EQ(writes[0].slices[0].rank, 1);
  EXPECT_EQ(writes[0].slices[1].rank, 0);
}

TEST(PlanWrites, RefusesWhatDoesNotFitTogether) {
  const auto refused = [](const std::vector<std::vector<SliceSpec>>& tables) {
    return named_error_of([&] { (void)plan_writes(tables); });
  };
  EXPECT_EQ(refused({{slice("t", 0, 99)}}), "CheckpointError: tensor \"t\": no rank holds elements [99, 100)");
  EXPECT_EQ(
      refused({{slice("t", 0, 60)}, {slice("t", 50, 50)}}),
      "CheckpointError: tensor \"t\": slices overlap in part: rank 1 holds elements [50, 100), rank 0 holds [0, 60)");
  EXPECT_EQ(refused({{slice("t", 0, 100)}, {slice("t", 0, 99, 99)}}),
            "CheckpointError: tensor \"t\" is [100] F32 on rank 0 and [99] F32 on rank 1");
  EXPECT_EQ(refused({{slice("t", -1, 5)}}),
            "CheckpointError: tensor \"t\" on rank 0: elements [-1, 4) are outside of its 100");
}

}  // namespace
}  // namespace trireme
