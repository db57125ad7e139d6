// Patterns that std::regex alone answers with the end of the process, or never.
#include "trireme/base/name_pattern.h"

#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::named_error_of;

std::string refusal(const std::string& pattern) {
  return named_error_of([&] { const NamePattern compiled(pattern, "key"); });
}

TEST(NamePattern, FindsBeginsAndEndsAsARegularExpressionDoes) {
  const NamePattern block("(^|\\.)[0-9]+\\.", "key");
  EXPECT_EQ(block.end_in("layers.12.mlp.3.weight"), 10u);
  EXPECT_EQ(block.end_in("lm_head.weight"), std::nullopt);
  EXPECT_TRUE(NamePattern("mlp", "key").is_in("layers.0.mlp.weight"));
  EXPECT_FALSE(NamePattern("mlp", "key").begins("layers.0.mlp.weight"));
  EXPECT_TRUE(NamePattern("layers", "key").begins("layers.0.mlp.weight"));
  EXPECT_FALSE(NamePattern("linear", "key").is_in("Linear"));
  EXPECT_TRUE(NamePattern("linear", "key", NamePattern::Case::kIgnored).is_in("Linear"));
  // The first way that matches, not the longest, whatever the pattern's form.
  EXPECT_EQ(NamePattern("layers|layers\\.0", "key").end_in("layers.0"), 6u);
  EXPECT_EQ(NamePattern("(a*)*b|layers|layers\\.0", "key").end_in("layers.0"), 6u);
}

TEST(NamePattern, RefusesWhatIsTooLongAndNamesTheKey) {
  EXPECT_EQ(refusal(std::string(5000, 'a')), "nothing");
  for (const std::string& pattern :
       {std::string(5001, 'a'), std::string(100'000, '('), std::string("(a?){100000}"), std::string("(a{100}){100}")})
    EXPECT_TRUE(refusal(pattern).starts_with("ConfigError: key: '" + pattern.substr(0, 5)))
        << refusal(pattern).substr(0, 200);
  EXPECT_NE(refusal("(").find("key: '(' is no regular expression"), std::string::npos);
}

TEST(NamePattern, AnswersPatternsThatCouldTryEveryWayInTime) {
  const std::string name(60, 'a');
  for (const char* pattern : {"(a*)*b", "(a|a)*b", "(a?){60}b", "(.*)*(.*)*(.*)*b"}) {
    const NamePattern compiled(pattern, "key");
    EXPECT_FALSE(compiled.is_in(name)) << pattern;
    EXPECT_EQ(compiled.end_in(name), std::nullopt) << pattern;
    EXPECT_TRUE(compiled.is_in(name + "b")) << pattern;
  }
}

}  // namespace
}  // namespace trireme
