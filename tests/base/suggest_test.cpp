#include "trireme/base/suggest.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(Suggest, FindsTheNearestName) {
  EXPECT_EQ(closest_name("gradient_cliping", {"gradient_accumulation_steps", "gradient_clipping"}),
            "gradient_clipping");
  EXPECT_EQ(closest_name("stgae", {"stage"}), "stage");  // two neighbours swapped: one edit
  EXPECT_EQ(closest_name("ADAMw", {"Adam", "AdamW"}), "AdamW");
}

TEST(Suggest, FindsANameWithFewerOrMoreWordsWhereNoneIsNear) {
  EXPECT_EQ(closest_name("batch-size", {"ranks", "batch"}), "batch");
  EXPECT_EQ(closest_name("data", {"dat", "data-format"}), "dat");  // near: comes first
  EXPECT_EQ(closest_name("save", {"save-every"}), "save-every");
  EXPECT_EQ(closest_name("saver", {"save-every"}), "");
}

TEST(Suggest, SaysNothingWhenNothingIsNear) {
  EXPECT_EQ(closest_name("colour", {"stage", "lr"}), "");
  EXPECT_EQ(closest_name("lr", {"eps"}), "");
  EXPECT_EQ(closest_name("abxy", {"abcd"}), "");  // half of it would change
  EXPECT_EQ(closest_name("anything", {}), "");
}

TEST(Suggest, PrefersTheFirstOfEquallyNearNames) { EXPECT_EQ(closest_name("bata1", {"beta1", "data1"}), "beta1"); }

TEST(Suggest, AsksAQuestionOnlyWhenThereIsAnAnswer) {
  EXPECT_EQ(did_you_mean("stag", {"stage"}), " Did you mean `stage`?");
  EXPECT_EQ(did_you_mean("xyz", {"stage"}), "");
}

}  // namespace
}  // namespace trireme
