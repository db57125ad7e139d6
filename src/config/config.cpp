#include "trireme/config/config.h"

#include <algorithm>
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

/// Those that a program gives; the data degree is what they leave of the world.
Degrees read_degrees(Section& top, int world_size, const Degrees& given) {
  Degrees degrees = given;
  const int64_t model = int64_t{given.pipe} * given.tensor * given.sequence;
  const bool is_positive = std::min({given.pipe, given.tensor, given.sequence, given.expert, given.replicas}) >= 1;
  if (!is_positive || world_size % model != 0)
    throw ConfigError(str(top.notes().origin, ": degrees: pipe ", given.pipe, " * tensor ", given.tensor,
                          " * sequence ", given.sequence, " must divide the ", world_size,
                          " ranks, and each degree is 1 or more; choose others, or another number of ranks"));
  degrees.data = static_cast<int>(world_size / model);
  if (degrees.data % given.expert != 0 || degrees.data % given.replicas != 0)
    throw ConfigError(str(top.notes().origin, ": degrees: expert ", given.expert, " and replicas ", given.replicas,
                          " must each divide the data degree, ", degrees.data, "; choose others"));
  const int64_t size = top.integer_or("data_parallel_size", degrees.data, kPositive);
  if (size != degrees.data)
    top.not_there_yet("data_parallel_size", str("all ", degrees.data, " ranks are data-parallel; remove it"));
  return degrees;
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

Config read_config(const std::filesystem::path& path, int world_size, const Degrees& degrees) {
  return config_from_json(read_hjson(path), world_size, degrees, path.string());
}

Config parse_config(std::string_view text, int world_size, const Degrees& degrees, const std::string& origin) {
  return config_from_json(parse_hjson(text, origin), world_size, degrees, origin);
}

Config config_from_json(const Json& json, int world_size, const Degrees& degrees, const std::string& origin) {
  TRIREME_CHECK(world_size >= 1, "world_size is ", world_size, ".");
  ReadNotes notes{.origin = origin, .warnings = {}, .without_meaning = {}, .hints = {}};
  Section top(json, "", notes);
  Config config;
  config.degrees = read_degrees(top, world_size, degrees);
  config.precision = read_precision(top);
  read_zero(top, config.precision, config);
  read_gradient_reduction(top, config.degrees.data, config.pager);
  config.optimizer = read_optimizer(top);
  config.scheduler = read_scheduler(top);
  config.pager.deterministic = top.flag_or("deterministic", config.pager.deterministic);
  config.gradient_clipping = top.number_or("gradient_clipping", config.gradient_clipping, kNonNegative);
  config.steps_per_print = read_steps_per_print(top);
  config.managed_gradient_accumulation = top.flag_or("managed_gradient_accumulation", true);
  config.checkpoint = read_checkpoint(top);
  read_activation_checkpointing(top);
  read_known_keys(top);
  config.batch = read_batch_sizes(top, config.degrees.data);
  top.finish();
  report(notes);
  return config;
}

Config default_config(int world_size, const Degrees& degrees) {
  return config_from_json(Json{{"train_micro_batch_size_per_gpu", 1}}, world_size, degrees, "<defaults>");
}

}  // namespace trireme
