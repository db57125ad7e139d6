#include "cli/pipeline_homes.h"

#include <torch/nn/module.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <optional>
#include <vector>

#include "cli/flags.h"
#include "trireme/base/error.h"
#include "trireme/models/language_model.h"
#include "trireme/schedule/ordered_partition.h"

namespace trireme::cli {
namespace {

constexpr int64_t kStateBytes = 16;  // of a parameter in fp32: itself, its gradient, two states of Adam
constexpr double kCost = 1e9;        // of the whole model

/// One layer, or several that have to lie together because they share a parameter.
struct Part {
  std::string name;
  int64_t parameters = 0;
  int64_t multiply_adds = 0;
};

std::vector<Part> parts_of(const ModelOptions& options, int64_t tokens) {
  std::vector<Part> parts;
  std::optional<size_t> tied;
  for (const ModelLayer& layer : language_model_layers(options, tokens)) {
    int64_t parameters = 0;
    for (const auto& item : layer.make()->named_parameters())
      if (!layer.is_tied || !tied || item.key() != "weight") parameters += item.value().numel();
    if (layer.is_tied && tied) {  // the head, where the embedding is
      parts[*tied].multiply_adds += layer.multiply_adds;
      parts[*tied].parameters += parameters;
      parts[*tied].name += " and " + layer.name;
      continue;
    }
    parts.push_back({layer.name, parameters, layer.multiply_adds});
    if (layer.is_tied) tied = parts.size() - 1;
  }
  return parts;
}

}  // namespace

std::string homes_text(const HomesFlags& flags) {
  if (!(flags.memory_weight >= 0 && flags.memory_weight <= 1))
    throw ConfigError(str("--memory-weight ", flags.memory_weight, ": use a number from 0 to 1"));
  const ModelOptions options = read_input([&] { return model_options(flags.model); });
  const std::vector<Part> parts = parts_of(options, flags.tokens);
  int64_t parameters = 0, multiply_adds = 0;
  for (const Part& part : parts) {
    parameters += part.parameters;
    multiply_adds += part.multiply_adds;
  }
  std::vector<pipeline::Atom> atoms;
  for (const Part& part : parts) {
    const double memory = static_cast<double>(part.parameters) / static_cast<double>(parameters);
    const double time = static_cast<double>(part.multiply_adds) / static_cast<double>(multiply_adds);
    atoms.push_back({.name = part.name,
                     .cost = std::llround(kCost * (flags.memory_weight * memory + (1 - flags.memory_weight) * time)),
                     .bytes = kStateBytes * part.parameters});
  }
  const std::vector<int64_t> bounds =
      pipeline::ordered_partition(atoms, flags.stages, std::numeric_limits<int64_t>::max());
  std::string text = str("stages of a step function: ", parts.size(), " atoms in the order of the program, cut by ",
                         flags.memory_weight, " of memory and ", 1 - flags.memory_weight, " of time at ", flags.tokens,
                         " tokens\n\nPartition assignments:\n");
  for (int stage = 0; stage < flags.stages; ++stage) {
    int64_t elements = 0, cost = 0;
    for (int64_t atom = bounds[stage]; atom < bounds[stage + 1]; ++atom) {
      elements += parts[atom].parameters;
      cost += atoms[atom].cost;
    }
    char share[32];
    std::snprintf(share, sizeof share, "%.1f", 100 * static_cast<double>(cost) / kCost);
    const int64_t count = bounds[stage + 1] - bounds[stage];
    text += str("  stage ", stage, ": ", elements, " elements, ", share, " % of the cost; ",
                count == 0   ? "nothing"
                : count == 1 ? parts[bounds[stage]].name
                             : parts[bounds[stage]].name + " to " + parts[bounds[stage + 1] - 1].name,
                "\n");
  }
  return text;
}

}  // namespace trireme::cli
