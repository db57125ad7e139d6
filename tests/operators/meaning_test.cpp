// The meaning of operators for tensors of one shape, read off their rows.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <sstream>
#include <string>

#include "trireme/operators/row.h"
#include "trireme/operators/rules.h"

namespace trireme::testing {
namespace meaning_test {

c10::OperatorHandle handle(const std::string& op) {
  const size_t dot = op.find('.');
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + op.substr(0, dot)).c_str(),
                                                        dot == op.npos ? "" : op.substr(dot + 1).c_str());
}

/// Those of `operators` for which `is_so` is false.
template <typename IsSo>
std::string others(const std::string& operators, const IsSo& is_so) {
  std::istringstream names(operators);
  std::string found;
  for (std::string name; names >> name;)
    if (!is_so(meaning_of(handle(name)))) found += name + " ";
  return found;
}

TEST(OperatorMeanings, TellWhatComputesElementByElement) {
  const auto is_each = [](const OperatorMeaning& one) { return one.is_each; };
  EXPECT_EQ(
      others("mul.Tensor mul_.Tensor div_.Scalar pow.Tensor_Scalar sqrt_ reciprocal lerp_.Scalar maximum addcmul_ "
             "clone detach alias isnan clamp_ clamp.Tensor nan_to_num_ masked_fill_.Scalar where.self eq.Tensor "
             "_to_copy zeros_like fill_.Scalar copy_ logical_not bitwise_and.Tensor relu erf",
             is_each),
      "");
  // By positions, by other elements, at random, or with several results.
  const std::string mixed =
      "tril transpose.int flip roll softmax.int cumsum sum max.dim sort normal_ bernoulli randn_like native_dropout "
      "prelu isin.Tensor_Tensor frexp.Tensor view mm cat index_select unique_consecutive";
  EXPECT_EQ(others(mixed, is_each), mixed + " ");
}

TEST(OperatorMeanings, TellHowWholeReductionsJoin) {
  const auto joins = [](FactorKind kind) {
    return [kind](const OperatorMeaning& one) { return one.reduction == kind; };
  };
  EXPECT_EQ(others("sum nansum count_nonzero sum.dim_IntList", joins(FactorKind::kSum)), "");
  EXPECT_EQ(others("mean", joins(FactorKind::kMean)), "");
  EXPECT_EQ(others("max amax", joins(FactorKind::kMaximum)), "");
  EXPECT_EQ(others("min amin", joins(FactorKind::kMinimum)), "");
  EXPECT_EQ(others("any", joins(FactorKind::kAny)), "");
  EXPECT_EQ(others("all", joins(FactorKind::kAll)), "");
  const auto is_none = [](const OperatorMeaning& one) {
    return one.reduction.value_or(FactorKind::kWhole) == FactorKind::kWhole;
  };
  EXPECT_EQ(others("std var median norm.Scalar logsumexp argmax max.dim softmax.int mul.Tensor", is_none), "");
}

TEST(OperatorMeanings, TellWhatReadsNoElementOfTheFirstArgument) {
  const auto reads_none = [](const OperatorMeaning& one) { return !one.reads_first; };
  EXPECT_EQ(
      others("zeros_like randn_like new_zeros new_full normal_ uniform_ bernoulli_.float geometric_ cauchy_ zero_ "
             "fill_.Scalar copy_",
             reads_none),
      "");
  const std::string readers = "bernoulli add_.Tensor clone dropout_ masked_fill_.Scalar index_put_";
  EXPECT_EQ(others(readers, reads_none), readers + " ");
  EXPECT_EQ(others("detach alias lift_fresh", [](const OperatorMeaning& one) { return one.is_alias; }), "");
}

TEST(OperatorMeanings, TellWhoseSizesDependOnValues) {
  for (const char* const name : {"nonzero", "masked_select", "where", "unique_consecutive", "combinations", "bincount"})
    EXPECT_EQ(result_sizes_of(handle(name)), ResultSizes::kByValues) << name;
  for (const char* const name : {"add.Tensor", "where.self", "mm", "narrow"})
    EXPECT_EQ(result_sizes_of(handle(name)), ResultSizes::kBySizes) << name;
  EXPECT_EQ(result_sizes_of(handle("index.Tensor")), ResultSizes::kByMasks);
}

TEST(OperatorMeanings, MultiplyAddsAreTheProductOfAllFactors) {
  const auto of = [](const std::string& name, std::vector<std::vector<int64_t>> sizes) {
    std::vector<c10::IValue> arguments;
    for (const auto& one : sizes) arguments.emplace_back(at::zeros(one));
    const c10::OperatorHandle op = handle(name);
    while (arguments.size() < op.schema().arguments().size()) arguments.emplace_back();
    return row_of(op)->row(RowCall(op, arguments)).multiply_adds();
  };
  EXPECT_EQ(of("linear", {{2, 3, 5}, {7, 5}}), 2 * 3 * 5 * 7);
  EXPECT_EQ(of("addmm", {{7}, {3, 5}, {5, 7}}), 3 * 5 * 7);
  EXPECT_EQ(of("matmul", {{4, 1, 3, 5}, {2, 5, 7}}), 4 * 2 * 3 * 5 * 7);
  EXPECT_EQ(of("mv", {{3, 5}, {5}}), 3 * 5);
}

}  // namespace meaning_test
}  // namespace trireme::testing
