#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <string>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"

namespace trireme {
namespace {

std::string read_text(const std::string& text) { return parse_hjson(text, "ds.hjson").dump(); }

std::string hjson_error_of(const std::string& text) {
  try {
    parse_hjson(text, "ds.hjson");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Hjson, ReadsJsonWithCommentsAsJson) {
  EXPECT_EQ(read_text("{\"b\": 1, // one\n \"a\": [true, null, \"x\", 1.5, -2]} # end"),
            R"({"b":1,"a":[true,null,"x",1.5,-2]})");
}

TEST(Hjson, CallsAnEmptyTextEmpty) {
  for (const char* text : {"", " \n\t"})
    EXPECT_EQ(hjson_error_of(text), "ds.hjson: empty, where an object { … } is expected");
}

TEST(Hjson, NeedsNoQuotesAroundKeysAndTexts) {
  EXPECT_EQ(read_text("{\n  optimizer: {\n    type: AdamW\n    lr: 1e-3\n  }\n  steps: 3\n}"),
            R"({"optimizer":{"type":"AdamW","lr":0.001},"steps":3})");
}

TEST(Hjson, NeedsNoOutermostBraces) {
  EXPECT_EQ(read_text("# mine\nstage: 2\non: true\n"), R"({"stage":2,"on":true})");
}

TEST(Hjson, TakesTrailingAndMissingCommas) {
  EXPECT_EQ(read_text("{\"a\": [1, 2,], \"b\": 3,}"), R"({"a":[1,2],"b":3})");
  EXPECT_EQ(read_text("{\"a\": [1\n2]\n\"b\": 3}"), R"({"a":[1,2],"b":3})");
}

TEST(Hjson, EndsANumberOrWordAtCommasBracketsAndComments) {
  EXPECT_EQ(read_text("{a: 1, b: true} // x"), R"({"a":1,"b":true})");
  EXPECT_EQ(read_text("{a: null # x\n b: [false /* y */, -0.5e3]}"), R"({"a":null,"b":[false,-500.0]})");
}

TEST(Hjson, TakesAnyOtherValueWithoutQuotesUpToTheEndOfItsLine) {
  EXPECT_EQ(read_text("{\n a: x, y # z }\n b: 007\n c: 1 2 \n d: C:\\new\n}"),
            R"({"a":"x, y # z }","b":"007","c":"1 2","d":"C:\\new"})");
}

TEST(Hjson, TakesSingleQuotesAndEscapes) {
  EXPECT_EQ(read_text(R"({'a\'b': 'x"y\n', "c": "\u00e4\'"})"), R"({"a'b":"x\"y\n","c":"ä'"})");
}

TEST(Hjson, TakesTextsOfSeveralLinesWithoutTheirIndentation) {
  EXPECT_EQ(read_text("{\n  a:\n    '''\n    one\n      two\n    '''\n}"), R"({"a":"one\n  two"})");
}

TEST(Hjson, ReadsNumbersBeyondADoubleAsInfinite) {
  const Json json = parse_hjson("a: 1e999\nb: -Infinity", "");
  EXPECT_EQ(json["a"].get<double>(), INFINITY);
  EXPECT_EQ(json["b"].get<double>(), -INFINITY);
}

TEST(Hjson, RefusesADuplicateKeyByItsPath) {
  EXPECT_EQ(hjson_error_of("a: {x: 1\nx: 2}"), "ds.hjson: the key `a.x` stands twice; remove one of the two");
}

TEST(Hjson, ShowsTheErrorOfTheReaderThatGotFurther) {
  // As JSON it would fail at the first key.
  EXPECT_EQ(hjson_error_of("{\n  stage: 2\n  lr: ]\n}"), "ds.hjson:3:7: expected a value\n      lr: ]\n          ^");
  EXPECT_EQ(hjson_error_of("{\n  a: 1\n  b: [1\n"), "ds.hjson:3:6: this `[` has no `]`\n      b: [1\n         ^");
  // As Hjson the value would be the text `1 "b": 2}`, and the brace would be missing.
  EXPECT_EQ(hjson_error_of("{\"a\": 1 \"b\": 2}\n").rfind("ds.hjson:1:11: syntax error", 0), 0u);
}

TEST(Hjson, FindsTheLinesOfManyKeysInOnePass) {
  std::string text;
  for (int i = 0; i < 190'000; ++i) text += "key" + std::to_string(i) + ": 1\n";
  const auto lines = key_lines(text);
  EXPECT_EQ(lines.size(), 190'000u);
  EXPECT_EQ(lines.at("key189999"), 190'000);
}

TEST(Hjson, KeepsNoLinesOfKeysWhosePathsAreAsLongAsAFile) {
  std::string text = std::string(9'000, 'k') + ": {\n";
  for (int i = 0; i < 100; ++i) text += "key" + std::to_string(i) + ": 1\n";
  EXPECT_TRUE(key_lines(text + "}\na: 1\n").size() == 1 && key_lines(text + "}\na: 1\n").contains("a"));
}

TEST(Hjson, LooksOnceThroughATextWithManyCommas) {
  const std::string text = std::string(500'000, '1') + "x" + std::string(500'000, ',');
  EXPECT_EQ(parse_hjson("a: " + text, "ds.hjson").at("a"), text);
}

TEST(Hjson, RefusesNestingThatWouldUseUpTheStack) {
  EXPECT_NE(hjson_error_of("a: " + std::string(100'000, '[')).find("nested deeper than 500 levels"), std::string::npos);
}

TEST(Hjson, RefusesWhatIsNoHjson) {
  for (const char* text : {"word", "{a b: 1}", "{a /* b */: 1}", "{: 1}", "{a: 1} x", "{a:}", "{,}", "a: 'open\n'",
                           "a: \"\\q\"", "a: '''x", "a: 1 /* never", "a: \xff\n"})
    EXPECT_EQ(hjson_error_of(text).rfind("ds.hjson:1:", 0), 0u) << text << " -> " << hjson_error_of(text);
  EXPECT_NE(hjson_error_of("a:\n" + std::string(100'000, '[')).find("nested deeper than 500 levels"),
            std::string::npos);
}

}  // namespace
}  // namespace trireme
