// Tensors that ranks hold in parts: saved once each, loaded into other parts.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <set>

#include "tests/checkpoint/fixture.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/async_save.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/manifest.h"
#include "trireme/checkpoint/reshard.h"
#include "trireme/checkpoint/source.h"

namespace trireme {
namespace {

using checkpoint_test::Folder;
using testing::named_error_of;

/// The elements of `slice`, taken from the global tensor by libtorch.
at::Tensor cut(const at::Tensor& whole, const TensorSlice& slice, int64_t numel) {
  at::Tensor part = whole;
  if (slice.part.dim >= 0) {
    std::vector<at::Tensor> pieces{whole.narrow(slice.part.dim, 0, 0)};
    for (const Interval& interval : slice.part.intervals)
      pieces.push_back(whole.narrow(slice.part.dim, interval.begin, interval.size()));
    part = at::cat(pieces, slice.part.dim);
  }
  return part.contiguous().flatten().narrow(0, slice.begin, numel).clone();
}

/// A global tensor and the slice of it that each rank holds.
struct Global {
  at::Tensor whole;
  std::vector<TensorSlice> slice_of_rank;  ///< without data
  std::vector<int64_t> numel_of_rank;
  size_t distinct = 0;  ///< slices
};

class Cutter {
 public:
  explicit Cutter(unsigned seed) : random_(seed) {}

  int64_t below(int64_t bound) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(bound)); }

  std::vector<int64_t> shape() {
    std::vector<int64_t> shape(below(4));
    for (int64_t& extent : shape) extent = 1 + below(9);
    return shape;
  }

  /// Rank r of `ranks` is in tensor-parallel place r % cuts; the ranks of a place share its part out between them, or
  /// each hold all of it.
  Global global(const std::string& name, const at::Tensor& whole, int ranks) {
    const std::vector<int64_t> shape = whole.sizes().vec();
    const int cuts = shape.empty() ? 1 : static_cast<int>(1 + below(ranks));
    std::vector<TensorPart> parts(cuts, TensorPart{shape});
    if (cuts > 1) deal(parts, static_cast<int>(below(static_cast<int64_t>(shape.size()))));
    const bool replicated = below(2) == 0;
    Global global{whole, {}, {}, 0};
    std::set<std::pair<int, int64_t>> distinct;
    for (int rank = 0; rank < ranks; ++rank) {
      const int place = rank % cuts;
      const int holders = (ranks - place + cuts - 1) / cuts;
      const ShardRange range =
          shard_range(local_numel(parts[place]), replicated ? 1 : holders, replicated ? 0 : rank / cuts);
      global.slice_of_rank.push_back({name, parts[place], range.begin, {}});
      global.numel_of_rank.push_back(range.numel());
      if (range.numel() > 0) distinct.emplace(place, range.begin);
    }
    global.distinct = distinct.size();
    return global;
  }

 private:
  /// Deals the indices of `dim` out in stretches: uneven, and some parts may get none.
  void deal(std::vector<TensorPart>& parts, int dim) {
    for (TensorPart& part : parts) part.dim = dim;
    for (int64_t begin = 0; begin < parts[0].shape[dim];) {
      const int64_t end = std::min(parts[0].shape[dim], begin + 1 + below(3));
      parts[below(static_cast<int64_t>(parts.size()))].intervals.push_back({begin, end});
      begin = end;
    }
  }

  std::mt19937 random_;
};

StateTree state_of(const std::vector<Global>& globals, int rank, bool filled) {
  StateTree state;
  for (const Global& global : globals) {
    TensorSlice slice = global.slice_of_rank[rank];
    slice.data = cut(global.whole, slice, global.numel_of_rank[rank]);
    if (!filled) slice.data.zero_();
    state.tensors.push_back(std::move(slice));
  }
  return state;
}

TEST(Parts, FiveHundredRandomTensorsComeBackInOtherPartsEachByteWrittenOnce) {
  constexpr int kTensors = 500, kRounds = 5;
  Cutter cutter(3);
  for (int round = 0; round < kRounds; ++round) {
    Folder folder;
    const int from = static_cast<int>(1 + cutter.below(8)), to = static_cast<int>(1 + cutter.below(8));
    std::vector<Global> saved, loaded;
    int64_t bytes = 0;
    for (int i = 0; i < kTensors / kRounds; ++i) {
      const std::vector<int64_t> shape = cutter.shape();
      const int64_t numel = local_numel({shape});
      at::Tensor whole = at::arange(1, numel + 1).to(i % 2 == 0 ? at::kFloat : at::kShort).view(shape);
      saved.push_back(cutter.global(str("t", i), whole, from));
      loaded.push_back(cutter.global(str("t", i), whole, to));
      bytes += static_cast<int64_t>(whole.nbytes());
    }
    SCOPED_TRACE(str("from ", from, " to ", to, " ranks"));
    run_ranks(from, [&](Rank& rank) {
      (void)save_checkpoint(rank.world(), folder.path(), "one", state_of(saved, rank.id(), true));
    });
    const CheckpointSource source = open_checkpoint(folder.path());
    for (const SavedFile& file : source.manifest.files) bytes -= file.bytes - file.header_bytes;
    EXPECT_EQ(bytes, 0);
    TensorReader reader(source);
    for (size_t i = 0; i < saved.size(); ++i) {
      EXPECT_EQ(source.manifest.tensors[i].slices.size(), saved[i].distinct);
      const at::Tensor whole = at::zeros_like(saved[i].whole);
      reader.read(i, 0, whole.numel(), static_cast<std::byte*>(whole.data_ptr()));
      EXPECT_TRUE(at::equal(whole, saved[i].whole)) << i;
    }
    run_ranks(to, [&](Rank& rank) {
      StateTree state = state_of(loaded, rank.id(), false);
      (void)load_checkpoint(rank.world(), folder.path(), "", state);
      const StateTree expected = state_of(loaded, rank.id(), true);
      for (size_t i = 0; i < state.tensors.size(); ++i)
        EXPECT_TRUE(at::equal(state.tensors[i].data, expected.tensors[i].data)) << state.tensors[i].name;
    });
  }
}

