// Python's pickle format read as data: what becomes of its values, what is refused, and that no bytes do harm.
#include "trireme/formats/pickle/pickle.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/support/error_of.h"
#include "trireme/base/error.h"
#include "trireme/formats/pickle/json.h"

namespace trireme {
namespace {

using pickle::Document;
using pickle::Kind;
using pickle::Value;
using testing::named_error_of;

std::string bytes_of(std::string_view operations) { return "\x80\x02" + std::string(operations); }

std::string parse_error(std::string_view operations) {
  return named_error_of([&] { (void)pickle::parse(bytes_of(operations), "a.pt"); });
}

/// One of everything that a checkpoint's pickle holds.
std::string sample() {
  Document document;
  Value* shared = document.list({document.integer(1), document.integer(-70'000), document.integer(int64_t{1} << 40)});
  document.set_root(document.dict({
      {"none", document.none()},
      {"flags", document.tuple({document.boolean(true), document.boolean(false)})},
      {"numbers", shared},
      {"real", document.real(0.1)},
      {"text", document.string("Grüße")},
      {"ordered", document.dict({{"w", document.tensor("0", at::kBFloat16, {2, 3})}}, /*ordered=*/true)},
      {"size", document.size({2, 3})},
      {"dtype", document.dtype(at::kHalf)},
      {"stage", document.call("deepspeed.runtime.zero.config.ZeroStageEnum", {document.integer(2)})},
      {"scaler", document.instance("deepspeed.runtime.fp16.loss_scaler.LossScaler", {{"cur_scale", document.real(4)}})},
      {"again", shared},
  }));
  return pickle::dump(document);
}

TEST(Pickle, ReadsEveryKindOfValueThatItWrites) {
  const Document read = pickle::parse(sample(), "sample");
  const Value& root = read.root();
  EXPECT_TRUE(root.find("none")->is(Kind::kNone));
  EXPECT_TRUE(root.find("flags")->items[0]->flag);
  EXPECT_FALSE(root.find("flags")->items[1]->flag);
  EXPECT_EQ(root.find("numbers")->items[1]->integer, -70'000);
  EXPECT_EQ(root.find("again")->items[2]->integer, int64_t{1} << 40);
  EXPECT_EQ(root.find("real")->real, 0.1);
  EXPECT_EQ(root.find("text")->text, "Grüße");
  EXPECT_EQ(root.find("ordered")->text, "collections.OrderedDict");
  const pickle::TensorPlace& tensor = *root.find("ordered")->find("w")->place;
  EXPECT_EQ(tensor.storage, "0");
  EXPECT_EQ(tensor.dtype, at::kBFloat16);
  EXPECT_EQ(tensor.shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(tensor.strides, (std::vector<int64_t>{3, 1}));
  EXPECT_EQ(root.find("size")->text, "torch.Size");
  EXPECT_EQ(root.find("size")->items[1]->integer, 3);
  EXPECT_EQ(root.find("dtype")->text, "torch.float16");
  EXPECT_EQ(root.find("stage")->text, "deepspeed.runtime.zero.config.ZeroStageEnum");
  EXPECT_EQ(root.find("stage")->items[0]->integer, 2);
  EXPECT_EQ(root.find("scaler")->attribute("cur_scale")->real, 4);
  EXPECT_EQ(root.find("absent"), nullptr);
}

TEST(Pickle, WritesTheSameBytesForWhatItHasRead) {
  EXPECT_EQ(pickle::dump(pickle::parse(sample(), "sample")), sample());
}

TEST(Pickle, ReadsTheOperationsOfNewerProtocols) {
  // pickle.dumps(…, protocol=4) of [2**70, b"\xff", {"k"}, frozenset({1}), -1, 300, [same string twice]]
  const char text[] =
      "\x80\x04\x95\x30\x00\x00\x00\x00\x00\x00\x00]\x94("
      "\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x40"
      "C\x01\xff\x94"
      "\x8f\x94(\x8c\x01k\x94\x90"
      "(K\x01\x91\x94"
      "J\xff\xff\xff\xff"
      "M\x2c\x01"
      "\x8a\x01\xfe"
      "h\x03"
      "e.";
  const Document read = pickle::parse({text, sizeof text - 1}, "newer");
  const auto& items = read.root().items;
  ASSERT_EQ(items.size(), 8U);
  EXPECT_TRUE(items[0]->is(Kind::kBigInt));
  EXPECT_EQ(items[1]->text, "\xff");
  EXPECT_TRUE(items[2]->is(Kind::kSet));
  EXPECT_EQ(items[2]->items[0]->text, "k");
  EXPECT_EQ(items[3]->items[0]->integer, 1);
  EXPECT_EQ(items[4]->integer, -1);
  EXPECT_EQ(items[5]->integer, 300);
  EXPECT_EQ(items[6]->integer, -2);
  EXPECT_EQ(items[7]->text, "k");  // the memo's third entry
}

TEST(Pickle, ReadsAnEnumsMemberAsPython311HasWrittenIt) {  // as data: nothing is looked up
  const std::string name("X\x04\0\0\0NAME\x86R.", 12);
  const std::string enumeration = "ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\n";
  const Document read = pickle::parse(bytes_of("cbuiltins\ngetattr\n" + enumeration + name), "a.pt");
  EXPECT_TRUE(read.root().is(Kind::kObject));
  EXPECT_EQ(read.root().text, "builtins.getattr");
  EXPECT_EQ(read.root().items.at(1)->text, "NAME");
  EXPECT_NE(parse_error("cbuiltins\ngetattr\nK\x01" + name).find("of what is no class"), std::string::npos);
}

TEST(Pickle, RefusesAnyOtherClassByItsNameAndPlace) {
  // The bytes that pickle.dumps writes for an object that runs a command when it is loaded.
  const std::string error = parse_error("cposix\nsystem\nX\x02\x00\x00\x00id\x85R.");
  EXPECT_TRUE(error.starts_with("CheckpointError: a.pt: byte 2: the class posix.system is not one")) << error;
  EXPECT_NE(parse_error(std::string("\x8c\x08"
                                    "builtins\x8c\x04"
                                    "eval\x93."))
                .find("the class builtins.eval"),
            std::string::npos);
  EXPECT_NE(parse_error("c__main__\nConfig\n)\x81.").find("the class __main__.Config"), std::string::npos);
  EXPECT_NE(parse_error("c__main__\n\xf4\n)\x81.").find("the class __main__.? is"), std::string::npos);
}

TEST(Pickle, RefusesMisuseOfStackMarksAndMemo) {
  for (const char* operations : {".", "0.", "R.", "t.", "e.", "(.", "]K\x01s.",
                                 "K\x01K\x02"
                                 "a.",
                                 "}(K\x01u.", "h\x07.", "N)\x81.", "NQ.", "b.", "\x93."})
    EXPECT_TRUE(parse_error(operations).starts_with("CheckpointError: a.pt: byte ")) << operations;
  // Another operation must not take what lies below a mark.
  EXPECT_NE(parse_error("N(a.").find("the stack is empty"), std::string::npos);
}

TEST(Pickle, RefusesWhatItDoesNotKnow) {
  EXPECT_NE(parse_error("\x82\x01.").find("operation 0x82"), std::string::npos);  // EXT1: a registry of the reader's
  EXPECT_NE(parse_error("P1\n.").find("operation 0x50"), std::string::npos);      // persistent ids as text
  EXPECT_NE(named_error_of([] { (void)pickle::parse("\x80\x06N.", "a.pt"); }).find("protocol 6"), std::string::npos);
  EXPECT_NE(parse_error(std::string("X\x02\x00\x00\x00\xc3\x28.", 8)).find("not UTF-8"), std::string::npos);
  EXPECT_NE(parse_error("X\xff\xff\xff\x7fN.").find("truncated"), std::string::npos);
}

TEST(Pickle, RefusesATensorThatReachesBeyondItsStorage) {
  const auto tensor = [](const std::string& storage_numel, const std::string& offset, const std::string& size,
                         const std::string& stride) {
    return "ctorch._utils\n_rebuild_tensor_v2\n((X\x07" + std::string("\0\0\0storage", 10) +
           "ctorch\nFloatStorage\nX\x01" +
           std::string(
               "\0\0\0"
               "0",
               4) +
           "X\x03" + std::string("\0\0\0cpu", 6) + storage_numel + "tQ" + offset + size + stride + "\x89NtR.";
  };
  const std::string six = "K\x06", zero("K\0", 2), two_three = "K\x02K\x03\x86", three_one = "K\x03K\x01\x86";
  EXPECT_EQ(parse_error(tensor(six, zero, two_three, three_one)), "nothing");
  EXPECT_NE(parse_error(tensor(six, "K\x01", two_three, three_one)).find("reaches beyond its storage 0 of 6"),
            std::string::npos);
  EXPECT_NE(parse_error(tensor(six, zero, "K\x02\x85", three_one)).find("other strides than dimensions"),
            std::string::npos);
  EXPECT_NE(parse_error(tensor(six, zero, "J\xff\xff\xff\xff\x85", "K\x01\x85")).find("size is no tuple"),
            std::string::npos);
  // The product of these extents wraps around to 0.
  const std::string huge = "\x8a\x05" + std::string("\0\0\0\0\x01", 5);
  EXPECT_NE(parse_error(tensor(six, zero, huge + huge + "\x86", three_one)).find("beyond what memory can be"),
            std::string::npos);
}

TEST(Pickle, RepeatsNothingBeyondWhatItsBytesCouldHold) {
  // One tuple of 60,000 items, made into a torch.Size 10,000 times: 600 million items from 0.2 MB.
  std::string operations = "(" + std::string(60'000, 'N') +
                           "tq\x01"
                           "0"
                           "ctorch\nSize\nq\x02"
                           "0(";
  for (int i = 0; i < 10'000; ++i) operations += "h\x02h\x01\x85R";
  EXPECT_NE(parse_error(operations + "t.").find("repeats one value"), std::string::npos);
}

TEST(Pickle, HoldsNoMoreValuesThanPythonWritesIntoAsManyBytes) {
  // Each operation of one byte would be a value of a hundred.
  EXPECT_NE(parse_error("(" + std::string(1'000'000, ']') + "l.").find("more values than a pickle of this size"),
            std::string::npos);
  const Document shared = pickle::parse(bytes_of("(" + std::string(1'000'000, 'N') + "l."), "shared");
  EXPECT_EQ(shared.root().items.size(), 1'000'000u);
  EXPECT_LT(shared.values(), 10u);
  EXPECT_NE(parse_error("NNb.").find("a state for what has none"), std::string::npos);
}

TEST(Pickle, IsNoJsonWhereItRepeatsOneValueBeyondAllMeasure) {
  const auto fits = [](const std::string& operations) {
    return pickle::to_json(pickle::parse(bytes_of(operations), "a.pt").root()).has_value();
  };
  const auto text = [](uint32_t bytes) {
    return "X" + std::string(reinterpret_cast<const char*>(&bytes), 4) + std::string(bytes, 'x') + "q\x01";
  };
  const auto again = [](int times) {
    std::string all;
    for (int i = 0; i < times; ++i) all += "h\x01";
    return all;
  };
  EXPECT_TRUE(fits("(" + text(1000) + again(10'000) + "l."));
  EXPECT_FALSE(fits("(" + text(500'000) + again(60) + "l."));
  EXPECT_NE(parse_error("(" + text(500'000) + again(1'000) + "l.").find("repeats one value beyond all measure"),
            std::string::npos);
  std::string doubled = "](NNeq" + std::string(1, '\0');  // each list has its predecessor twice
  for (char i = 1; i < 60; ++i) doubled += std::string("](h") + char(i - 1) + "h" + char(i - 1) + "eq" + i;
  EXPECT_NE(parse_error("(" + doubled + "l.").find("repeats one value beyond all measure"), std::string::npos);
  const std::string itself =
      "]q" + std::string(1, '\0') + "(h" + std::string(1, '\0') + "h" + std::string(1, '\0') + "e.";
  EXPECT_FALSE(fits(itself));
  EXPECT_EQ(pickle::to_json(pickle::parse(bytes_of("}(" + text(1) + "K\x01h\x01K\x02u."), "a.pt").root())->dump(),
            R"({"x":2})");
}

TEST(Pickle, HoldsValuesOfAnyDepthButWritesNoneTooDeep) {
  const std::string deep = std::string(100'000, ']') + std::string(99'999, 'a') + '.';
  const Document read = pickle::parse(bytes_of(deep), "deep");
  EXPECT_TRUE(read.root().is(Kind::kList));
  EXPECT_NE(named_error_of([&] { (void)pickle::dump(read); }).find("nested more than 200 deep"), std::string::npos);
  const Document itself = pickle::parse(bytes_of("]q\x01h\x01"
                                                 "a."),
                                        "itself");  // a list that contains itself
  EXPECT_EQ(itself.root().items[0], &itself.root());
}

TEST(Pickle, AnswersDamagedBytesWithValuesOrACheckpointError) {
  const std::string whole = sample();
  std::mt19937 random(7);
  int refused = 0;
  const auto survives = [&](const std::string& bytes) {
    const std::string error = named_error_of([&] { (void)pickle::parse(bytes, "damaged"); });
    refused += error != "nothing";
    ASSERT_TRUE(error == "nothing" || error.starts_with("CheckpointError: damaged: byte ")) << error;
  };
  for (size_t length = 0; length < whole.size(); ++length) survives(whole.substr(0, length));
  EXPECT_EQ(refused, static_cast<int>(whole.size()));  // nothing that is cut short passes for whole
  for (int round = 0; round < 20'000; ++round) {
    std::string bytes = whole;
    for (int flips = 1 + round % 4; flips > 0; --flips) bytes[random() % bytes.size()] = static_cast<char>(random());
    survives(bytes);
  }
  for (int round = 0; round < 20'000; ++round) {
    std::string noise(random() % 64, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    survives(bytes_of(noise));
  }
}

}  // namespace
}  // namespace trireme
