#include <gtest/gtest.h>

#include "tests/config/config_test_support.h"
#include "tests/support/captured_log.h"

namespace trireme {
namespace {

RecomputeConfig recompute_with(const std::string& value) {
  return read_with("\"trireme\": {\"recompute\": " + value + "}").recompute;
}

Refusal refusal_with(const std::string& value) { return refusal_of("\"trireme\": {\"recompute\": " + value + "}"); }

TEST(RecomputeSection, IsOffByDefaultAndOneWordSwitchesItOn) {
  EXPECT_EQ(read_with("\"trireme\": {}").recompute.mode, RecomputeMode::kNone);
  EXPECT_EQ(recompute_with("\"none\"").mode, RecomputeMode::kNone);
  EXPECT_EQ(recompute_with("\"full\"").mode, RecomputeMode::kFull);
  EXPECT_EQ(recompute_with("\"selective\""), (RecomputeConfig{RecomputeMode::kSelective, {}}));
}

TEST(RecomputeSection, AnObjectTunesTheSelection) {
  EXPECT_EQ(recompute_with(R"({"mode": "selective", "keep": ["softmax"], "extra_compute": 0.1})"),
            (RecomputeConfig{RecomputeMode::kSelective, {.keep = {"softmax"}, .extra_compute = 0.1}}));
  EXPECT_EQ(recompute_with(R"({"extra_compute": 0.1})").mode, RecomputeMode::kSelective);
}

TEST(RecomputeSection, ItsResolvedFormReadsBack) {
  for (const char* value :
       {"\"none\"", "\"full\"", R"({"mode": "selective", "keep": ["gelu"], "extra_compute": 0.25})"}) {
    const Config config = read_with("\"trireme\": {\"recompute\": " + std::string(value) + "}");
    EXPECT_EQ(parse_config(to_text(config), 1), config) << value;
  }
}

TEST(RecomputeSection, RefusesWhatItDoesNotKnow) {
  EXPECT_EQ(refusal_with("\"some\""),
            wrong("`trireme.recompute` is \"some\"; expected one of \"none\", \"full\", \"selective\"."));
  EXPECT_EQ(refusal_with(R"({"extra_computes": 1})"),
            wrong("unknown key `trireme.recompute.extra_computes`. Did you mean `extra_compute`?"));
  EXPECT_EQ(
      refusal_with(R"({"extra_compute": 0.5})"),
      wrong("`trireme.recompute.extra_compute` is 0.5; expected a share of a step's multiply-adds from 0 to 0.333"));
  EXPECT_EQ(refusal_with(R"({"mode": "full", "keep": ["gelu"]})"),
            wrong("`trireme.recompute.keep` is for \"mode\": \"selective\"; remove it"));
}

TEST(TiledSection, GivesTheTokensOfTiles) {
  EXPECT_EQ(read_with(R"("trireme": {})").tiled, TilePolicy{});
  const Config config = read_with(R"("trireme": {"tiled": {"loss_tokens": 512, "mlp_tokens": 1024}})");
  EXPECT_EQ(config.tiled, (TilePolicy{.loss_tokens = 512, .mlp_tokens = 1024}));
  EXPECT_EQ(parse_config(to_text(config), 1), config);
  EXPECT_EQ(refusal_of(R"("trireme": {"tiled": {"loss_tokens": -1}})"),
            wrong("`trireme.tiled.loss_tokens` is -1; expected an integer >= 0 (0: not tiled)"));
  EXPECT_EQ(refusal_of(R"("trireme": {"tiled": {"loss_token": 1}})"),
            wrong("unknown key `trireme.tiled.loss_token`. Did you mean `loss_tokens`?"));
}

TEST(ActivationCheckpointing, NamesWhatHasNoMeaningHere) {
  const CapturedLog log;
  read_with(R"("activation_checkpointing": {"partition_activations": true, "contiguous_memory_optimization": true,
               "number_checkpoints": 4, "cpu_checkpointing": true, "synchronize_checkpoint_boundary": true})");
  EXPECT_EQ(
      log.text(),
      "info <string>: ignored, because Trireme does not need them (`trireme docs config` says why): "
      "`activation_checkpointing.partition_activations`, `activation_checkpointing.contiguous_memory_optimization`, "
      "`activation_checkpointing.number_checkpoints`, `activation_checkpointing.cpu_checkpointing`, "
      "`activation_checkpointing.synchronize_checkpoint_boundary`\n");
}

TEST(ActivationCheckpointing, RefusesWhatDeepSpeedRefuses) {
  EXPECT_EQ(refusal_of(R"("activation_checkpointing": {"contiguous_memory_optimization": true})"),
            wrong("`activation_checkpointing.contiguous_memory_optimization` is true; expected false, or "
                  "`partition_activations` = true beside it"));
  EXPECT_EQ(refusal_of(R"("activation_checkpointing": {"partition_activations": true,
                          "contiguous_memory_optimization": true})"),
            wrong("`activation_checkpointing.contiguous_memory_optimization` = true needs "
                  "`activation_checkpointing.number_checkpoints`, the number of layers"));
  EXPECT_EQ(refusal_of(R"("activation_checkpointing": {"profile": true})"),
            not_there("`activation_checkpointing.profile` = true is not there yet; remove it or set it to false"));
}

}  // namespace
}  // namespace trireme
