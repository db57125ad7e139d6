#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "tests/support/temporary_folder.h"
#include "trireme/base/error.h"
#include "trireme/models/language_model.h"

namespace trireme {
namespace {

/// A config.json that goes away.
class ConfigFile {
 public:
  explicit ConfigFile(const std::string& text) : path_(folder_.write("config.json", text)) {}
  const std::string& path() const { return path_; }

 private:
  testing::TemporaryFolder folder_;
  const std::string path_;
};

ModelOptions parse(const std::string& text) { return model_options(ConfigFile(text).path()); }

void expect_refused(const std::string& text, const std::vector<std::string>& parts,
                    ErrorCode code = ErrorCode::kConfig) {
  try {
    parse(text);
    FAIL() << "accepted: " << text;
  } catch (const ConfigError& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const auto& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in: " << error.what();
    }
  }
}

int64_t counted(const ModelOptions& options) {
  int64_t numel = 0;
  for (const auto& parameter : make_language_model(options)->parameters()) numel += parameter.numel();
  return numel;
}

TEST(ModelOptions, TheBuiltInModelsHaveTheSizesTheyAreNamedAfter) {
  EXPECT_EQ(parameter_count(model_options("llama-3m")), 2'689'280);
  EXPECT_EQ(parameter_count(model_options("llama-10m")), 10'720'128);
  EXPECT_EQ(parameter_count(model_options("llama-130m")), 134'105'856);
  EXPECT_EQ(parameter_count(model_options("llama-1b")), 1'235'814'400);
  EXPECT_EQ(parameter_count(model_options("llama-8b")), 8'030'261'248);
  EXPECT_EQ(parameter_count(model_options("gpt2")), 124'439'808);
}

// As Meta's config.json files say, but for rope_scaling, which is not supported, and the positions that come of it.
TEST(ModelOptions, TheLargeLlamasAreMetas) {
  const char* common = R"("model_type": "llama", "vocab_size": 128256, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": null, "hidden_act": "silu", "initializer_range": 0.02)";
  EXPECT_EQ(config_json(model_options("llama-1b")),
            config_json(parse(std::string("{") + common + R"(, "hidden_size": 2048, "intermediate_size": 8192,
                "num_hidden_layers": 16, "head_dim": 64, "tie_word_embeddings": true})")));
  EXPECT_EQ(config_json(model_options("llama-8b")),
            config_json(parse(std::string("{") + common + R"(, "hidden_size": 4096, "intermediate_size": 14336,
                "num_hidden_layers": 32, "tie_word_embeddings": false})")));
}

TEST(ModelOptions, TheCountIsThatOfTheModelMade) {
  LlamaOptions llama = {.vocab_size = 13,
                        .hidden_size = 24,
                        .intermediate_size = 20,
                        .num_hidden_layers = 3,
                        .num_attention_heads = 4,
                        .num_key_value_heads = 2,
                        .head_dim = 10};
  EXPECT_EQ(parameter_count(llama), counted(llama));
  llama.tie_word_embeddings = true;
  EXPECT_EQ(parameter_count(llama), counted(llama));
  const GptOptions gpt = {.vocab_size = 13, .n_embd = 24, .n_layer = 3, .n_head = 4, .n_inner = 7, .n_positions = 9};
  EXPECT_EQ(parameter_count(gpt), counted(gpt));
}

TEST(ModelOptions, ALlamaConfigOfHuggingFaceIsRead) {
  const auto options = std::get<LlamaOptions>(parse(R"({
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "use_cache": true,
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": null, "max_position_embeddings": 4096, "rms_norm_eps": 1e-05,
    "rope_theta": 500000, "rope_scaling": null, "hidden_act": "silu", "attention_bias": false, "mlp_bias": false,
    "attention_dropout": 0.0, "pretraining_tp": 1, "initializer_range": 0.01, "tie_word_embeddings": true})"));
  EXPECT_EQ(options.vocab_size, 100);
  EXPECT_EQ(options.hidden_size, 64);
  EXPECT_EQ(options.intermediate_size, 96);
  EXPECT_EQ(options.num_hidden_layers, 3);
  EXPECT_EQ(options.num_attention_heads, 8);
  EXPECT_EQ(options.num_key_value_heads, 2);
  EXPECT_EQ(options.max_position_embeddings, 4096);
  EXPECT_EQ(options.rms_norm_eps, 1e-5);
  EXPECT_EQ(options.rope_theta, 500000);
  EXPECT_EQ(options.initializer_range, 0.01);
  EXPECT_TRUE(options.tie_word_embeddings);
}

TEST(ModelOptions, WithoutKeyValueHeadsEachHeadHasItsOwn) {
  const auto options = std::get<LlamaOptions>(parse(R"({"model_type": "llama", "num_attention_heads": 6})"));
  EXPECT_EQ(options.num_key_value_heads, 6);
}

TEST(ModelOptions, RopeParametersOfTransformersFiveAreRead) {
  const auto options = std::get<LlamaOptions>(
      parse(R"({"model_type": "llama", "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}})"));
  EXPECT_EQ(options.rope_theta, 7);
}

TEST(ModelOptions, AGptTwoConfigOfHuggingFaceIsRead) {
  const auto options = std::get<GptOptions>(parse(R"({"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
    "n_positions": 64, "n_ctx": 64, "vocab_size": 50, "activation_function": "gelu_new", "attn_pdrop": 0.0,
    "layer_norm_epsilon": 1e-4})"));
  EXPECT_EQ(options.n_embd, 32);
  EXPECT_EQ(options.n_positions, 64);
  EXPECT_EQ(options.layer_norm_epsilon, 1e-4);
}

TEST(ModelOptions, WhatIsNotSupportedIsRefusedByName) {
  const auto unsupported = ErrorCode::kUnsupported;
  expect_refused(R"({"model_type": "mistral"})", {"model_type=\"mistral\"", "llama"}, unsupported);
  expect_refused(R"({"hidden_size": 8})", {"model_type"}, unsupported);
  expect_refused(R"({"model_type": "llama", "attention_bias": true})", {"attention_bias=true", "only false"},
                 unsupported);
  expect_refused(R"({"model_type": "llama", "mlp_bias": true})", {"mlp_bias=true"}, unsupported);
  expect_refused(R"({"model_type": "llama", "hidden_act": "gelu"})", {"hidden_act=\"gelu\""}, unsupported);
  expect_refused(R"({"model_type": "llama", "attention_dropout": 0.1})", {"attention_dropout=0.1"}, unsupported);
  expect_refused(R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8}})",
                 {"rope_scaling: rope_type=\"llama3\""}, unsupported);
  expect_refused(R"({"model_type": "gpt2", "activation_function": "relu"})", {"activation_function"}, unsupported);
}

