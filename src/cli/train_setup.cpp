#include "cli/train_setup.h"

#include <fcntl.h>
#include <strings.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <variant>

#include "cli/flags.h"
#include "cli/launch/launch_machine.h"
#include "cli/model_parameters.h"
#include "cli/quiet_log.h"
#include "cli/resume_check.h"
#include "trireme/base/error.h"
#include "trireme/config/source.h"
#include "trireme/device/device.h"
#include "trireme/tensor/partition.h"

namespace trireme::cli {
namespace {

constexpr const char* kDefaultConfig = R"({
  "train_micro_batch_size_per_gpu": "auto",
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "weight_decay": 0.1}},
  "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": "auto", "total_num_steps": "auto",
                                                     "warmup_type": "linear", "cos_min_ratio": 0.1}},
  "gradient_clipping": 1.0,
  "zero_optimization": {"stage": 3}
})";

constexpr int64_t kDefaultBatch = 8;
constexpr double kDefaultLr = 1e-3;

// bf16 is what GPUs are made for.
Json built_in_config(bool has_gpu) {
  Json config = Json::parse(kDefaultConfig);
  if (has_gpu) config["bf16"] = {{"enabled", true}};
  return config;
}

bool is_open(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() || *found == "auto";
}

// The object at `key`, or nothing: what is no object is left for the reader to refuse.
Json* object_at(Json& json, const char* key) {
  const auto found = json.find(key);
  return found != json.end() && found->is_object() ? &*found : nullptr;
}

// {"a": {"b": 1}} at a.b, or nothing.
Json* value_at(Json& json, const std::string& path) {
  const auto dot = path.find('.');
  if (dot == std::string::npos) return json.contains(path) ? &json[path] : nullptr;
  Json* inner = object_at(json, path.substr(0, dot).c_str());
  return inner ? value_at(*inner, path.substr(dot + 1)) : nullptr;
}

bool is_called(const std::string& type, const char* name) { return strcasecmp(type.c_str(), name) == 0; }

void complete_batch(Json& config, const TrainOptions& options, const std::string& origin) {
  for (const char* key : {"train_batch_size", "train_micro_batch_size_per_gpu"}) {
    if (is_open(config, key)) continue;
    if (options.batch)
      throw ConfigError(str("--batch: ", origin, " already says ", key, "=", config[key].dump(), "; leave one out"));
    return;
  }
  config["train_micro_batch_size_per_gpu"] = options.batch.value_or(kDefaultBatch);
}

void complete_optimizer(Json& config, const TrainOptions& options) {
  if (is_open(config, "optimizer")) config["optimizer"] = Json::parse(kDefaultConfig)["optimizer"];
  Json* optimizer = object_at(config, "optimizer");
  if (!optimizer) return;
  if (is_open(*optimizer, "params")) (*optimizer)["params"] = Json::object();
  Json* params = object_at(*optimizer, "params");
  if (params && (options.lr || is_open(*params, "lr"))) (*params)["lr"] = options.lr.value_or(kDefaultLr);
}

void complete_schedule(Json& config, const TrainOptions& options) {
  Json* scheduler = object_at(config, "scheduler");
  Json* params = scheduler ? object_at(*scheduler, "params") : nullptr;
  if (!params) return;
  // The peak of these two is their own, whatever the optimizer's rate; that of the cosine is the optimizer's.
  const Json type = scheduler->value("type", Json());
  const bool has_peak = type.is_string() && (is_called(type, "WarmupLR") || is_called(type, "WarmupDecayLR"));
  if (options.lr && has_peak) (*params)["warmup_max_lr"] = *options.lr;
}

bool holds_a_run(const std::filesystem::path& folder) {
  std::error_code unreadable;  // RunLock names it
  return std::filesystem::exists(folder / "metrics.jsonl", unreadable) ||
         std::filesystem::exists(folder / "checkpoints", unreadable);
}

