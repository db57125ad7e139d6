// Values and texts that ranks compare, and what each rank learns where they differ.
#include "trireme/comm/agreement.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include <stdexcept>

#include "tests/comm/collective_cases.h"
#include "tests/comm/thrown.h"

namespace trireme {
namespace {

using Values = std::vector<int64_t>;
using Agreements = OnEveryWorld;

TEST(Digest, IsOfBytesAndNeverNone) {
  EXPECT_NE(digest_of(""), 0);
  EXPECT_EQ(digest_of("weights"), digest_of(std::string("weights")));
  EXPECT_NE(digest_of("weights"), digest_of("weight"));
  const at::Tensor flat = at::arange(6, at::kFloat), other = flat.clone();
  EXPECT_EQ(digest_of(flat), digest_of(other));
  EXPECT_EQ(digest_of(at::zeros({0})), digest_of(""));
  other[5] += 1e-6;
  EXPECT_NE(digest_of(flat), digest_of(other));
}

TEST_P(Agreements, FindNothingInEqualValuesByOneCall) {
  run([](Rank& rank) {
    const CommCounters before = rank.world().counters();
    EXPECT_FALSE(first_difference(rank.world(), Values{1, -2, 3}));
    EXPECT_FALSE(first_difference(rank.world(), {}));
    EXPECT_LE(rank.world().counters().calls, before.calls + 2);
  });
}

TEST_P(Agreements, FindTheFirstPlaceAndTheLowestRankThatIsAnother) {
  run([](Rank& rank) {
    if (rank.size() < 2) return;
    const int last = rank.size() - 1;
    Values values{7, 8, 9};
    if (rank.id() == last) values[1] = -8, values[2] = 0;
    auto found = first_difference(rank.world(), values);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->index, 1u);
    EXPECT_EQ(found->rank, last);
    EXPECT_EQ(found->of_rank_0, 8);
    EXPECT_EQ(found->of_rank, -8);
    found = first_difference(rank.world(), rank.id() == 0 ? Values{0, 8} : Values{7, 8});
    ASSERT_TRUE(found);
    EXPECT_EQ(found->index, 0u);
    EXPECT_EQ(found->rank, 1);
  });
}

TEST_P(Agreements, FindTheEndOfAShorterList) {
  run([](Rank& rank) {
    if (rank.size() < 2) return;
    const auto found = first_difference(rank.world(), rank.id() == 1 ? Values{7} : Values{7, 8});
    ASSERT_TRUE(found);
    EXPECT_EQ(found->index, 1u);
    EXPECT_EQ(found->rank, 1);
    EXPECT_EQ(found->of_rank_0, 8);
    EXPECT_FALSE(found->of_rank);
  });
}

TEST_P(Agreements, QuoteTheFirstLineThatDiffers) {
  run([](Rank& rank) {
    EXPECT_FALSE(first_different_line(rank.world(), [] { return std::string("a\nb"); }));
    if (rank.size() < 2) return;
    const auto found = first_different_line(rank.world(), [&] { return str("a\n", rank.id() == 0 ? "b\nc" : "b"); });
    ASSERT_TRUE(found);
    EXPECT_EQ(found->text(), "`c` on rank 0 and `nothing more` on rank 1");
  });
}

TEST_P(Agreements, ThrowEachRanksOwnErrorThereAndTheFirstOfThemElsewhere) {
  run([](Rank& rank) {
    if (rank.size() < 2) return;
    const auto work = [&] {
      if (rank.id() == 1) throw std::runtime_error("a program's");
    };
    const auto look = [&](const std::function<void()>& call) {
      if (rank.id() == 1)
        EXPECT_THROW(call(), std::runtime_error);
      else
        EXPECT_TRUE(thrown_by(call).has("rank 1: a program's"));
    };
    look([&] { together(rank.world(), work); });
    look([&] {
      (void)first_different_line(rank.world(), [&] {
        work();
        return std::string("text");
      });
    });
    EXPECT_FALSE(first_difference(rank.world(), Values{1}));  // the group still works
  });
}

TRIREME_ON_EVERY_WORLD(Agreements);

}  // namespace
}  // namespace trireme
