// Tensors of which ranks have parts, some elements several of them.
#include "trireme/comm/parts.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/run_ranks.h"

namespace trireme {
namespace {

TEST(JoinParts, TakesEachElementFromTheFirstRankThatHasIt) {
  run_ranks(3, [](Rank& rank) {
    const std::vector<int64_t> shape = {4, 3};
    const std::vector<TensorPart> parts = {{shape, 0, {{0, 1}, {3, 4}}}, {shape, 0, {{0, 3}}}, {shape, 0, {{2, 4}}}};
    const at::Tensor whole = at::arange(12).view({4, 3});
    // Each rank's own values: 100 and 200 more where an earlier rank has the element.
    at::Tensor own = cut_part(whole, parts[static_cast<size_t>(rank.id())]).clone();
    if (rank.id() == 1) own[0] += 100;
    if (rank.id() == 2) own += 200;
    EXPECT_TRUE(at::equal(join_parts(rank.world(), parts, own), whole));
  });
}

}  // namespace
}  // namespace trireme
