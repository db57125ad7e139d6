#include "trireme/data/dataset.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>

#include <set>

#include "tests/data/data_test.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

at::Tensor longs(const std::vector<int64_t>& values) { return at::tensor(values, at::kLong); }

/// All tokens that the samples of `dataset` show, in order.
std::vector<int64_t> tokens_of(const TokenDataset& dataset) {
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < dataset.size(); ++i) {
    const auto input = dataset.sample(i).input;
    tokens.insert(tokens.end(), input.const_data_ptr<int64_t>(), input.const_data_ptr<int64_t>() + input.numel());
  }
  return tokens;
}

TEST(TokenDataset, ASampleIsAWindowAndTheSameShiftedByOne) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", "abcdefgh");
  const auto data = open_data({.path = path, .seq = 3, .held_out_fraction = 0}).train;
  EXPECT_EQ(data.size(), 2);  // 8 letters and the document end make 9 tokens: (9 - 1) / 3 windows
  EXPECT_TRUE(at::equal(data.sample(1).input, longs({'d', 'e', 'f'})));
  EXPECT_TRUE(at::equal(data.sample(1).target, longs({'e', 'f', 'g'})));
}

TEST(TokenDataset, DocumentsFollowOneAnotherInTheOrderOfTheirNamesEachWithItsEnd) {
  const TemporaryFolder folder;
  folder.write("b.txt", "BB");
  folder.write("a/z.txt", "ZZ");
  folder.write("a/c.txt", "C");
  const auto data = open_data({.path = folder.path(), .seq = 7, .held_out_fraction = 0}).train;
  EXPECT_TRUE(at::equal(data.sample(0).input, longs({'C', 0, 'Z', 'Z', 0, 'B', 'B'})));
  EXPECT_TRUE(at::equal(data.sample(0).target, longs({0, 'Z', 'Z', 0, 'B', 'B', 0})));
}

TEST(TokenDataset, ABatchStacksSamples) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", "abcdefgh");
  const auto data = open_data({.path = path, .seq = 2, .held_out_fraction = 0}).train;
  const auto batch = data.batch({3, 0});
  EXPECT_TRUE(at::equal(batch.input, longs({'g', 'h', 'a', 'b'}).view({2, 2})));
  EXPECT_TRUE(at::equal(batch.target, longs({'h', 0, 'b', 'c'}).view({2, 2})));
}

TEST(TokenDataset, AnIndexOutsideIsAShapeError) {
  const TemporaryFolder folder;
  const auto data = open_data({.path = folder.write("a.txt", "abcdefgh"), .seq = 4, .held_out_fraction = 0}).train;
  expect_error<ShapeError>([&] { data.sample(2); }, {"sample 2", "2 samples"});
  expect_error<ShapeError>([&] { data.sample(-1); }, {"sample -1"});
}

TEST(TokenDataset, FilesOfMappedAndOfCopiedSizesReadAlike) {
  const TemporaryFolder folder;
  folder.write("large.txt", std::string(5000, 'x'));  // above a page: mapped
  folder.write("small.txt", "y");
  const auto data = open_data({.path = folder.path(), .seq = 5002, .held_out_fraction = 0}).train;
  const auto input = data.sample(0).input;
  EXPECT_EQ((input == 'x').sum().item<int64_t>(), 5000);
  EXPECT_EQ(input[5000].item<int64_t>(), kDocumentEnd);
  EXPECT_EQ(input[5001].item<int64_t>(), 'y');
}

TEST(TokenDataset, BinAndNpyFilesOfBothWidthsGiveTheirTokens) {
  const TemporaryFolder folder;
  const std::vector<uint16_t> narrow = {1, 2, 300, 65535};
  const std::vector<uint32_t> wide = {1, 2, 300, 70000};
  const struct {
    std::string name, bytes;
    DataFormat format;
    int64_t last;
  } cases[] = {
      {"auto16.bin", raw_tokens(narrow), DataFormat::kAuto, 65535},
      {"16.bin", raw_tokens(narrow), DataFormat::kUint16, 65535},
      {"32.bin", raw_tokens(wide), DataFormat::kUint32, 70000},
      {"v1.npy", npy(1, npy_header("<u2", "(4,)"), raw_tokens(narrow)), DataFormat::kAuto, 65535},
      {"v2.npy", npy(2, npy_header("<u4", "(4,)"), raw_tokens(wide)), DataFormat::kAuto, 70000},
      {"v3.npy", npy(3, npy_header("<u4", "(4,)"), raw_tokens(wide)), DataFormat::kUint32, 70000},
  };
  for (const auto& c : cases) {
    const auto path = folder.write(c.name, c.bytes);
    const auto data = open_data({.path = path, .format = c.format, .seq = 3, .held_out_fraction = 0}).train;
    ASSERT_EQ(data.size(), 1) << c.name;
    EXPECT_TRUE(at::equal(data.sample(0).input, longs({1, 2, 300}))) << c.name;
    EXPECT_TRUE(at::equal(data.sample(0).target, longs({2, 300, c.last}))) << c.name;
  }
}

