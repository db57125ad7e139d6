// Flags, help and error lines, without starting anything.
#include "cli/command.h"

#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "tests/cli/program.h"
#include "trireme/formats/safetensors.h"
#include "trireme/models/language_model.h"

namespace trireme::cli {
namespace {

struct Said {
  int exit_code;
  std::string out;
  std::string err;
};

Said say(const std::vector<std::string>& arguments) {
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int exit_code = run(arguments);
  const auto err = ::testing::internal::GetCapturedStderr();
  return {exit_code, ::testing::internal::GetCapturedStdout(), err};
}

void expect_wrong_use(const std::vector<std::string>& arguments, const std::string& line) {
  const auto said = say(arguments);
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_EQ(said.out, "");
  EXPECT_EQ(said.err, line + "\n");
}

TEST(Command, SuggestsTheNameThatWasMeant) {
  expect_wrong_use({"trian"}, "trireme: there is no command 'trian'. Did you mean `train`? (see trireme --help)");
  expect_wrong_use({"frobnicate"},
                   "trireme: there is no command 'frobnicate'; there is: train, generate, launch, "
                   "deepspeed, inspect, consolidate, convert, estimate, plan, config, "
                   "top, timeline, env, docs, completion (see "
                   "trireme --help)");
  expect_wrong_use({"--versoin"},
                   "trireme: there is no flag --versoin. Did you mean `--version`? (see trireme --help)");
  EXPECT_NE(say({"-v"}).err.find("trireme: there is no flag -v; give a command first: train, "), std::string::npos);
}

TEST(Command, PrintsTheManualToWhichErrorsPoint) {
  const auto list = run_program({"docs"});
  EXPECT_EQ(list.exit_code, 0) << list.err;
  EXPECT_NE(list.out.find("\n  config              config\n"), std::string::npos) << list.out;
  const auto page = run_program({"docs", "config"});
  EXPECT_TRUE(page.out.starts_with("# config\n")) << page.err;
  expect_wrong_use({"docs", "confg"},
                   "trireme docs: there is no page 'confg'. Did you mean `config`? `trireme docs` lists them");
}

TEST(Command, ChecksAConfigurationWithASchedulerThatPythonMakes) {
  const TemporaryFolder folder;
  const auto checked = [&](const std::string& scheduler, const std::string& more) {
    const auto file =
        folder.write("ds.json", R"({"train_micro_batch_size_per_gpu": 2, "scheduler": )" + scheduler + more + "}");
    return run_program({"config", "check", file});
  };
  const auto step = R"({"type": "StepLR", "params": {"step_size": 3}})";
  const auto done = checked(step, "");
  EXPECT_EQ(done.exit_code, 0) << done.err;
  EXPECT_NE(
      done.err.find("`scheduler.type` = \"StepLR\" is of torch.optim.lr_scheduler: initialize() in Python makes it"),
      std::string::npos)
      << done.err;
  EXPECT_NE(done.out.find("\"step_size\": 3"), std::string::npos) << done.out;
  EXPECT_EQ(checked(step, R"(, "fp61": {})").exit_code, 2);
  EXPECT_EQ(checked(R"({"type": "steplr"})", "").exit_code, 2);  // torch has no such name
}

TEST(Command, SuggestsTheFlagThatWasMeant) {
  expect_wrong_use({"train", "--dta", "x"},
                   "trireme train: there is no flag --dta. Did you mean `--data`? (see trireme train --help)");
  expect_wrong_use(
      {"launch", "--num_gpu=2", "x"},
      "trireme launch: there is no flag --num_gpu. Did you mean `--num_gpus`? (see trireme launch --help)");
  expect_wrong_use(
      {"config", "check", "--wrld", "2", "x.json"},
      "trireme config check: there is no flag --wrld. Did you mean `--world`? (see trireme config check --help)");
  expect_wrong_use({"train", "--batch-size", "3"},
                   "trireme train: there is no flag --batch-size. Did you mean `--batch`? (see trireme train --help)");
  expect_wrong_use({"train", "--stage", "3"}, "trireme train: there is no flag --stage (see trireme train --help)");
  expect_wrong_use({"train", "---"}, "trireme train: there is no flag --- (see trireme train --help)");
}

TEST(Command, SaysWhatToWriteForFlagsOfOtherLaunchers) {
  const std::pair<const char*, const char*> cases[] = {{"--nproc_per_node=2", "--num_gpus N"},
                                                       {"--deepspeed", "behind the program"},
                                                       {"--deepspeed_config", "behind the program"},
                                                       {"--nproc-per-node", "--num_gpus N"},
                                                       {"-np", "--num_gpus N"},
                                                       {"--num_processes", "--num_gpus N"},
                                                       {"--nnodes=1", "torchrun --nnodes N"},
                                                       {"--node_rank", "torchrun --nnodes N"},
                                                       {"--standalone", "leave it out: ranks meet at a free port"},
                                                       {"--rdzv_backend=c10d", "--master_addr"},
                                                       {"--rdzv-endpoint", "--master_addr"},
                                                       {"--max_restarts", "start it again"},
                                                       {"--enable_each_rank_log", "--log-dir DIR"},
                                                       {"--tee", "--log-dir DIR"},
                                                       {"--main_process_port", "--master_port PORT"},
                                                       {"--use_deepspeed", "--as-deepspeed"},
                                                       {"--bind_cores_to_rank", "OMP_NUM_THREADS"},
                                                       {"--elastic_training", "not there yet"}};
  for (const auto& [flag, advice] : cases) {
    const auto said = say({"launch", flag, "2", "train.py"});
    EXPECT_EQ(said.exit_code, 2) << flag;
    EXPECT_TRUE(said.err.starts_with("trireme launch: there is no flag -")) << said.err;
    EXPECT_NE(said.err.find(advice), std::string::npos) << said.err;
    EXPECT_EQ(std::count(said.err.begin(), said.err.end(), '\n'), 1) << said.err;
  }
  EXPECT_EQ(say({"train", "--nnodes", "2"}).err.find("torchrun"), std::string::npos);  // no launcher
}

TEST(Command, HelpsWithTheCommandThatIsNamed) {
  for (const auto& command : commands()) {
    const auto said = say({"help", command.name});
    EXPECT_EQ(said.exit_code, 0) << command.name;
    EXPECT_NE(said.out.find(std::string("Usage: trireme ") + command.name), std::string::npos) << said.out;
  }
  EXPECT_EQ(say({"help", "config", "check"}).out, say({"config", "check", "--help"}).out);
  EXPECT_EQ(say({"help"}).out, say({"--help"}).out);
  EXPECT_EQ(say({"help", "trian"}).exit_code, 2);
}

TEST(Command, GeneratesFromAFolderWithoutAFlag) {
  const TemporaryFolder folder;
  expect_wrong_use({"generate", folder / "nothing"},
                   "trireme generate: --checkpoint " + (folder / "nothing") + ": there is no such folder");
  expect_wrong_use({"generate"},
                   "trireme generate: FOLDER is missing: folder of a run, of its checkpoints, or one checkpoint (see "
                   "trireme generate --help)");
  EXPECT_NE(say({"generate", "--help"}).out.find("Usage: trireme generate [FLAGS] FOLDER"), std::string::npos);
}

TEST(Command, SuggestsTheCommandBelowACommandThatWasMeant) {
  expect_wrong_use({"config", "chek", "x.json"},
                   "trireme config: there is no command 'chek'. Did you mean `check`? (see trireme config --help)");
  expect_wrong_use(
      {"config", "x.json"},
      "trireme config: there is no command 'x.json'; there is: check, convert, keys, map (see trireme config --help)");
  expect_wrong_use({"config"}, "trireme config: give a command: check, convert, keys, map (see trireme config --help)");
}

TEST(Command, SaysWhatAFlagOrArgumentNeeds) {
  expect_wrong_use({"train", "--data"}, "trireme train: a value is missing: --data PATH (see trireme train --help)");
  expect_wrong_use({"train", "--data", "x", "--steps"},
                   "trireme train: a value is missing: --steps N (see trireme train --help)");
  expect_wrong_use(
      {"config", "check"},
      "trireme config check: FILE is missing: DeepSpeed JSON, or YAML of Accelerate (see trireme config check "
      "--help)");
  expect_wrong_use({"estimate", "--params", "1", "--dtype", "fp16"},
                   "trireme estimate: --dtype: 'fp16' is none of fp32, bf16 (see trireme estimate --help)");
  expect_wrong_use(
      {"launch", "--prefix", "al", "x"},
      "trireme launch: --prefix: 'al' is none of all, others, none. Did you mean `all`? (see trireme launch "
      "--help)");
  expect_wrong_use({"estimate", "--params", "1", "--model", "gpt2"},
                   "trireme estimate: --params and --model exclude each other; give one (see trireme estimate --help)");
  expect_wrong_use({"train", "--help-all"},
                   "trireme train: there is no flag --help-all. Did you mean `--help`? (see trireme train --help)");
}

// As elsewhere on a command line; `make train` puts its own flags before those of TRAIN_FLAGS.
TEST(Command, TakesTheLastOfAFlagThatIsRepeated) {
  expect_wrong_use({"train", "--data", "/no/first", "--data", "/no/last"},
                   "trireme train: data path `/no/last` does not exist; give a file, a folder or a glob such as "
                   "\"corpus/**/*.txt\"");
  expect_wrong_use({"launch", "--num_gpus", "2", "--num_ranks", "x", "y"},
                   "trireme launch: --num_gpus: 'x' is not a whole number from 1 to 65535 (see trireme launch --help)");
}

TEST(Command, RefusesAStrayArgument) {
  expect_wrong_use({"estimate", "llama"},
                   "trireme estimate: unexpected argument 'llama' (see trireme estimate --help)");
}

TEST(Command, HelpsWithEveryCommand) {
  EXPECT_EQ(say({"--help"}).exit_code, 0);
  for (const auto& command : commands()) {
    const auto said = say({command.name, "--help"});
    EXPECT_EQ(said.exit_code, 0) << command.name;
    EXPECT_NE(said.out.find(std::string("Usage: trireme ") + command.name), std::string::npos) << said.out;
    EXPECT_NE(say({"--help"}).out.find(command.name), std::string::npos);
  }
  EXPECT_NE(say({"train", "--help"}).out.find("Exit codes: 0 done, 1 failed, 2 wrong use"), std::string::npos);
  EXPECT_NE(say({"launch", "--help"}).out.find("PROGRAM [ARGUMENTS...]"), std::string::npos);
  EXPECT_NE(say({"config", "check", "--help"}).out.find("Usage: trireme config check [FLAGS] FILE"), std::string::npos);
}

TEST(Command, NeedsACommand) {
  const auto said = say({});
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_NE(said.out.find("Usage: trireme COMMAND"), std::string::npos);
}

struct WrongFlag {
  std::vector<std::string> words;
  std::string complaint;
};

TEST(TrainFlags, RefuseValuesThatMakeNoSenseAndSayWhatWould) {
  const std::vector<WrongFlag> cases = {
      {{"--steps", "many"}, "--steps: 'many' is not a whole number of at least 1"},
      {{"--steps", "0"}, "--steps: '0' is not a whole number of at least 1"},
      {{"--steps", "1.5"}, "--steps: '1.5' is not a whole number of at least 1"},
      {{"--seq", "-1"}, "--seq: '-1' is not a whole number of at least 1"},
      {{"--ranks", "0"}, "--ranks: '0' is not a whole number from 1 to 4096"},
      {{"--batch", "x"}, "--batch: 'x' is not a whole number of at least 1"},
      {{"--seed", "-5"}, "--seed: '-5' is not a whole number of at least 0"},
      {{"--save-every", "1e3"}, "--save-every: '1e3' is not a whole number of at least 0"},
      {{"--keep", "-1"}, "--keep: '-1' is not a whole number from 0 to 1000000"},
      {{"--eval-every", "x"}, "--eval-every: 'x' is not a whole number of at least 0"},
      {{"--eval-samples", "0"}, "--eval-samples: '0' is not a whole number of at least 1"},
      {{"--lr", "fast"}, "--lr: 'fast' is not a number of at least 0"},
      {{"--lr", "nan"}, "--lr: 'nan' is not a number of at least 0"},
  };
  for (const std::string peak : {"0", "-1", "nan", "inf", "989TF", "1e999"}) {
    expect_wrong_use({"train", "--data", "x", "--peak-tflops", peak},
                     "trireme train: --peak-tflops: '" + peak +
                         "' is not a number above 0; give the dense peak of one rank in TFLOP/s, such as 989.4, or "
                         "leave the flag out (see trireme train --help)");
  }
  const auto expect_no_device = [](const std::string& device, const std::string& complaint) {
    const auto said = say({"train", "--data", "x", "--device", device});
    EXPECT_EQ(said.exit_code, 2) << said.err;
    EXPECT_NE(said.err.find(complaint), std::string::npos) << said.err;
  };
  expect_no_device("gpu", "device \"gpu\" is none of auto, cpu, cuda and cuda:N");
  expect_no_device("cuda:99", "device \"cuda:99\": ");
  for (const auto& [words, complaint] : cases) {
    std::vector<std::string> arguments = {"train", "--data", "x"};
    arguments.insert(arguments.end(), words.begin(), words.end());
    expect_wrong_use(arguments, "trireme train: " + complaint + " (see trireme train --help)");
  }
}

TEST(TrainFlags, NeedData) {
  expect_wrong_use({"train"}, "trireme train: --data is required (see trireme train --help)");
}

TEST(TrainCommand, RefusesWrongInputsBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  const auto text = folder.write("data/a.txt", std::string(20000, 'a'));
  const auto bad = folder.write("bad.json", R"({"train_batch_size": 4, "optimiser": {}})");
  const auto both = folder.write("both.json", R"({"train_batch_size": 4})");
  const auto out = folder / "out";
  const std::vector<WrongFlag> cases = {
      {{"--config", bad}, bad + ":1: unknown key `optimiser`. Did you mean `optimizer`?"},
      {{"--config", folder / "none.json"}, folder / "none.json"},
      {{"--config", both, "--batch", "2"}, "--batch: " + both + " already says train_batch_size=4; leave one out"},
      {{"--model", "llama-4m"}, "llama-4m"},
      {{"--data-format", "utf8"}, "utf8"},
      {{"--init-from", folder / "w.safetensors"},
       "--init-from " + (folder / "w.safetensors") + ": there is no such file"},
  };
  for (const std::string ranks : {"1", "2"}) {
    for (const auto& [words, complaint] : cases) {
      std::vector<std::string> arguments = {"train", "--data", text, "--seq", "16", "--ranks", ranks, "--out", out};
      arguments.insert(arguments.end(), words.begin(), words.end());
      const auto said = say(arguments);
      EXPECT_EQ(said.exit_code, 2) << said.err;
      EXPECT_TRUE(said.err.starts_with("trireme train: ")) << said.err;
      EXPECT_NE(said.err.find(complaint), std::string::npos) << said.err;
      EXPECT_FALSE(std::filesystem::exists(out));
    }
  }
}

TEST(InspectCommand, WritesJsonOfFilesWhoseNamesAreNotUtf8) {
  const TemporaryFolder folder;
  const std::string latin = folder / "caf\xe9";
  std::filesystem::create_directory(latin);
  write_safetensors(latin + "/model.safetensors", {{"w", at::zeros({2})}});
  const auto said = say({"inspect", latin, "--json"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_NE(said.out.find("caf\xef\xbf\xbd"), std::string::npos) << said.out;
}

TEST(TrainCommand, NamesAFlagThatItsRecordCannotKeep) {
  const TemporaryFolder folder;
  const auto text = folder.write("caf\xe9.txt", std::string(10'000, 'x'));
  const auto said = say({"train", "--data", text, "--out", folder / "run"});
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_NE(said.err.find("--data '" + (folder / "caf?.txt") + "': not UTF-8"), std::string::npos) << said.err;
}

TEST(TrainCommand, NamesDataThatIsNotThere) {
  const auto said = say({"train", "--data", "/no/such/data"});
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_NE(said.err.find("/no/such/data"), std::string::npos) << said.err;
}

TEST(GenerateCommand, RefusesAFolderWithoutACheckpoint) {
  const TemporaryFolder folder;
  expect_wrong_use({"generate", "--checkpoint", folder / "nothing"},
                   "trireme generate: --checkpoint " + (folder / "nothing") + ": there is no such folder");
  expect_wrong_use({"generate", "--checkpoint", folder.path().string()},
                   "trireme generate: --checkpoint " + folder.path().string() +
                       ": no checkpoint in this folder; give that of a run of `trireme train`");
  const auto file = folder.write("c.json", "{}");
  expect_wrong_use({"generate", "--checkpoint", file},
                   "trireme generate: --checkpoint " + file +
                       ": this is a file; give the folder of a run, of its checkpoints, or of one checkpoint");
}

TEST(EstimateCommand, PrintsTheFourStagesOfZeroForEachAccumulationDtype) {
  const auto said = say({"estimate", "--params", "7.5e9", "--world", "64"});
  EXPECT_EQ(said.exit_code, 0);
  // 16, 4 + 12/64, 2 + 14/64, 16/64 bytes per parameter; fp32 gradients cost 2 more at ZeRO stages 0-1, 2/64 at 2-3.
  EXPECT_NE(said.out.find("bf16       120      31.4      16.6       1.9"), std::string::npos) << said.out;
  EXPECT_NE(said.out.find("fp32       135      46.4      16.9       2.1"), std::string::npos) << said.out;
}

TEST(EstimateCommand, PrintsThePartsOfOneStage) {
  const auto said = say({"estimate", "--params", "7.5e9", "--world", "64", "--stage", "1", "--accumulation", "fp32"});
  EXPECT_EQ(said.exit_code, 0);
  // 2, 4, 4 / 64 and 8 / 64 bytes per parameter.
  EXPECT_EQ(said.out,
            "7.5 B parameters, bf16 weights, AdamW: model states per rank at ZeRO stage 1 in GB\n\n"
            " ranks  accumulation   weights gradients   masters optimizer     total\n"
            "    64          fp32        15        30      0.47      0.94      46.4\n\n"
            "With checkpoint.async_save each rank holds a snapshot besides: 105 GB / ranks.\n");
}

TEST(EstimateCommand, KnowsTheModeWithoutMasters) {
  const auto said = say({"estimate", "--params", "7.5e9", "--world", "64", "--mode", "low"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  // 8, 4 + 4/64, 2 + 6/64, 8/64 bytes per parameter.
  EXPECT_EQ(said.out,
            "7.5 B parameters, bf16 weights, mode low, AdamW: model states per rank in GB\n\n"
            " ranks  accumulation   stage 0   stage 1   stage 2   stage 3\n"
            "    64          bf16        60      30.5      15.7      0.94\n\n"
            "With checkpoint.async_save each rank holds a snapshot besides: 45 GB / ranks.\n");
  expect_wrong_use({"estimate", "--params", "1", "--mode", "low", "--dtype", "fp32"},
                   "trireme estimate: --mode low: it is for weights in bf16; give --dtype bf16");
  expect_wrong_use({"estimate", "--params", "1", "--mode", "low", "--accumulation", "both"},
                   "trireme estimate: --mode low: gradients are summed in bf16; leave --accumulation both out");
}

TEST(EstimateCommand, SaysWhatOffloadingLeavesToTheDevice) {
  const auto said = say({"estimate", "--params", "1e9", "--world", "1", "--accumulation", "fp32", "--offload",
                         "optimizer", "--stage", "2"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_NE(said.out.find("total      host\n     1          fp32         2         0         0         0         2"
                          "        18\n"),
            std::string::npos)
      << said.out;
  const auto half = say({"estimate", "--params", "1e9", "--world", "1", "--stage", "3", "--offload", "parameters",
                         "--offload-ratio", "0.5", "--json"});
  EXPECT_NE(half.out.find("\"host_bytes\": 9000000000"), std::string::npos) << half.out;
  expect_wrong_use({"estimate", "--params", "1", "--offload-ratio", "0.5"},
                   "trireme estimate: --offload-ratio: nothing is offloaded; give --offload optimizer or --offload "
                   "parameters too");
  expect_wrong_use({"estimate", "--params", "1", "--offload", "gpu"},
                   "trireme estimate: --offload: 'gpu' is none of nothing, optimizer, parameters (see trireme estimate "
                   "--help)");
}

TEST(EstimateCommand, NamesTheModel) {
  EXPECT_TRUE(
      say({"estimate", "--model", "llama-130m"}).out.starts_with("llama-130m: 134.1 M parameters, bf16 weights"));
}

TEST(EstimateCommand, KnowsModelsThatThisMachineNeedNotHold) {
  EXPECT_TRUE(say({"estimate", "--model", "llama-1b"}).out.starts_with("llama-1b: 1.2 B parameters, bf16 weights"));
  EXPECT_TRUE(say({"estimate", "--model", "llama-8b"}).out.starts_with("llama-8b: 8 B parameters, bf16 weights"));
}

TEST(TrainCommand, ListsAllBuiltInModelsAndTheConventionOfItsFlops) {
  auto help = say({"train", "--help"}).out;
  help.erase(std::unique(help.begin(), help.end(), [](char a, char b) { return std::isspace(a) && std::isspace(b); }),
             help.end());
  std::replace(help.begin(), help.end(), '\n', ' ');
  std::string names;
  for (const auto& name : model_names()) names += name + ", ";
  EXPECT_NE(help.find(names), std::string::npos) << help;
  EXPECT_NE(help.find("PaLM, appendix B"), std::string::npos) << help;
}

TEST(EstimateCommand, PrintsOneStageAsJson) {
  const auto said =
      say({"estimate", "--params", "1000", "--world", "2", "--stage", "3", "--accumulation", "bf16", "--json"});
  EXPECT_EQ(said.exit_code, 0);
  EXPECT_NE(said.out.find("\"total_bytes\": 8000"), std::string::npos) << said.out;
  EXPECT_EQ(said.out.find("\"stage\": 2"), std::string::npos) << said.out;
}

TEST(EstimateCommand, ReadsNumbersAsDecimalOnes) {
  const auto said = say({"estimate", "--params", "1000", "--world", "010", "08", "--stage", "0", "--json"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_NE(said.out.find("\"world\": 10,"), std::string::npos) << said.out;
  EXPECT_NE(said.out.find("\"world\": 8,"), std::string::npos) << said.out;
}

TEST(EstimateCommand, TakesParametersAsPeopleWriteThem) {
  const auto parameters = [](const std::string& text) {
    const auto said = say({"estimate", "--params", text, "--world", "1", "--json"});
    EXPECT_EQ(said.exit_code, 0) << said.err;
    const auto at = said.out.find("\"parameters\": ");
    return said.out.substr(at, said.out.find(',', at) - at);
  };
  const std::pair<const char*, const char*> cases[] = {
      {"7B", "7000000000"},    {"7.5e9", "7500000000"}, {"350M", "350000000"}, {"1.3b", "1300000000"},
      {"1t", "1000000000000"}, {"12k", "12000"},        {"1000", "1000"},      {"123456789", "123456789"}};
  for (const auto& [text, number] : cases)
    EXPECT_EQ(parameters(text), "\"parameters\": " + std::string(number)) << text;
  for (const std::string wrong : {"7BB", "B", "7 B", "-7B", "7G", "1e9B1", "1e17B", "0.1"})
    EXPECT_EQ(say({"estimate", "--params", wrong}).exit_code, 2) << wrong;
}

TEST(EstimateCommand, RefusesANumberOfParametersWhoseBytesNoIntegerHolds) {
  for (const std::string number : {"1e18", "1.1e17"})
    expect_wrong_use(
        {"estimate", "--params", number},
        "trireme estimate: --params: '" + number +
            "' is not a number of parameters from 1 to 1e+17; write it as 7B, 350M, 1.3b or 7.5e9 (see trireme "
            "estimate --help)");
  EXPECT_EQ(say({"estimate", "--params", "1e17"}).exit_code, 0);
}

TEST(EstimateCommand, RefusesWrongFlags) {
  expect_wrong_use(
      {"estimate"},
      "trireme estimate: how large is the model? Give --params, such as --params 7B, or --model, such as --model "
      "llama-130m");
  expect_wrong_use({"estimate", "--params", "big"},
                   "trireme estimate: --params: 'big' is not a number of parameters from 1 to 1e+17; write it as 7B, "
                   "350M, 1.3b or 7.5e9 (see trireme estimate --help)");
  expect_wrong_use({"estimate", "--params", "1", "--stage", "4"},
                   "trireme estimate: --stage: '4' is not a whole number from 0 to 3 (see trireme estimate --help)");
  expect_wrong_use(
      {"estimate", "--params", "1", "--dtype", "fp32", "--accumulation", "bf16"},
      "trireme estimate: --accumulation bf16: the weights are fp32; gradients are summed in at least their dtype");
}

TEST(PlanCommand, PrintsTheTimelineWithItsBubbleBuffersAndActivations) {
  const auto said = say({"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_EQ(said.out,
            "1f1b: 2 stages, 2 micro-batches; a column is 1\n\n"
            "stage 0  0   1   .   .   0'  0'  .   1'  1'\n"
            "stage 1  .   0   0'  0'  1   1'  1'  .   .\n\n"
            "bubble share  33.33 % of 9 on each stage\n"
            "buffers       2 2 on the stages, each for the activations of one part and micro-batch\n"
            "activations   2 1 at most, of one part and micro-batch each\n");
  const auto inference = say({"plan", "--schedule", "inference", "--stages", "2", "--micro-batches", "3"});
  EXPECT_NE(inference.out.find("buffers       2 2 on"), std::string::npos) << inference.out;
  EXPECT_EQ(inference.out.find("activations   "), std::string::npos) << inference.out;
}

TEST(PlanCommand, PrintsThePlanOfAllAxesOfAConfiguration) {
  const TemporaryFolder folder;
  const std::string parts = folder.write("parts.json", R"({
    "train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}, "sequence_parallel_size": 2,
    "trireme": {"recompute": "selective", "tiled": {"loss_tokens": 8}, "sequence_attention": "ring"}})");
  const auto said = say({"plan", "--config", parts, "--model", "llama-3m", "--world", "4", "--rank", "3"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_EQ(said.out,
            "rank 3 of 4\n\n"
            "axes\n"
            "  replica   1, position 0\n"
            "  shard     2, position 1; ranks 0,2 1,3\n"
            "  sequence  2, position 1; ranks 0,1 2,3\n"
            "ranks that, together with this one,\n"
            "  step together         0-3\n"
            "  add gradients         0-3\n"
            "  hold all shards       0-3\n"
            "  share samples         2,3\n"
            "samples\n"
            "  place 1 of 2\n"
            "parameters\n"
            "  38 parameters, such as model.embed_tokens.weight; ZeRO 2: gradients and optimizer states are sharded\n"
            "    weights    whole on each rank\n"
            "    gradients  sharded along shard, sequence\n"
            "    states     sharded along shard, sequence\n"
            "    sum        of gradients along shard, sequence, divided by 4\n"
            "passes over operators, outermost first\n"
            "  sequence, ring, along sequence\n"
            "  tiles\n"
            "  recompute\n"
            "  pager\n");
}

TEST(PlanCommand, PrintsSlicesOfAConfiguration) {
  const TemporaryFolder folder;
  const std::string slices = folder.write("slices.json", R"({
    "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}, "tensor_parallel": {"autotp_size": 2}})");
  const auto said = say({"plan", "--config", slices, "--model", "llama-3m", "--world", "4", "--rank", "3"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  for (const char* text :
       {"  share layers          2,3\n", "  hold all shards       1,3\n",
        "  21 parameters, such as model.embed_tokens.weight; cut along dim 0 over \"tensor\"; of a slice, ",
        "  9 parameters, such as model.layers.0.input_layernorm.weight; ZeRO 3: ", "  tensor, along tensor\n"})
    EXPECT_NE(said.out.find(text), std::string::npos) << text << said.out;
}

TEST(PlanCommand, PrintsTheScheduleOfAConfigurationsPipelines) {
  const TemporaryFolder folder;
  const std::string stages = folder.write("stages.json", R"({
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "pipeline": {"stages": 2}})");
  const auto said = say({"plan", "--config", stages, "--world", "2"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_NE(said.out.find("  pipe      2, position 0; ranks 0,1\n"), std::string::npos) << said.out;
  const std::string alone = say({"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2"}).out;
  EXPECT_TRUE(said.out.ends_with("\n  pager\n\n" + alone)) << said.out;
}

TEST(PlanCommand, PrintsTheSlicesOfTheTensorAxisOfABuiltInModel) {
  const auto said = say({"plan", "--tp", "4", "--model", "gpt2"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_TRUE(said.out.starts_with("tensor axis of 4 ranks; rules of preset gpt2, by model_type\n")) << said.out;
  // 12 heads of 64: rank 1 has three of each third.
  EXPECT_NE(said.out.find("  transformer.h.*.attn.c_attn.weight [768, 2304], 12 of them\n"), std::string::npos);
  EXPECT_NE(said.out.find("    rank 1     dim 1: 192-384, 960-1152, 1728-1920, [768, 576]\n"), std::string::npos);
  EXPECT_NE(said.out.find("tied to lm_head.weight\n"), std::string::npos) << said.out;
}

TEST(PlanCommand, PrintsTheSlicesOfAFolderOfAnyFamily) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"model_type": "gpt_neox", "num_attention_heads": 3})");
  const std::string attention = "gpt_neox.layers.0.attention.";
  write_safetensors(folder.path() / "model.safetensors", {{attention + "query_key_value.weight", at::zeros({36, 12})},
                                                          {attention + "dense.weight", at::zeros({12, 12})}});
  const auto said = say({"plan", "--tp", "2", "--model", folder.path().string()});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  EXPECT_NE(said.out.find("    rank 0     dim 0: 0-24, [24, 12]\n"), std::string::npos) << said.out;
  const std::string config =
      folder.write("rules.json", R"({"layer_specs": [{"patterns": [".*dense\\.weight$"], "partition_type": "row"}]})");
  const auto ruled = say({"plan", "--tp", "3", "--model", folder.path().string(), "--partition-config", config});
  EXPECT_NE(ruled.out.find("rules of partition_config\n"), std::string::npos) << ruled.out << ruled.err;
  EXPECT_NE(ruled.out.find("    rank 2     dim 1: 8-12, [12, 4]\n"), std::string::npos) << ruled.out;
}

TEST(PlanCommand, KnowsTheTiedHeadAndThePlanOfAFolder) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"model_type": "new", "num_attention_heads": 2, "architectures": ["NewForCausalLM"],
    "base_model_tp_plan": {"layers.*.mlp.up": "colwise"}})");
  write_safetensors(folder.path() / "model.safetensors", {{"model.embed_tokens.weight", at::zeros({10, 4})},
                                                          {"model.layers.0.mlp.up.weight", at::zeros({6, 4})}});
  const auto said = say({"plan", "--tp", "2", "--model", folder.path().string()});
  EXPECT_NE(said.out.find("rules of the model's tp_plan"), std::string::npos) << said.out << said.err;
  EXPECT_NE(said.out.find("tied to lm_head.weight"), std::string::npos) << said.out;
  folder.write("config.json", R"({"model_type": "new", "num_attention_heads": 2, "tie_word_embeddings": false,
    "architectures": ["NewForCausalLM"], "base_model_tp_plan": {"layers.*.mlp.up": "colwise"}})");
  EXPECT_EQ(say({"plan", "--tp", "2", "--model", folder.path().string()}).out.find("tied to"), std::string::npos);
}

TEST(PlanCommand, PrintsTheHomesOfAStepFunctionsModel) {
  const auto said = say({"plan", "--homes", "3", "--model", "llama-130m"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  // A layer has 4 * 768^2 + 3 * 768 * 2048 + 2 * 768 elements, embedding and head 32000 * 768 each.
  EXPECT_NE(said.out.find("  stage 1: 42476544 elements, 33.4 % of the cost; model.layers.3 to model.layers.8\n"),
            std::string::npos)
      << said.out;
  // A tied head is where the embedding is, and computes there.
  const auto tied = say({"plan", "--homes", "2", "--model", "gpt2", "--memory-weight", "1"});
  EXPECT_NE(tied.out.find("  stage 0: 60647424 elements, 48.7 % of the cost; transformer.wte and lm_head to "),
            std::string::npos)
      << tied.out;
}

TEST(PlanCommand, RefusesWhatHomesCannotBe) {
  expect_wrong_use({"plan", "--homes", "2"},
                   "trireme plan: --model is required with --homes (see trireme plan --help)");
  expect_wrong_use({"plan", "--tokens", "2"},
                   "trireme plan: --tokens is for stages of a step function; give --homes, or leave it out");
  expect_wrong_use({"plan", "--homes", "2", "--model", "gpt2", "--tp", "2"},
                   "trireme plan: --tp is not for --homes, which places layers alone; leave one out");
}

TEST(PlanCommand, RefusesWhatTheTensorAxisCannotBe) {
  expect_wrong_use({"plan", "--tp", "2"}, "trireme plan: --model is required with --tp (see trireme plan --help)");
  expect_wrong_use({"plan", "--preset", "llama"},
                   "trireme plan: --preset is for the tensor axis; give --tp, or leave it out");
  expect_wrong_use({"plan", "--tp", "2", "--model", "gpt2", "--world", "4"},
                   "trireme plan: --world is not for --tp, which plans the tensor axis alone; leave one out");
  const TemporaryFolder empty;
  EXPECT_EQ(say({"plan", "--tp", "2", "--model", empty.path().string()}).exit_code,
            say({"plan", "--tp", "2"}).exit_code);
}

TEST(PlanCommand, RefusesWhatARunIsRefused) {
  const TemporaryFolder folder;
  const std::string file = folder.write("a.json", R"({"train_batch_size": 8, "sequence_parallel_size": 2})");
  const std::string both = folder.write("b.json",
                                        R"({"train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": 2,
          "tensor_parallel": {"autotp_size": 2, "sequence_parallel": true}})");
  expect_wrong_use({"plan", "--config", both, "--world", "4"},
                   "trireme plan: tensor_parallel.sequence_parallel: on 2 ranks along \"tensor\" and 2 along "
                   "\"sequence\" tokens would be cut twice, which is not there yet; remove the key, or make one of the "
                   "two 1");
  expect_wrong_use({"plan", "--config", file, "--world", "2", "--rank", "2"},
                   "trireme plan: --rank 2: there are 2 ranks; give one below, or --world");
  expect_wrong_use({"plan", "--config", file, "--world", "2", "--stages", "2"},
                   "trireme plan: --config: the configuration says the schedule; leave --schedule, --stages, "
                   "--micro-batches and --chunks out");
  expect_wrong_use({"plan", "--schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--world", "2"},
                   "trireme plan: --world is for a run of a configuration; give --config, or leave it out");
}

TEST(PlanCommand, KeepsColumnsStraightOverHundredsOfMicroBatches) {
  const auto said = say({"plan", "--schedule", "gpipe", "--stages", "11", "--micro-batches", "101"});
  EXPECT_NE(said.out.find("stage 0   0    1    2    3"), std::string::npos) << said.out.substr(0, 200);
  EXPECT_NE(said.out.find("stage 10  .    .    .    ."), std::string::npos);
  EXPECT_NE(said.out.find(" 99   100  .    "), std::string::npos);
}

// ZB-H1 of 8 stages at the times that its paper measured: a rate of 0.1585 (arXiv:2401.10241, table 5).
TEST(PlanCommand, TakesTheTimesOfTheParts) {
  const auto share = [](const std::string& times) {
    const auto said = say({"plan", "--schedule", "zb-h1", "--stages", "8", "--micro-batches", "24", "--times", times});
    EXPECT_EQ(said.exit_code, 0) << said.err;
    const std::string line = "bubble share  ";
    return std::stod(said.out.substr(said.out.find(line) + line.size()));
  };
  EXPECT_NEAR(share("18.522,18.086,9.337,0.601"), 15.85, 1.585);
  EXPECT_NEAR(share("1,1,1,0"), 100 * 7 / (3.0 * 24 + 7), 0.01);
}

TEST(PlanCommand, PrintsInstructionsAndDrawsTheTimeline) {
  const TemporaryFolder folder;
  const auto said = say({"plan", "--schedule", "interleaved", "--stages", "2", "--micro-batches", "2", "--chunks", "3",
                         "--streams", "--svg", folder / "a.svg"});
  EXPECT_TRUE(
      said.out.starts_with("interleaved: 2 stages, 3 parts on each, 2 micro-batches\n\n"
                           "stage 0\n"
                           "  step 0: LoadMicroBatch(micro_batch=0, chunk=0, buffer=0) "
                           "ForwardPass(micro_batch=0, chunk=0, buffer=0) "
                           "SendActivation(micro_batch=0, chunk=0, buffer=0, peer=1)\n"))
      << said.out;
  EXPECT_NE(said.out.find("\nstage 1\n"), std::string::npos);
  EXPECT_TRUE(said.out.ends_with(": ReduceTiedGrads ReduceGrads OptimizerStep\n"));
  const std::string svg = contents_of(folder / "a.svg");
  EXPECT_TRUE(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
  EXPECT_NE(svg.find(">interleaved: 2 stages, 3 parts on each, 2 micro-batches</text>"), std::string::npos);
}

TEST(PlanCommand, NamesTheFlagThatIsWrongAndTheFix) {
  const std::vector<std::string> sizes = {"--stages", "4", "--micro-batches", "8"};
  const auto plan = [&](std::vector<std::string> words) {
    words.insert(words.begin(), "plan");
    words.insert(words.end(), sizes.begin(), sizes.end());
    return words;
  };
  expect_wrong_use(plan({"--schedule", "zb-h2"}),
                   "trireme plan: --schedule: 'zb-h2' is none of 1f1b, inference, gpipe, interleaved, zb-h1, zb-v, "
                   "dualpipe-v. Did you mean `zb-h1`? (see trireme plan --help)");
  expect_wrong_use(plan({}),
                   "trireme plan: --schedule is missing: for a pipeline's schedule give --schedule, --stages and "
                   "--micro-batches, for a run --config FILE, for the slices of a model --tp N and --model "
                   "(see trireme plan --help)");
  expect_wrong_use(
      plan({"--schedule", "zb-v", "--chunks", "2"}),
      "trireme plan: --chunks 2: the schedule 'zb-v' has a fixed number of parts per stage; leave --chunks "
      "out, or give --schedule interleaved");
  expect_wrong_use({"plan", "--schedule", "interleaved", "--stages", "4", "--micro-batches", "6"},
                   "trireme plan: schedule 'interleaved': micro_batches=6 is no multiple of 4 stages; use 8");
  expect_wrong_use({"plan", "--schedule", "1f1b", "--stages", "3000", "--micro-batches", "3000"},
                   "trireme plan: --stages 3000 --micro-batches 3000: their product 9000000 is above 1000000; give "
                   "fewer: the middle of a schedule repeats itself");
  expect_wrong_use(
      {"plan", "--schedule", "interleaved", "--stages", "100", "--micro-batches", "100", "--chunks", "101"},
      "trireme plan: --stages 100 --micro-batches 100 --chunks 101: their product 1010000 is above "
      "1000000; give fewer: the middle of a schedule repeats itself");
  expect_wrong_use({"plan", "--schedule", "1f1b", "--stages", "0", "--micro-batches", "6"},
                   "trireme plan: --stages: '0' is not a whole number from 1 to 100000 (see trireme plan --help)");
  for (const std::string times :
       {"1", "1,1,1", "1,1,1,1,1", "0,1,1,0", "1,1,-1,0", "1,1,1,-1", "1,1,nan,0", "1;1;1;0", ""})
    expect_wrong_use(plan({"--schedule", "1f1b", "--times", times}),
                     "trireme plan: --times: '" + times +
                         "' is not F,B,W,COMM: three numbers above 0 and one of at least 0, such as 1,1,1,0.1 (see "
                         "trireme plan --help)");
  const auto lost = say(plan({"--schedule", "1f1b", "--svg", "/no/such/folder/a.svg"}));
  EXPECT_EQ(lost.exit_code, 1);
  EXPECT_NE(lost.err.find("trireme plan: /no/such/folder/"), std::string::npos) << lost.err;
}

TEST(ConfigCheckCommand, PrintsTheResolvedConfigurationOrTheMistake) {
  const TemporaryFolder folder;
  const auto good = say({"config", "check", folder.write("good.json", R"({"train_batch_size": 8})"), "--world", "4"});
  EXPECT_EQ(good.exit_code, 0) << good.err;
  EXPECT_NE(good.out.find("\"train_micro_batch_size_per_gpu\": 2"), std::string::npos) << good.out;
  const auto bad = say({"config", "check", folder.write("bad.json", R"({"train_batch_sise": 8})")});
  EXPECT_EQ(bad.exit_code, 2);
  EXPECT_NE(bad.err.find("train_batch_size"), std::string::npos) << bad.err;
}

TEST(ConfigCheckCommand, NamesEveryMistakeWithItsLine) {
  const TemporaryFolder folder;
  const auto file =
      folder.write("bad.json", "{\"train_batch_size\": 8,\n \"zero_optimization\": {\"stage\": 9},\n \"bf61\": {}}");
  const auto said = say({"config", "check", file});
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_EQ(said.err, "trireme config check: 2 mistakes:\n" + file +
                          ":2: `zero_optimization.stage` is 9; expected an integer from 0 to 3\n" + file +
                          ":3: unknown key `bf61`. Did you mean `bf16`?\n");
}

TEST(ConfigConvertCommand, PrintsTheOtherDialectAndSaysWhatIsLost) {
  const TemporaryFolder folder;
  const auto file = folder.write(
      "fsdp.yaml",
      "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n");
  const auto there = say({"config", "convert", "--to", "deepspeed", file});
  EXPECT_EQ(there.exit_code, 0) << there.err;
  const auto json = folder.write("ds.json", there.out);
  const auto checked = say({"config", "check", json});
  EXPECT_EQ(checked.exit_code, 0) << checked.err;
  EXPECT_NE(checked.out.find("\"stage\": 2"), std::string::npos) << checked.out;
  const auto clipping = folder.write("clip.json", R"({"train_batch_size": 8, "gradient_clipping": 0.5})");
  const auto back = say({"config", "convert", "--to", "fsdp", clipping});
  EXPECT_NE(
      back.err.find(clipping + ": not in the new file: `gradient_clipping` = 0.5: call accelerator.clip_grad_norm_"),
      std::string::npos)
      << back.err;
  EXPECT_NE(back.out.find("distributed_type: MULTI_GPU"), std::string::npos) << back.out;
  expect_wrong_use({"config", "convert", "--to", "fsd", file},
                   "trireme config convert: --to: 'fsd' is none of fsdp, deepspeed. Did you mean `fsdp`? (see trireme "
                   "config convert --help)");
}

TEST(ConfigConvertCommand, GoesRoundAndNamesTheFlagOfAnotherNumberOfRanks) {
  const TemporaryFolder folder;
  const auto file = folder.write("fsdp.yaml", "distributed_type: FSDP\nmixed_precision: bf16\n");
  const auto json = folder.write("ds.json", say({"config", "convert", "--to", "deepspeed", file}).out);
  const auto back = say({"config", "convert", "--to", "fsdp", json});
  EXPECT_EQ(back.exit_code, 0) << back.err;
  EXPECT_EQ(back.err, "");
  const auto mics = folder.write(
      "mics.json", R"({"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3, "mics_shard_size": 2}})");
  const auto refused = say({"config", "convert", "--to", "fsdp", mics});
  EXPECT_EQ(refused.exit_code, 2);
  EXPECT_NE(refused.err.find("(read for 1 rank; --world gives another number)"), std::string::npos) << refused.err;
  EXPECT_NE(say({"config", "convert", "--to", "fsdp", "--world", "4", mics}).out.find("dp_replicate_size: 2"),
            std::string::npos);
}

TEST(ConfigMapCommand, PrintsWhichKeyIsWhich) {
  EXPECT_NE(say({"config", "map"}).out.find("| `fsdp_offload_params` |"), std::string::npos);
  EXPECT_NE(say({"config", "keys"}).out.find("### `zero_optimization`"), std::string::npos);
}

TEST(ConfigCheckCommand, SaysWhoFillsInWhatIsAuto) {
  const TemporaryFolder folder;
  const auto file = folder.write("auto.json", R"({
    "train_micro_batch_size_per_gpu": "auto", "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto"}}})");
  const auto said = say({"config", "check", file});
  EXPECT_EQ(said.exit_code, 0) << said.err;
  const auto line = [&](const std::string& key, const std::string& from) {
    return file + ": `" + key + "` is \"auto\": `trireme train` fills in " + from +
           "; for a program of your own write a number\n";
  };
  EXPECT_EQ(said.err, line("train_micro_batch_size_per_gpu", "--batch (8 without it)") +
                          line("optimizer.params.lr", "--lr (0.001 without it)") +
                          line("scheduler.params.total_num_steps", "--steps (500 without it)") +
                          line("scheduler.params.warmup_num_steps", "5 % of --steps (25 without it)"));
  EXPECT_NE(said.out.find("\"total_num_steps\": 500"), std::string::npos) << said.out;
  const auto left = say({"config", "check", folder.write("left.json", R"({"train_batch_size": 4,
      "train_micro_batch_size_per_gpu": "auto"})")});
  EXPECT_EQ(left.exit_code, 0) << left.err;
  EXPECT_EQ(left.err, "");
}

TEST(ConfigCheckCommand, AcceptsTheConfigurationThatMakeTrainRunsWith) {
  const auto root = std::filesystem::path(__FILE__).parent_path().parent_path().parent_path();
  const auto said = say({"config", "check", root / "examples/train/ds_config.json", "--world", "2"});
  EXPECT_EQ(said.exit_code, 0) << said.err;
}

TEST(LaunchCommand, RefusesWrongFlags) {
  expect_wrong_use({"launch"},
                   "trireme launch: no program given; write it after the flags, such as --num_gpus 2 "
                   "./my_program --epochs 3");
  expect_wrong_use(
      {"launch", "--num_gpus", "none", "/bin/true"},
      "trireme launch: --num_gpus: 'none' is not a whole number from 1 to 65535 (see trireme launch --help)");
  expect_wrong_use({"launch", "--grace", "1e18", "/bin/true"},
                   "trireme launch: --grace: '1e18' is not a number from 0 to 1e+06 (see trireme launch --help)");
  expect_wrong_use({"launch", "./no_such_program"},
                   "trireme launch: there is no program './no_such_program'; correct its path");
  const TemporaryFolder folder;
  const auto hosts = folder.write("hosts", "elsewhere slots=2\n");
  const auto said = say({"launch", "--hostfile", hosts, "/bin/true"});
  EXPECT_EQ(said.exit_code, 2);
  EXPECT_TRUE(said.err.starts_with("trireme launch: " + hosts + ": host 'elsewhere' is not this machine")) << said.err;
}

}  // namespace
}  // namespace trireme::cli