RunLock lock_output(TrainSetup& setup) {
  if (!setup.options.out.empty() || setup.options.resume) return RunLock(setup.out);
  while (true) {
    auto lock = RunLock::try_lock(setup.out);
    if (lock && !holds_a_run(setup.out)) return std::move(*lock);
    // Another run has taken the folder since it was chosen.
    setup.out = choose_output(setup.options, setup.name);
  }
}

/// Whether a file can be made in the folder of checkpoints, or beside it while it is not there yet; nothing is left.
/// Throws ConfigError.
void check_checkpoints(const TrainSetup& setup) {
  const std::filesystem::path checkpoints = setup.checkpoints();
  std::error_code unreadable;
  const bool is_there = std::filesystem::exists(std::filesystem::symlink_status(checkpoints, unreadable));
  const std::filesystem::path folder = is_there ? checkpoints : setup.out;
  const std::filesystem::path probe = folder / ".tmp-probe";
  if (const Fd file(::open(probe.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0666)); !file.is_open())
    throw ConfigError(str("--out ", setup.out.string(), ": checkpoints cannot be written to ", folder.string(), ": ",
                          std::strerror(errno), "; make it a folder that may be written to, or choose another --out"));
  ::unlink(probe.c_str());
}

void check_vocabulary_of_model(const TrainSetup& setup, int64_t needed) {
  if (needed <= vocab_size(setup.model)) return;
  throw ConfigError(str("--model ", setup.options.model, ": its vocabulary of ", vocab_size(setup.model),
                        " is smaller than the data's, ", needed,
                        "; choose another model, or set vocab_size in its JSON file"));
}

/// Reads the tokenizer. A built-in model gets its vocabulary; that of a file has one.
void take_tokenizer(TrainSetup& setup) {
  const TrainOptions& options = setup.options;
  try {
    setup.tokenizer = load_tokenizer(options.text.tokenizer, {.eos_token = options.text.eos_token});
  } catch (const IoError& error) {
    throw ConfigError(str("--tokenizer ", options.text.tokenizer, ": ", error.what(),
                          "; give a tokenizer.json of Hugging Face's form, or a folder with one"));
  }
  if (std::ranges::find(model_names(), options.model) != model_names().end())
    std::visit([&](auto& model) { model.vocab_size = setup.tokenizer->vocab_size(); }, setup.model);
  check_vocabulary_of_model(setup, setup.tokenizer->vocab_size());
}

/// The steps after which training has read its data `epochs` times, the last of them filled from the epoch after.
int64_t steps_of_epochs(const TrainSetup& setup) {
  constexpr double kMost = 1e15;
  const double epochs = setup.options.epochs.value();
  const SavedPosition done = setup.options.resume ? saved_position(setup) : SavedPosition{};
  const double samples = epochs * static_cast<double>(setup.data.train.size());
  if (!(samples < kMost))
    throw ConfigError(
        str("--epochs ", epochs, " of ", setup.data.train.size(), " samples are more than can be counted; give fewer"));
  // A product such as 0.1 * 30 lies above the whole number that is meant.
  const auto wanted = static_cast<int64_t>(std::ceil(samples * (1 - 1e-12)));
  const int64_t batch = setup.config.batch.train_batch_size;
  return done.steps + std::max<int64_t>(0, (wanted - done.samples + batch - 1) / batch);
}

}  // namespace

std::string name_of_model(const std::string& name_or_path) {
  const std::filesystem::path path(name_or_path);
  std::error_code unreadable;
  if (std::filesystem::is_directory(path, unreadable))
    return std::filesystem::canonical(path, unreadable).filename().string();
  const bool is_config_json = path.filename() == "config.json" && path.has_parent_path();
  return is_config_json ? path.parent_path().filename().string() : path.stem().string();
}