TEST(TokenDataset, TheTailOfASingleFileIsHeldOut) {
  const TemporaryFolder folder;
  std::vector<uint16_t> tokens(100);
  for (uint16_t i = 0; i < 100; ++i) tokens[i] = i;
  const auto path = folder.write("a.bin", raw_tokens(tokens));
  const auto data = open_data({.path = path, .seq = 4, .held_out_fraction = 0.2});
  EXPECT_EQ(data.train.tokens(), 80);
  EXPECT_EQ(data.held_out.tokens(), 20);
  EXPECT_TRUE(at::equal(data.train.sample(0).input, at::arange(0, 4, at::kLong)));
  EXPECT_TRUE(at::equal(data.held_out.sample(0).input, at::arange(80, 84, at::kLong)));
}

TEST(TokenDataset, AFileIsEitherTrainedOnOrHeldOut) {
  const TemporaryFolder folder;
  // File i holds two tokens with the value i, so that tokens tell files.
  for (uint16_t i = 0; i < 200; ++i) {
    folder.write(std::to_string(i) + ".bin", raw_tokens<uint16_t>({i, i}));
  }
  const auto data = open_data({.path = folder.path(), .seq = 1, .held_out_fraction = 0.25});
  EXPECT_EQ(data.train.files() + data.held_out.files(), 200);
  EXPECT_NEAR(static_cast<double>(data.held_out.files()), 50, 25);  // four standard deviations of 200 coins at 0.25
  const auto train = tokens_of(data.train);
  const std::set<int64_t> seen(train.begin(), train.end());
  for (const int64_t token : tokens_of(data.held_out)) EXPECT_FALSE(seen.contains(token)) << token;
}

TEST(TokenDataset, TheSplitFollowsTheSeedAndNotTheFolder) {
  const TemporaryFolder here, there;
  for (int i = 0; i < 50; ++i) {
    here.write("f" + std::to_string(i), std::string(9, static_cast<char>('A' + i)));
    there.write("f" + std::to_string(i), std::string(9, static_cast<char>('A' + i)));
  }
  const auto held_out = [](const TemporaryFolder& folder, uint64_t seed) {
    return tokens_of(open_data({.path = folder.path(), .seq = 1, .held_out_fraction = 0.2, .seed = seed}).held_out);
  };
  EXPECT_EQ(held_out(here, 7), held_out(there, 7));
  EXPECT_NE(held_out(here, 7), held_out(here, 8));
}

TEST(TokenDataset, OfTwoFilesOneIsHeldOutWhateverTheFraction) {
  const TemporaryFolder folder;
  folder.write("a.txt", "aaaa");
  folder.write("b.txt", "bbbb");
  for (const double fraction : {0.0001, 0.9999}) {
    const auto data = open_data({.path = folder.path(), .seq = 2, .held_out_fraction = fraction});
    EXPECT_EQ(data.train.files(), 1);
    EXPECT_EQ(data.held_out.files(), 1);
  }
}

TEST(TokenDataset, AFolderLeavesOutHiddenBinaryEmptyAndExcludedFiles) {
  const TemporaryFolder folder;
  folder.write("a.txt", "aa");
  folder.write("skip/b.txt", "bb");
  folder.write(".hidden/c.txt", "cc");
  folder.write(".d.txt", "dd");
  folder.write("e.pyc", std::string("e\0e", 3));
  folder.write("f.txt", "");
  const auto data = open_data({.path = folder.path(), .seq = 2, .held_out_fraction = 0, .exclude = {"sk*p"}});
  EXPECT_EQ(tokens_of(data.train), (std::vector<int64_t>{'a', 'a'}));
  EXPECT_EQ(data.skipped_files, 2);  // the binary one and the empty one
}

TEST(TokenDataset, TheFormatIsThatOfTheFilesWhateverTheVocabulary) {
  const TemporaryFolder folder;
  folder.write("a.txt", "some text");
  folder.write("b.bin", raw_tokens<uint16_t>({1, 2, 3, 4, 5}));
  folder.write("c.npy", npy(1, npy_header("<u4", "(5,)"), raw_tokens<uint32_t>({1, 2, 3, 4, 5})));
  const auto format_of = [&](const std::string& name) {
    return open_data({.path = folder / name, .seq = 2, .held_out_fraction = 0, .vocab_size = kByteVocabSize}).format;
  };
  EXPECT_EQ(format_of("a.txt"), DataFormat::kBytes);
  EXPECT_EQ(format_of("b.bin"), DataFormat::kUint16);
  EXPECT_EQ(format_of("c.npy"), DataFormat::kUint32);
}

std::string text_of(const TokenDataset& data) {
  std::string text;
  const auto tokens = data.sample(0);
  for (int64_t i = 0; i < data.seq(); ++i) text += static_cast<char>(tokens.input[i].item<int64_t>());
  return text + static_cast<char>(tokens.target[data.seq() - 1].item<int64_t>());
}

