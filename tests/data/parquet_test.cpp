// Parquet files that pyarrow writes, beside the same rows as JSON lines.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <optional>

#include "tests/data/data_test.h"
#include "trireme/base/error.h"
#include "trireme/data/dataset.h"
#include "trireme/data/tokenizer.h"

namespace trireme {
namespace {

// Runs in the folder of the files. Pairs NAME.parquet and NAME.jsonl have the same texts; those in refused/ are
// refused.
constexpr const char* kWriter = R"py(
import json, os
import pyarrow as pa
from pyarrow import parquet as pq
import pyarrow.parquet.encryption as pe
rows = ["", "naïve 😀 \"quoted\"\nline", "b" * 3000] + [f"row {i} of many" for i in range(700)] + ["same", "same", "a"]
def write(name, column, texts=rows, key="text", **options):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    table = column if isinstance(column, pa.Table) else pa.table({"id": pa.array(range(len(texts))), key: column})
    pq.write_table(table, name + ".parquet", **options)
    with open(name + ".jsonl", "w") as lines:
        lines.writelines(json.dumps({"id": 1, key: text}) + "\n" for text in texts)
text = pa.array(rows)
write("plain", text, use_dictionary=False)
write("dictionary", text, use_dictionary=True)
for codec in ("none", "snappy", "gzip", "zstd", "lz4", "brotli"):
    write(codec, text, compression=codec, row_group_size=100)
for encoding in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
    write(encoding, text, use_dictionary=False, column_encoding={"text": encoding})
write("large_string", text.cast(pa.large_string()))
write("binary", text.cast(pa.binary()))
write("large_binary", text.cast(pa.large_binary()))
write("string_view", text.cast(pa.string_view()))
write("categories", text.dictionary_encode(), row_group_size=7)
write("pages", text, data_page_size=64, data_page_version="2.0", write_page_checksum=True, row_group_size=300)
write("without_arrow", text, store_schema=False)
write("chunks", pa.chunked_array([rows[:2], [], rows[2:]]))
write("dot/a", pa.table({"a.b": text, "a": pa.array([{"b": "no", "c": 1}] * len(rows))}), key="a.b")
write("groups_without_rows", text)
with pq.ParquetWriter("groups_without_rows.parquet", pa.schema([("text", pa.string())])) as writer:
    for part in ([], rows[:1], [], rows[1:], []):
        writer.write_table(pa.table({"text": pa.array(part, pa.string())}), row_group_size=1000)
for part, cut in enumerate((0, 200, 400)):
    write(f"folder/lang=de/part-{part}.snappy", text[cut:cut + 200], rows[cut:cut + 200])
pq.write_metadata(pa.schema([("text", pa.string())]), "folder/_common_metadata")
open("folder/_SUCCESS", "w").close()
write("empty/no_rows", pa.array([], pa.string()), [])
write("empty/empty_texts", pa.array(["", ""]), ["", ""])
pq.ParquetWriter("empty/no_groups.parquet", pa.schema([("text", pa.string())])).close()

def refused(name, column, key="text", **options):
    write("refused/" + name, column if isinstance(column, pa.Table) else pa.table({key: column}), [], **options)
refused("missing", pa.table({"body": ["a"], "n": [1]}))
refused("no_columns", pa.table({}))
refused("ints", pa.table({"text": [1], "body": ["a"]}))
refused("tokens", pa.array([[1, 2]]))
refused("texts", pa.array([["a", "b"]]))
refused("records", pa.array([{"a": "b"}]))
refused("nulls", pa.array(["a"] * 300 + [None]), row_group_size=9)
refused("null_categories", pa.array(["a", None]).dictionary_encode())
refused("nothing", pa.array([None, None]))
refused("twice", pa.Table.from_arrays([pa.array(["a"])] * 2, ["text", "text"]))
refused("latin", pa.array(["a".encode(), "\xe9".encode("latin1")]))
refused("nul", pa.array(["a", "b", "c\0d"]))
refused("damaged", pa.array([f"{i} {i * i}" for i in range(20000)]), write_page_checksum=True, compression="none", use_dictionary=False)
data = bytearray(open("refused/damaged.parquet", "rb").read())
data[5000] ^= 1
open("refused/damaged.parquet", "wb").write(data)
whole = open("plain.parquet", "rb").read()
for name, contents in (("cut", whole[:-1]), ("half", whole[:len(whole) // 2]), ("footer", whole[:-40] + b"\xff" * 32 + whole[-8:]),
                       ("length", whole[:-8] + b"\xff\xff\xff\x7fPAR1"), ("only_magic", b"PAR1\0\0\0\0PAR1"),
                       ("prose", b"404: Not Found"), ("pointer", b"version https://git-lfs.github.com/spec/v1\n")):
    open(f"refused/{name}.parquet", "wb").write(contents)

class Keys(pe.KmsClient):
    def wrap_key(self, key, name): return key.hex()
    def unwrap_key(self, key, name): return bytes.fromhex(key)
factory = pe.CryptoFactory(lambda configuration: Keys())
for name, plain in (("encrypted", False), ("encrypted_column", True)):
    keys = pe.EncryptionConfiguration(footer_key="k", column_keys={"c": ["text"]}, plaintext_footer=plain)
    refused(name, text, encryption_properties=factory.file_encryption_properties(pe.KmsConnectionConfig(), keys))
)py";

std::string python_of_build() {
  std::ifstream file(std::filesystem::read_symlink("/proc/self/exe").parent_path().parent_path() /
                     "share/trireme/python");
  std::string python;
  return std::getline(file, python) ? python : "";
}

bool succeeds(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

std::string python_with_pyarrow() {
  for (const std::string& python : {python_of_build(), std::string("python3")})
    if (!python.empty() && succeeds(python + " -c 'import pyarrow.parquet'")) return python;
  return "";
}

std::vector<int64_t> all_tokens(const DataOptions& options) {
  const TokenDataset data = open_data(options).train;
  std::vector<int64_t> indices(static_cast<size_t>(data.size()));
  std::iota(indices.begin(), indices.end(), 0);
  const TokenBatch batch = data.batch(indices);
  const auto* input = batch.input.const_data_ptr<int64_t>();
  return {input, input + batch.input.numel()};
}

// Processes that this one has started, also those that have ended and were not waited for.
std::string children() {
  std::ifstream file("/proc/thread-self/children");
  std::string numbers;
  std::getline(file, numbers);
  return numbers;
}

// Letters of bytes that the texts have; others are the unknown token.
const char* kTokenizer = R"({"model": {"type": "BPE", "vocab": {"<unk>": 0, "<end>": 1, "a": 2, "b": 3, "r": 4, "o": 5,
  "w": 6, "ro": 7, "row": 8, "0": 9, "1": 10}, "merges": [["r", "o"], ["ro", "w"]], "unk_token": "<unk>"}})";

