// `trireme convert` as users call it.
#include <ATen/ops/ones.h>
#include <gtest/gtest.h>

#include "tests/cli/program.h"
#include "tests/support/run_ranks.h"
#include "trireme/checkpoint/checkpoint.h"

namespace trireme::cli {
namespace {

/// A checkpoint "one" of a model with one weight and its Adam states.
void save_small(const std::string& folder) {
  run_ranks(1, [&](Rank& rank) {
    StateTree state;
    for (const char* name : {"model.w", "optimizer.exp_avg.w", "optimizer.exp_avg_sq.w"})
      state.tensors.push_back({name, {{3}}, 0, at::ones({3})});
    state.values = R"({"global_steps": 1, "skipped_steps": 0, "global_samples": 4, "lr": 0.5, "group_lrs": [0.5],
                       "parameter_steps": {"w": 1}, "client_state": {}})";
    save_checkpoint(rank.world(), folder, "one", state);
  });
}

TEST(ConvertProgram, GoesToDeepSpeedsLayoutAndBack) {
  const TemporaryFolder folder;
  save_small(folder / "ours");
  const ProgramResult there =
      run_program({"convert", folder / "ours", folder / "theirs", "--to", "deepspeed", "--stage", "3", "--ranks", "2"});
  EXPECT_EQ(there.exit_code, 0) << there.err;
  EXPECT_EQ(there.err, "");  // no progress where nobody looks
  EXPECT_TRUE(there.out.starts_with(folder / "theirs/one: 3 tensors of ")) << there.out;
  EXPECT_EQ(contents_of(folder / "theirs/latest"), "one");
  const ProgramResult back =
      run_program({"convert", folder / "theirs", folder / "again", "--to", "trireme", "--out-tag", "two"});
  EXPECT_EQ(back.exit_code, 0) << back.err;
  EXPECT_NE(back.out.find("(DeepSpeed)"), std::string::npos) << back.out;
  EXPECT_TRUE(std::filesystem::exists(folder / "again/two/manifest.json"));
}

TEST(ConvertProgram, RefusesBeforeItWrites) {
  const TemporaryFolder folder;
  save_small(folder / "ours");
  const auto refused = [&](std::vector<std::string> arguments, int exit_code, const std::string& text) {
    arguments.insert(arguments.begin(), "convert");
    const ProgramResult result = run_program(arguments);
    EXPECT_EQ(result.exit_code, exit_code) << result.err;
    EXPECT_TRUE(result.err.starts_with("trireme convert: ")) << result.err;
    EXPECT_NE(result.err.find(text), std::string::npos) << result.err;
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  };
  const std::string from = folder / "ours";
  const std::string out = folder / "out";
  refused({from, out, "--to", "deepspeed"}, 2, "--to deepspeed needs --stage and --ranks");
  refused({from, out, "--to", "trireme", "--stage", "2"}, 2, "--stage and --ranks have no meaning with --to trireme");
  refused({from, out, "--to", "onnx"}, 2, "--to: 'onnx' is none of trireme, deepspeed");
  refused({from, out, "--to", "deepspeed", "--stage", "4", "--ranks", "2"}, 2, "--stage");
  refused({from, "--to", "trireme"}, 2, "OUT");
  refused({from, out, "--to", "trireme", "--tag", "two"}, 1, "name one of its tags: one");
  refused({folder / "none", out, "--to", "trireme"}, 2, "none");
}

}  // namespace
}  // namespace trireme::cli
