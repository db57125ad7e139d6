// Every mistake of a file in one run, with its line.
#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"
#include "trireme/config/source.h"

namespace trireme {
namespace {

/// "line: message", without the origin.
std::vector<std::string> mistakes_of(const std::string& text, int world_size = 1) {
  std::vector<std::string> lines;
  for (const ConfigMistake& mistake : mistakes_in(parse_source(text, "f"), world_size)) {
    const size_t origin = mistake.message.find("f: ");
    lines.push_back(str(mistake.line, ": ", mistake.message.substr(origin == std::string::npos ? 0 : origin + 3)));
  }
  return lines;
}

using Lines = std::vector<std::string>;

TEST(Mistakes, AreNoneInAGoodFile) { EXPECT_EQ(mistakes_of(R"({"train_batch_size": 1})"), Lines{}); }

TEST(Mistakes, AreAllNamedInTheOrderOfTheirLines) {
  EXPECT_EQ(
      mistakes_of(R"({
  "train_batch_size": 8, # good
  "zero_optimization": {
    "stage": 4,
    "stgae": 3,
    "offload_param": {"device": "tape"}
  },
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": -1,
               "betas": 3, "momentum": 1}
  },
  "scheduler": {"type": "WarmpLR"},
  "fp16": {"enabled": "yes"},
  "elasticity": {"enabled": true},
  "amp": 5
})"),
      (Lines{"4: `zero_optimization.stage` is 4; expected an integer from 0 to 3",
             "5: unknown key `zero_optimization.stgae`. Did you mean `stage`?",
             "6: `zero_optimization.offload_param.device` is \"tape\"; expected one of \"none\", \"cpu\", \"nvme\".",
             "10: `optimizer.params.lr` is -1; expected a finite number >= 0",
             "11: `optimizer.params.betas` is 3; expected a list of two numbers, each from 0 up to, but not "
             "including, 1",
             "11: unknown key `optimizer.params.momentum`. Remove it; `trireme docs config` lists all keys.",
             "13: `scheduler.type` is \"WarmpLR\"; expected one of WarmupLR, WarmupDecayLR, WarmupCosineLR, "
             "LRRangeTest, OneCycle, constant, linear, cosine, wsd, or in Python a scheduler of "
             "torch.optim.lr_scheduler. Did you mean `WarmupLR`?",
             "14: `fp16.enabled` is \"yes\"; expected true or false",
             "15: `elasticity.enabled` = true is not there yet; remove it or set it to false",
             "16: `amp` = 5 is not there yet; remove it or set its \"enabled\" to false"}));
}

TEST(Mistakes, OfOneKeyDoNotSpoilAnother) {
  // Neither "needs to be provided" nor a sum that does not work out follows from a batch size that is no number.
  EXPECT_EQ(mistakes_of(R"({"train_batch_size": "x",
  "train_micro_batch_size_per_gpu": 3})",
                        2),
            (Lines{"1: `train_batch_size` is \"x\"; expected an integer from 1 to 2147483647"}));
  EXPECT_EQ(mistakes_of(R"({"train_batch_size": 1,
  "bf16": {"enabled": 3}, "data_types": {"grad_accum_dtype": "bf16"}})"),
            (Lines{"2: `bf16.enabled` is 3; expected true or false"}));
}

TEST(Mistakes, OfSeveralKeysTogetherStandAtOneOfThem) {
  EXPECT_EQ(mistakes_of("{\n\"train_batch_size\": 1, \"deterministic\": true,\n\"trireme\": {\"pipeline\": "
                        "{\"whole_gradients\": true}}}"),
            (Lines{"3: `trireme.pipeline.whole_gradients` sums the gradients of a rank first, and `deterministic` adds "
                   "those of each micro-batch in order; keep one of the two"}));
  EXPECT_EQ(mistakes_of(R"({"train_batch_size": 1, "deterministic": true,
  "trireme": {"pipeline": {"whole_gradients": "auto"}}})"),
            Lines{});
  EXPECT_EQ(mistakes_of(R"({"train_batch_size": 1,
  "trireme": {"pipeline": {"whole_gradients": "some"}}})"),
            (Lines{"2: `trireme.pipeline.whole_gradients` is \"some\"; expected true, false or \"auto\""}));
  EXPECT_EQ(
      mistakes_of("{\n\"train_batch_size\": 5,\n\"gradient_predivide_factor\": 2,\n\"prescale_gradients\": true}", 2),
      (Lines{"2: `train_batch_size` is 5; set it to 4, or leave one of the three out: it follows from the other two",
             "4: `prescale_gradients` = true divides gradients by the number of ranks before they travel, and "
             "`gradient_predivide_factor` by another number; keep one of the two"}));
}

TEST(Mistakes, HaveTheLineOfTheNameInTheFile) {
  EXPECT_EQ(mistakes_of("{\"train_batch_size\": 1,\n\"bfloat16\": {\n\"enabled\": 2}}"),
            (Lines{"3: `bfloat16.enabled` is 2; expected true or false"}));
  EXPECT_EQ(mistakes_of("train_batch_size: 1\n\ntrireme: {\n  recompute: some\n}"),
            (Lines{"4: `trireme.recompute` is \"some\"; expected one of \"none\", \"full\", \"selective\"."}));
}

TEST(Mistakes, AreTogetherTheErrorOfReadingAndTheFirstGivesItsKind) {
  EXPECT_EQ(refusal_of(R"("zero_optimization": {"stage": 4}, "elasticity": {"enabled": true})"),
            wrong("`zero_optimization.stage` is 4; expected an integer from 0 to 3\n"
                  "<string>: `elasticity.enabled` = true is not there yet; remove it or set it to false"));
}

}  // namespace
}  // namespace trireme
