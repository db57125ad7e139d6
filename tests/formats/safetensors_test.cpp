#include "trireme/formats/safetensors.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <gtest/gtest.h>

#include "tests/support/error_of.h"
#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

using testing::named_error_of;
using Folder = testing::TemporaryFolder;

/// A file with the given header and data.
std::string raw_file(const std::string& header, const std::string& data) {
  std::string length(8, '\0');
  for (int i = 0; i < 8; ++i) length[i] = static_cast<char>(header.size() >> (8 * i) & 255);
  return length + header + data;
}

TEST(Safetensors, EveryDtypeComesBack) {
  Folder folder;
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto dtype : {at::kBool, at::kByte, at::kChar, at::kShort, at::kInt, at::kLong, at::kHalf, at::kBFloat16,
                           at::kFloat, at::kDouble})
    tensors.emplace_back(c10::toString(dtype), at::arange(0, 15).reshape({3, 5}).to(dtype));
  write_safetensors(folder / "a.safetensors", tensors, {{"note", "x"}});
  const auto read = read_safetensors(folder / "a.safetensors");
  ASSERT_EQ(read.size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(read.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(read.at(name).equal(tensor)) << name;
  }
}

TEST(Safetensors, EmptyTensorsScalarsAndViewsComeBack) {
  Folder folder;
  const auto view = at::arange(0, 12).reshape({3, 4}).t();
  write_safetensors(folder / "a",
                    {{"empty", at::empty({0, 3})}, {"scalar", at::scalar_tensor(2.5, at::kDouble)}, {"view", view}});
  const auto read = read_safetensors(folder / "a");
  EXPECT_EQ(read.at("empty").sizes(), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(read.at("scalar").dim(), 0);
  EXPECT_EQ(read.at("scalar").item<double>(), 2.5);
  EXPECT_TRUE(read.at("view").equal(view));
}

TEST(Safetensors, DataIsAlignedAndWithoutHoles) {
  Folder folder;
  write_safetensors(folder / "a",
                    {{"byte", at::arange(0, 3).to(at::kByte)}, {"double", at::arange(0, 3).to(at::kDouble)}});
  const std::string text = folder.read("a");
  const auto header_bytes = static_cast<unsigned char>(text[0]) + 256 * static_cast<unsigned char>(text[1]);
  EXPECT_EQ((header_bytes + 8) % 64, 0);
  EXPECT_EQ(text.size(), 8u + header_bytes + 3 + 3 * 8);
}

TEST(Safetensors, OutliveTheMapAndTheirFileAndMayBeWritten) {
  Folder folder;
  write_safetensors(folder / "a", {{"t", at::arange(0, 10).to(at::kFloat)}});
  const std::string before = folder.read("a");
  at::Tensor tensor = read_safetensors(folder / "a").at("t");
  tensor.add_(1);
  EXPECT_EQ(tensor[9].item<float>(), 10);
  EXPECT_EQ(folder.read("a"), before);
  std::filesystem::remove(folder / "a");
  EXPECT_EQ(tensor.sum().item<float>(), 55);
}

TEST(Safetensors, AMisalignedTensorIsCopied) {
  Folder folder;
  const std::string number("\0\0\x80\x3f", 4);  // 1.0f
  const std::string header =
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"f":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}})";
  folder.write("a", raw_file(header, "x" + number));
  const at::Tensor tensor = read_safetensors(folder / "a").at("f");
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 4, 0u);
  EXPECT_EQ(tensor[0].item<float>(), 1);
}

TEST(Safetensors, AShardedHuggingFaceModelIsOneMap) {
  Folder folder;
  write_safetensors(folder / "m1.safetensors", {{"a", at::tensor({1.0f})}});
  write_safetensors(folder / "m2.safetensors", {{"b", at::tensor({2.0f})}});
  folder.write("model.safetensors.index.json",
               R"({"metadata":{},"weight_map":{"a":"m1.safetensors","b":"m2.safetensors"}})");
  const auto read = read_safetensors(folder.path());
  EXPECT_EQ(read.at("a").item<float>() + 10 * read.at("b").item<float>(), 21);
  folder.write("model.safetensors.index.json", R"({"weight_map":{"c":"m1.safetensors"}})");
  EXPECT_NE(
      named_error_of([&] { (void)read_safetensors(folder.path()); }).find("tensor \"c\" is not in m1.safetensors"),
      std::string::npos);
}

TEST(Safetensors, BrokenFilesAreNamed) {
  Folder folder;
  const auto refusal = [&](const std::string& contents) {
    folder.write("a", contents);
    const auto error = named_error_of([&] { (void)read_safetensors(folder / "a"); });
    EXPECT_TRUE(error.starts_with("CheckpointError: " + (folder / "a").string())) << error;
    return error;
  };
  const auto entry = [](const char* dtype, int begin, int end) {
    return str(R"({"t":{"dtype":")", dtype, R"(","shape":[2],"data_offsets":[)", begin, ",", end, "]}}");
  };
  EXPECT_NE(refusal("abc").find("3 bytes are no safetensors file"), std::string::npos);
  EXPECT_NE(refusal(std::string(64, '\xff')).find("its header should have"), std::string::npos);
  EXPECT_NE(refusal(raw_file("[1]", "")).find("not a JSON object"), std::string::npos);
  EXPECT_NE(refusal(raw_file(entry("F32", 0, 8), "1234567")).find("truncated"), std::string::npos);
  EXPECT_NE(refusal(raw_file(entry("F32", 0, 8), "123456789")).find("1 bytes behind"), std::string::npos);
  EXPECT_NE(refusal(raw_file(entry("F32", 4, 12), "123456789abc")).find("begins at byte 4, expected 0"),
            std::string::npos);
  EXPECT_NE(refusal(raw_file(entry("F32", 0, 4), "1234")).find("need 2 x 4 bytes"), std::string::npos);
  EXPECT_NE(refusal(raw_file(entry("X32", 0, 8), "12345678")).find("dtype \"X32\""), std::string::npos);
  EXPECT_NE(refusal(raw_file(R"({"t":{"shape":[2]}})", "")).find("makes no sense"), std::string::npos);
  EXPECT_NE(refusal(raw_file("{\"__metadata__\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}", ""))
                .find("nests deeper"),
            std::string::npos);
}

TEST(Safetensors, NamesThatCannotBeWrittenAreRefusedAndLeaveNothing) {
  Folder folder;
  const auto t = at::tensor({1.0f});
  EXPECT_THROW(write_safetensors(folder / "a", {{"t", t}, {"t", t}}), CheckpointError);
  EXPECT_THROW(write_safetensors(folder / "a", {{"__metadata__", t}}), CheckpointError);
  EXPECT_THROW(write_safetensors(folder / "none/a", {{"t", t}}), IoError);
  EXPECT_THROW((void)read_safetensors(folder / "none"), IoError);
  EXPECT_TRUE(folder.names().empty());
}

}  // namespace
}  // namespace trireme