TEST(TokenDataset, RecordsOfJsonGiveTheTextsOfTheirKeyEachWithItsEnd) {
  const std::string lines = "{\"text\": \"ab\", \"id\": 1}\r\n\n{\"id\": 2, \"text\": \"\"}\n{\"text\": \"\u00e9c\"}";
  const std::string array = R"([{"text": "ab"},
                                {"text": "\u00e9c", "id": {"text": "x"}}])";
  const std::string one = R"({
    "text": "ab\u0001\u00e9c"
  })";
  const std::string texts = std::string("ab\0\u00e9c", 6) + std::string(1, '\0');
  const struct {
    std::string name, bytes, texts;
  } cases[] = {{"a.jsonl", lines, texts},   {"a.ndjson", "\xef\xbb\xbf" + lines, texts},
               {"a.json", lines, texts},    {"a.json", array, texts},
               {"a.jsonl", array, texts},   {"a.txt", lines, texts},
               {"no_ending", array, texts}, {"a.json", one, std::string("ab\1\u00e9c", 6) + std::string(1, '\0')}};
  for (const auto& c : cases) {
    const TemporaryFolder folder;
    const auto path = folder.write(c.name, c.bytes);
    const auto data = open_data({.path = path, .seq = 6, .held_out_fraction = 0});
    EXPECT_EQ(data.train.tokens(), 7);
    EXPECT_EQ(text_of(data.train), c.texts) << c.name << ": " << c.bytes;
    EXPECT_EQ(data.json_files, 1);
  }
}

TEST(TokenDataset, AnotherTextKeyIsTaken) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.jsonl", R"({"text": "no", "content": "yes"})");
  const auto data = open_data({.path = path, .seq = 3, .held_out_fraction = 0, .text_key = "content"});
  EXPECT_EQ(text_of(data.train), std::string("yes\0", 4));
}

TEST(TokenDataset, BesideProgramsJsonIsText) {
  const TemporaryFolder folder;
  folder.write("a.json", R"({"version": 1})");
  folder.write("b.py", "print()");
  folder.write("c.jsonl", R"({"text": "yes"})");
  const auto data = open_data({.path = folder.path(), .seq = 1, .held_out_fraction = 0});
  EXPECT_EQ(data.train.tokens(), 14 + 1 + 7 + 1 + 3 + 1);
  EXPECT_EQ(data.json_files, 1);
}

TEST(TokenDataset, BytesAreTakenAsTheyAreWhereTheyAreAskedFor) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.jsonl", R"({"a": 1})");
  const auto data = open_data({.path = path, .format = DataFormat::kBytes, .seq = 1, .held_out_fraction = 0});
  EXPECT_EQ(data.train.tokens(), 9);
}

TEST(TokenDataset, AFolderNamesTheKindsThatItLeavesOut) {
  const TemporaryFolder folder;
  folder.write("a.txt", "text");
  folder.write("b.lz4", "\x04\x22\x4d\x18 packed");
  folder.write("c.lz4", "\x04\x22\x4d\x18 packed");
  folder.write("d.pdf", "%PDF-1.7 text");
  const auto data = open_data({.path = folder.path(), .seq = 1, .held_out_fraction = 0});
  EXPECT_EQ(data.train.files(), 1);
  EXPECT_EQ(data.skipped_files, 3);
  EXPECT_EQ(data.skipped_kinds, (std::vector<std::string>{"PDF", "lz4"}));
}

TEST(TokenDataset, AGlobChoosesFilesAtAnyDepth) {
  const TemporaryFolder folder;
  folder.write("a.py", "aa");
  folder.write("x/y/b.py", "bb");
  folder.write("x/c.txt", "cc");
  const auto read = [&](const std::string& glob) {
    return tokens_of(open_data({.path = folder / glob, .seq = 1, .held_out_fraction = 0}).train);
  };
  EXPECT_EQ(read("**/*.py"), (std::vector<int64_t>{'a', 'a', 0, 'b', 'b'}));
  EXPECT_EQ(read("*.py"), (std::vector<int64_t>{'a', 'a'}));
  EXPECT_EQ(read("x/*/[abc].py"), (std::vector<int64_t>{'b', 'b'}));
  EXPECT_EQ(read("x/**"), (std::vector<int64_t>{'c', 'c', 0, 'b', 'b'}));
}

TEST(TokenDataset, TheFingerprintTellsContentsApart) {
  const TemporaryFolder folder;
  const auto fingerprint = [&](int64_t seq) {
    return open_data({.path = folder.path(), .seq = seq, .held_out_fraction = 0}).train.fingerprint();
  };
  folder.write("a.txt", "aaaa");
  const auto before = fingerprint(2);
  EXPECT_EQ(before, fingerprint(2));
  EXPECT_NE(before, fingerprint(3));
  folder.write("b.txt", "bbbb");
  EXPECT_NE(before, fingerprint(2));
}

}  // namespace
}  // namespace trireme
