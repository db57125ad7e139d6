// Keys of calls, and what is told of their results.
#include "ownership/sizes.h"

#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tests/support/error_of.h"

namespace trireme::ownership {
namespace sizes {

using at::Tensor;
using c10::IValue;
using testing::error_of;

Key key(const std::vector<IValue>& arguments, uint64_t op = 1) {
  bool is_complete = true;
  const Key key = key_of(op, arguments, is_complete);
  EXPECT_TRUE(is_complete);
  return key;
}

/// Values of every kind that stands among arguments of operators; no two are the same.
std::vector<IValue> values() {
  const Tensor tensor = at::ones({2, 3});
  const auto with = [&](const std::function<Tensor(const Tensor&)>& change) { return IValue(change(tensor)); };
  c10::List<std::optional<Tensor>> optional_tensors;
  optional_tensors.push_back(tensor);
  optional_tensors.push_back(std::optional<Tensor>());
  c10::List<std::optional<Tensor>> other_optional_tensors;
  other_optional_tensors.push_back(std::optional<Tensor>());
  other_optional_tensors.push_back(tensor);
  return {
      IValue(),
      tensor,
      with([](const Tensor& t) { return t.to(at::kDouble); }),
      with([](const Tensor& t) { return t.t().contiguous(); }),
      with([](const Tensor& t) { return t.t().contiguous().t(); }),
      with([](const Tensor& t) { return t.view({6}); }),
      with([](const Tensor& t) {
        return t.view({1, 2, 3});
      }),
      with([](const Tensor& t) { return t.clone().requires_grad_(); }),
      with([](const Tensor& t) { return t.to(at::kComplexFloat); }),
      with([](const Tensor& t) { return t.to(at::kComplexFloat).conj(); }),
      with([](const Tensor& t) { return at::imag(t.to(at::kComplexFloat)).contiguous()._neg_view(); }),
      Tensor(),
      0,
      1,
      -1,
      0.0,
      -0.0,
      1.0,
      1.5,
      true,
      false,
      "a",
      "b",
      "",
      "ab",
      std::string(9, 'a'),
      std::string(17, 'a'),
      c10::complex<double>(1, 2),
      c10::complex<double>(2, 1),
      c10::Device("cpu"),
      c10::Device("meta"),
      std::vector<int64_t>{},
      std::vector<int64_t>{1},
      std::vector<int64_t>{1, 2},
      std::vector<int64_t>{2, 1},
      std::vector<double>{1},
      std::vector<double>{1, 2},
      std::vector<bool>{true},
      std::vector<bool>{true, false},
      std::vector<Tensor>{tensor},
      std::vector<Tensor>{tensor, tensor},
      optional_tensors,
      other_optional_tensors,
  };
}

TEST(Keys, OfEqualCallsAreEqualAndOfOthersNot) {
  const std::vector<IValue> one = values(), other = values();  // other tensors of the same sizes
  for (size_t i = 0; i < one.size(); ++i)
    for (size_t j = 0; j < other.size(); ++j)
      EXPECT_EQ(key({one[i]}) == key({other[j]}), i == j) << i << ": " << one[i] << "; " << j << ": " << other[j];
}

TEST(Keys, AreOfTheOperatorAndTheOrderOfArguments) {
  EXPECT_FALSE(key({1, 2}) == key({2, 1}));
  EXPECT_FALSE(key({1}, 1) == key({1}, 2));
  EXPECT_FALSE(key({std::vector<int64_t>{1}, 2}) == key({std::vector<int64_t>{1, 2}}));
  EXPECT_FALSE(key({IValue(), 1}) == key({1, IValue()}));
}

TEST(Keys, AreNotOfTheNumbersInATensor) {
  EXPECT_TRUE(key({at::ones({2})}) == key({at::zeros({2})}));
  const auto generator = at::make_generator<at::CPUGeneratorImpl>(1),
             other = at::make_generator<at::CPUGeneratorImpl>(2);
  EXPECT_TRUE(key({generator}) == key({other}));
}

TEST(Keys, AreOfTheStateThatOperatorsDependOn) {
  const Key usual = key({at::ones({2})});
  {
    const at::NoGradGuard no_grad;
    EXPECT_FALSE(key({at::ones({2})}) == usual);
  }
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Key autocast = key({at::ones({2})});
  at::autocast::set_autocast_dtype(at::kCPU, at::kHalf);
  const Key in_fp16 = key({at::ones({2})});
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_FALSE(autocast == usual);
  EXPECT_FALSE(in_fp16 == autocast);
  const auto before = torch::get_default_dtype();
  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  const Key in_double = key({at::ones({2}, at::kFloat)});
  torch::set_default_dtype(before);
  EXPECT_FALSE(in_double == usual);
  EXPECT_TRUE(key({at::ones({2})}) == usual);
}

TEST(Keys, SayWhereAnArgumentCannotBePartOfThem) {
  bool is_complete = true;
  (void)key_of(1, {IValue(c10::ivalue::Tuple::create(1, 2))}, is_complete);
  EXPECT_FALSE(is_complete);
}

/// Results of calls with these arguments.
struct Call {
  std::string name;
  std::vector<IValue> arguments, results;
};

std::vector<Call> calls() {
  const Tensor x = at::ones({2, 3}), y = at::ones({3});
  const Tensor complex = at::ones({2}, at::kComplexFloat);
  return {
      {"new", {x}, {at::ones({2, 2}, at::kDouble)}},
      {"of strides", {x}, {at::ones({3, 2}).t()}},
      {"needs a gradient", {x}, {at::ones({2}).requires_grad_()}},
      {"view", {x}, {x.t()}},
      {"argument", {y, x}, {x}},
      {"none", {x}, {}},
      {"undefined", {x}, {Tensor()}},
      {"several", {x, y}, {at::ones({1}), y, x.view({6}), Tensor()}},
      {"list", {std::vector<Tensor>{x, y}}, {std::vector<Tensor>{y.slice(0, 1), at::ones({4})}}},
      {"empty list", {x}, {std::vector<Tensor>{}}},
      {"conjugated", {complex}, {complex.conj()}},
      {"negated", {complex}, {at::imag(complex.conj())}},
      {"scalar", {x}, {at::ones({})}},
      {"empty", {x}, {at::ones({0, 3})}},
  };
}

TEST(ToldCalls, ComeBackFromTheirBytes) {
  for (const Call& call : calls()) {
    const ToldCall told = told_of(call.name, ArgumentTensors(call.arguments), call.results);
    EXPECT_EQ(told.returns.size(), call.results.size());
    EXPECT_EQ(told_from(bytes_of(told)), told) << call.name;
    EXPECT_TRUE(holds(told, ArgumentTensors(call.arguments), call.results)) << call.name;
  }
}

TEST(ToldCalls, HoldForTheirOwnResultsAlone) {
  const std::vector<Call> all = calls();
  for (const Call& one : all) {
    const ToldCall told = told_of(one.name, ArgumentTensors(one.arguments), one.results);
    for (const Call& other : all) {
      if (one.arguments.size() != other.arguments.size()) continue;
      EXPECT_EQ(holds(told, ArgumentTensors(other.arguments), other.results), one.name == other.name)
          << one.name << " and " << other.name;
    }
  }
}

TEST(ToldCalls, SayWhatResultsAre) {
  std::map<std::string, ToldCall> told;
  for (const Call& call : calls()) told[call.name] = told_of(call.name, ArgumentTensors(call.arguments), call.results);
  const auto first = [&](const std::string& name) { return told.at(name).returns.at(0).tensors.at(0); };
  EXPECT_EQ(at::IntArrayRef(first("of strides").strides), at::IntArrayRef({1, 2}));
  EXPECT_TRUE(first("needs a gradient").requires_grad);
  EXPECT_EQ(first("view").shares_with, 0);
  EXPECT_EQ(first("argument").is_argument, 1);
  EXPECT_EQ(first("argument").shares_with, -1);
  EXPECT_FALSE(first("undefined").is_defined);
  EXPECT_EQ(first("list").shares_with, 1);  // of the tensors, those in lists counted
  EXPECT_TRUE(first("conjugated").is_conjugated);
  EXPECT_TRUE(first("negated").is_negated);
  EXPECT_TRUE(told.at("view").is_view());
  EXPECT_FALSE(told.at("several").is_view());
  EXPECT_SAYS(told.at("new").text(), "[2, 2]");
}

TEST(ToldCalls, RefuseAResultWithoutAStorage) {
  const std::vector<IValue> arguments{at::ones({2})}, results{at::ones({2}).to_sparse()};
  EXPECT_SAYS(error_of<Error>([&] { (void)told_of("aten::to_sparse", ArgumentTensors(arguments), results); }),
              "aten::to_sparse");
}

TEST(ToldCalls, RefuseBytesInPart) {
  const std::vector<IValue> arguments{at::ones({2})}, results{at::ones({2, 3})};
  const std::string bytes = bytes_of(told_of("op", ArgumentTensors(arguments), results));
  for (size_t length = 0; length < bytes.size(); length += 5)
    EXPECT_SAYS(error_of<CommError>([&] { (void)told_from(bytes.substr(0, length)); }),
                "smp: sizes of an operator's results were told in part");
}

}  // namespace sizes
}  // namespace trireme::ownership
