#include "cli/resume_check.h"

#include <nlohmann/json.hpp>
#include <set>

#include "cli/run_flags.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/manifest.h"

namespace trireme::cli {
namespace {

// "hidden_size is 64 there, 96 here"; empty for equal models.
std::string first_difference(const Json& there, const Json& here) {
  std::set<std::string> keys;
  for (const Json* json : {&there, &here})
    for (const auto& item : json->items()) keys.insert(item.key());
  for (const auto& key : keys) {
    const Json a = there.value(key, Json()), b = here.value(key, Json());
    if (a != b) return str(key, " is ", a.dump(), " there, ", b.dump(), " here");
  }
  return "";
}

Json values_of(const TrainSetup& setup, const std::filesystem::path& checkpoint) {
  try {
    return Json::parse(read_manifest(checkpoint).values);
  } catch (const CheckpointError& error) {
    throw CheckpointError(error.what() + other_tags_hint(setup));
  }
}

// The checkpoint that --resume continues from; empty where there is none.
std::filesystem::path chosen_checkpoint(const TrainSetup& setup) {
  const std::string tag = setup.options.tag.empty() ? latest_tag(setup.checkpoints()).value_or("") : setup.options.tag;
  const auto path = setup.checkpoints() / tag;
  std::error_code unreadable;  // as there
  return !tag.empty() && std::filesystem::exists(path / "manifest.json", unreadable) ? path : std::filesystem::path();
}

}  // namespace

SavedPosition saved_position(const TrainSetup& setup) {
  const auto path = chosen_checkpoint(setup);
  if (path.empty()) return {};
  const Json values = values_of(setup, path);
  const Json data = values.value("client_state", Json::object()).value("data", Json::object());
  return {.steps = values.value("global_steps", int64_t{0}), .samples = data.value("samples_consumed", int64_t{0})};
}

std::string other_tags_hint(const TrainSetup& setup) {
  const auto tags = complete_tags(setup.checkpoints());
  if (tags.empty()) return "";
  std::string text = "; --resume --tag TAG continues from one of ";
  for (size_t i = 0; i < tags.size(); ++i) text += (i ? ", " : "") + tags[i];
  return text;
}

void check_resume(const TrainSetup& setup) {
  const auto path = chosen_checkpoint(setup);
  if (path.empty() && !setup.options.tag.empty())
    throw ConfigError(str("--tag ", setup.options.tag, ": ", setup.checkpoints().string(),
                          " has no checkpoint of this name", other_tags_hint(setup)));
  if (path.empty()) return;  // loading starts anew, or says what is wrong
  const auto& options = setup.options;
  const Json values = values_of(setup, path);
  const Json state = values.value("client_state", Json::object());
  if (!state.contains("model")) {
    throw ConfigError(str("--out ", setup.out.string(), ": ", path.string(),
                          " was not saved by `trireme train`; choose another folder"));
  }
  const auto refuse = [&](const std::string& flag, const std::string& what) {
    throw ConfigError(str(flag, ": ", path.string(), " ", what, ", or choose another --out"));
  };
  const Json& data = state.at("data");
  if (state.at("seq") != options.seq)
    refuse(str("--seq ", options.seq), str("was trained with --seq ", state.at("seq").dump(), "; give that"));
  const auto difference = first_difference(state.at("model"), Json::parse(config_json(setup.model)));
  if (!difference.empty())
    refuse(str("--model ", options.model), str("holds another model (", difference, "); give that one"));
  const Json tokenizer = state.value("tokenizer", Json::object());
  if (tokenizer.empty() != !setup.tokenizer ||
      (setup.tokenizer && tokenizer.value("fingerprint", uint64_t{0}) != setup.tokenizer->fingerprint())) {
    std::error_code unreadable;
    if (std::filesystem::equivalent(options.text.tokenizer, tokenizer_of_run(setup.out), unreadable) &&
        !tokenizer.empty())
      refuse(str("the run's copy ", options.text.tokenizer),
             "was trained with another tokenizer, so the copy has changed; name the one it was by --tokenizer");
    refuse(setup.tokenizer ? str("--tokenizer ", options.text.tokenizer) : "no --tokenizer",
           tokenizer.empty() ? "was trained without a tokenizer; leave it out"
                             : "was trained with another tokenizer; leave the flag out, for the run has a copy of its "
                               "own");
  }
  if (data.at("seed") != options.seed)
    refuse(str("--seed ", options.seed), str("was trained with --seed ", data.at("seed").dump(), "; give that"));
  if (data.at("fingerprint") != setup.data.train.fingerprint())
    refuse(str("--data ", options.data),
           "was trained on other files; give those, with the same --exclude and --data-format");
}

}  // namespace trireme::cli
