// Runs of `trireme train` on a tiny model, and what they leave.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "tests/cli/program.h"
#include "tests/support/run_ranks.h"
#include "trireme/base/json.h"
#include "trireme/checkpoint/checkpoint.h"
#include "trireme/checkpoint/manifest.h"

namespace trireme::cli {

class TrainProgram : public ::testing::Test {
 protected:
  TrainProgram() {
    std::string text;
    for (int i = 0; i < 6000; ++i) text += "line " + std::to_string(i * 7919 % 1000) + " of the story\n";
    data_ = folder_.write("data/story.txt", text);
    model_ = folder_.write("tiny.json",
                           R"({"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": true})");
  }

  std::vector<std::string> train(const std::string& out, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> arguments = {"train", "--model",        model_, "--data", data_,        "--seq",
                                          "32",    "--batch",        "2",    "--seed", "5",          "--ranks",
                                          "2",     "--eval-samples", "16",   "--out",  folder_ / out};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return arguments;
  }

  // `words` with another value behind `flag`.
  static std::vector<std::string> with(std::vector<std::string> words, const std::string& flag,
                                       const std::string& value) {
    *std::next(std::find(words.begin(), words.end(), flag)) = value;
    return words;
  }

  // A copy of run `from` as it was at `step`: what came later is taken away.
  void cut(const std::string& from, const std::string& to, int step) const {
    const std::filesystem::path checkpoints = folder_ / (to + "/checkpoints");
    const auto tag = "global_step" + std::to_string(step);
    std::filesystem::copy(folder_ / from, folder_ / to, std::filesystem::copy_options::recursive);
    for (const auto& other : complete_tags(checkpoints))
      if (other != tag) std::filesystem::remove_all(checkpoints / other);
    folder_.write(to + "/checkpoints/latest", tag);
  }

  // The numbers under `key` in the lines of the metrics, step by step.
  std::vector<double> numbers_of(const std::string& out, const std::string& key) const {
    std::vector<double> numbers;
    std::istringstream lines(contents_of(folder_ / (out + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const auto json = Json::parse(line);
      if (!json.contains("event")) numbers.push_back(json[key]);
    }
    return numbers;
  }

  // Steps and losses of a run's metrics, as written.
  std::vector<std::string> losses_of(const std::string& out) const {
    std::vector<std::string> losses;
    std::istringstream lines(contents_of(folder_ / (out + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const auto json = Json::parse(line);
      if (!json.contains("event")) losses.push_back(json["step"].dump() + ": " + json["loss"].dump());
    }
    return losses;
  }

  // The saved tensors of the last checkpoint, file by file.
  std::string weights_of(const std::string& out) const {
    const std::filesystem::path checkpoints = folder_ / (out + "/checkpoints");
    auto tag = contents_of(checkpoints / "latest");
    tag.erase(tag.find_last_not_of('\n') + 1);
    std::vector<std::filesystem::path> files;
    for (const auto& entry : std::filesystem::directory_iterator(checkpoints / tag)) {
      if (entry.path().extension() == ".safetensors") files.push_back(entry.path());
    }
    std::sort(files.begin(), files.end());
    std::string bytes;
    for (const auto& file : files) bytes += file.filename().string() + contents_of(file);
    return bytes;
  }

  // The weights of the last checkpoint by name, however many ranks saved them.
  std::map<std::string, at::Tensor> saved_weights(const std::string& out) const {
    const std::filesystem::path checkpoints = folder_ / (out + "/checkpoints");
    const auto tag = latest_tag(checkpoints).value();
    std::map<std::string, at::Tensor> weights;
    StateTree state;
    for (const auto& tensor : read_manifest(checkpoints / tag).tensors) {
      if (!tensor.name.starts_with("model.")) continue;
      auto& weight = weights[tensor.name.substr(6)] = at::zeros(tensor.shape, tensor.dtype);
      state.tensors.push_back({tensor.name, {tensor.shape}, 0, weight.view({-1})});
    }
    run_ranks(1, [&](Rank& rank) {
      (void)load_checkpoint(rank.world(), checkpoints, tag, state, {.extra = Mismatch::kIgnore});
    });
    return weights;
  }

  TemporaryFolder folder_;
  std::string data_;
  std::string model_;
};

inline void expect_same_weights(const std::map<std::string, at::Tensor>& a,
                                const std::map<std::string, at::Tensor>& b) {
  ASSERT_FALSE(a.empty());
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, weight] : a) {
    ASSERT_TRUE(b.contains(name)) << name;
    EXPECT_TRUE(at::equal(weight, b.at(name))) << name;
  }
}

}  // namespace trireme::cli
