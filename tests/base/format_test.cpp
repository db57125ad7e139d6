#include "trireme/base/format.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(Format, GroupsDigitsByThousandsAndNoSign) {
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1234567), "1,234,567");
  EXPECT_EQ(grouped(-123456), "-123,456");
}

TEST(Format, GivesSizesTheUnitThatKeepsThemBelowAThousand) {
  EXPECT_EQ(size_text(999), "999 bytes");
  EXPECT_EQ(size_text(1500), "1.5 kB");
  EXPECT_EQ(size_text(2.5e9, 2), "2.50 GB");
}

}  // namespace
}  // namespace trireme
