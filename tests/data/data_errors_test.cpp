// Every way in which input can be wrong is named before training starts: path, value and fix.
#include "tests/data/data_test.h"
#include "trireme/base/error.h"
#include "trireme/data/dataset.h"

namespace trireme {
namespace {

const std::string kTokens = raw_tokens<uint16_t>({1, 2, 3, 4});

void expect_data_error(const DataOptions& options, std::vector<std::string> parts) {
  expect_error<DataError>([&] { open_data(options); }, parts);
}

TEST(DataErrors, AMissingPathIsNamed) {
  const TemporaryFolder folder;
  expect_data_error({.path = folder / "nowhere"}, {folder / "nowhere", "does not exist", "glob"});
  expect_data_error({.path = folder / "nowhere/*.txt"}, {"nowhere/*.txt", "does not exist"});
}

TEST(DataErrors, AnEmptyFolderFileOrGlobIsNamed) {
  const TemporaryFolder folder;
  expect_data_error({.path = folder.path()}, {folder.path(), "no file"});
  folder.write("a.txt", "");
  expect_data_error({.path = folder.path()}, {folder.path(), "nothing to train on", "1 files"});
  expect_data_error({.path = folder / "a.txt"}, {"a.txt", "nothing to train on"});
  expect_data_error({.path = folder / "*.md"}, {"*.md", "no file"});
}

TEST(DataErrors, WhatIsNeitherFileNorFolderIsNamed) {
  expect_data_error({.path = "/dev/null"}, {"/dev/null", "neither a regular file nor a folder"});
}

TEST(DataErrors, ASequenceLongerThanTheDataIsNamedWithBothLengths) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", "abcd");
  expect_data_error({.path = path, .seq = 5, .held_out_fraction = 0}, {path, "5 tokens", "seq + 1 = 6", "smaller seq"});
}

TEST(DataErrors, AHeldOutSplitWithoutASampleIsNamed) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", std::string(100, 'a'));
  expect_data_error({.path = path, .seq = 20, .held_out_fraction = 0.1},
                    {"held-out split has 11 tokens", "give more data or a smaller seq"});
}

TEST(DataErrors, ATokenBeyondTheVocabularyIsNamedWithItsPlace) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.bin", kTokens);
  const DataOptions options = {.path = path, .seq = 1, .held_out_fraction = 0.5, .vocab_size = 4};
  expect_data_error(options, {path, "token 4 at position 3", "vocab_size=4", "at least 5"});
}

TEST(DataErrors, AVocabularyBelowTheBytesIsRefused) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", "abc");
  expect_data_error({.path = path, .seq = 1, .vocab_size = 128}, {path, "256", "vocab_size=128"});
}

TEST(DataErrors, HalfATokenIsNamed) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.bin", "1234567");
  expect_data_error({.path = path}, {path, "7 bytes", "uint16"});
  expect_data_error({.path = path, .format = DataFormat::kUint32}, {path, "7 bytes", "uint32"});
}

TEST(DataErrors, ABinaryFileGivenAsTextIsRefusedUntilBytesAreAskedFor) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.dat", std::string("a\0b\0", 4));
  expect_data_error({.path = path}, {path, "NUL bytes", "uint16"});
  const auto data = open_data({.path = path, .format = DataFormat::kBytes, .seq = 2, .held_out_fraction = 0});
  EXPECT_EQ(data.train.tokens(), 5);
}

TEST(DataErrors, AFolderOfTextAndTokensNeedsAFormat) {
  const TemporaryFolder folder;
  folder.write("a.bin", kTokens);
  folder.write("readme.txt", "text");
  expect_data_error({.path = folder.path()}, {"a.bin", "readme.txt", "glob"});
  const auto data = open_data({.path = folder.path(), .format = DataFormat::kUint16, .seq = 1, .held_out_fraction = 0});
  EXPECT_EQ(data.train.tokens(), 4);
  EXPECT_EQ(data.skipped_files, 1);
}

