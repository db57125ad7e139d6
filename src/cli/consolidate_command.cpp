// `trireme consolidate`: a checkpoint's weights as files that other programs read.
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cstdio>
#include <memory>

#include "cli/checkpoint_place.h"
#include "cli/command.h"
#include "cli/flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/checkpoint/consolidate.h"

namespace trireme::cli {
namespace {

constexpr const char* kConsolidateFooter =
    "DIR is the folder of a run, of its checkpoints, or of one checkpoint, of any layout that `trireme inspect` "
    "knows.\n"
    "OUT is a folder, which from_pretrained() of transformers opens where the checkpoint or --model tells the model.\n"
    "Weights stream: memory does not grow with the model.\n\n"
    "Examples:\n"
    "  trireme consolidate runs/llama-3m weights/\n"
    "  trireme consolidate checkpoints/ weights/ --tag global_step100 --dtype bf16 --max-shard-size 2GB";

struct ConsolidateFlags {
  std::string folder;
  std::string out;
  std::string tag;
  std::string dtype = "fp32";
  std::string max_shard_size = "5GB";
  std::string file = "model.safetensors";
  std::string model;
  bool weights_only = false;
  bool exclude_frozen_parameters = false;
  bool overwrite = false;
};

void declare(CLI::App& app, ConsolidateFlags& flags) {
  app.add_option("DIR", flags.folder, "the checkpoint")->type_name("")->required();
  app.add_option("OUT", flags.out, "folder that the weights go into")->type_name("")->required();
  app.add_option("--tag", flags.tag, "which checkpoint of the folder (default: the one that `latest` names)")
      ->type_name("TAG");
  app.add_option("--dtype", flags.dtype, "of the weights: fp32 (from the masters), bf16, fp16, or keep")
      ->check(one_of({"fp32", "bf16", "fp16", "keep"}))
      ->capture_default_str()
      ->type_name("NAME");
  app.add_option("--max-shard-size", flags.max_shard_size, "larger models become several files with an index")
      ->capture_default_str()
      ->type_name("SIZE");
  app.add_option("--file", flags.file, "name of the file: .safetensors, or .bin, .pt, .pth for torch.load()")
      ->capture_default_str()
      ->type_name("NAME");
  auto* model = app.add_option("--model", flags.model,
                               "folder in Hugging Face's form whose config.json and tokenizer go beside the weights\n"
                               "(default: config.json as the checkpoint tells the model)")
                    ->type_name("DIR");
  app.add_flag("--weights-only", flags.weights_only, "no config.json, no tokenizer")->excludes(model);
  app.add_flag("--exclude-frozen-parameters", flags.exclude_frozen_parameters, "only what is trained, and buffers");
  app.add_flag("--overwrite", flags.overwrite, "replace weights that are in OUT already");
  app.footer(kConsolidateFooter);
}

std::optional<at::ScalarType> dtype_of(const std::string& name) {
  if (name == "keep") return std::nullopt;
  return name == "fp32" ? at::kFloat : name == "bf16" ? at::kBFloat16 : at::kHalf;
}

int run_consolidate(const ConsolidateFlags& flags) {
  ConsolidateOptions options{.dtype = dtype_of(flags.dtype),
                             .max_shard_bytes = parse_bytes(flags.max_shard_size),
                             .exclude_frozen_parameters = flags.exclude_frozen_parameters,
                             .file_name = flags.file,
                             .model_files = !flags.weights_only,
                             .model_folder = flags.model,
                             .existing = flags.overwrite ? ExistingOutput::kReplace : ExistingOutput::kRefuse,
                             .files = nullptr,
                             .progress = {}};
  const bool shows_progress = isatty(STDERR_FILENO) != 0;
  if (shows_progress)
    options.progress = [](int64_t done, int64_t total) {
      std::fprintf(stderr, "\r%5.1f %% of %.2f GB",
                   total > 0 ? 100.0 * static_cast<double>(done) / static_cast<double>(total) : 100.0,
                   static_cast<double>(total) / 1e9);
      if (done == total) std::fprintf(stderr, "\n");
    };
  const CheckpointSource source = open_checkpoint(checkpoints_folder(flags.folder), flags.tag);
  const ConsolidatedWeights written = consolidate(source, flags.out, options);
  std::string names;
  for (const auto& file : written.files) names += str(file.string(), "\n");
  print_result(names);
  return kDone;
}

}  // namespace

Action add_consolidate(CLI::App& app) {
  const auto flags = std::make_shared<ConsolidateFlags>();
  declare(app, *flags);
  return [flags](const Invocation&) { return run_consolidate(*flags); };
}

}  // namespace trireme::cli
