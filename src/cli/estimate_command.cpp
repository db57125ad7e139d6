// `trireme estimate`: how much memory the model states need on each rank.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <cmath>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/command.h"
#include "cli/flags.h"
#include "cli/shell/exit_code.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"
#include "trireme/models/language_model.h"
#include "trireme/plan/estimate.h"

namespace trireme::cli {
namespace {

constexpr const char* kEstimateFooter =
    "Model states are weights, gradients, fp32 masters and optimizer states. Activations and the units gathered for "
    "computing\n"
    "come on top.\n\n"
    "Examples:\n"
    "  trireme estimate --params 7.5B --world 64\n"
    "  trireme estimate --model llama-130m --dtype fp32 --world 2 --stage 3 --json\n"
    "  trireme estimate --model llama-8b --world 8 --mode low\n"
    "  trireme estimate --model llama-8b --world 1 --offload optimizer\n"
    "  trireme estimate --model llama-1b --world 1 --disk weights";

struct EstimateFlags {
  std::optional<double> parameters;
  std::string model;
  std::vector<int> worlds;
  std::optional<int> stage;
  std::string dtype = "bf16";
  std::optional<std::string> accumulation;
  std::string mode = "mixed";
  std::string offload = "nothing";
  std::optional<double> offload_ratio;
  std::string disk = "nothing";
  bool json = false;
};

void declare(CLI::App& app, EstimateFlags& flags) {
  // Beyond that, the bytes of a stage are more than an int64_t holds.
  auto* parameters = app.add_option("--params", flags.parameters, "number of parameters, such as 7B, 350M or 7.5e9")
                         ->transform(count_of("parameters", {.least = 1, .most = 1e17}))
                         ->type_name("X");
  auto* model = app.add_option("--model", flags.model,
                               "built-in model, or a config.json in Hugging Face's form, or a folder with one")
                    ->check(offered(model_names()))
                    ->type_name("NAME|FILE");
  parameters->excludes(model)->group("Model");
  model->group("Model");
  app.add_option("--dtype", flags.dtype, "of the weights: fp32 or bf16")
      ->check(one_of({"fp32", "bf16"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Model");
  app.add_option("--world", flags.worlds, "numbers of ranks (default: 1 2 4 8 16 64)")
      ->transform(whole_number({.most = 10'000'000}))
      ->type_name("N")
      ->group("Ranks");
  add_whole(app, "--stage", flags.stage, "only this ZeRO stage, with its parts (default: all stages)",
            {.least = 0, .most = 3})
      ->group("Ranks");
  app.add_option("--mode", flags.mode, "mixed: masters and states in fp32; low: no masters, all in bf16")
      ->check(one_of({"mixed", "low"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Model");
  app.add_option("--accumulation", flags.accumulation,
                 "dtype that gradients are summed in: fp32, bf16 or both (default: both; of --mode low bf16)")
      ->check(one_of({"fp32", "bf16", "both"}))
      ->type_name("NAME")
      ->group("Ranks");
  app.add_option("--offload", flags.offload,
                 "what a GPU leaves to the host: nothing, optimizer (with masters and gradients) or parameters too")
      ->check(one_of({"nothing", "optimizer", "parameters"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Ranks");
  app.add_option("--disk", flags.disk,
                 "what a host leaves to its disk: nothing, optimizer (masters and states) or, at stage 3, weights too")
      ->check(one_of({"nothing", "optimizer", "weights"}))
      ->capture_default_str()
      ->type_name("NAME")
      ->group("Ranks");
  add_real(app, "--offload-ratio", flags.offload_ratio, "of the parameters, with --offload (default: 1)",
           {.least = 0, .most = 1})
      ->group("Ranks");
  app.add_flag("--json", flags.json, "bytes, for programs")->group("Output");
  app.footer(kEstimateFooter);
}

EstimateRequest request_of(const EstimateFlags& flags) {
  EstimateRequest request;
  if (!flags.worlds.empty()) request.worlds = flags.worlds;
  request.weight_dtype = flags.dtype == "bf16" ? at::kBFloat16 : at::kFloat;
  const bool is_low = flags.mode == "low";
  const std::string accumulation = flags.accumulation.value_or(is_low ? "bf16" : "both");
  if (is_low && flags.dtype == "fp32") throw ConfigError("--mode low: it is for weights in bf16; give --dtype bf16");
  if (is_low && accumulation != "bf16")
    throw ConfigError(str("--mode low: gradients are summed in bf16; leave --accumulation ", accumulation, " out"));
  if (is_low) request.update_dtype = at::kBFloat16;
  if (accumulation == "bf16" && flags.dtype == "fp32") {
    throw ConfigError("--accumulation bf16: the weights are fp32; gradients are summed in at least their dtype");
  }
  if (accumulation == "fp32") request.accumulation_dtypes = {at::kFloat};
  if (accumulation == "bf16") request.accumulation_dtypes = {at::kBFloat16};
  const bool offloads = flags.offload != "nothing";
  if (flags.offload_ratio && !offloads)
    throw ConfigError("--offload-ratio: nothing is offloaded; give --offload optimizer or --offload parameters too");
  request.offload_ratio = offloads ? flags.offload_ratio.value_or(1) : 0;
  request.offload_parameters = flags.offload == "parameters";
  if (flags.disk != "nothing" && offloads)
    throw ConfigError("--disk: it is for models on the host, from where nothing is offloaded; leave --offload out");
  if (flags.disk != "nothing")
    request.on_disk = flags.disk == "weights" ? KeptOnDisk::kStatesAndWeights : KeptOnDisk::kStates;
  return request;
}

Json json_of(const Estimate& estimate, std::optional<int> stage) {
  Json json = to_json(estimate);
  if (!stage) return json;
  Json rows = Json::array();
  for (const auto& row : json["per_rank"]) {
    if (row["stage"] == *stage) rows.push_back(row);
  }
  json["per_rank"] = rows;
  return json;
}

int run_estimate(const EstimateFlags& flags) {
  if (!flags.parameters && flags.model.empty()) {
    throw ConfigError(
        "how large is the model? Give --params, such as --params 7B, or --model, such as --model llama-130m");
  }
  const int64_t parameters = flags.parameters ? std::llround(*flags.parameters)
                                              : parameter_count(read_input([&] { return model_options(flags.model); }));
  const auto result = estimate(parameters, request_of(flags));
  if (flags.json) {
    print_result(json_of(result, flags.stage).dump(2) + "\n");
  } else {
    const auto table = flags.stage ? to_table(result, *flags.stage) : to_table(result);
    print_result(str(flags.model, flags.model.empty() ? "" : ": ", table));
  }
  return kDone;
}

}  // namespace

Action add_estimate(CLI::App& app) {
  const auto flags = std::make_shared<EstimateFlags>();
  declare(app, *flags);
  return [flags](const Invocation&) { return run_estimate(*flags); };
}

}  // namespace trireme::cli
