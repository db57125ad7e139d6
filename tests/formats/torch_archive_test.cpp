// The archives of torch.save(): where tensors stand in them, and what damage is noticed.
#include "trireme/formats/pickle/torch_archive.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <random>

#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/formats/pickle/pickle.h"

namespace trireme {
namespace {

using testing::named_error_of;
using Folder = testing::TemporaryFolder;

/// A dict with the tensors "a" (fp32 [2, 3]: 0, 1, …) and "b" (int64 scalar: 7).
std::string small_archive() {
  std::string file;
  pickle::TorchArchiveWriter writer(
      [&](const void* data, size_t bytes) { file.append(static_cast<const char*>(data), bytes); });
  const at::Tensor a = at::arange(6, at::kFloat);
  const int64_t b = 7;
  writer.storage("0", a.const_data_ptr(), a.nbytes());
  writer.storage("1", &b, sizeof b);
  pickle::Document document;
  document.set_root(
      document.dict({{"a", document.tensor("0", at::kFloat, {2, 3})}, {"b", document.tensor("1", at::kLong, {})}}));
  writer.finish(document);
  return file;
}

TEST(TorchArchive, TellsWhereTheElementsOfATensorStandInTheFile) {
  const Folder folder;
  folder.write("a.pt", small_archive());
  pickle::TorchArchive archive(folder / "a.pt");
  const int64_t offset = archive.offset_of(*archive.root().find("a"), "a");
  at::Tensor read = at::empty({6});
  std::memcpy(read.data_ptr(), small_archive().data() + offset, 24);
  EXPECT_TRUE(at::equal(read, at::arange(6, at::kFloat)));
  EXPECT_EQ(archive.item(*archive.root().find("b"), "b"), 7);
  EXPECT_NE(named_error_of([&] { archive.item(*archive.root().find("a"), "a"); }).find("expected one element, found 6"),
            std::string::npos);
}

TEST(TorchArchive, RefusesFilesOfAnotherKindByName) {
  const Folder folder;
  folder.write("empty.pt", "");
  folder.write("old.pt",
               std::string("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19.", 15));  // before PyTorch 1.6
  for (const char* name : {"empty.pt", "old.pt"}) {
    const std::string error = named_error_of([&] { pickle::TorchArchive archive(folder / name); });
    EXPECT_TRUE(
        error.starts_with("CheckpointError: " + (folder / name).string() + ": damaged, or not written by torch.save()"))
        << error;
  }
  EXPECT_TRUE(named_error_of([&] { pickle::TorchArchive archive(folder / "none.pt"); }).starts_with("IoError: "));
}

TEST(TorchArchive, RefusesACompressedRecord) {
  const Folder folder;
  {
    caffe2::serialize::PyTorchStreamWriter writer((folder / "a.pt").string());
    const std::string zeros(24'000, '\0');
    writer.writeRecord("data/0", zeros.data(), zeros.size(), /*compress=*/true);
    pickle::Document document;
    document.set_root(document.tensor("0", at::kFloat, {6000}));
    const std::string pickle = pickle::dump(document);
    writer.writeRecord("data.pkl", pickle.data(), pickle.size());
    writer.writeEndOfFile();
  }
  const std::string error = named_error_of([&] { pickle::TorchArchive archive(folder / "a.pt"); });
  EXPECT_NE(error.find("data/0 is compressed; load the file with torch.load()"), std::string::npos) << error;
}

TEST(TorchArchive, TakesNoMemoryForWhatARecordOnlyDeclares) {
  const Folder folder;
  const std::string whole = small_archive();
  size_t entries = 0;
  for (size_t at = whole.find("PK\1\2"); at != std::string::npos; at = whole.find("PK\1\2", at + 4), ++entries) {
    for (const size_t field : {20, 24}) {
      std::string file = whole;
      file.replace(at + field, 4, "\xff\xff\xff\x7f");
      folder.write("a.pt", file);
      const std::string error = named_error_of([&] { pickle::TorchArchive archive(folder / "a.pt"); });
      EXPECT_NE(error.find("should have"), std::string::npos) << error;
      EXPECT_NE(error.find("2147483647"), std::string::npos) << error;
    }
  }
  EXPECT_GT(entries, 3u);
}

TEST(TorchArchive, NoticesThatARecordIsShorterThanItsStorage) {
  const Folder folder;
  std::string file;
  pickle::TorchArchiveWriter writer(
      [&](const void* data, size_t bytes) { file.append(static_cast<const char*>(data), bytes); });
  const float one = 1;
  writer.storage("0", &one, sizeof one);
  pickle::Document document;
  document.set_root(document.list({document.tensor("0", at::kFloat, {2}), document.tensor("1", at::kFloat, {2})}));
  writer.finish(document);
  folder.write("a.pt", file);
  pickle::TorchArchive archive(folder / "a.pt");
  EXPECT_NE(named_error_of([&] { archive.offset_of(*archive.root().items[0], "w"); }).find("does not hold 2 elements"),
            std::string::npos);
  EXPECT_NE(named_error_of([&] { archive.offset_of(*archive.root().items[1], "w"); }).find("there is no record data/1"),
            std::string::npos);
}

TEST(TorchArchive, AnswersDamageWithValuesOrAnError) {
  const Folder folder;
  const std::string whole = small_archive();
  std::mt19937 random(3);
  for (int round = 0; round < 1000; ++round) {
    std::string file = whole;
    if (round % 2 == 0) file.resize(random() % whole.size());
    if (round % 2 == 1) file[random() % file.size()] = static_cast<char>(random());
    folder.write("a.pt", file);
    const std::string error = named_error_of([&] {
      pickle::TorchArchive archive(folder / "a.pt");
      for (const char* name : {"a", "b"})
        if (const pickle::Value* value = archive.root().find(name)) (void)archive.offset_of(*value, name);
    });
    ASSERT_TRUE(error == "nothing" || error.starts_with("CheckpointError: ") || error.starts_with("IoError: "))
        << error;
    if (round % 2 == 0) {
      ASSERT_NE(error, "nothing") << file.size();
    }
  }
}

}  // namespace
}  // namespace trireme
