// The flags of `trireme train`.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace trireme::cli {

/// How `--data` is read.
struct TextOptions {
  std::string format = "auto";
  std::string key;        ///< of JSON files: the key whose texts are trained on; empty: `text`
  std::string tokenizer;  ///< tokenizer.json, or a folder with one; empty: bytes
  std::string eos_token;  ///< text of the token that ends a document; empty: as the tokenizer's files say
};

struct TrainOptions {
  std::string config;              ///< DeepSpeed JSON; empty: ZeRO stage 3 with AdamW
  std::string model = "llama-3m";  ///< a built-in name, or a JSON file in Hugging Face's form
  std::string init_from;           ///< safetensors with the first weights; empty: drawn from the seed
  std::string data;
  TextOptions text;
  std::vector<std::string> exclude;  ///< names of files or folders of `data` to leave out
  int64_t seq = 256;
  std::optional<int64_t> ranks;  ///< processes to start; not given: the ones that a launcher started, or 1
  std::string device = "auto";   ///< of each rank: auto, cpu, cuda or cuda:N
  bool oversubscribe = false;    ///< any number of ranks, whatever the cores
  int64_t steps = 500;
  std::optional<double> epochs;  ///< in place of `steps`, which prepare_training() computes from it
  std::optional<int64_t> batch;  ///< samples per rank and micro-batch, where the configuration does not say
  std::optional<double> lr;      ///< in place of the configuration's
  uint64_t seed = 0;
  std::string out;              ///< empty: runs/MODEL
  bool resume = false;          ///< also with --resume-if-there
  std::string tag;              ///< of the checkpoint to resume from; empty: the latest
  int64_t save_every = 0;       ///< steps; 0: only at the end
  std::optional<int64_t> keep;  ///< checkpoints; 0: all; not given: as the configuration says, or 3
  int64_t eval_every = 0;       ///< steps; 0: only at the end
  int64_t eval_samples = 256;
  std::string prompt;
  bool quiet = false;                 ///< errors and the last line alone
  bool tells_exchanges = false;       ///< of the first step, by operator
  std::optional<double> peak_tflops;  ///< dense peak of one rank in the dtype that is computed in, 10^12 per second
};

}  // namespace trireme::cli
