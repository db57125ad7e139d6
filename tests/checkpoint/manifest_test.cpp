#include "trireme/checkpoint/manifest.h"

#include <gtest/gtest.h>

#include "checkpoint/checksum.h"
#include "tests/checkpoint/fixture.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using checkpoint_test::Folder;
using testing::named_error_of;

Manifest small_manifest() {
  Manifest manifest;
  manifest.topology = {{"data", 2}};
  manifest.software = R"({"trireme":"1"})";
  manifest.values = R"({"loss":0.1,"big":9007199254740993,"text":"é"})";
  manifest.rank_values = {"{}", R"({"rng":[1,2]})"};
  manifest.files = {{.name = "a.safetensors", .bytes = 104, .header_bytes = 64, .header_checksum = 0xfedcba9876543210}};
  manifest.tensors = {
      {.name = "w",
       .shape = {2, 5},
       .dtype = at::kFloat,
       .slices = {{.file = 0, .begin = 0, .numel = 4, .offset = 64, .bytes = 16, .checksums = {1}},
                  {.file = 0, .begin = 4, .numel = 6, .offset = 80, .bytes = 24, .checksums = {0xffffffffffffffff}}}}};
  return manifest;
}

/// The text with `from` replaced by `to` and the checksum made right again.
std::string changed(const std::string& from, const std::string& to) {
  std::string text = dump_manifest(small_manifest());
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const size_t digits = text.rfind('"') - 16;
  const std::string body = text.substr(0, text.rfind("  \"manifest_checksum\""));
  return text.replace(digits, 16, checksum_text(checksum_of(body)));
}

std::string refusal(const std::string& text) {
  return named_error_of([&] { (void)parse_manifest(text, "M"); });
}

TEST(Manifest, ComesBackAsItWasWritten) {
  const std::string text = dump_manifest(small_manifest());
  const Manifest parsed = parse_manifest(text, "M");
  EXPECT_EQ(dump_manifest(parsed), text);
  EXPECT_EQ(parsed.values, small_manifest().values);
  EXPECT_EQ(parsed.rank_values, small_manifest().rank_values);
  EXPECT_EQ(parsed.files[0].header_checksum, 0xfedcba9876543210);
  EXPECT_EQ(parsed.tensors[0].slices[1].begin, 4);
  EXPECT_EQ(parsed.tensors[0].slices[1].checksums, std::vector<uint64_t>{0xffffffffffffffff});
}

TEST(Manifest, OfANewerVersionSaysSo) {
  EXPECT_EQ(
      refusal(changed("\"version\": 2", "\"version\": 3")),
      "CheckpointError: M: written in format version 3, this program reads up to 2; load it with a newer Trireme");
  EXPECT_NE(refusal(R"({"format": "trireme-checkpoint", "version": 9})").find("version 9"), std::string::npos)
      << "a newer version may end in another way";
}

TEST(Manifest, ADamagedVersionIsDamageNotANewerVersion) {
  std::string text = dump_manifest(small_manifest());
  text.replace(text.find("\"version\": 2"), 12, "\"version\": 9");
  EXPECT_NE(refusal(text).find("damaged: its checksum is"), std::string::npos);
}

TEST(Manifest, TruncatedAnywhereIsRefused) {
  const std::string text = dump_manifest(small_manifest());
  for (size_t bytes = 0; bytes < text.size(); ++bytes)
    EXPECT_TRUE(refusal(text.substr(0, bytes)).starts_with("CheckpointError: M: truncated")) << bytes;
}

TEST(Manifest, FieldsThatMakeNoSenseAreNamed) {
  EXPECT_NE(refusal(changed("\"begin\":4", "\"begin\":5"))
                .find("tensor \"w\": slice [5, +6) of part 0, expected to begin at 4"),
            std::string::npos);
  EXPECT_NE(refusal(changed("\"file\":0", "\"file\":1")).find("tensor \"w\": there is no file 1"), std::string::npos);
  EXPECT_NE(refusal(changed("\"offset\":80", "\"offset\":81")).find("do not fit into \"a.safetensors\""),
            std::string::npos);
  EXPECT_NE(refusal(changed("F32", "F99")).find("tensor \"w\": dtype \"F99\""), std::string::npos);
  EXPECT_NE(refusal(changed("\"numel\":6", "\"number\":6")).find("numel"), std::string::npos);
  EXPECT_NE(refusal(changed("\"a.safetensors\"", "\"../a\"")).find("does not stay in the checkpoint's directory"),
            std::string::npos);
  EXPECT_NE(refusal(changed("\"size\":2", "\"size\":3")).find("values of 2 ranks, world size 3"), std::string::npos);
  EXPECT_NE(refusal(changed("0000000000000001", "000000000000000x")).find("is no checksum"), std::string::npos);
  EXPECT_NE(refusal(changed("trireme-checkpoint", "another")).find("not a trireme-checkpoint manifest"),
            std::string::npos);
}

TEST(Manifest, RefusesNestingThatWouldUseUpTheStack) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  EXPECT_EQ(refusal(changed("0.1", deep)), "CheckpointError: M: not a trireme-checkpoint manifest");
}

TEST(Manifest, AFolderWithoutOneIsNoCheckpoint) {
  Folder folder;
  EXPECT_NE(named_error_of([&] { (void)read_manifest(folder.path()); }).find("no manifest.json"), std::string::npos);
}

TEST(Checksum, IsTheOneThatXxhsumPrints) {
  EXPECT_EQ(checksum_text(checksum_of("")), "2d06800538d394c2");  // the algorithm's published value for no input
  EXPECT_EQ(parse_checksum("2d06800538d394c2"), 0x2d06800538d394c2u);
  EXPECT_FALSE(parse_checksum("2D06800538D394C2"));
  EXPECT_FALSE(parse_checksum("2d06800538d394c"));
}

}  // namespace
}  // namespace trireme
