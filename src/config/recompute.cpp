#include "config/read_parts.h"

namespace trireme {
namespace {

const std::vector<std::string> kModes = {"none", "full", "selective"};
constexpr IntegerRange kTileTokens = {.min = 0, .words = "an integer >= 0 (0: not tiled)"};

RecomputeMode mode_of(const std::string& name) {
  return name == "full" ? RecomputeMode::kFull : name == "selective" ? RecomputeMode::kSelective : RecomputeMode::kNone;
}

}  // namespace

RecomputeConfig read_recompute(Section& own) {
  const Json* json = own.value("recompute");
  if (json == nullptr || !json->is_object())
    return {.mode = mode_of(own.choice_or("recompute", "none", kModes)), .selective = {}};
  Section section = own.section("recompute");
  RecomputeConfig config;
  config.mode = mode_of(section.choice_or("mode", "selective", kModes));
  for (const char* key : {"keep", "extra_compute"})
    if (config.mode != RecomputeMode::kSelective && section.has(key))
      section.refuse(str("`", section.path_of(key), "` is for \"mode\": \"selective\"; remove it"));
  config.selective.keep = section.texts_or("keep", config.selective.keep);
  config.selective.extra_compute =
      section.number_or("extra_compute", config.selective.extra_compute,
                        {.min = 0, .max = 1.0 / 3, .words = "a share of a step's multiply-adds from 0 to 0.333"});
  section.finish();
  return config;
}

TilePolicy read_tiled(Section& own) {
  Section section = own.section("tiled");
  const TilePolicy policy{.loss_tokens = section.integer_or("loss_tokens", 0, kTileTokens),
                          .mlp_tokens = section.integer_or("mlp_tokens", 0, kTileTokens)};
  section.finish();
  return policy;
}

void read_activation_checkpointing(Section& top) {
  Section section = top.section("activation_checkpointing");
  const bool partition = section.flag_or("partition_activations", false);
  const bool contiguous = section.flag_or("contiguous_memory_optimization", false);
  const int64_t number = section.integer_or("number_checkpoints", 0, kPositive);
  if (contiguous && !partition)
    section.fail("contiguous_memory_optimization", "false, or `partition_activations` = true beside it");
  if (contiguous && number == 0)
    section.refuse(str("`", section.path_of("contiguous_memory_optimization"), "` = true needs `",
                       section.path_of("number_checkpoints"), "`, the number of layers"));
  if (section.flag_or("profile", false)) section.not_there_yet("profile", "remove it or set it to false");
  const auto note = [&](const char* key, bool is_on) {
    if (is_on) section.without_meaning(key);
  };
  note("partition_activations", partition);
  note("contiguous_memory_optimization", contiguous);
  note("number_checkpoints", number > 0);
  for (const char* key : {"cpu_checkpointing", "synchronize_checkpoint_boundary"})
    note(key, section.flag_or(key, false));
  section.finish();
}

}  // namespace trireme
