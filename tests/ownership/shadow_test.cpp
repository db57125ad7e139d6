// A tensor whose numbers are on another stage: all that does not need its numbers is right, all else says where they
// are.
#include "ownership/shadow.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/error_of.h"

namespace trireme::ownership {
namespace shadow {

using at::Tensor;
using testing::error_of;

Tensor of(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype = at::kFloat) {
  return make_shadow({.sizes = at::DimVector(sizes), .strides = at::DimVector(strides), .dtype = dtype}, c10::kCPU,
                     {1, false, 4});
}

TEST(Shadow, HasAllButItsNumbers) {
  const Tensor shadow = of({3, 4}, {1, 3}, at::kBFloat16);
  EXPECT_EQ(shadow.sizes(), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(shadow.strides(), (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(shadow.scalar_type(), at::kBFloat16);
  EXPECT_TRUE(shadow.device().is_cpu());
  EXPECT_EQ(shadow.storage().nbytes(), 24U);
  EXPECT_TRUE(shadow.is_leaf());
  EXPECT_FALSE(shadow.requires_grad());
  EXPECT_EQ(at::ones({2}, shadow.options()).scalar_type(), at::kBFloat16);
  EXPECT_EQ(*remote_home(*shadow.storage().unsafeGetStorageImpl()), (Home{1, false, 4}));
  EXPECT_EQ(remote_home(*at::ones({2}).storage().unsafeGetStorageImpl()), nullptr);
}

TEST(Shadow, HasTheLazyBitsOfComplexViews) {
  ToldTensor told{.sizes = {2}, .strides = {1}, .dtype = at::kComplexFloat, .is_conjugated = true};
  EXPECT_TRUE(make_shadow(told, c10::kCPU, {}).is_conj());
  told = {.sizes = {2}, .strides = {2}, .is_negated = true};
  EXPECT_TRUE(make_shadow(told, c10::kCPU, {}).is_neg());
}

TEST(Shadow, ViewsAreViewsOfIt) {
  const Tensor shadow = of({3, 4}, {4, 1});
  const Tensor view = shadow.t().slice(0, 1, 3).unsqueeze(0);
  EXPECT_EQ(view.sizes(), (std::vector<int64_t>{1, 2, 3}));
  EXPECT_EQ(view.strides(), (std::vector<int64_t>{2, 1, 4}));
  EXPECT_TRUE(view.is_view());
  EXPECT_TRUE(view._base().is_same(shadow));
  EXPECT_EQ(remote_home(*view.storage().unsafeGetStorageImpl())->stage, 1);
}

struct Reader {
  const char* name;
  std::function<void(const Tensor&)> read;
};

TEST(Shadow, ItsReadersSayWhereItsNumbersAre) {
  const std::vector<Reader> readers{
      {"const_data_ptr", [](const Tensor& t) { (void)t.const_data_ptr(); }},
      {"mutable_data_ptr", [](const Tensor& t) { (void)t.mutable_data_ptr(); }},
      {"data_ptr", [](const Tensor& t) { (void)t.data_ptr(); }},
      {"item", [](const Tensor& t) { (void)t[0][0].item(); }},
      {"add", [](const Tensor& t) { (void)(t + 1); }},
      {"add of a view", [](const Tensor& t) { (void)(t.t() + 1); }},
      {"mm",
       [](const Tensor& t) {
         (void)at::mm(at::ones({2, 3}), t);
       }},
      {"clone", [](const Tensor& t) { (void)t.clone(); }},
      {"to", [](const Tensor& t) { (void)t.to(at::kDouble); }},
      {"equal",
       [](const Tensor& t) {
         (void)at::equal(t, at::ones({3, 4}));
       }},
      {"copy from",
       [](const Tensor& t) {
         at::ones({3, 4}).copy_(t);
       }},
      {"copy into",
       [](const Tensor& t) {
         t.copy_(at::ones({3, 4}));
       }},
      {"fill_", [](const Tensor& t) { t.fill_(1); }},
      {"nonzero", [](const Tensor& t) { (void)t.nonzero(); }},
      {"index",
       [](const Tensor& t) {
         (void)at::ones({3, 4}).index({t > 0});
       }},
      {"print",
       [](const Tensor& t) {
         std::ostringstream text;
         text << t;
       }},
      {"save",
       [](const Tensor& t) {
         std::ostringstream file;
         torch::save(t, file);
       }},
  };
  const at::NoGradGuard no_grad;
  for (const Reader& reader : readers) {
    EXPECT_SAYS(error_of([&] {
                  reader.read(of({3, 4}, {4, 1}));
                }) + reader.name,
                "this tensor was computed by stage 1, and its numbers are there alone");
    const Tensor parameter = at::ones({3, 4});
    make_remote(parameter, {2, true, 0}, "h.7.weight");
    EXPECT_SAYS(error_of([&] { reader.read(parameter); }) + reader.name,
                "'h.7.weight' is on stage 2: inside of a step function every stage may use it in operators, elsewhere "
                "stage 2 alone");
  }
}

TEST(Shadow, OfAParameterKeepsTheParameter) {
  const Tensor parameter = at::ones({3, 4}).requires_grad_();
  make_remote(parameter, {2, true, 0}, "weight");
  EXPECT_TRUE(parameter.requires_grad());
  EXPECT_TRUE(parameter.is_leaf());
  EXPECT_EQ(parameter.sizes(), (std::vector<int64_t>{3, 4}));
  EXPECT_EQ(*remote_home(*parameter.storage().unsafeGetStorageImpl()), (Home{2, true, 0}));
}

TEST(Shadow, OfAResultHasAPlaceInTheGraph) {
  const Tensor parameter = at::ones({3}).requires_grad_(), shadow = of({2}, {1});
  torch::autograd::set_history(shadow, make_stub({parameter, at::ones({2})}));
  EXPECT_TRUE(shadow.requires_grad());
  EXPECT_FALSE(shadow.is_leaf());
  EXPECT_EQ(shadow.grad_fn()->name(), "TriremeOtherStage");
  EXPECT_EQ(shadow.grad_fn()->num_outputs(), 2U);
  EXPECT_FALSE(shadow.detach().requires_grad());
}

TEST(Shadow, ABackwardPassFromItSaysWhatToCall) {
  const Tensor parameter = at::ones({2}).requires_grad_(), shadow = of({2}, {1});
  torch::autograd::set_history(shadow, make_stub({parameter}));
  EXPECT_SAYS(error_of([&] { shadow.backward(at::ones({2})); }),
              "smp: a backward pass was started inside of a step function");
  EXPECT_FALSE(parameter.grad().defined());
}

TEST(Shadow, AWriteIntoItGivesItAVersionAndAHistory) {
  const Tensor parameter = at::ones({4}).requires_grad_(), shadow = of({3, 4}, {4, 1}), view = shadow[1];
  note_write(shadow, {shadow, parameter}, /*requires_grad=*/true);
  EXPECT_EQ(shadow._version(), 1U);
  EXPECT_EQ(view._version(), 1U);
  EXPECT_TRUE(shadow.requires_grad());
  EXPECT_TRUE(view.requires_grad());
  note_write(view, {view}, /*requires_grad=*/false);
  EXPECT_EQ(shadow._version(), 2U);
}

TEST(Shadow, AWriteIntoAViewOfItIsAWriteIntoIt) {
  const Tensor parameter = at::ones({4}).requires_grad_(), shadow = of({3, 4}, {4, 1}), view = shadow[1];
  note_write(view, {view, parameter}, /*requires_grad=*/true);
  EXPECT_TRUE(shadow.requires_grad());
  EXPECT_NE(shadow.grad_fn(), nullptr);
  EXPECT_EQ(shadow._version(), 1U);
}

}  // namespace shadow
}  // namespace trireme::ownership
