#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

std::string json_error_of(const std::string& text) {
  try {
    parse_json(text, "ds.json");
  } catch (const ConfigError& error) {
    return error.what();
  }
  return "no error";
}

TEST(Json, KeepsTheOrderOfKeys) {
  EXPECT_EQ(parse_json(R"({"b": 1, "a": [true, null, "x", 1.5, -2]})", "").dump(),
            R"({"b":1,"a":[true,null,"x",1.5,-2]})");
}

TEST(Json, IgnoresAllThreeKindsOfComments) {
  const std::string text =
      "{ // to the end of the line\n"
      "  \"a\": 1, # also this \" quote\n"
      "  /* over\n two lines */ \"b\": 2 /**/ }\n# after the end";
  EXPECT_EQ(parse_json(text, "").dump(), R"({"a":1,"b":2})");
}

TEST(Json, KeepsCommentSignsInsideStrings) {
  EXPECT_EQ(parse_json(R"({"a": "http://x /* y */ #z", "b\"//": "\\"})", "").dump(),
            R"({"a":"http://x /* y */ #z","b\"//":"\\"})");
}

TEST(Json, ReadsNumbersBeyondADoubleAsInfinite) {
  const Json json = parse_json("[1e999, -1e999, Infinity, -Infinity, 1e308]", "");
  EXPECT_EQ(json[0].get<double>(), INFINITY);
  EXPECT_EQ(json[1].get<double>(), -INFINITY);
  EXPECT_EQ(json[2].get<double>(), INFINITY);
  EXPECT_EQ(json[3].get<double>(), -INFINITY);
  EXPECT_EQ(json[4].get<double>(), 1e308);
}

TEST(Json, RefusesADuplicateKeyByItsPath) {
  EXPECT_EQ(json_error_of(R"({"a": {"x": 1}, "b": [{}, {"c": {"stage": 1, "stage": 2}}]})"),
            "ds.json: the key `b[1].c.stage` stands twice; remove one of the two");
  EXPECT_EQ(json_error_of(R"({"a": 1, "b": {"a": 2}, "a": 3})"),
            "ds.json: the key `a` stands twice; remove one of the two");
}

TEST(Json, AcceptsTheSameKeyInDifferentObjects) {
  EXPECT_EQ(parse_json(R"([{"a": 1}, {"a": 2}])", "").dump(), R"([{"a":1},{"a":2}])");
}

TEST(Json, ShowsTheLineOfASyntaxError) {
  EXPECT_EQ(json_error_of("{\n  \"stage\": 2,\n  \"lr\": ]\n}"),
            "ds.json:3:9: syntax error while parsing value - unexpected ']'; expected '[', '{', or a literal\n"
            "      \"lr\": ]\n"
            "            ^");
}

TEST(Json, PlacesASyntaxErrorRightAfterComments) {
  EXPECT_NE(json_error_of("{ /* a\nb */ \"x\" 1}").find("ds.json:2:10: syntax error"), std::string::npos)
      << json_error_of("{ /* a\nb */ \"x\" 1}");
}

TEST(Json, RefusesACommentWithoutEnd) {
  EXPECT_EQ(json_error_of("{\"a\": 1 /* never"),
            "ds.json:1:9: comment without its end `*/`\n    {\"a\": 1 /* never\n            ^");
}

TEST(Json, RefusesWhatIsNoJson) {
  for (const char* text : {"", "{", "{\"a\": 1,}", "[1 2]", "\"open", "nul", "{} x", "{\"a\": NaN}", "\"a\\"})
    EXPECT_EQ(json_error_of(text).rfind("ds.json:1:", 0), 0u) << text << " -> " << json_error_of(text);
}

TEST(Json, ShowsNoBytesOfABinaryFile) {
  EXPECT_EQ(json_error_of(std::string("\x7f\0ELF", 5)),
            "ds.json: a binary file, where text is expected; give the path of another file");
}

std::string nested(size_t levels) { return std::string(levels, '[') + std::string(levels, ']'); }

TEST(Json, RefusesNestingThatWouldUseUpTheStack) {
  EXPECT_EQ(parse_json(nested(500), "ds.json").dump(), nested(500));
  for (const size_t levels : {501, 100'000})
    EXPECT_TRUE(
        json_error_of(nested(levels))
            .starts_with("ds.json: objects and lists inside of each other, nested deeper than 500 levels, in `["))
        << json_error_of(nested(levels));
  EXPECT_FALSE(parse_plain_json(nested(500)).is_discarded());
  EXPECT_TRUE(parse_plain_json(nested(100'000)).is_discarded());
}

TEST(Json, RefusesMoreKeysAndLongerOnesThanAConfigurationHas) {
  std::string many = "{";
  for (int i = 0; i < 200'000; ++i) many += "\"key" + std::to_string(i) + "\": 1,";
  many.back() = '}';
  EXPECT_EQ(json_error_of(many), "ds.json: more than 200000 values; give the path of another file");
  const std::string error = json_error_of("{\"" + std::string(1'000'000, 'k') + "\": 1}");
  EXPECT_EQ(error, "ds.json: a key of 1000000 bytes, `" + std::string(40, 'k') + "…`; at most 10000 are read");
  // Values that a program saves have no such limit.
  EXPECT_EQ(parse_json(many, "state", kSavedValues).size(), 200'000u);
}

TEST(Json, ShowsAPartOfALineThatIsAsLongAsAFile) {
  const std::string error = json_error_of("{\"a\": \"" + std::string(1'000'000, 'x') + "\", }");
  EXPECT_LT(error.size(), 1000u);
  EXPECT_TRUE(error.starts_with("ds.json:1:1000011: syntax error")) << error;
}

TEST(Json, ShowsNoByteThatIsNoUtf8) {
  const std::string error = json_error_of("{\"a\": \"\xff\"}");
  EXPECT_TRUE(error.starts_with("ds.json:1:8: syntax error")) << error;
  EXPECT_TRUE(is_utf8(error)) << error;
}

TEST(Json, ReadsWhatProgramsWroteWithoutAGuessAtInfinities) {
  EXPECT_EQ(parse_plain_json("[9e307, 1]").dump(), "[9e+307,1]");
  for (const char* text : {"", "{", "[1] 2", "# comment\n1", R"({"a": 1, "a": 2})"})
    EXPECT_TRUE(parse_plain_json(text).is_discarded()) << text;
}

TEST(Json, RefusesAFileThatIsNoConfigurationByItsSize) {
  const testing::TemporaryFolder folder;
  std::ofstream(folder / "big.json") << "1";
  std::filesystem::resize_file(folder / "big.json", 10LL << 30);  // sparse
  try {
    read_json(folder / "big.json");
    FAIL();
  } catch (const IoError& error) {
    EXPECT_NE(std::string(error.what()).find("big.json: it has 10737418240 bytes"), std::string::npos);
  }
}

TEST(Json, ReadsAFileAndNamesItInErrors) {
  const testing::TemporaryFolder folder;
  const auto path = folder / "a.json";
  std::ofstream(path) << "{\"a\": 1} # comment\n";
  EXPECT_EQ(read_json(path).dump(), R"({"a":1})");
  std::ofstream(path) << "{\"a\"}";
  try {
    read_json(path);
    FAIL() << "no error";
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()).rfind(path.string() + ":1:", 0), 0u) << error.what();
  }
  std::filesystem::remove(path);
  EXPECT_THROW(read_json(path), IoError);
}

}  // namespace
}  // namespace trireme