TEST(DataErrors, ADamagedNpyFileIsNamed) {
  const TemporaryFolder folder;
  const auto header = [](const std::string& dtype, const std::string& shape) { return npy_header(dtype, shape); };
  const struct {
    std::string bytes, message;
  } cases[] = {
      {"NUMPY", "does not begin as one"},
      {npy(4, header("<u2", "(4,)"), kTokens), "format version 4"},
      {npy(1, header("<u2", "(4,)"), kTokens).substr(0, 20), "header is cut off"},
      {npy(2, "", "").substr(0, 11), "header is cut off"},
      {npy(1, header("<i8", "(1,)"), kTokens), "dtype <i8"},
      {npy(1, header(">u2", "(4,)"), kTokens), "dtype >u2"},
      {npy(1, header("<u2", "(2, 2)"), kTokens), "(2, 2) is not one-dimensional"},
      {npy(1, header("<u2", "()"), kTokens), "() is not one-dimensional"},
      {npy(1, "{'descr': '<u2', 'fortran_order': True, 'shape': (4,), }", kTokens), "fortran_order"},
      {npy(1, "{'descr': '<u2', 'shape': (4,), }", kTokens), "no `fortran_order`"},
      {npy(1, header("<u2", "(5,)"), kTokens), "promises 5 tokens of 2 bytes, but 8 bytes"},
  };
  for (const auto& c : cases) {
    const auto path = folder.write("a.npy", c.bytes);
    expect_data_error({.path = path, .seq = 1, .held_out_fraction = 0}, {path, c.message});
  }
}

TEST(DataErrors, AnNpyFileOfAnotherWidthThanAskedForIsNamed) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.npy", npy(1, npy_header("<u2", "(4,)"), kTokens));
  expect_data_error({.path = path, .format = DataFormat::kUint32}, {path, "16-bit", "uint32", "auto"});
}

TEST(DataErrors, ARecordWithoutTheTextKeyIsNamedByItsLineWithTheKeysThatItHas) {
  const TemporaryFolder folder;
  const struct {
    std::string text;
    std::vector<std::string> parts;
  } cases[] = {
      {R"({"prompt": "a", "completion": "b"})",
       {"a.jsonl, line 1", "no key `text`", "`prompt`, `completion`", "--text-key"}},
      {"{\"text\": \"a\"}\n\n{\"txt\": \"b\"}\n", {"a.jsonl, line 3", "`txt`"}},
      {R"({"text": ["a", "b"], "id": 1})", {"line 1", "`text` is an array, not a text", "`text`, `id`"}},
      {R"({"text": null})", {"line 1", "`text` is null"}},
      {"{}", {"line 1", "the record is empty"}},
      {"\"a\"\n\"b\"\n", {"line 1", "this is a string", "expected a record"}},
      {"{\"text\": \"a\"}\n{\"text\": \"b}\n", {"line 2", "--data-format bytes"}},
      {R"({"text": ")" + std::string(9000, 'x') + "\n", {"line 1", "missing closing quote", "xx…; mend it"}},
      {R"({"text": "a\u0000b"})", {"line 1", "\\u0000"}},
      {R"([{"text": "a"}, {"body": "b"}])", {"a.jsonl[1]", "`body`"}},
      {"{\n  \"data\": [{\"text\": \"a\"}]\n}\n", {"a.jsonl", "no key `text`", "`data`"}},
  };
  for (const auto& c : cases) {
    const auto path = folder.write("a.jsonl", c.text);
    expect_data_error({.path = path, .seq = 1, .held_out_fraction = 0}, c.parts);
  }
}

TEST(DataErrors, ATextKeyWhereNoFileIsJsonIsRefused) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", "prose {\"text\": 1}");
  expect_data_error({.path = path, .seq = 1, .held_out_fraction = 0, .text_key = "body"}, {"`body`", "no JSON"});
}