std::vector<FilledIn> fill_in_autos(Json& config, const TrainOptions& options) {
  std::vector<FilledIn> filled;
  const auto fill = [&](const char* key, const Json& value, const char* source) {
    Json* place = value_at(config, key);
    if (!place || *place != "auto") return;
    *place = value;
    filled.push_back({key, value.dump(), source});
  };
  if (!config.is_object()) return filled;
  // Beside a train batch size, the micro-batch follows from it.
  if (is_open(config, "train_batch_size"))
    fill("train_micro_batch_size_per_gpu", options.batch.value_or(kDefaultBatch), "--batch");
  fill("optimizer.params.lr", options.lr.value_or(kDefaultLr), "--lr");
  fill("scheduler.params.total_num_steps", options.steps, "--steps");
  fill("scheduler.params.warmup_num_steps", std::clamp<int64_t>(options.steps / 20, 2, 1000), "5 % of --steps");
  return filled;
}

Json complete_config(Json config, const TrainOptions& options, const std::string& origin) {
  if (!config.is_object()) return config;  // refused by the reader, with a better text
  complete_batch(config, options, origin);
  complete_optimizer(config, options);
  complete_schedule(config, options);
  fill_in_autos(config, options);
  return config;
}

std::filesystem::path choose_output(const TrainOptions& options, const std::string& name) {
  if (!options.out.empty()) {
    // A run that is still going is refused by RunLock.
    if (!options.resume && holds_a_run(options.out) && !is_locked(options.out)) {
      throw ConfigError(str("--out ", options.out,
                            ": there is a run in this folder; continue it with --resume, or choose another folder"));
    }
    return options.out;
  }
  const auto candidate = [&](int number) {
    return std::filesystem::path("runs") / (number == 1 ? name : str(name, "-", number));
  };
  int free = 1;
  while (holds_a_run(candidate(free)) || is_locked(candidate(free))) ++free;
  return candidate(options.resume && free > 1 ? free - 1 : free);
}

RunLock take_output(TrainSetup& setup) {
  RunLock lock = lock_output(setup);
  check_checkpoints(setup);
  return lock;
}

void check_slices(const TrainSetup& setup) {
  if (setup.config.degrees.tensor > 1)
    (void)make_partition_plan((setup.tokenizer ? model_to_partition(setup.model, setup.options.model)
                                               : model_to_partition(setup.options.model))
                                  .model,
                              setup.config.tensor);
}

TrainSetup prepare_training(const TrainOptions& options, int world_size) {
  TrainSetup setup{
      .options = options, .name = name_of_model(options.model), .config = {}, .model = {}, .data = {}, .out = {}};
  const std::string origin = options.config.empty() ? "the built-in configuration" : options.config;
  check_device(options.device);
  const bool has_gpu = options.device != "cpu" && count_gpus() > 0;
  ConfigSource source = options.config.empty() ? source_from_json(built_in_config(has_gpu), origin)
                                               : read_input([&] { return read_source(options.config); });
  const auto resolve = [&] {
    ConfigSource completed = source;
    completed.options = complete_config(source.options, setup.options, origin);
    setup.config = config_from_source(completed, world_size);
  };
  {
    std::optional<QuietLog> quiet;  // with --epochs the configuration is read again, when the steps are known
    if (options.epochs) quiet.emplace();
    resolve();
  }
  setup.model = with_positions(read_input([&] { return model_options(options.model); }), options.seq);
  if (!options.text.tokenizer.empty()) take_tokenizer(setup);
  setup.data = open_data({.path = options.data,
                          .format = data_format(options.text.format),
                          .seq = options.seq,
                          .vocab_size = vocab_size(setup.model),
                          .exclude = options.exclude,
                          .text_key = options.text.key,
                          .python = python_of_scripts(),
                          .tokenizer = setup.tokenizer});
  check_vocabulary_of_model(setup, setup.data.vocab_size);
  std::error_code reason;
  if (!options.init_from.empty() && !std::filesystem::exists(options.init_from, reason)) {
    throw ConfigError(
        str("--init-from ", options.init_from, ": ", reason ? reason.message() : "there is no such file"));
  }
  setup.out = choose_output(options, setup.name);
  if (options.resume && !is_locked(setup.out)) check_resume(setup);
  if (options.epochs) {
    setup.options.steps = steps_of_epochs(setup);
    resolve();
  }
  return setup;
}

}  // namespace trireme::cli
