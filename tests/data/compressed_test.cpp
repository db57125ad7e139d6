// Texts in files of gzip and zstd are read as if they were unpacked.
#include <zlib.h>
#include <zstd.h>

#include "tests/data/data_test.h"
#include "trireme/base/error.h"
#include "trireme/data/dataset.h"

namespace trireme {
namespace {

std::string gzip(const std::string& text) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, text.size()) + 64, '\0');
  std::string input = text;
  stream.next_in = reinterpret_cast<Bytef*>(input.data());
  stream.avail_in = static_cast<uInt>(input.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string zstd(const std::string& text) {
  std::string packed(ZSTD_compressBound(text.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), text.data(), text.size(), 3));
  return packed;
}

std::string (*const kPackers[])(const std::string&) = {gzip, zstd};

// A text that neither makes short, of more bytes than either writes at once.
std::string long_text() {
  std::string text;
  uint64_t state = 1;
  while (text.size() < 3'000'000) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    text += std::to_string(state) + '\n';
  }
  return text;
}

std::vector<int64_t> tokens_in(const std::string& path) {
  const auto data = open_data({.path = path, .seq = 1, .held_out_fraction = 0});
  std::vector<int64_t> tokens;
  for (int64_t i = 0; i < data.train.size(); ++i) tokens.push_back(data.train.sample(i).input.item<int64_t>());
  return tokens;
}

void expect_refused(const std::string& path, std::vector<std::string> parts) {
  parts.push_back(path);
  expect_error<DataError>([&] { open_data({.path = path, .seq = 1, .held_out_fraction = 0}); }, parts);
}

TEST(CompressedText, IsReadWhateverTheFileIsCalled) {
  const TemporaryFolder folder;
  for (const auto pack : kPackers)
    for (const char* name : {"a.txt.gz", "a.zst", "a"})
      EXPECT_EQ(tokens_in(folder.write(name, pack("abc"))), (std::vector<int64_t>{'a', 'b', 'c'})) << name;
}

TEST(CompressedText, IsReadToItsEnd) {
  const TemporaryFolder folder;
  const std::string text = long_text();
  for (const auto pack : kPackers) {
    const auto data = open_data({.path = folder.write("a.txt.gz", pack(text)),
                                 .seq = static_cast<int64_t>(text.size()),
                                 .held_out_fraction = 0});
    const auto input = data.train.sample(0).input;
    EXPECT_EQ(std::string(input.const_data_ptr<int64_t>(), input.const_data_ptr<int64_t>() + input.numel()), text);
  }
}

TEST(CompressedText, OfSeveralMembersIsRead) {
  const TemporaryFolder folder;
  for (const auto pack : kPackers)
    EXPECT_EQ(tokens_in(folder.write("a", pack("ab") + pack("") + pack("cd"))),
              (std::vector<int64_t>{'a', 'b', 'c', 'd'}));
  EXPECT_EQ(tokens_in(folder.write("a", gzip("ab") + std::string(512, '\0'))), (std::vector<int64_t>{'a', 'b'}));
  const std::string skippable("\x50\x2a\x4d\x18\x02\0\0\0xx", 10);
  EXPECT_EQ(tokens_in(folder.write("a", zstd("ab") + skippable)), (std::vector<int64_t>{'a', 'b'}));
}

TEST(CompressedText, OfRecordsIsJsonLines) {
  const TemporaryFolder folder;
  folder.write("a.txt", "prose");
  for (const auto pack : kPackers) {
    folder.write("b.jsonl.gz", pack("{\"text\": \"one\"}\n{\"text\": \"two\"}\n"));
    const auto data = open_data({.path = folder.path(), .seq = 1, .held_out_fraction = 0});
    EXPECT_EQ(data.json_files, 1);
    EXPECT_EQ(data.train.tokens(), 6 + 8);
  }
}

TEST(CompressedText, ThatIsCutShortIsNamedWithItsOffset) {
  const TemporaryFolder folder;
  for (const auto pack : kPackers) {
    const std::string packed = pack(long_text());
    for (const size_t left : {packed.size() - 1, packed.size() / 2, size_t{12}}) {
      const auto path = folder.write("a.txt.gz", packed.substr(0, left));
      expect_refused(path, {"ends before its text does, at byte " + std::to_string(left), "copy or download"});
    }
  }
}

TEST(CompressedText, ThatIsDamagedIsNamed) {
  const TemporaryFolder folder;
  for (const auto pack : kPackers) {
    std::string packed = pack("a text of some letters");
    packed[pack == gzip ? packed.size() - 6 : 5] ^= 0x55;  // gzip's checksum, zstd's size of the text
    expect_refused(folder.write("a.txt.gz", packed), {"is damaged (", "at byte "});
  }
}

TEST(CompressedText, WithSomethingElseBehindItIsNamed) {
  const TemporaryFolder folder;
  for (const auto pack : kPackers) {
    const std::string packed = pack("abc");
    expect_refused(folder.write("a", packed + "trailing prose"),
                   {"is followed by something else at byte " + std::to_string(packed.size())});
  }
}

TEST(CompressedText, OfTokensIsRefused) {
  const TemporaryFolder folder;
  expect_refused(folder.write("a.bin.gz", gzip("abcd")), {"tokens are read where they lie in the file", "unpack"});
}

TEST(CompressedText, OfSomethingElseIsNamedByThat) {
  const TemporaryFolder folder;
  expect_refused(folder.write("a.tar.gz", gzip(std::string(257, '\1') + "ustar")), {"of the kind tar", "tar -xf"});
  expect_refused(folder.write("a.gz", gzip(gzip("abc"))), {"of the kind gzip"});
}

TEST(CompressedText, IsBytesWhereTheseAreAskedFor) {
  const TemporaryFolder folder;
  const std::string packed = gzip("abc");
  const auto data =
      open_data({.path = folder.write("a.gz", packed), .format = DataFormat::kBytes, .seq = 1, .held_out_fraction = 0});
  EXPECT_EQ(data.train.tokens(), static_cast<int64_t>(packed.size()) + 1);
}

}  // namespace
}  // namespace trireme
