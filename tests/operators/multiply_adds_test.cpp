// The work of operators: closed forms, forward and backward.
#include "trireme/operators/multiply_adds.h"

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace trireme::testing {
namespace multiply_adds_test {

c10::OperatorHandle handle(const std::string& name) {
  const size_t dot = name.find('.');
  return c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name.substr(0, dot)).c_str(),
                                                        dot == std::string::npos ? "" : name.substr(dot + 1).c_str());
}

/// The multiply-adds of a call whose first arguments are given; the others are None.
int64_t of(const std::string& name, std::vector<c10::IValue> arguments) {
  const c10::OperatorHandle op = handle(name);
  while (arguments.size() < op.schema().arguments().size()) arguments.emplace_back();
  return multiply_adds(RowCall(op, arguments));
}

at::Tensor sized(const std::vector<int64_t>& sizes) { return at::zeros(sizes); }

TEST(MultiplyAdds, OfAProductAreTheElementsOfTheLeftTimesTheColumnsOfTheRight) {
  EXPECT_EQ(of("mm", {sized({3, 5}), sized({5, 7})}), 3 * 5 * 7);
  EXPECT_EQ(of("bmm", {sized({2, 3, 5}), sized({2, 5, 7})}), 2 * 3 * 5 * 7);
  EXPECT_EQ(of("addmm", {sized({7}), sized({3, 5}), sized({5, 7})}), 3 * 5 * 7);
  EXPECT_EQ(of("addmm_", {sized({3, 7}), sized({3, 5}), sized({5, 7})}), 3 * 5 * 7);
  EXPECT_EQ(of("mm.out", {sized({3, 5}), sized({5, 7}), sized({3, 7})}), 3 * 5 * 7);
  EXPECT_EQ(of("baddbmm", {sized({2, 3, 7}), sized({2, 3, 5}), sized({2, 5, 7})}), 2 * 3 * 5 * 7);
  EXPECT_EQ(of("addbmm", {sized({3, 7}), sized({2, 3, 5}), sized({2, 5, 7})}), 2 * 3 * 5 * 7);
  EXPECT_EQ(of("mv", {sized({3, 5}), sized({5})}), 3 * 5);
  EXPECT_EQ(of("addmv", {sized({3}), sized({3, 5}), sized({5})}), 3 * 5);
  EXPECT_EQ(of("dot", {sized({5}), sized({5})}), 5);
}

TEST(MultiplyAdds, OfGroupedProductsAreThoseOfEachRowByTheMatrixOfItsGroup) {
  EXPECT_EQ(of("_grouped_mm", {sized({6, 5}), sized({2, 5, 7})}), 6 * 5 * 7);
  EXPECT_EQ(of("_grouped_mm", {sized({2, 3, 5}), sized({2, 5, 7})}), 2 * 3 * 5 * 7);
  EXPECT_EQ(of("_grouped_mm", {sized({2, 3, 5}), sized({5, 8})}), 3 * 5 * 8);
  EXPECT_EQ(of("_grouped_mm", {sized({3, 6}), sized({6, 7})}), 3 * 6 * 7);
}

struct Convolution {
  std::vector<int64_t> input, weight, result;
  int64_t stride = 1, padding = 0, dilation = 1;
  bool is_transposed = false;
  int64_t groups = 1;
};

/// Multiply-adds of each element of the result (of the input, transposed), counted one by one.
int64_t by_elements(const Convolution& one) {
  const std::vector<int64_t>& at = one.is_transposed ? one.input : one.result;
  int64_t made = at[0];  // samples
  for (size_t d = 2; d < at.size(); ++d) made *= at[d] * one.weight[d];
  return made * one.weight[0] * one.weight[1];
}

TEST(MultiplyAdds, OfAConvolutionAreItsWeightAtEachPlaceAndBackwardOnceForEachGradient) {
  const std::vector<Convolution> cases = {
      {{2, 3, 9}, {4, 3, 3}, {2, 4, 7}},
      {{2, 3, 9, 8}, {4, 3, 3, 2}, {2, 4, 5, 5}, 2, 1, 1},
      {{2, 4, 9, 9}, {6, 2, 3, 3}, {2, 6, 5, 5}, 1, 0, 2, false, 2},
      {{2, 4, 5, 5}, {4, 3, 3, 3}, {2, 3, 11, 11}, 2, 0, 1, true},
      {{1, 2, 4, 4, 4}, {3, 2, 2, 2, 2}, {1, 3, 3, 3, 3}},
  };
  for (const Convolution& one : cases) {
    const std::vector<int64_t> stride(one.input.size() - 2, one.stride), padding(one.input.size() - 2, one.padding),
        dilation(one.input.size() - 2, one.dilation), none(one.input.size() - 2, 0);
    const at::Tensor input = sized(one.input), weight = sized(one.weight);
    const at::Tensor result =
        at::convolution(input, weight, {}, stride, padding, dilation, one.is_transposed, none, one.groups);
    ASSERT_EQ(result.sizes(), at::IntArrayRef(one.result));
    const int64_t once = by_elements(one);
    EXPECT_EQ(of("convolution", {input, weight, {}, stride, padding, dilation, one.is_transposed, none, one.groups}),
              once);
    for (const auto& [mask, gradients] : std::vector<std::pair<std::vector<bool>, int>>{
             {{true, true, true}, 2}, {{false, true, false}, 1}, {{false, false, true}, 0}}) {
      c10::List<bool> asked;
      for (const bool one_mask : mask) asked.push_back(one_mask);
      EXPECT_EQ(of("convolution_backward",
                   {result, input, weight, {}, stride, padding, dilation, one.is_transposed, none, one.groups, asked}),
                once * gradients);
    }
  }
}

