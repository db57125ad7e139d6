// --epochs: steps follow from the size of the data.
#include <gtest/gtest.h>

#include "tests/cli/error_text.h"
#include "tests/cli/train_runs.h"

namespace trireme::cli {
namespace {

class Epochs : public TrainProgram {
 protected:
  // 21 samples of 32 tokens and no held-out tail that is shorter than one: 5 % of 736 bytes are 36.
  Epochs() { few_ = folder_.write("few/story.txt", std::string(736, 'x')); }

  std::vector<std::string> few(const std::vector<std::string>& more) const {
    return with(train("run", more), "--data", few_);
  }

  std::string few_;
};

// 736 - 36 bytes are 21 samples, and a step takes 2 ranks x 2 samples: 42 samples are 10.5 steps.
TEST_F(Epochs, BecomeStepsRoundedUp) {
  const auto done = run_program(few({"--epochs", "2"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(done.err.find("--epochs 2 of 21 samples: 11 steps in all"), std::string::npos) << done.err;
  EXPECT_EQ(numbers_of("run", "loss").size(), 11u);
  const auto config = Json::parse(contents_of(folder_ / "run/resolved_config.json"));
  EXPECT_EQ(config["scheduler"]["params"]["total_num_steps"], 11);
}

TEST_F(Epochs, MayBeAPartOfOne) {
  const auto done = run_program(few({"--epochs", "0.5"}));
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(numbers_of("run", "loss").size(), 3u);  // 10.5 samples
}

// The second start has a smaller batch: what is read counts, not the steps.
TEST_F(Epochs, AreThoseInAllAfterResuming) {
  ASSERT_EQ(run_program(few({"--epochs", "1"})).exit_code, 0);  // 6 steps of 4, 24 samples
  const auto done =
      run_program({"train", "--resume", "--out", folder_ / "run", "--epochs", "2", "--ranks", "1"});  // 18 are left
  ASSERT_EQ(done.exit_code, 0) << done.err;
  EXPECT_EQ(numbers_of("run", "loss").size(), 15u) << done.err;
  const auto again = run_program({"train", "--resume", "--out", folder_ / "run"});
  EXPECT_NE(again.err.find("nothing is left to train: 15 steps are done, --epochs is 2"), std::string::npos)
      << again.err;
  const auto by_steps = run_program({"train", "--resume", "--out", folder_ / "run", "--steps", "17"});
  ASSERT_EQ(by_steps.exit_code, 0) << by_steps.err;
  EXPECT_EQ(numbers_of("run", "loss").size(), 17u) << by_steps.err;
}

TEST_F(Epochs, BesideStepsAreRefused) {
  const auto done = run_program(few({"--epochs", "2", "--steps", "9"}));
  EXPECT_EQ(done.exit_code, 2);
  EXPECT_NE(done.err.find("--epochs 2 beside --steps 9: each says how long to train; leave one out"), std::string::npos)
      << done.err;
  const auto none = run_program(few({"--epochs", "0"}));
  EXPECT_EQ(none.exit_code, 2);
  EXPECT_NE(none.err.find("--epochs: '0' is not a number above 0"), std::string::npos) << none.err;
}

}  // namespace
}  // namespace trireme::cli
