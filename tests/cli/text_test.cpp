#include "cli/text.h"

#include <gtest/gtest.h>

namespace trireme::cli {
namespace {

TEST(Printable, KeepsTextAndReplacesWhatATerminalWouldObey) {
  EXPECT_EQ(printable("def f():\n\treturn 'ä€😀'\n"), "def f():\n\treturn 'ä€😀'\n");
  EXPECT_EQ(printable("a\x1b[2Jb"), "a\uFFFD[2Jb");
  EXPECT_EQ(printable("\r\x7f"), "\uFFFD\uFFFD");
}

TEST(Printable, ReplacesInvalidUtf8ByteByByte) {
  EXPECT_EQ(printable("\xff"), "\uFFFD");
  EXPECT_EQ(printable("\xc3"), "\uFFFD");                      // cut short
  EXPECT_EQ(printable("\xc0\xaf"), "\uFFFD\uFFFD");            // an overlong '/'
  EXPECT_EQ(printable("\xed\xa0\x80"), "\uFFFD\uFFFD\uFFFD");  // half of a surrogate pair
}

}  // namespace
}  // namespace trireme::cli
