#include "trireme/config/config.h"

#include <cmath>

#include "config/known_keys.h"
#include "config/read_parts.h"
#include "trireme/base/log.h"

namespace trireme {
namespace {

/// Integrations write an infinity for "never", as a number or as a word.
int64_t read_steps_per_print(Section& top) {
  const char* key = "steps_per_print";
  const Json* json = top.value(key);
  if (!json) return 0;
  if (json->is_string() && find_ignoring_case(json->get<std::string>(), {"inf", "infinity"})) return 0;
  const int64_t steps = top.integer_or(key, 0, {.min = 0, .words = "an integer >= 0 (0 or an infinity: never)"});
  return steps == std::numeric_limits<int64_t>::max() ? 0 : steps;
}

void read_data_parallel_size(Section& top, int world_size) {
  const int64_t size = top.integer_or("data_parallel_size", world_size, kPositive);
  if (size != world_size)
    top.not_there_yet("data_parallel_size", str("all ", world_size, " ranks are data-parallel; remove it"));
}

void report(const ReadNotes& notes) {
  for (const std::string& warning : notes.warnings) log(LogLevel::kWarning, warning);
  for (const std::string& hint : notes.hints) log(LogLevel::kInfo, str(notes.origin, ": ", hint));
  if (notes.without_meaning.empty()) return;
  std::string keys;
  for (const std::string& key : notes.without_meaning) keys += (keys.empty() ? "`" : ", `") + key + "`";
  log(LogLevel::kInfo, str(notes.origin, ": without a meaning here (`trireme docs config` says why): ", keys));
}

}  // namespace

Config read_config(const std::filesystem::path& path, int world_size) {
  return config_from_json(read_hjson(path), world_size, path.string());
}

Config parse_config(std::string_view text, int world_size, const std::string& origin) {
  return config_from_json(parse_hjson(text, origin), world_size, origin);
}

Config config_from_json(const Json& json, int world_size, const std::string& origin) {
  TRIREME_CHECK(world_size >= 1, "world_size is ", world_size, ".");
  ReadNotes notes{.origin = origin, .warnings = {}, .without_meaning = {}, .hints = {}};
  Section top(json, "", notes);
  Config config;
  config.precision = read_precision(top);
  read_zero(top, config.precision, config);
  read_gradient_reduction(top, world_size, config.pager);
  config.optimizer = read_optimizer(top);
  config.scheduler = read_scheduler(top);
  config.pager.deterministic = top.flag_or("deterministic", config.pager.deterministic);
  config.gradient_clipping = top.number_or("gradient_clipping", config.gradient_clipping, kNonNegative);
  config.steps_per_print = read_steps_per_print(top);
  config.managed_gradient_accumulation = top.flag_or("managed_gradient_accumulation", true);
  config.checkpoint = read_checkpoint(top);
  read_data_parallel_size(top, world_size);
  read_activation_checkpointing(top);
  read_known_keys(top);
  config.batch = read_batch_sizes(top, world_size);
  top.finish();
  report(notes);
  return config;
}

Config default_config(int world_size) {
  return config_from_json(Json{{"train_micro_batch_size_per_gpu", 1}}, world_size, "<defaults>");
}

}  // namespace trireme