TEST(ModelOptions, WrongKeysTypesAndValuesAreNamed) {
  expect_refused(R"({"model_type": "llama", "hiden_size": 8})", {"hiden_size", "Did you mean `hidden_size`?"});
  expect_refused(R"({"model_type": "llama", "hidden_size": "8"})", {"hidden_size=\"8\"", "an integer"});
  expect_refused(R"({"model_type": "llama", "hidden_size": 8.5})", {"hidden_size=8.5", "an integer"});
  expect_refused(R"({"model_type": "llama", "hidden_size": 100})", {"hidden_size=100", "num_attention_heads=12"},
                 ErrorCode::kConfig);
  expect_refused(R"([1])", {"an object"});
}

TEST(ModelOptions, AnUnknownNameListsTheKnownOnes) {
  try {
    model_options("lama-3m");
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_NE(std::string(error.what()).find("llama-3m, llama-10m, llama-130m, llama-1b, llama-8b, gpt2"),
              std::string::npos);
    EXPECT_NE(std::string(error.what()).find("Did you mean `llama-3m`?"), std::string::npos);
  }
  EXPECT_THROW(model_options("nowhere/config.json"), IoError);
}

TEST(ModelOptions, AFileOfWeightsIsNamedAsThatWithoutItsBytes) {
  const std::string weights = std::string("\x40\0\0\0\0\0\0\0", 8) + R"({"w":{"dtype":"F32"}})";
  const ConfigFile file(weights);
  try {
    model_options(file.path());
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(std::string(error.what()),
              "model `" + file.path() +
                  "` is a binary file, such as one of weights; give a built-in model or the path of a config.json, and "
                  "safetensors as first weights: `trireme train --init-from " +
                  file.path() + "`");
  }
}

TEST(ModelOptions, AFolderIsNamedAsThat) {
  const std::string folder = std::filesystem::temp_directory_path().string();
  try {
    model_options(folder);
    FAIL();
  } catch (const ConfigError& error) {
    EXPECT_EQ(
        std::string(error.what()),
        "model `" + folder + "` is a folder without a config.json; give the path of one, or of a folder with one");
  }
}

TEST(ModelOptions, AFolderStandsForTheConfigJsonInIt) {
  const testing::TemporaryFolder folder;
  folder.write("config.json", config_json(model_options("llama-3m")));
  EXPECT_EQ(config_json(model_options(folder.path())), config_json(model_options("llama-3m")));
}

TEST(ModelOptions, WhatIsWrittenReadsBackAsTheSame) {
  for (const auto& name : model_names()) {
    const auto text = config_json(model_options(name));
    EXPECT_EQ(config_json(parse(text)), text) << name;
  }
}

TEST(ModelOptions, RoomForLongerSequencesIsMadeWhenAskedFor) {
  EXPECT_EQ(max_positions(with_positions(LlamaOptions{.max_position_embeddings = 8}, 20)), 20);
  EXPECT_EQ(max_positions(with_positions(GptOptions{.n_positions = 30}, 20)), 30);
  EXPECT_EQ(vocab_size(GptOptions{.vocab_size = 30}), 30);
}

}  // namespace
}  // namespace trireme