class ParquetFiles : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    python_ = python_with_pyarrow();
    if (python_.empty()) return;
    folder_.emplace();
    folder_->write("write.py", kWriter);
    const auto errors = (*folder_ / "errors").string();
    const std::string command = "cd " + folder_->path().string() + " && " + python_ + " write.py 2>" + errors;
    ASSERT_EQ(std::system(command.c_str()), 0) << folder_->read("errors");
    folder_->write("tokenizer.json", kTokenizer);
  }
  static void TearDownTestSuite() { folder_.reset(); }

  void SetUp() override {
    if (python_.empty()) GTEST_SKIP() << "no Python has pyarrow, so there are no Parquet files to read";
  }

  // No process of a reader is left, not even one that has ended.
  void TearDown() override { EXPECT_EQ(children(), children_); }

  static std::string path(const std::string& name) { return (*folder_ / name).string(); }

  static DataOptions options(const std::string& name, const std::string& key = "") {
    return {.path = path(name), .seq = 1, .held_out_fraction = 0, .text_key = key, .python = python_};
  }

  static void expect_equal(const std::vector<int64_t>& tokens, const std::vector<int64_t>& others) {
    ASSERT_GT(tokens.size(), 0u);
    EXPECT_EQ(tokens.size(), others.size());
    const auto place = std::mismatch(tokens.begin(), tokens.end(), others.begin(), others.end()).first - tokens.begin();
    EXPECT_EQ(static_cast<size_t>(place), tokens.size()) << "tokens differ from there on";
  }

  static void expect_as_json(const std::string& parquet, const std::string& json, const std::string& key = "") {
    DataOptions one = options(parquet, key), other = options(json, key);
    expect_equal(all_tokens(one), all_tokens(other));
    one.tokenizer = other.tokenizer = load_tokenizer(path("tokenizer.json"), {.eos_token = "<end>"});
    expect_equal(all_tokens(one), all_tokens(other));
  }

  static void expect_refused(const std::string& name, const std::vector<std::string>& parts) {
    SCOPED_TRACE(name);
    expect_error<DataError>([&] { open_data(options(name)); }, parts);
  }

  const std::string children_ = children();
  static std::string python_;
  static std::optional<TemporaryFolder> folder_;
};

