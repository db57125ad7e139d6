#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"

namespace trireme {
namespace {

BatchSizes resolve(const std::string& text, int world_size) { return parse_config(text, world_size).batch; }

std::string batch_error(const std::string& text, int world_size) {
  const Refusal refusal = refusal_of_text(text, world_size);
  EXPECT_EQ(refusal.code, ErrorCode::kBatchSize) << text;
  return refusal.message;
}

TEST(Batch, TakesAllThreeWhenTheyMultiplyOut) {
  EXPECT_EQ(
      resolve(R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})", 4),
      (BatchSizes{24, 2, 3}));
}

TEST(Batch, DerivesTheStepsFromTheOtherTwo) {
  EXPECT_EQ(resolve(R"({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2})", 4), (BatchSizes{24, 2, 3}));
}

TEST(Batch, DerivesTheMicroBatchFromTheOtherTwo) {
  EXPECT_EQ(resolve(R"({"train_batch_size": 24, "gradient_accumulation_steps": 3})", 4), (BatchSizes{24, 2, 3}));
}

TEST(Batch, DerivesTheTrainBatchFromTheOtherTwo) {
  EXPECT_EQ(resolve(R"({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3})", 4),
            (BatchSizes{24, 2, 3}));
}

TEST(Batch, TakesOneStepWhenOnlyOneSizeIsGiven) {
  EXPECT_EQ(resolve(R"({"train_batch_size": 24})", 4), (BatchSizes{24, 6, 1}));
  EXPECT_EQ(resolve(R"({"train_micro_batch_size_per_gpu": 2})", 4), (BatchSizes{8, 2, 1}));
}

TEST(Batch, ReadsAutoAndNullAsAbsent) {
  EXPECT_EQ(
      resolve(
          R"({"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": null})",
          4),
      (BatchSizes{8, 2, 1}));
}

TEST(Batch, NeedsOneOfTheTwoSizes) {
  const std::string text =
      "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided\n"
      "<string>: `train_micro_batch_size_per_gpu` is missing; set it to the samples of one rank's forward pass";
  EXPECT_EQ(batch_error("{}", 2), text);
  EXPECT_EQ(batch_error(R"({"gradient_accumulation_steps": 2})", 2), text);
  EXPECT_EQ(batch_error(R"({"train_batch_size": "auto"})", 2), text);
}

TEST(Batch, RefusesATripleThatDoesNotMultiplyOut) {
  EXPECT_EQ(
      batch_error(R"({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2})",
                  2),
      "Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * "
      "world_size 32 != 2 * 2 * 2\n"
      "<string>: `train_batch_size` is 32; set it to 8, or leave one of the three out: it follows from the other two");
}

TEST(Batch, RefusesADerivedSizeThatLosesARemainder) {
  EXPECT_NE(batch_error(R"({"train_batch_size": 25, "train_micro_batch_size_per_gpu": 2})", 4)
                .find("world_size 25 != 2 * 3 * 4"),
            std::string::npos);
  EXPECT_NE(batch_error(R"({"train_batch_size": 5})", 2).find("world_size 5 != 2 * 1 * 2"), std::string::npos);
}

TEST(Batch, RefusesSizesThatAreNotPositive) {
  EXPECT_EQ(batch_error(R"({"train_batch_size": 0})", 1),
            "Train batch size: 0 has to be greater than 0\n"
            "<string>: `train_batch_size` is 0; expected an integer >= 1");
  EXPECT_EQ(batch_error(R"({"train_micro_batch_size_per_gpu": -1})", 1),
            "Micro batch size per gpu: -1 has to be greater than 0\n"
            "<string>: `train_micro_batch_size_per_gpu` is -1; expected an integer >= 1");
  EXPECT_EQ(batch_error(R"({"train_batch_size": 2, "gradient_accumulation_steps": 0})", 1),
            "Gradient accumulation steps: 0 has to be greater than 0\n"
            "<string>: `gradient_accumulation_steps` is 0; expected an integer >= 1");
}

TEST(Batch, RefusesDerivedSizesOfZero) {
  EXPECT_EQ(batch_error(R"({"train_batch_size": 2})", 4),
            "Micro batch size per gpu: 0 has to be greater than 0\n"
            "<string>: `train_batch_size` is 2, which is not enough for 4 ranks; set it to 4 or a multiple of that");
  EXPECT_EQ(
      batch_error(R"({"train_batch_size": 5, "gradient_accumulation_steps": 3})", 2),
      "Micro batch size per gpu: 0 has to be greater than 0\n"
      "<string>: `train_batch_size` is 5, which is not enough for 2 ranks and 3 accumulation steps; set it to 6 or "
      "a multiple of that");
  EXPECT_EQ(
      batch_error(R"({"train_batch_size": 2, "train_micro_batch_size_per_gpu": 4})", 1),
      "Gradient accumulation steps: 0 has to be greater than 0\n"
      "<string>: `train_batch_size` is 2, which is not enough for 1 rank with micro-batches of 4; set it to 4 or a "
      "multiple of that");
}

TEST(Batch, DoesNotOverflow) {
  EXPECT_NE(batch_error(R"({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 2147483647,
                            "gradient_accumulation_steps": 2147483647})",
                        11)
                .find("1 != 2147483647 * 2147483647 * 11"),
            std::string::npos);
}

TEST(Batch, NamesASizeThatNoMachineHolds) {
  EXPECT_EQ(refusal_of_text(R"({"train_micro_batch_size_per_gpu": 1e30})"),
            wrong("`train_micro_batch_size_per_gpu` is 1e+30; expected an integer from 1 to 2147483647"));
}

