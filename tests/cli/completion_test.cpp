// The words that bash and zsh offer with the printed script.
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

#include "cli/command.h"
#include "cli/launch/rank_process.h"
#include "tests/cli/program.h"
#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

bool has_shell(const std::string& shell) {
  try {
    return !find_program(shell).empty();
  } catch (const Error&) {
    return false;
  }
}

// The words that `shell` offers for the last of `words`.
std::vector<std::string> offered(const std::string& shell, const std::vector<std::string>& words) {
  const TemporaryFolder folder;
  const auto printed = run_program({"completion", shell});
  EXPECT_EQ(printed.exit_code, 0) << printed.err;
  std::string script =
      shell == "zsh" ? "autoload -U compinit && compinit -u -D\n" + printed.out + "setopt ksharrays\n" : printed.out;
  script += "COMP_WORDS=(";
  for (const auto& word : words) script += "'" + word + "' ";
  script += ")\nCOMP_CWORD=" + std::to_string(words.size() - 1) + "\n_trireme\nprintf '%s\\n' \"${COMPREPLY[@]}\"\n";
  const auto done = run_program({find_program(shell), folder.write("script", script)});
  EXPECT_EQ(done.err, "");
  std::vector<std::string> lines;
  std::istringstream text(done.out);
  for (std::string line; std::getline(text, line);)
    // zsh itself leaves out what does not begin with the word.
    if (!line.empty() && (shell != "zsh" || words.back() == "=" || line.starts_with(words.back())))
      lines.push_back(line);
  return lines;
}

using Words = std::vector<std::string>;

class Completion : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (!has_shell(GetParam())) GTEST_SKIP() << "there is no " << GetParam();
  }
  Words offers(const Words& words) const { return offered(GetParam(), words); }
};

TEST_P(Completion, OffersEveryCommand) {
  const auto all = offers({"trireme", ""});
  for (const auto& command : commands()) EXPECT_EQ(std::count(all.begin(), all.end(), command.name), 1) << command.name;
  EXPECT_EQ(offers({"trireme", "est"}), Words{"estimate"});
  EXPECT_EQ(offers({"trireme", "help", "est"}), Words{"estimate"});
  EXPECT_EQ(offers({"trireme", "--v"}), Words{"--version"});
  EXPECT_EQ(offers({"trireme", "config", "ch"}), Words{"check"});
}

TEST_P(Completion, OffersFlagsOfTheCommandThatIsThere) {
  EXPECT_EQ(offers({"trireme", "train", "--data", "x", "--resume"}), (Words{"--resume", "--resume-if-there"}));
  EXPECT_EQ(offers({"trireme", "estimate", "--wor"}), Words{"--world"});
  EXPECT_EQ(offers({"trireme", "config", "check", "--wo"}), Words{"--world"});
  EXPECT_EQ(offers({"trireme", "train", "--wor"}), Words{});
}

TEST_P(Completion, OffersTheValuesOfAFlagThatTakesNoOthers) {
  EXPECT_EQ(offers({"trireme", "estimate", "--dtype", ""}), (Words{"fp32", "bf16"}));
  EXPECT_EQ(offers({"trireme", "estimate", "--dtype", "=", "b"}), Words{"bf16"});
  EXPECT_EQ(offers({"trireme", "estimate", "--dtype", "="}), (Words{"fp32", "bf16"}));
  EXPECT_EQ(offers({"trireme", "estimate", "--stage", ""}), Words{});
  EXPECT_EQ(offers({"trireme", "completion", "z"}), Words{"zsh"});
  EXPECT_EQ(offers({"trireme", "train", "--data-format", "uint1"}), Words{"uint16"});
}

TEST_P(Completion, OffersTheNamesOfAFlagThatTakesPathsToo) {
  EXPECT_EQ(offers({"trireme", "train", "--model", "gp"}), Words{"gpt2"});
  EXPECT_EQ(offers({"trireme", "estimate", "--model", "llama-1"}), (Words{"llama-10m", "llama-130m", "llama-1b"}));
  EXPECT_EQ(offers({"trireme", "train", "--device", "c"}), (Words{"cpu", "cuda"}));
  EXPECT_EQ(offers({"trireme", "train", "--model", "./config"}), Words{});  // the shell's own files
}

// Files, which the shell offers itself where nothing is.
TEST_P(Completion, LeavesTheProgramOfALauncherToTheShell) {
  EXPECT_EQ(offers({"trireme", "launch", "--num_gp"}), Words{"--num_gpus"});
  EXPECT_EQ(offers({"trireme", "launch", "--num_gpus", "2", "--pre"}), Words{"--prefix"});
  EXPECT_EQ(offers({"trireme", "launch", "--num_gpus", "2", "train.py", "--num_gp"}), Words{});
  EXPECT_EQ(offers({"trireme", "launch", "--num_gpus", "=", "2", "train.py", "--num_gp"}), Words{});
  EXPECT_EQ(offers({"trireme", "launch", ""}), Words{});
}

INSTANTIATE_TEST_SUITE_P(Shells, Completion, ::testing::Values("bash", "zsh"),
                         [](const auto& info) { return info.param; });

TEST(CompletionCommand, KnowsTwoShells) {
  const auto refused = run_program({"completion", "fish"});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("SHELL: 'fish' is none of bash, zsh"), std::string::npos) << refused.err;
}

}  // namespace
}  // namespace trireme::cli
