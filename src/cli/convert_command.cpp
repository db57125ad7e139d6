// `trireme convert`: a checkpoint of any layout, written in another one.
#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <array>
#include <chrono>
#include <cstdio>
#include <memory>
#include <optional>

#include "cli/checkpoint_place.h"
#include "cli/command.h"
#include "cli/flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/checkpoint/consolidate.h"
#include "trireme/checkpoint/convert.h"
#include "trireme/checkpoint/torch_distributed.h"

namespace trireme::cli {
namespace {

constexpr const char* kConvertFooter =
    "IN is a checkpoint of Trireme's, DeepSpeed's (ZeRO stages 0 to 3) or torch.distributed.checkpoint's, a folder of "
    "such, or\n"
    "safetensors files; which it is shows in its files. OUT is the folder that gets the copy as OUT/TAG, and a "
    "`latest` "
    "that\n"
    "names it; with --to dcp and huggingface it is the copy itself. Nothing in a pickle is executed; classes that are "
    "not\n"
    "known are refused by name. Memory: a few blocks of a few MiB, whatever the model's size.\n\n"
    "Examples:\n"
    "  trireme convert deepspeed_run/ checkpoints/ --to trireme\n"
    "  trireme convert checkpoints/ for_deepspeed/ --to deepspeed --stage 3 --ranks 8\n"
    "  trireme convert checkpoints/ for_torch/ --to dcp\n"
    "  trireme convert runs/llama-3m for_transformers/ --to huggingface\n"
    "  trireme convert checkpoints/ copy/ --to trireme --tag global_step100 --out-tag best";

struct ConvertFlags {
  std::string from;
  std::string to;
  std::string layout;
  std::string tag;
  std::string out_tag;
  std::string model;
  std::optional<int> stage;
  std::optional<int> ranks;
};

/// The result of a layout's writer.
struct Written {
  SavedCheckpoint saved;
  size_t tensors = 0;
};

Written write_as_trireme(const CheckpointSource& source, const ConvertFlags& flags, const ConvertOptions& options) {
  return {write_trireme_checkpoint(source, flags.to, options), source.manifest.tensors.size()};
}

Written write_as_deepspeed(const CheckpointSource& source, const ConvertFlags& flags, const ConvertOptions& options) {
  return {write_deepspeed_checkpoint(source, flags.to, {.stage = *flags.stage, .ranks = *flags.ranks}, options),
          source.manifest.tensors.size()};
}

Written write_as_dcp(const CheckpointSource& source, const ConvertFlags& flags, const ConvertOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto written =
      write_torch_distributed(source, flags.to, {.files = options.files, .progress = options.progress});
  return {{written.path, written.tensor_bytes,
           std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()},
          source.manifest.tensors.size()};
}

Written write_as_huggingface(const CheckpointSource& source, const ConvertFlags& flags, const ConvertOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto written = consolidate(
      source, flags.to,
      {.dtype = std::nullopt, .model_folder = flags.model, .files = options.files, .progress = options.progress});
  return {{flags.to, written.bytes, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()},
          static_cast<size_t>(written.tensors)};
}

struct LayoutWriter {
  const char* name;
  bool is_sharded;  ///< for so many ranks of a stage
  bool has_tags;    ///< OUT/TAG and a `latest`, otherwise OUT itself
  Written (*write)(const CheckpointSource& source, const ConvertFlags& flags, const ConvertOptions& options);
};

constexpr std::array kWriters{
    LayoutWriter{"trireme", false, true, write_as_trireme},
    LayoutWriter{"deepspeed", true, true, write_as_deepspeed},
    LayoutWriter{"dcp", false, false, write_as_dcp},
    LayoutWriter{"huggingface", false, false, write_as_huggingface},
};

std::vector<std::string> writer_names() {
  std::vector<std::string> names;
  for (const LayoutWriter& writer : kWriters) names.emplace_back(writer.name);
  return names;
}

const LayoutWriter& writer_for(const ConvertFlags& flags) {
  for (const LayoutWriter& writer : kWriters) {
    if (flags.layout != writer.name) continue;
    if (writer.is_sharded && (!flags.stage || !flags.ranks))
      throw ConfigError(str("--to ", writer.name, " needs --stage and --ranks: those of the run that will load it"));
    if (!writer.is_sharded && (flags.stage || flags.ranks))
      throw ConfigError(str("--stage and --ranks have no meaning with --to ", writer.name,
                            ": what it writes loads at any stage and number of ranks; leave them out"));
    if (!writer.has_tags && !flags.out_tag.empty())
      throw ConfigError(str("--out-tag has no meaning with --to ", writer.name, ": what it writes is OUT itself"));
    if (!flags.model.empty() && writer.write != write_as_huggingface)
      throw ConfigError(str("--model ", flags.model, " has no meaning with --to ", writer.name,
                            ": only --to huggingface has a config.json; leave it out"));
    return writer;
  }
  throw ConfigError(str("--to ", flags.layout, ": no such layout"));  // CLI11 has refused it before
}

/// A line that is written over, where somebody looks.
std::function<void(int64_t, int64_t)> progress_line() {
  if (::isatty(STDERR_FILENO) == 0) return {};
  return [](int64_t done, int64_t total) {
    constexpr double kMib = 1 << 20;
    std::fprintf(stderr, "\r%.0f of %.0f MiB%s", static_cast<double>(done) / kMib, static_cast<double>(total) / kMib,
                 done < total ? "" : "\n");
  };
}

int run_convert(const ConvertFlags& flags) {
  const LayoutWriter& writer = writer_for(flags);
  const CheckpointSource source = open_checkpoint(checkpoints_folder(flags.from), flags.tag);
  const auto [saved, tensors] = writer.write(source, flags, {.tag = flags.out_tag, .progress = progress_line()});
  print_result(str(saved.path.string(), ": ", tensors, " tensors of ", source.folder.string(), " (",
                   layout_name(source.layout), "), ",
                   formatted("{:.1f} MB in {:.1f} s\n", static_cast<double>(saved.tensor_bytes) / 1e6, saved.seconds)));
  return kDone;
}

}  // namespace

Action add_convert(CLI::App& app) {
  const auto flags = std::make_shared<ConvertFlags>();
  app.add_option("IN", flags->from, "checkpoint, or folder of checkpoints")->type_name("")->required();
  app.add_option("OUT", flags->to, "folder that gets the copy")->type_name("")->required();
  app.add_option("--to", flags->layout,
                 "layout to write: trireme, deepspeed, dcp (weights and optimizer), huggingface (weights)")
      ->check(one_of(writer_names()))
      ->type_name("NAME")
      ->required();
  app.add_option("--model", flags->model,
                 "huggingface: folder whose config.json and tokenizer go beside the weights\n"
                 "(default: config.json as the checkpoint tells the model)")
      ->type_name("DIR");
  app.add_option("--tag", flags->tag, "which checkpoint of IN (default: the one that `latest` names)")
      ->type_name("TAG");
  app.add_option("--out-tag", flags->out_tag, "name of the copy (default: the same tag)")->type_name("TAG");
  add_whole(app, "--stage", flags->stage, "deepspeed: ZeRO stage of the run that will load it",
            {.least = 1, .most = 3});
  add_whole(app, "--ranks", flags->ranks, "deepspeed: ranks of the run that will load it", {.least = 1, .most = 4096});
  app.footer(kConvertFooter);
  return [flags](const Invocation&) { return run_convert(*flags); };
}

}  // namespace trireme::cli