std::string ParquetFiles::python_;
std::optional<TemporaryFolder> ParquetFiles::folder_;

TEST_F(ParquetFiles, HaveTheTokensOfTheSameRowsAsJsonLines) {
  expect_as_json("*.parquet", "*.jsonl");
  expect_as_json("dot/a.parquet", "dot/a.jsonl", "a.b");
}

TEST_F(ParquetFiles, InAFolderAreReadInTheOrderOfTheirPaths) {
  expect_as_json("folder/**/*.parquet", "folder/**/*.jsonl");
  auto all = options("folder");
  all.exclude = {"*.jsonl"};
  const auto data = open_data(all);
  EXPECT_EQ(data.parquet_files, 3);
  EXPECT_EQ(data.json_files, 0);
  EXPECT_EQ(data.skipped_files, 2);
  EXPECT_EQ(data.skipped_kinds, std::vector<std::string>{"metadata of Parquet"});
}

TEST_F(ParquetFiles, AreKnownByTheirBytesBesideOthers) {
  const TemporaryFolder folder;
  std::filesystem::copy(path("plain.parquet"), folder / "a.data");
  folder.write("b.txt", "prose");
  folder.write("c.txt", "PAR1 is a golfer's word");
  folder.write("d.data", "PAR1" + std::string(100, '\0'));
  const auto data = open_data({.path = folder.path(), .seq = 1, .held_out_fraction = 0, .python = python_});
  EXPECT_EQ(data.parquet_files, 1);
  EXPECT_EQ(data.train.files(), 3);
  EXPECT_EQ(data.skipped_files, 1);
  const auto bytes = open_data({.path = folder / "a.data", .format = DataFormat::kBytes, .seq = 1, .python = "no"});
  EXPECT_EQ(bytes.train.tokens() + bytes.held_out.tokens(), std::filesystem::file_size(folder / "a.data") + 1);
}

TEST_F(ParquetFiles, WithoutTextsAreSkippedAsEmptyOnesAre) {
  for (const std::string name : {"no_rows", "empty_texts", "no_groups"})
    expect_refused("empty/" + name + ".parquet", {"nothing to train on", "all of them empty"});
}

TEST_F(ParquetFiles, AreRefusedByName) {
  const struct {
    std::string name;
    std::vector<std::string> parts;
  } cases[] = {
      {"missing", {"no column `text`", "`body` (string), `n` (int64)", "--text-key"}},
      {"no_columns", {"no column `text`", "it has no columns"}},
      {"ints", {"`text` is int64, not a text", "`body` (string)", "--text-key"}},
      {"tokens", {"`text` is list<", "not a text", "numpy.save()"}},
      {"texts", {"`text` is list<", "a column of their own"}},
      {"records", {"`text` is struct<", "a column of their own"}},
      {"nulls", {", row 301: `text` is null", "dropna(subset=[\"text\"])"}},
      {"null_categories", {", row 2: `text` is null"}},
      {"nothing", {"`text` is null, not a text"}},
      {"twice", {"2 columns are called `text`"}},
      {"latin", {", row 2: `text` is not UTF-8"}},
      {"nul", {", row 3: `text` has the character \\u0000"}},
      {"damaged", {"is damaged", "copy or download it again"}},
      {"cut", {"cut short", "copy or download it again"}},
      {"half", {"cut short"}},
      {"footer", {"is damaged"}},
      {"length", {"is damaged"}},
      {"only_magic", {"is damaged"}},
      {"prose", {"no Parquet", "PAR1"}},
      {"pointer", {"git lfs pull"}},
      {"encrypted", {"encrypt", "without encryption"}},
      {"encrypted_column", {"is encrypted"}},
  };
  for (const auto& c : cases) {
    auto parts = c.parts;
    parts.push_back(path("refused/" + c.name + ".parquet"));
    expect_refused("refused/" + c.name + ".parquet", parts);
  }
}

