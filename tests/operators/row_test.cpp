// Rows as text in closed form, and against the sizes that libtorch gives for every operator of the table.
#include "trireme/operators/row.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "tests/support/operators/draw.h"
#include "tests/support/operators/quiet.h"
#include "tests/support/operators/row_text.h"
#include "trireme/base/error.h"

namespace trireme::testing {
namespace row_test {

c10::OperatorHandle handle(const std::string& op) {
  const size_t dot = op.find('.', op.find("::"));
  return c10::Dispatcher::singleton().findSchemaOrThrow(op.substr(0, dot).c_str(),
                                                        dot == op.npos ? "" : op.substr(dot + 1).c_str());
}

std::vector<at::Tensor> tensors_of(const std::vector<c10::IValue>& values) {
  std::vector<at::Tensor> found;
  for (const c10::IValue& value : values) {
    if (value.isTensor()) found.push_back(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorVector()) found.push_back(tensor);
  }
  return found;
}

/// Whether a tensor has the factor, as such or as a piece.
bool has(const Row& row, const TensorFactors& tensor, uint8_t factor) {
  return std::ranges::any_of(tensor, [&](const DimFactors& dim) {
    return std::ranges::any_of(dim, [&](uint8_t own) {
      const std::vector<Piece>* const pieces = row.pieces_of(own);
      return own == factor || (pieces && std::ranges::find(*pieces, factor, &Piece::factor) != pieces->end());
    });
  });
}

/// Factors that no result has must be joined or whole, and those that a result has are not joined.
std::string problem_of_kinds(const Row& row) {
  std::ostringstream problem;
  for (size_t i = 0; i < row.factors.size(); ++i) {
    const FactorKind kind = row.factors[i].kind;
    const auto has_it = [&](const TensorFactors& tensor) { return has(row, tensor, static_cast<uint8_t>(i)); };
    if (kind == FactorKind::kEach && !std::ranges::any_of(row.results, has_it))
      problem << "factor " << i << " is in no result";
    if (kind >= FactorKind::kPlaces && std::ranges::any_of(row.results, has_it))
      problem << "factor " << i << " is in a result";
  }
  return problem.str();
}

/// Why a row does not fit a call; "": it does.
std::string problem_of(const OperatorCase& one) {
  const c10::OperatorHandle op = handle(one.op);
  const OperatorRow* const entry = row_of(op);
  if (!entry) return "no row";
  std::ostringstream problem;
  const std::vector<at::Tensor> given = tensors_of(one.arguments);
  std::vector<std::vector<int64_t>> sizes;
  for (const at::Tensor& tensor : given) sizes.push_back(tensor.sizes().vec());
  torch::jit::Stack stack(one.arguments);
  op.callBoxed(stack);
  const std::vector<at::Tensor> results = tensors_of(stack);
  const RowCall call(op, one.arguments, sizes);
  const Row row = entry->row(call);
  if (row.arguments.size() != given.size())
    problem << row.arguments.size() << " arguments, not " << given.size() << "; ";
  if (row.results.size() != results.size()) problem << row.results.size() << " results, not " << results.size() << "; ";
  if (!problem.str().empty()) return problem.str();
  for (size_t i = 0; i < given.size(); ++i)
    for (size_t d = 0; d < given[i].sizes().size(); ++d)
      if (row.arguments[i].size() != sizes[i].size() || (row.size_of(row.arguments[i][d]) != sizes[i][d]))
        problem << "argument " << i << " of " << c10::IntArrayRef(sizes[i]) << " as " << row.sizes_of(row.arguments[i]);
  for (size_t i = 0; i < results.size(); ++i)
    if (results[i].sizes() != c10::IntArrayRef(row.sizes_of(row.results[i])))
      problem << "result " << i << " of " << results[i].sizes() << " as " << row.sizes_of(row.results[i]);
  problem << problem_of_kinds(row);
  LocalCall here{.arguments = one.arguments};
  if (entry->localise) entry->localise(call, LocalRow(row), here);
  if (here.mend || here.run) problem << "an uncut call is changed";
  for (size_t i = 0; i < one.arguments.size(); ++i) {
    const c10::IValue &before = one.arguments[i], &after = here.arguments[i];
    const bool is_same = before.isTensor()       ? after.isTensor() && before.toTensor().is_same(after.toTensor())
                         : before.isTensorList() ? after.isTensorList()
                                                 : before == after;
    if (!is_same) problem << "argument " << i << " is changed";
  }
  return problem.str();
}

std::string row_text(const std::string& op, const Given& given) {
  const OperatorCase one = call_of(op, given);
  const c10::OperatorHandle found = handle(op);
  const Row row = row_of(found)->row(RowCall(found, one.arguments));
  return RowText{row, {}}.all();
}

at::Tensor zeros(const Sizes& sizes) { return at::zeros(sizes); }

TEST(Rows, OfProductsSumOverWhatNoResultHas) {
  EXPECT_EQ(row_text("aten::linear", {{"input", zeros({2, 3, 4})}, {"weight", zeros({5, 4})}, {"bias", zeros({5})}}),
            "[a b c] [d c] + [d] -> [a b d], c sum");
  EXPECT_EQ(row_text("aten::matmul", {{"self", zeros({2, 3, 4, 5})}, {"other", zeros({1, 5, 6})}}),
            "[a b c d] [1 d e] -> [a b c e], d sum");
}

TEST(Rows, OfAddedProductsHaveATermUnlessItIsScaled) {
  const Given given{{"self", zeros({5})}, {"mat1", zeros({2, 3})}, {"mat2", zeros({3, 5})}};
  EXPECT_EQ(row_text("aten::addmm", given), "[a] [b c] [c a] -> [b a], c sum");
  Given scaled = given;
  scaled.push_back({"beta", 0.5});
  EXPECT_EQ(row_text("aten::addmm", scaled), "[a] [b c] [c a] -> [b a], c whole");
}

TEST(Rows, OfEquationsReadThem) {
  EXPECT_EQ(
      row_text("aten::einsum", {{"equation", "...ij,jk"}, {"tensors", std::vector{zeros({2, 3, 4}), zeros({4, 5})}}}),
      "[a b c] [c d] -> [a b d], c sum");
}

TEST(Rows, OfViewsCutDimsWhereEitherSideDoes) {
  EXPECT_EQ(row_text("aten::view", {{"self", zeros({6, 4})}, {"size", Sizes{2, 3, 2, -1}}}),
            "[(a b) (c d)] -> [a b c d]");
  EXPECT_EQ(row_text("aten::view", {{"self", zeros({6, 4})}, {"size", Sizes{8, 3}}}),
            "[a b] -> [c d], a whole, b whole, c whole, d whole");
  EXPECT_EQ(row_text("aten::view", {{"self", zeros({2, 6, 4})}, {"size", Sizes{2, 8, 3}}}),
            "[a b c] -> [a d e], b whole, c whole, d whole, e whole");
}

TEST(Rows, OfRepeatsHaveAFactorMore) {
  EXPECT_EQ(row_text("aten::repeat", {{"self", zeros({3})}, {"repeats", Sizes{2, 2}}}), "[a] -> [b (c a)]");
  EXPECT_EQ(row_text("aten::repeat_interleave.self_int", {{"self", zeros({3, 4})}, {"repeats", 2}}),
            "[a b] -> [(a b c)]");
  EXPECT_EQ(row_text("aten::expand", {{"self", zeros({1, 4})}, {"size", Sizes{2, 3, -1}}}), "[1 a] -> [b c a]");
}

TEST(Rows, OfAttentionGroupHeads) {
  EXPECT_EQ(row_text("aten::scaled_dot_product_attention", {{"query", zeros({2, 6, 4, 8})},
                                                            {"key", zeros({2, 3, 5, 8})},
                                                            {"value", zeros({2, 3, 5, 7})},
                                                            {"enable_gqa", true}}),
            "[a (b c) d e] [a b f e] [a b f g] -> [a (b c) d g], f whole, e whole");
}

TEST(Rows, OfSlicesArePieces) {
  EXPECT_EQ(row_text("aten::slice.Tensor", {{"self", zeros({3, 8})}, {"dim", 1}, {"start", 2}, {"end", -2}}),
            "[a b] -> [a c], c = b(2, 6)");
  EXPECT_EQ(row_text("aten::slice.Tensor", {{"self", zeros({3, 8})}, {"dim", 1}}), "[a b] -> [a b]");
  EXPECT_EQ(row_text("aten::select.int", {{"self", zeros({3, 8})}, {"dim", 1}, {"index", -1}}),
            "[a b] -> [a], b places");
}

TEST(Rows, OfJoinsAndShiftsArePieces) {
  EXPECT_EQ(row_text("aten::cat", {{"tensors", std::vector{zeros({3, 2}), zeros({1, 2})}}}),
            "[a b] [c b] -> [d b], d = a(0, 3) c(0, 1)");
  EXPECT_EQ(row_text("aten::roll", {{"self", zeros({5})}, {"shifts", Sizes{2}}}), "[a] -> [b], b = a(3, 5) a(0, 3)");
  EXPECT_EQ(row_text("aten::flip", {{"self", zeros({5})}, {"dims", Sizes{0}}}), "[a] -> [b], b = a(0, 5) reversed");
  EXPECT_EQ(row_text("aten::constant_pad_nd", {{"self", zeros({5})}, {"pad", Sizes{2, -1}}}),
            "[a] -> [b], b = constant(0, 2) a(0, 4)");
}

TEST(Rows, OfReductionsNameHowRanksJoin) {
  EXPECT_EQ(row_text("aten::mean.dim", {{"self", zeros({2, 3, 4})}, {"dim", Sizes{0, -1}}, {"keepdim", true}}),
            "[a b c] -> [1 b 1], a mean, c mean");
  EXPECT_EQ(row_text("aten::max.dim", {{"self", zeros({2, 3})}, {"dim", 1}}), "[a b] -> [a] [a], b whole");
  EXPECT_EQ(row_text("aten::softmax.int", {{"self", zeros({2, 3})}, {"dim", 1}}), "[a b] -> [a b], b whole");
}

TEST(Rows, OfChannelsAreGroupsOfChannels) {
  EXPECT_EQ(row_text("aten::group_norm", {{"input", zeros({2, 6, 5})}, {"num_groups", 3}, {"weight", zeros({6})}}),
            "[a (b c) d] [(b c)] -> [a (b c) d], c whole, d whole");
  EXPECT_EQ(row_text("aten::conv1d", {{"input", zeros({2, 6, 5})}, {"weight", zeros({4, 3, 1})}, {"groups", 2}}),
            "[a (b c) d] [(b e) c 1] -> [a (b e) d], c sum");
}

TEST(Rows, OfLookupsArePlaces) {
  const at::Tensor places = at::zeros({2, 3}, at::kLong);
  EXPECT_EQ(row_text("aten::embedding", {{"weight", zeros({5, 4})}, {"indices", places}}),
            "[a b] [c d] -> [c d b], a places");
  EXPECT_EQ(
      row_text("aten::scatter_add", {{"self", zeros({2, 5})}, {"dim", 1}, {"index", places}, {"src", zeros({2, 3})}}),
      "[a b] [a c] [a c] -> [a b], c whole");
}

TEST(Rows, OfBroadcastArgumentsLackWhatIsLarger) {
  EXPECT_EQ(row_text("aten::add.Tensor", {{"self", zeros({2, 1, 4})}, {"other", zeros({3, 1})}}),
            "[a 1 b] [c 1] -> [a c b]");
}

TEST(Rows, HaveTheSizesThatLibtorchGivesAndLeaveUncutCallsAsTheyAre) {
  const QuietWarnings quiet;
  std::mt19937_64 random(1);
  size_t cases = 0;
  for (const NamedCase& one : operator_cases()) {
    int failures = 0;
    for (int i = 0; i < 30 && failures == 0; ++i) {
      std::string problem, text;
      try {
        const std::optional<OperatorCase> made = one.make(random, {});
        if (!made) continue;
        ++cases;
        problem = problem_of(*made);
        std::ostringstream arguments;
        for (const c10::IValue& value : made->arguments)
          if (value.isTensor())
            arguments << value.toTensor().sizes() << " ";
          else
            arguments << value << " ";
        text = arguments.str();
      } catch (const std::exception& error) {
        problem = std::string(error.what()).substr(0, 300);
      }
      EXPECT_EQ(problem, "") << one.name << ", case " << i << ": " << text;
      failures += !problem.empty();
    }
  }
  EXPECT_GT(operator_cases().size(), 150U);
  EXPECT_GT(cases, 25 * operator_cases().size());
}

TEST(Rows, AreOfOperatorsThatLibtorchHas) {
  std::set<std::string, std::less<>> known;
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (!name.name.starts_with("aten::")) continue;
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (!op || !row_of(*op)) continue;
    std::string base = name.name.substr(6);
    known.insert({base, base + "." + name.overload_name});
    if (base.ends_with('_')) base.pop_back();
    known.insert({base, base + "." + name.overload_name});
  }
  for (const std::string_view name : names_with_rows()) EXPECT_TRUE(known.contains(name)) << name;
}

}  // namespace row_test
}  // namespace trireme::testing
