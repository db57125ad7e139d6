// `trireme train`: checks everything, starts the ranks if it has to, and trains.
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <strings.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>

#include "cli/command.h"
#include "cli/explain.h"
#include "cli/flags.h"
#include "cli/launch/launch_machine.h"
#include "cli/launch/supervisor.h"
#include "cli/quiet_log.h"
#include "cli/run_flags.h"
#include "cli/run_lock.h"
#include "cli/shell/exit_code.h"
#include "cli/train_setup.h"
#include "cli/training.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/stop_signals.h"
#include "trireme/base/utf8.h"
#include "trireme/comm/world.h"
#include "trireme/models/language_model.h"

namespace trireme::cli {
namespace {

constexpr const char* kResumeIfThere = "--resume-if-there";

constexpr const char* kTrainFooter =
    "Examples:\n"
    "  trireme train --data my_corpus/ --ranks 2 --steps 500\n"
    "  trireme train --data 'books/**/*.txt' --model llama-10m --config ds_config.json --out runs/books --save-every "
    "100\n"
    "  trireme train --resume --out runs/books\n\n"
    "Pipelines, sequences and layers over several ranks are the configuration's: pipeline.stages,\n"
    "sequence_parallel_size, tensor_parallel.autotp_size. trireme plan shows what they do to a model.\n"
    "Without --config: AdamW, linear warm-up and cosine decay, ZeRO stage 3. In a configuration, \"auto\" for lr,\n"
    "total_num_steps, warmup_num_steps and the batch size takes the value of the flag.\n"
    "--resume takes the flags that the run in --out was started with; those beside it take their place. Without a\n"
    "checkpoint there it refuses; --resume-if-there, for a script that is started again, begins the run then.\n"
    "Ctrl-C saves after the current step, prints the command that goes on, and ends with code 130; a second one ends "
    "at\n"
    "once. SIGUSR1 saves after the current step, and training goes on.\n"
    "FLOP/s count 6 per weight of a matrix product and 12 * layers * hidden * seq per token (PaLM, appendix B):\n"
    "without recomputation, and not halved for causality.\n"
    "The last line on stdout is `validation loss X`; everything else that tells of progress goes to stderr.";

void declare_output(CLI::App& app, TrainOptions& options) {
  app.add_option("--out", options.out, "folder of the run (default: runs/MODEL, or the next free runs/MODEL-2, ...)")
      ->type_name("DIR")
      ->group("Output");
  auto* resume = app.add_flag("--resume", options.resume,
                              "continue the run in --out with the flags that it has, from its last checkpoint");
  resume->group("Output");
  app.add_flag(kResumeIfThere)
      ->description("the same where --out has a checkpoint; else begin the run, for scripts that are started again")
      ->group("Output");
  app.add_option("--tag", options.tag,
                 "with --resume: this checkpoint of the run, such as global_step100, not the latest")
      ->type_name("TAG")
      ->needs(resume)
      ->group("Output");
  add_whole(app, "--save-every", options.save_every, "steps between checkpoints; 0: only at the end", {.least = 0})
      ->capture_default_str()
      ->group("Output");
  add_whole(app, "--keep", options.keep,
            "newest checkpoints to keep; 0: all (default: the configuration's checkpoint.keep_last, or 3)",
            {.least = 0, .most = 1'000'000})
      ->group("Output");
  add_whole(app, "--eval-every", options.eval_every, "steps between validations; 0: only at the end", {.least = 0})
      ->capture_default_str()
      ->group("Output");
  add_whole(app, "--eval-samples", options.eval_samples, "held-out samples per validation")
      ->capture_default_str()
      ->group("Output");
  app.add_option("--prompt", options.prompt, "what the sample at the end continues (default: nothing)")
      ->type_name("TEXT")
      ->group("Output");
  app.add_flag("--quiet", options.quiet,
               "no progress, notes, warnings or sample: what remains is an error, what --exchanges asks for, and the "
               "last\nline, which is the validation loss or, after Ctrl-C, the command that goes on")
      ->group("Output");
  app.add_flag("--exchanges", options.tells_exchanges,
               "after the first step: what rank 0 sent other ranks along \"sequence\" and \"tensor\", by operator")
      ->group("Output");
  app.add_option("--peak-tflops", options.peak_tflops,
                 "dense peak of one rank in TFLOP/s, in the dtype that it computes in;\nshows the part of it that is "
                 "used (MFU)")
      ->check(positive_number("give the dense peak of one rank in TFLOP/s, such as 989.4, or leave the flag out"))
      ->type_name("X")
      ->group("Output");
}

void declare(CLI::App& app, TrainOptions& options) {
  app.add_option(
         "--data", options.data,
         "file, folder or glob of text or JSON lines (also as .gz, .zst), of .parquet, or of .bin/.npy of tokens")
      ->type_name("PATH")
      ->group("Data");
  app.add_option("--data-format", options.text.format, "auto, bytes, uint16 or uint32")
      ->check(one_of({"auto", "bytes", "uint16", "uint32"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Data");
  app.add_option("--text-key", options.text.key,
                 "of .jsonl, .json and .parquet: the key or column whose texts are trained on (default: text)")
      ->type_name("KEY")
      ->group("Data");
  app.add_option(
         "--tokenizer", options.text.tokenizer,
         "tokenizer.json in Hugging Face's form, or a folder with one, that makes tokens of the text\n(default: "
         "a byte is a token)")
      ->check(path_text())
      ->type_name("PATH")
      ->group("Data");
  app.add_option("--eos-token", options.text.eos_token,
                 "the token that ends each document (default: eos_token of the tokenizer_config.json beside the "
                 "tokenizer.json)")
      ->type_name("TEXT")
      ->group("Data");
  app.add_option("--exclude", options.exclude,
                 "names of files or folders to leave out, such as 'test*'; may be repeated")
      ->type_name("NAME")
      ->group("Data");
  add_whole(app, "--seq", options.seq, "tokens per sample")->capture_default_str()->group("Data");

  app.add_option("--model", options.model,
                 "llama-3m, llama-10m, llama-130m, llama-1b, llama-8b, gpt2,\nor a config.json in Hugging Face's form, "
                 "or a folder with one")
      ->check(offered(model_names()))
      ->capture_default_str()
      ->type_name("NAME|PATH")
      ->group("Model");
  app.add_option("--init-from", options.init_from, "safetensors file with the first weights")
      ->check(path_text())
      ->type_name("FILE")
      ->group("Model");
  add_whole(app, "--seed", options.seed, "of weights, data order and sample", {.least = 0})
      ->capture_default_str()
      ->group("Model");

  app.add_option("--config", options.config, "DeepSpeed JSON, or YAML of Accelerate (see trireme config check)")
      ->check(path_text())
      ->type_name("FILE")
      ->group("Training");
  add_whole(app, "--ranks", options.ranks, "processes to start on this machine (default: 1, or those of the launcher)",
            {.most = 4096})
      ->group("Training");
  app.add_option("--device", options.device,
                 "what a rank computes on: auto (a GPU where there is one), cpu, cuda, or cuda:N for the N-th GPU")
      ->check(offered({"auto", "cpu", "cuda"}))
      ->capture_default_str()
      ->group("Training");
  app.add_flag("--oversubscribe", options.oversubscribe, "allow more than 8 ranks per core")->group("Training");
  add_whole(app, "--steps", options.steps, "optimizer steps in all")->capture_default_str()->group("Training");
  app.add_option("--epochs", options.epochs,
                 "in place of --steps: how often all training data is read, such as 3 or 0.5;\nthe last step is filled "
                 "from the next epoch")
      ->check(positive_number("give how often the training data is to be read, such as 3 or 0.5"))
      ->type_name("X")
      ->group("Training");
  add_whole(app, "--batch", options.batch,
            "samples per rank and micro-step, if the configuration does not say (default: 8)")
      ->group("Training");
  add_real(app, "--lr", options.lr, "learning rate, in place of the configuration's (default: 0.001)")
      ->group("Training");
  declare_output(app, options);
  app.footer(kTrainFooter);
}

// As a launcher's child this process is a rank already: by the same variables as init() reads. A batch script has
// SLURM_PROCID without SLURM_STEP_ID; a shell that srun has started is a step of one task, which may start ranks.
bool is_rank_of_a_job() {
  if (environment("RANK") || environment("WORLD_SIZE") || environment("OMPI_COMM_WORLD_SIZE")) return true;
  if (!environment("SLURM_PROCID") || !environment("SLURM_STEP_ID")) return false;
  const auto step_tasks = environment("SLURM_STEP_NUM_TASKS");
  const auto tasks = step_tasks ? step_tasks : environment("SLURM_NTASKS");
  return tasks && std::atoi(tasks->c_str()) > 1;
}

// Each rank takes some 300 MB before it holds a model; on a few cores, a slip of the keyboard takes all memory.
void check_ranks(const TrainOptions& options, int cores) {
  constexpr int kMostPerCore = 8;
  if (options.oversubscribe || *options.ranks <= int64_t{kMostPerCore} * cores) return;
  throw ConfigError(str("--ranks ", *options.ranks,
                        ": each rank is a process with memory of its own, and this machine has ", cores,
                        cores == 1 ? " core" : " cores", "; give at most ", kMostPerCore * cores,
                        ", or --oversubscribe to start them all the same"));
}

int start_ranks(const TrainOptions& options, const Invocation& invocation) {
  const auto ranks = static_cast<int>(*options.ranks);
  const auto machine = this_machine();
  check_ranks(options, machine.cores);
  {
    const QuietLog quiet;
    auto setup = prepare_training(options, ranks);  // so that a mistake is told once, not by every rank
    check_slices(setup);
    const RunLock tried = take_output(setup);  // rank 0 takes one for the run
  }
  std::vector<std::string> program = {std::filesystem::read_symlink("/proc/self/exe"), "train"};
  program.insert(program.end(), invocation.arguments.begin(), invocation.arguments.end());
  program.insert(program.end(), {"--ranks", std::to_string(ranks)});  // also where --resume brought them
  auto commands = plan_launch({.ranks_per_node = ranks, .kind = ProgramKind::kProgram, .program = program}, machine);
  winsize size{};
  if (isatty(STDERR_FILENO) && ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    commands[0].environment.emplace_back("TRIREME_COLUMNS", std::to_string(size.ws_col));
  }
  return Supervisor(std::move(commands), {.name = "trireme train", .prefix = Prefix::kAllButFirst}).run().exit_code;
}

// Every rank says for whom it waits; of the rest, rank 0 speaks for all, unless it is the one that is stopped.
LogSink log_of_rank(int rank, bool quiet) {
  const bool shows_details = strcasecmp(environment("TRIREME_LOG_LEVEL").value_or("").c_str(), "debug") == 0;
  return [rank, quiet, shows_details](LogLevel level, const std::string& message) {
    const bool is_error = level == LogLevel::kError;
    const bool is_about_rank_0 = level == LogLevel::kWarning && message.starts_with("comm: rank 0 ");
    const bool is_hidden = quiet || (level == LogLevel::kDebug && !shows_details);
    if (!is_error && (is_hidden || (rank != 0 && !is_about_rank_0))) return;
    const char* kind = is_error ? "" : level == LogLevel::kWarning ? "warning: " : "note: ";
    std::fprintf(stderr, "trireme train: %s%s\n", kind, message.c_str());
  };
}

// Rank 0's text, on every rank. Collective.
std::string text_of_rank_0(Group& group, const std::string& text) {
  auto bytes = at::tensor({static_cast<int64_t>(text.size())}, at::kLong);
  group.broadcast(bytes, 0).wait();
  auto letters = at::zeros({bytes.item<int64_t>()}, at::kByte);
  if (group.rank() == 0) std::memcpy(letters.mutable_data_ptr(), text.data(), text.size());
  group.broadcast(letters, 0).wait();
  return {static_cast<const char*>(letters.const_data_ptr()), static_cast<size_t>(letters.numel())};
}

/// As prepare_training(). With --resume a mistake may be in a flag that nobody has typed: the error says where it is.
TrainSetup prepare(const TrainOptions& options, int ranks) {
  try {
    return prepare_training(options, ranks);
  } catch (const Error& error) {
    const std::filesystem::path record = std::filesystem::path(options.out) / "run.json";
    std::error_code unreadable;
    if (!options.resume || options.out.empty() || !std::filesystem::exists(record, unreadable)) throw;
    throw_error(error.code(),
                str(error.what(), " (flags that were not given are those in ", excerpt(record.string()), ")"));
  }
}

int train_as_rank(const TrainOptions& options, const CLI::App& app) {
  set_log_sink(log_of_rank(0, options.quiet));
  auto world = init();
  if (options.ranks && *options.ranks != world.size) {
    throw ConfigError(
        str("--ranks ", *options.ranks, ": the launcher has started ", world.size, " already; leave the flag out"));
  }
  set_log_sink(log_of_rank(world.rank, options.quiet));
  try {
    auto setup = prepare(options, world.size);
    world.group->barrier();  // every rank has looked at the folder that rank 0 now takes
    std::optional<RunLock> lock;
    if (world.rank == 0) lock.emplace(take_output(setup));
    setup.flags = flags_of_run(app, options.config);
    setup.out = text_of_rank_0(*world.group, setup.out.string());
    return run_training(setup, world);
  } catch (const CommError&) {
    throw;
  } catch (const std::exception& error) {
    world.group->abort(explain(error, "trireme train"));  // the others need not wait until they notice
    throw;
  }
}

// --resume alone has the flags of the run in --out. --data is then the one flag without which nothing starts.
void complete_flags(CLI::App& app, const TrainOptions& options) {
  if (app.count("--epochs") > 0 && app.count("--steps") > 0)
    throw ConfigError(str("--epochs ", app["--epochs"]->as<std::string>(), " beside --steps ", options.steps,
                          ": each says how long to train; leave one out"));
  if (options.resume) {
    const auto run = choose_output(options, name_of_model(options.model));
    std::error_code unreadable;  // what is wrong with the folder will show
    const bool has_checkpoint = std::filesystem::exists(run / "checkpoints" / "latest", unreadable);
    // A run that still goes on is refused by RunLock, with better words.
    if (!has_checkpoint && options.tag.empty() && app.count(kResumeIfThere) == 0 && !is_locked(run))
      throw ConfigError(str("--resume: ", run.string(),
                            " has no checkpoint to continue from; correct --out, or give --resume-if-there to begin "
                            "a run where there is none yet"));
    restore_flags(app, {.run = run, .takes_ranks = !is_rank_of_a_job(), .has_checkpoint = has_checkpoint});
    if (options.data.empty())
      throw ConfigError(str("--data is required: ", run.string(),
                            " has no run.json that says what its run was started with; ",
                            "give the run's flags, or the folder of a run as --out"));
  }
  if (options.data.empty()) throw ConfigError("--data is required (see trireme train --help)");
  if (!options.text.eos_token.empty() && options.text.tokenizer.empty())  // the run that goes on may have one
    throw ConfigError(str("--eos-token ", options.text.eos_token,
                          ": without --tokenizer a byte is a token; give one, or ", "leave the flag out"));
}

}  // namespace

Action add_train(CLI::App& app) {
  const auto options = std::make_shared<TrainOptions>();
  declare(app, *options);
  return [options, &app](const Invocation& invocation) {
    const SaveSignal early;  // until training, and the launcher, catch the signal themselves
    options->resume = options->resume || app.count(kResumeIfThere) > 0;
    complete_flags(app, *options);
    const bool starts_ranks = options->ranks.value_or(1) > 1 && !is_rank_of_a_job();
    return starts_ranks ? start_ranks(*options, invocation) : train_as_rank(*options, app);
  };
}

}  // namespace trireme::cli