/// Ranks hold the columns of a matrix that has more blocks than one.
constexpr int64_t kRows = 3000, kColumns = 512;

StateTree columns_of(int rank, int size) {
  StateTree state;
  const at::Tensor whole = at::arange(kRows * kColumns).to(at::kFloat).view({kRows, kColumns});
  const ShardRange range = shard_range(kColumns, size, rank);
  TensorSlice slice{"model.w", {{kRows, kColumns}, 1, {{range.begin, range.end}}}, 0, {}};
  slice.data = cut(whole, slice, kRows * range.numel());
  slice.values = R"({"steps":5})";
  state.tensors.push_back(std::move(slice));
  return state;
}

void save_columns(const Folder& folder, int size) {
  run_ranks(size, [&](Rank& rank) {
    (void)save_checkpoint(rank.world(), folder.path(), "one", columns_of(rank.id(), size));
  });
}

TEST(Parts, OfColumnsAreOneEntryEachHoweverManyRowsThereAre) {
  Folder folder;
  save_columns(folder, 4);
  const Manifest manifest = read_manifest(folder / "one");
  ASSERT_EQ(manifest.tensors.size(), 1u);
  EXPECT_EQ(manifest.tensors[0].slices.size(), 4u);
  EXPECT_EQ(manifest.tensors[0].parts[1], (TensorPart{{kRows, kColumns}, 1, {{128, 256}}}));
  EXPECT_EQ(dump_manifest(manifest), checkpoint_test::text_of(folder / "one/manifest.json"));
  for (const int size : {1, 3})
    run_ranks(size, [&](Rank& rank) {
      StateTree state = columns_of(rank.id(), size);
      const at::Tensor expected = state.tensors[0].data.clone();
      state.tensors[0].data.zero_();
      const auto loaded = load_checkpoint(rank.world(), folder.path(), "", state);
      EXPECT_TRUE(at::equal(state.tensors[0].data, expected));
      EXPECT_EQ(loaded->tensor_values.at(0).second, R"({"steps":5})");
    });
}

TEST(Parts, EachBlockIsReadOnceAlthoughItsRowsGoToManyPlaces) {
  const std::vector<SliceSpec> half{
      {.name = "w", .part = {{kRows, kColumns}, 1, {{0, 128}, {256, 384}}}, .numel = kRows * 256}};
  Manifest manifest;
  manifest.files = {{.name = "a", .bytes = 64 + 4 * kRows * kColumns, .header_bytes = 64}};
  manifest.tensors = {{.name = "w",
                       .shape = {kRows, kColumns},
                       .dtype = at::kFloat,
                       .slices = {{.file = 0,
                                   .begin = 0,
                                   .numel = kRows * kColumns,
                                   .offset = 64,
                                   .bytes = 4 * kRows * kColumns,
                                   .checksums = {}}}}};
  const std::vector<SliceRead> reads = plan_reads(manifest, half);
  ASSERT_EQ(reads.size(), 1u);
  EXPECT_EQ(reads[0].runs,
            (std::vector<PartRun>{{0, 0, 128, kRows, kColumns, 256}, {256, 128, 128, kRows, kColumns, 256}}));
}