TEST(DataErrors, AFileOfAnotherKindIsNamedByItsFirstBytesWithWhatToDo) {
  const TemporaryFolder folder;
  const std::string nul(1, '\0');
  const std::string header = R"({"a":{}})";
  const struct {
    std::string bytes, kind, fix;
  } cases[] = {
      {"\xfd"
       "7zXZ" +
           nul,
       "xz", "xz -dk"},
      {"PK\x03\x04" + std::string(26, '\1') + "notes.txt", "zip", "unzip"},
      {"PK\x03\x04" + std::string(26, '\1') + "model/data.pkl", "PyTorch archive", "JSON lines"},
      {"PK\x03\x04" + std::string(26, '\1') + "tokens.npy", ".npz", "numpy.save()"},
      {"PARE" + nul + "PARE", "encrypted Parquet", "without encryption"},
      {"ARROW1" + nul + nul, "Arrow", "--text-key"},
      {"\x80\x04\x95 frame", "pickle", "JSON lines"},
      {"\x80\x02\x8a\x0a", "pickle", "JSON lines"},
      {std::string("\x08\0\0\0\0\0\0\0", 8) + header, "safetensors", "--init-from"},
      {"%PDF-1.7 text", "PDF", "pdftotext"},
      {"\xff\xfe"
       "a" +
           nul,
       "UTF-16", "iconv"},
      {std::string(257, '\1') + "ustar", "tar", "tar -xf"},
      {"\x93NUMPY", "NumPy", ".npy"},
      {"version https://git-lfs.github.com/spec/v1\noid", "Git LFS", "git lfs pull"},
  };
  for (const auto& c : cases) {
    const auto path = folder.write("a.data", c.bytes);
    expect_data_error({.path = path, .seq = 1}, {path, c.kind, c.fix, "--data-format bytes"});
    const auto data = open_data({.path = path, .format = DataFormat::kBytes, .seq = 1, .held_out_fraction = 0});
    EXPECT_EQ(data.train.tokens(), static_cast<int64_t>(c.bytes.size()) + 1);
  }
}

TEST(DataErrors, AFileOfAnotherKindThatIsCalledLikeTokensOrRecordsIsNamedInAFolderToo) {
  const TemporaryFolder folder;
  const auto archive = folder.write("pytorch_model.bin", "PK\x03\x04" + std::string(26, '\1') + "archive/data.pkl");
  expect_data_error({.path = folder.path(), .seq = 1}, {archive, "PyTorch archive", "--data-format uint16"});
  const TemporaryFolder other;
  other.write("readme.md", "prose");
  const auto packed = other.write("train.jsonl", "BZh9 packed" + std::string(1, '\0'));
  expect_data_error({.path = other.path(), .seq = 1}, {packed, "bzip2", "bunzip2"});
}

TEST(DataErrors, AFolderOfNothingButOtherKindsSaysWhatTheyAre) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.data", "ARROW1" + std::string(8, '\0'));
  folder.write("b.data", "ARROW1" + std::string(8, '\0'));
  expect_data_error({.path = folder.path()}, {"nothing to train on: 2 files", path, "Arrow", "--text-key"});
}

TEST(DataErrors, TextsAndTokensThatOpenAsOtherKindsDoAreTaken) {
  const TemporaryFolder folder;
  for (const std::string bytes :
       {"PAR1 is a golfer's word", "ORCs live here", "BZh9 text", "ID3 is an algorithm", "GIF8"}) {
    const auto path = folder.write("a.txt", bytes);
    EXPECT_EQ(open_data({.path = path, .seq = 1, .held_out_fraction = 0}).train.files(), 1) << bytes;
  }
  const auto tokens = folder.write("a.bin", raw_tokens<uint16_t>({0xfeff, 0xffff, 0xffff, 0}));
  EXPECT_EQ(open_data({.path = tokens, .seq = 1, .held_out_fraction = 0}).train.tokens(), 4);
}

TEST(DataErrors, AnOptionOutOfRangeIsAConfigError) {
  const TemporaryFolder folder;
  const auto path = folder.write("a.txt", "abc");
  const auto open = [](const DataOptions& options) { return [options] { open_data(options); }; };
  expect_error<ConfigError>(open({.path = path, .seq = 0}), {"seq=0"});
  expect_error<ConfigError>(open({.path = path, .held_out_fraction = 1}), {"held_out_fraction=1"});
  expect_error<ConfigError>(open({.path = path, .vocab_size = -1}), {"vocab_size=-1"});
  expect_error<ConfigError>([] { data_format("unit16"); }, {"unit16", "Did you mean `uint16`?"});
}

}  // namespace
}  // namespace trireme
