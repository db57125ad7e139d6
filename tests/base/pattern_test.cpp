#include "trireme/base/pattern.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(Pattern, PlacesAreFilledInOrder) {
  EXPECT_EQ(filled("{} makes {} replicas", {"degrees.replicas=2", "2"}), "degrees.replicas=2 makes 2 replicas");
  EXPECT_EQ(filled("nothing", {"to fill"}), "nothing");
  EXPECT_EQ(filled("{}, {}", {"{}"}), "{}, {}");  // a value is no pattern
}

TEST(Pattern, AFilledTextIsKnownAgainWithinALongerOne) {
  const std::string_view pattern = "shared by {}, and these are on {}; move them";
  EXPECT_TRUE(has_filled("rank 0: " + filled(pattern, {"hosts", "a GPU"}) + ". Spent", pattern));
  EXPECT_FALSE(has_filled("shared by hosts; move them", pattern));
  EXPECT_FALSE(has_filled(", and these are on a GPU; move them: shared by hosts", pattern));
  EXPECT_TRUE(has_filled("anything", ""));
}

}  // namespace
}  // namespace trireme
