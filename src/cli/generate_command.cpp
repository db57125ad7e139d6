// `trireme generate`: text from a checkpoint.
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/checkpoint_place.h"
#include "cli/command.h"
#include "cli/encoded_text.h"
#include "cli/flags.h"
#include "cli/run_flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "cli/text.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/training_values.h"
#include "trireme/comm/world.h"
#include "trireme/engine/model_engine.h"
#include "trireme/models/generate.h"

namespace trireme::cli {
namespace {

constexpr const char* kGenerateFooter =
    "Examples:\n"
    "  trireme generate runs/llama-3m --prompt \"def main(\"\n"
    "  trireme generate runs/llama-3m/checkpoints/global_step100 --temperature 0 --tokens 50\n\n"
    "A model that was trained with --tokenizer reads and writes text by the copy that its run has. For a model of "
    "other\n"
    "tokens than bytes, without a tokenizer, --prompt takes their numbers, and numbers come out.";

struct GenerateFlags {
  std::string checkpoint;
  std::string prompt;
  std::string tokenizer;  ///< empty: the run's
  GenerateOptions options;
};

void declare(CLI::App& app, GenerateFlags& flags) {
  app.add_option("FOLDER,--checkpoint", flags.checkpoint, "folder of a run, of its checkpoints, or one checkpoint")
      ->type_name("DIR")
      ->required()
      ->group("Model");
  app.add_option("--tokenizer", flags.tokenizer,
                 "tokenizer.json, or a folder with one, where the checkpoint is not in its run's folder any more")
      ->type_name("PATH")
      ->group("Model");
  app.add_option("--prompt", flags.prompt, "the text to continue (default: nothing)")->type_name("TEXT")->group("Text");
  add_whole(app, "--tokens", flags.options.max_new_tokens, "most tokens to write")
      ->capture_default_str()
      ->group("Text");
  add_real(app, "--temperature", flags.options.temperature, "0: always the likeliest token")
      ->capture_default_str()
      ->group("Text");
  add_whole(app, "--top-k", flags.options.top_k, "draw among the K likeliest tokens; 0: among all", {.least = 0})
      ->capture_default_str()
      ->group("Text");
  add_whole(app, "--seed", flags.options.seed, "of the random numbers", {.least = 0})
      ->capture_default_str()
      ->group("Text");
  app.footer(kGenerateFooter);
}

// The model that a checkpoint describes. Collective.
struct SavedModel {
  Json client_state;
  Json config;
};

SavedModel saved_model(Group& group, const CheckpointPlace& place) {
  StateTree nothing;
  const auto loaded = load_checkpoint(group, place.directory, place.tag, nothing, {.extra = Mismatch::kIgnore});
  if (!loaded) throw ConfigError(str("--checkpoint ", place.directory.string(), ": no checkpoint in this folder"));
  const TrainingValues values = parse_training_values(loaded->values);
  SavedModel saved{Json::parse(values.client_state.value_or("{}")), Json::parse(values.config.value_or("{}"))};
  if (!saved.client_state.contains("model")) {
    throw ConfigError(str("--checkpoint ", place.directory.string(),
                          ": it does not say which model it is of; only checkpoints of `trireme train` do"));
  }
  return saved;
}

std::vector<int64_t> parse_tokens(const std::string& text) {
  std::vector<int64_t> tokens;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    int64_t token = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), token);
    if (error != std::errc() || end != word.data() + word.size()) {
      throw ConfigError(
          str("--prompt: '", word,
              "' is no token number; this model's tokens are not bytes, give them as in --prompt '12 7 400'"));
    }
    tokens.push_back(token);
  }
  if (tokens.empty()) throw ConfigError("--prompt: give at least one token number; this model's tokens are not bytes");
  return tokens;
}

std::string continue_tokens(LanguageModel& model, const GenerateFlags& flags) {
  std::string text;
  for (const int64_t token : generate(model, parse_tokens(flags.prompt), flags.options))
    text += str(text.empty() ? "" : " ", token);
  return flags.prompt + " " + text;
}

/// The tokenizer that the model was trained with; null where there was none.
std::shared_ptr<const Tokenizer> saved_tokenizer(const GenerateFlags& flags, const CheckpointPlace& place,
                                                 const Json& state) {
  if (!state.contains("tokenizer")) {
    if (flags.tokenizer.empty()) return nullptr;
    throw ConfigError(str("--tokenizer ", flags.tokenizer, ": this model was trained without one; leave the flag out"));
  }
  const std::filesystem::path copy = tokenizer_of_run(std::filesystem::absolute(place.directory).parent_path());
  std::error_code unreadable;
  if (flags.tokenizer.empty() && !std::filesystem::exists(copy, unreadable))
    throw ConfigError(str("the tokenizer of this model is not in ", copy.string(), "; name it by --tokenizer"));
  const Json& saved = state["tokenizer"];
  const std::filesystem::path from = flags.tokenizer.empty() ? copy : std::filesystem::path(flags.tokenizer);
  auto tokenizer = read_input([&] { return load_tokenizer(from, {.eos_token = saved.value("eos_token", "")}); });
  if (tokenizer->fingerprint() != saved.value("fingerprint", uint64_t{0}))
    throw ConfigError(str("--tokenizer ", from.string(), ": this model was trained with another one; name that"));
  return tokenizer;
}

int run_generate(const GenerateFlags& flags) {
  const auto place = find_checkpoint(flags.checkpoint);
  auto world = init();
  const SavedModel saved = saved_model(*world.group, place);
  const Json& state = saved.client_state;
  const auto tokenizer = saved_tokenizer(flags, place, state);
  auto model = make_language_model(model_options_from_json(state["model"].dump(), place.directory.string()));
  Config config = default_config(world.size);
  const auto is_on = [&](const char* section) {
    return saved.config.value(section, Json::object()).value("enabled", false);
  };
  config.precision.weight_dtype = is_on("bf16") ? at::kBFloat16 : is_on("fp16") ? at::kHalf : at::kFloat;
  auto engine = initialize(world, model, {.config = config});
  engine.load_checkpoint(place.directory, {.tag = place.tag, .load_module_only = true});
  engine.eval();
  const auto text = tokenizer ? flags.prompt + continue_text(*model, *tokenizer, flags.prompt, flags.options)
                    : state.value("byte_level", false)
                        ? flags.prompt + generate_text(*model, flags.prompt, flags.options)
                        : continue_tokens(*model, flags);
  // Bytes that a terminal would obey are shown as such; a file or a pipe gets exactly what the model wrote.
  if (world.rank == 0) print_result((isatty(STDOUT_FILENO) ? printable(text) : text) + "\n");
  return kDone;
}

}  // namespace

Action add_generate(CLI::App& app) {
  const auto flags = std::make_shared<GenerateFlags>();
  declare(app, *flags);
  return [flags](const Invocation&) { return run_generate(*flags); };
}

}  // namespace trireme::cli