/// The multiply-adds that the row of a call tells.
double by_row(const std::string& name, std::vector<c10::IValue> arguments) {
  const c10::OperatorHandle op = handle(name);
  while (arguments.size() < op.schema().arguments().size())
    arguments.push_back(op.schema().arguments()[arguments.size()].default_value().value_or(c10::IValue()));
  return row_of(op)->row(RowCall(op, arguments)).multiply_adds();
}

using Sizes = std::vector<int64_t>;

TEST(MultiplyAdds, OfTheRowOfAConvolutionAreItsWeightAtEachPlace) {
  // [2, 4, 7]: the weight, of 4 * 3 * 3 elements, at 7 places of 2 samples.
  EXPECT_EQ(by_row("conv1d", {sized({2, 3, 9}), sized({4, 3, 3})}), 2 * 7 * 4 * 3 * 3);
  EXPECT_EQ(by_row("conv1d", {sized({3, 9}), sized({4, 3, 3})}), 7 * 4 * 3 * 3);  // of one sample
  EXPECT_EQ(by_row("conv2d", {sized({2, 3, 9, 8}), sized({4, 3, 3, 2}), {}, Sizes{2, 2}, Sizes{1, 1}}),
            2 * (5 * 5) * 4 * 3 * (3 * 2));
  EXPECT_EQ(by_row("conv2d.padding", {sized({2, 3, 9, 8}), sized({4, 3, 3, 3}), {}, Sizes{1, 1}, "same"}),
            2 * (9 * 8) * 4 * 3 * (3 * 3));
  EXPECT_EQ(by_row("conv3d", {sized({1, 2, 4, 4, 4}), sized({3, 2, 2, 2, 2})}), (3 * 3 * 3) * 3 * 2 * (2 * 2 * 2));
  EXPECT_EQ(by_row("conv2d", {sized({2, 3, 9, 8}), sized({4, 3, 1, 1})}), 2 * (9 * 8) * 4 * 3);
  // Groups of 2 channels each; of 1 each, depthwise.
  EXPECT_EQ(by_row("conv2d", {sized({2, 4, 9, 9}), sized({6, 2, 3, 3}), {}, Sizes{1, 1}, Sizes{0, 0}, Sizes{2, 2}, 2}),
            2 * (5 * 5) * 6 * 2 * (3 * 3));
  EXPECT_EQ(by_row("conv2d", {sized({2, 4, 9, 9}), sized({4, 1, 3, 3}), {}, Sizes{1, 1}, Sizes{0, 0}, Sizes{1, 1}, 4}),
            2 * (7 * 7) * 4 * (3 * 3));
  // At each place of the input.
  EXPECT_EQ(by_row("conv_transpose2d.input", {sized({2, 4, 5, 5}), sized({4, 3, 3, 3}), {}, Sizes{2, 2}}),
            2 * (5 * 5) * 4 * 3 * (3 * 3));
  EXPECT_EQ(by_row("conv_transpose1d", {sized({2, 4, 5}), sized({4, 3, 3}), {}, Sizes{2}, Sizes{0}, Sizes{1}, 2}),
            2 * 5 * 4 * 3 * 3);
}

TEST(MultiplyAdds, OfAttentionAreTwoProductsForwardAndFiveBackward) {
  // B 2 samples, H 6 heads of queries over 3 of keys, S 5 queries, T 7 keys, D 4, V 8.
  const at::Tensor query = sized({2, 6, 5, 4}), key = sized({2, 3, 7, 4}), value = sized({2, 3, 7, 8});
  const int64_t pairs = 2 * 6 * 5 * 7;
  for (const char* const name : {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
                                 "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
                                 "_scaled_dot_product_cudnn_attention"})
    EXPECT_EQ(of(name, {query, key, value}), pairs * (4 + 8)) << name;
  for (const char* const name :
       {"_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention_backward"})
    EXPECT_EQ(of(name, {sized({2, 6, 5, 8}), query, key, value}), pairs * (3 * 4 + 2 * 8)) << name;
}

TEST(MultiplyAdds, AreNoneOfWhatIsMadeOfOtherOperatorsAndUnknownOfKernelsThatHideProducts) {
  for (const char* const name : {"linear", "matmul", "einsum", "mul.Tensor", "add.Tensor", "softmax.int"})
    EXPECT_EQ(work_of(handle(name)), Work::kNone) << name;
  for (const char* const name : {"lstm.input", "_trilinear", "_transformer_encoder_layer_fwd"})
    EXPECT_EQ(work_of(handle(name)), Work::kUnknown) << name;
  for (const char* const name : {"mm", "convolution", "scaled_dot_product_attention"})
    EXPECT_EQ(work_of(handle(name)), Work::kCounted) << name;
}

}  // namespace multiply_adds_test
}  // namespace trireme::testing