TEST_F(ParquetFiles, ThatAreDamagedAreRefusedInAFolderToo) {
  for (const std::string name : {"cut", "prose", "pointer", "encrypted"}) {
    const TemporaryFolder folder;
    folder.write("a.txt", "prose");
    std::filesystem::copy(path("refused/" + name + ".parquet"), folder / "b.parquet");
    SCOPED_TRACE(name);
    expect_error<DataError>([&] { open_data({.path = folder.path(), .seq = 1, .python = python_}); },
                            {folder / "b.parquet"});
  }
}

TEST_F(ParquetFiles, OfAnotherColumnThanTheOneThatIsNamedAreRefused) {
  expect_error<DataError>([&] { open_data(options("plain.parquet", "body")); },
                          {"no column `body`", "`id` (int64), `text` (string)"});
}

TEST_F(ParquetFiles, ThatArePackedAreRefused) {
  if (!succeeds("gzip -k " + path("plain.parquet"))) GTEST_SKIP() << "there is no gzip";
  expect_refused("plain.parquet.gz", {"plain.parquet.gz", "compressed Parquet file", "unpack it"});
}

// Programs of the shell that stand for Python.
class AReaderOfParquet : public ::testing::Test {
 protected:
  AReaderOfParquet() {
    path_ = folder_.write("a.parquet", "PAR1" + std::string(100, '\0') + "PAR1");
    if (const char* path = std::getenv("PATH")) search_ = path;
  }
  ~AReaderOfParquet() override {
    ::setenv("PATH", search_.c_str(), 1);
    EXPECT_EQ(children(), children_);
  }

  void expect_refused(const std::string& program, const std::vector<std::string>& parts) const {
    const auto python = folder_.write("python", "#!/bin/sh\n" + program);
    std::filesystem::permissions(python, std::filesystem::perms::owner_all);
    ::setenv("PATH", folder_.path().c_str(), 1);
    expect_error<DataError>([&] { open_data({.path = path_, .seq = 1, .python = python}); }, parts);
  }

  const std::string children_ = children();
  TemporaryFolder folder_;
  std::string path_;
  std::string search_;
};

const std::string kReady = R"(printf 'R\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000\000')";

TEST_F(AReaderOfParquet, ThatIsNotThereIsRefusedWithTheWayToGetIt) {
  const std::vector<std::string> parts = {path_,
                                          "pyarrow",
                                          folder_ / "python",
                                          "-m pip install pyarrow",
                                          "TRIREME_PYTHON",
                                          "pandas.read_parquet(\"" + path_,
                                          "python3 has none"};
  expect_refused("echo no module >&2; exit 1", parts);
  expect_refused("echo hello", parts);
  expect_refused("exit 0", parts);
  expect_error<DataError>([&] { open_data({.path = path_, .seq = 1, .python = "/no/python"}); },
                          {"/no/python has none (No such file or directory)"});
}

TEST_F(AReaderOfParquet, ThatDiesIsAnErrorThatNamesTheFile) {
  expect_refused(kReady + "; kill -9 $$", {path_, "ended by signal 9", "smaller row groups"});
  expect_refused(kReady + "; echo last words >&2; exit 3", {path_, "ended with status 3: last words"});
  expect_refused(kReady + "; printf T", {path_, "ended with status 0"});
}

TEST_F(AReaderOfParquet, ThatLacksPyarrowLeavesItToPython3) {
  const auto python = python_with_pyarrow();
  if (python.empty()) GTEST_SKIP() << "no Python has pyarrow";
  const auto other = folder_.write("python3", "#!/bin/sh\nexec " + python + " \"$@\"\n");
  std::filesystem::permissions(other, std::filesystem::perms::owner_all);
  expect_refused("exit 1", {path_, "is damaged"});
}

}  // namespace
}  // namespace trireme