TEST(Batch, NamesAWrongType) {
  EXPECT_EQ(refusal_of_text(R"({"train_batch_size": "8"})"),
            wrong("`train_batch_size` is \"8\"; expected an integer from 1 to 2147483647; write it without quotes"));
  EXPECT_EQ(refusal_of_text(R"({"train_batch_size": 8.5})"),
            wrong("`train_batch_size` is 8.5; expected an integer from 1 to 2147483647"));
}

TEST(Degrees, OfTheProgramLeaveTheDataDegreeToTheWorld) {
  const Config config =
      parse_config(R"({"train_batch_size": 24, "gradient_accumulation_steps": 3, "prescale_gradients": true})", 16,
                   {.pipe = 2, .tensor = 2});
  EXPECT_EQ(config.degrees, (Degrees{.data = 4, .pipe = 2, .tensor = 2}));
  EXPECT_EQ(config.batch, (BatchSizes{24, 2, 3}));
  EXPECT_EQ(config.pager.predivide_factor, 4);
  EXPECT_EQ(parse_config(to_text(config), 16, config.degrees), config);
}

TEST(Degrees, WithoutAProgramsAreAllData) {
  EXPECT_EQ(parse_config(R"({"train_batch_size": 8})", 8).degrees, (Degrees{.data = 8}));
}

TEST(Degrees, OfSequencesAreInTheFile) {
  const Config config = parse_config(R"({"train_batch_size": 6, "sequence_parallel_size": 4,
                                         "trireme": {"sequence_attention": "ring"}})",
                                     8);
  EXPECT_EQ(config.degrees, (Degrees{.data = 2, .sequence = 4}));
  EXPECT_EQ(config.batch, (BatchSizes{6, 3, 1}));
  EXPECT_EQ(config.sequence_attention, SequenceAttention::kRing);
  EXPECT_EQ(parse_config(to_text(config), 8), config);
  EXPECT_EQ(parse_config(to_text(config), 8, config.degrees), config);
}

TEST(Degrees, OfAutoSPAreAllRanksThatDataParallelSizeLeaves) {
  const auto read = [](const std::string& more) {
    return parse_config(R"({"train_micro_batch_size_per_gpu": 1,
                            "compile": {"deepcompile": true, "passes": ["autosp"]})" +
                            more + "}",
                        8);
  };
  EXPECT_EQ(read("").degrees, (Degrees{.sequence = 8}));
  EXPECT_EQ(read(R"(, "data_parallel_size": 4)").degrees, (Degrees{.data = 4, .sequence = 2}));
  EXPECT_EQ(read(R"(, "sequence_parallel_size": 4)").degrees, (Degrees{.data = 2, .sequence = 4}));
  // Products are computed again and attention is kept, unless the file says something else.
  EXPECT_EQ(read("").recompute.mode, RecomputeMode::kSelective);
  EXPECT_EQ(read("").recompute.selective.extra_compute, 1.0 / 3);
  EXPECT_EQ(read(R"(, "trireme": {"recompute": "none"})").recompute, RecomputeConfig{});
  EXPECT_EQ(parse_config(to_text(read("")), 8), read(""));
}

TEST(Degrees, OfSequencesThatContradictAreRefused) {
  const auto refusal = [](const std::string& text, const Degrees& degrees) -> std::string {
    try {
      parse_config(text, 4, degrees);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "nothing";
  };
  const std::string start = R"({"train_micro_batch_size_per_gpu": 1, )";
  EXPECT_EQ(refusal(start + R"("sequence_parallel_size": 2})", {.sequence = 4}),
            "<string>: `sequence_parallel_size` = 2, and the program's sequence degree is 4; remove the key, or set it "
            "to that");
  EXPECT_EQ(refusal(start + R"("sequence_parallel_size": 3})", {}),
            "<string>: `sequence_parallel_size` = 3 must divide the 4 ranks; change it, or the number of ranks");
  EXPECT_EQ(refusal(start + R"("sequence_parallel_size": 2, "pipeline": {"stages": 3}})", {}),
            "<string>: `pipeline.stages` = 3 times `sequence_parallel_size` = 2 must divide the 4 ranks; change it, "
            "or the number of ranks");
  EXPECT_EQ(refusal(start + R"("compile": {"deepcompile": true, "passes": ["z3"]}})", {}),
            "<string>: `compile.deepcompile` = true is not there yet; set \"passes\" to [\"autosp\"] beside it, or "
            "remove it");
}

TEST(Degrees, ThatDoNotDivideTheRanksAreRefusedByName) {
  const auto refusal = [](const Degrees& degrees) {
    try {
      parse_config(R"({"train_micro_batch_size_per_gpu": 1})", 6, degrees);
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string("no error");
  };
  EXPECT_EQ(
      refusal({.pipe = 2, .tensor = 2}),
      "<string>: degrees.pipe=2 times degrees.tensor=2 must divide the 6 ranks; change it, or the number of ranks");
  EXPECT_EQ(refusal({.sequence = 0}),
            "<string>: degrees: pipe 1, tensor 1, sequence 0, expert 1, replicas 1, model 1; each is 1 or more");
  EXPECT_EQ(refusal({.pipe = 2, .expert = 2}),
            "<string>: degrees: expert 2 and replicas 1 must each divide the data degree, 3; choose others");
}

}  // namespace
}  // namespace trireme
