// A tensor that travels has the same elements, strides and lazy bits on the other side, and each element goes once.
#include "ownership/wire.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace trireme::ownership {
namespace wire {

using at::Tensor;
using testing::error_of;

struct Case {
  const char* name;
  std::function<Tensor()> make;
  int64_t travel;  ///< elements that do
};

Tensor numbers(at::IntArrayRef sizes) { return at::randn(sizes); }

const Case kCases[] = {
    {"Contiguous",
     [] {
       return numbers({2, 3, 4});
     },
     24},
    {"Transposed",
     [] {
       return numbers({3, 5}).t();
     },
     15},
    {"Permuted",
     [] {
       return numbers({2, 3, 4, 5}).permute({2, 0, 3, 1});
     },
     120},
    {"ChannelsLast",
     [] {
       return numbers({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast);
     },
     120},
    {"WithGaps",
     [] {
       return numbers({4, 10}).slice(1, 2, 7);
     },
     20},
    {"EverySecond", [] { return numbers({9}).slice(0, 1, 9, 2); }, 4},
    {"Expanded",
     [] {
       return numbers({3, 1, 2}).expand({3, 7, 2});
     },
     6},
    {"ExpandedScalar",
     [] {
       return numbers({}).expand({4, 5});
     },
     1},
    {"ExpandedAndTransposed",
     [] {
       return numbers({1, 6}).expand({4, 6}).t();
     },
     6},
    {"Overlapping", [] { return numbers({10}).unfold(0, 4, 2); }, 10},
    {"OfOneElement",
     [] {
       return numbers({1, 1});
     },
     1},
    {"OddStridesOfOnes",
     [] {
       return numbers({8}).as_strided({4, 1}, {1, 1});
     },
     4},
    {"Scalar", [] { return numbers({}); }, 1},
    {"Empty",
     [] {
       return numbers({0, 3});
     },
     0},
    {"EmptyExpanded",
     [] {
       return numbers({1, 0}).expand({5, 0});
     },
     0},
    {"Conjugated",
     [] {
       return at::randn({3, 4}, at::kComplexFloat).t().conj();
     },
     12},
    {"Negated",
     [] {
       return at::imag(at::randn({3, 4}, at::kComplexFloat).conj());
     },
     12},
    {"OfBits",
     [] {
       return numbers({3, 4}) > 0;
     },
     12},
    {"OfBf16",
     [] {
       return numbers({3, 4}).to(at::kBFloat16).t();
     },
     12},
};

class Wire : public ::testing::TestWithParam<Case> {};

TEST_P(Wire, PutsATensorTogetherWhereItsStridesAreKnown) {
  const Tensor tensor = GetParam().make();
  const Tensor elements = packed(tensor);
  EXPECT_EQ(elements.dim(), 1);
  EXPECT_EQ(elements.numel(), GetParam().travel);
  const Room room = make_room(tensor);
  ASSERT_EQ(room.buffer.sizes(), elements.sizes());
  room.buffer.copy_(elements);
  const Tensor there = filled(room);
  EXPECT_EQ(there.strides(), tensor.strides());
  EXPECT_EQ(there.is_conj(), tensor.is_conj());
  EXPECT_EQ(there.is_neg(), tensor.is_neg());
  EXPECT_TRUE(at::equal(there, tensor));
}

TEST_P(Wire, PutsATensorTogetherWhoseStridesAreTold) {
  const Tensor tensor = GetParam().make();
  const std::string told = told_strides(layout_of(tensor));
  EXPECT_EQ(told.empty(), std::string(GetParam().name) == "Contiguous" || tensor.dim() == 0 ||
                              (tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg() &&
                               tensor.strides() == at::empty(tensor.sizes()).strides()));
  const Layout layout = layout_from(tensor.sizes(), tensor.scalar_type(), told);
  EXPECT_EQ(packed_numel(layout), GetParam().travel);
  const Tensor there = unpacked(packed(tensor), layout);
  EXPECT_EQ(there.strides(), tensor.strides());
  EXPECT_EQ(there.is_conj(), tensor.is_conj());
  EXPECT_EQ(there.is_neg(), tensor.is_neg());
  EXPECT_TRUE(at::equal(there, tensor));
}

INSTANTIATE_TEST_SUITE_P(Each, Wire, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Wire, CopiesWhatItPacks) {
  const Tensor tensor = at::ones({3});
  const Tensor elements = packed(tensor);
  tensor.zero_();
  EXPECT_TRUE(at::equal(elements, at::ones({3})));
}

TEST(Wire, RefusesWhatHasNoStrides) {
  EXPECT_SAYS(error_of<Error>([] { (void)layout_of(at::ones({3}).to_sparse()); }),
              "smp: a tensor or gradient of layout Sparse and sizes [3] would go to another stage; only dense ones do");
}

TEST(Wire, RefusesStridesOfAnotherTensor) {
  const std::string told = told_strides(layout_of(at::ones({2, 3}).t()));
  EXPECT_SAYS(error_of<CommError>([&] {
                (void)layout_from({2, 3, 4}, at::kFloat, told);
              }),
              "smp: strides of another tensor came for one of sizes [2, 3, 4]");
}

}  // namespace wire
}  // namespace trireme::ownership