TEST(Parts, ThatLeaveAGapOrOverlapAreRefusedByNameAndRank) {
  const auto refused = [](const std::vector<TensorPart>& parts) {
    return named_error_of([&] {
      std::vector<std::vector<SliceSpec>> tables;
      for (const TensorPart& part : parts) tables.push_back({{.name = "t", .part = part, .numel = local_numel(part)}});
      (void)plan_writes(tables);
    });
  };
  EXPECT_EQ(refused({{{4, 6}, 1, {{0, 2}}}, {{4, 6}, 1, {{3, 6}}}}),
            "CheckpointError: tensor \"t\": no rank holds dim 1: 2-3");
  EXPECT_EQ(refused({{{4, 6}, 1, {{0, 4}}}, {{4, 6}, 1, {{3, 6}}}}),
            "CheckpointError: tensor \"t\": parts overlap: rank 1 holds dim 1: 3-6, rank 0 dim 1: 0-4");
  EXPECT_EQ(refused({{{4, 6}, 1, {{0, 3}}}, {{4, 6}, 0, {{0, 2}}}}),
            "CheckpointError: tensor \"t\": parts overlap: rank 1 holds dim 0: 0-2, rank 0 dim 1: 0-3");
  EXPECT_EQ(refused({{{4, 6}}, {{4, 6}, 0, {{0, 2}}}}),
            "CheckpointError: tensor \"t\": parts overlap: rank 1 holds dim 0: 0-2, rank 0 all of it");
  EXPECT_EQ(refused({{{4, 6}, 1, {{0, 7}}}}),
            "CheckpointError: tensor \"t\" (dim 1: 0-7) on rank 0: dim 1: 0-7 of a tensor of shape [4, 6]: expected "
            "intervals that ascend, are not empty and stay inside");
}

TEST(Values, OfATensorComeFromAnyRankAndMustAgree) {
  const auto save = [](const std::vector<std::string>& values) {
    Folder folder;
    std::string error;
    run_ranks(2, [&](Rank& rank) {
      StateTree state;
      TensorSlice slice{"model.w", {{4}}, 2 * rank.id(), at::arange(2).to(at::kFloat)};
      slice.values = values[rank.id()];
      state.tensors.push_back(std::move(slice));
      const std::string found =
          named_error_of([&] { (void)save_checkpoint(rank.world(), folder.path(), "one", state); });
      if (rank.id() == 1) error = found;
    });
    return error == "nothing" ? read_manifest(folder / "one").tensors[0].values : error;
  };
  EXPECT_EQ(save({"", R"({"steps":3})"}), R"({"steps":3})");
  EXPECT_EQ(save({R"({"steps":3})", ""}), R"({"steps":3})");
  EXPECT_EQ(save({R"({"steps":3})", R"({"steps":2})"}),
            R"(CheckpointError: tensor "model.w" has the values {"steps":3} on rank 0 and {"steps":2} on rank 1)");
}

TEST(Topology, IsKeptWithTheCheckpointAndMustHaveTheRanks) {
  Folder folder;
  run_ranks(4, [&](Rank& rank) {
    const auto save = [&](std::vector<Axis> topology) {
      return named_error_of([&] {
        (void)save_checkpoint(rank.world(), folder.path(), "one", columns_of(rank.id(), 4), {.topology = topology});
      });
    };
    EXPECT_NE(save({{"data", 3}}).find("the topology has 3 ranks, the group 4"), std::string::npos);
    EXPECT_EQ(save({{"data", 2}, {"tensor", 2}}), "nothing");
    StateTree state = columns_of(rank.id(), 4);
    const auto loaded = load_checkpoint(rank.world(), folder.path(), "", state);
    EXPECT_EQ(loaded->topology, (std::vector<Axis>{{"data", 2}, {"tensor", 2}}));
    EXPECT_EQ(loaded->rank_values.size(), 4u);
  });
}

/// Elements that are nowhere but in a string, as a drive would have them.
class StringStore final : public SliceStore {
 public:
  explicit StringStore(const at::Tensor& values)
      : dtype_(values.scalar_type()), bytes_(static_cast<const char*>(values.const_data_ptr()), values.nbytes()) {}
  at::ScalarType dtype() const override { return dtype_; }
  int64_t numel() const override { return static_cast<int64_t>(bytes_.size() / c10::elementSize(dtype_)); }
  void read(Bytes begin, std::span<std::byte> to) override {
    largest_read = std::max(largest_read, to.size());
    std::memcpy(to.data(), &bytes_[begin.count], to.size());
  }
  void write(Bytes begin, std::span<const std::byte> from) override {
    std::memcpy(&bytes_[begin.count], from.data(), from.size());
  }
  bool operator==(const StringStore& other) const { return bytes_ == other.bytes_; }

  size_t largest_read = 0;

 private:
  const at::ScalarType dtype_;
  std::string bytes_;
};

TEST(Stores, AreSavedAndLoadedPieceByPieceLikeMemory) {
  Folder folder;
  run_ranks(2, [&](Rank& rank) {
    StateTree state = columns_of(rank.id(), 2);
    StringStore saved(state.tensors[0].data);
    state.tensors[0].data = at::Tensor();
    state.tensors[0].store = &saved;
    (void)save_checkpoint(rank.world(), folder.path(), "one", state);
    EXPECT_EQ(saved.largest_read, static_cast<size_t>(kChecksumBlockBytes));
    AsyncSaver saver(rank.world());
    (void)saver.save(folder.path(), "two", state);
    (void)saver.wait();
    for (const char* tag : {"one", "two"}) {
      StringStore loaded(at::zeros({saved.numel()}, saved.dtype()));
      state.tensors[0].store = &loaded;
      (void)load_checkpoint(rank.world(), folder.path(), tag, state);
      EXPECT_TRUE(loaded == saved) << tag;
    }
  });
}

}  // namespace
}  // namespace trireme
