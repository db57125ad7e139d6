#include "trireme/base/utf8.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

TEST(Utf8, IsEveryCodePointInItsShortestForm) {
  for (const char* text : {"", "plain", "\xc3\xa9", "\xe2\x82\xac", "\xf0\x9f\x98\x80"})
    EXPECT_TRUE(is_utf8(text)) << text;
  for (const char* text : {"\xff", "\xc3", "\xc0\xaf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf5\x80\x80\x80", "a\x80"})
    EXPECT_FALSE(is_utf8(text)) << text;
}

TEST(Excerpt, IsShortAndPlain) {
  EXPECT_EQ(excerpt("h\xc3\xa9llo\n\xff"), "h\xc3\xa9llo??");
  EXPECT_EQ(excerpt("abcdef", 3), "abc…");
  EXPECT_EQ(excerpt("ab\xc3\xa9", 3), "ab…");  // no half of a code point
  EXPECT_EQ(excerpt("abc", 3), "abc");
}

}  // namespace
}  // namespace trireme
