// Every pair of features: every gradient of every step, their norm, the losses and the weights are those of one process
// with plain libtorch, or the pair is a row of exclusions() and refused with its text.
//
// docs/compose.md has the table that this makes. A new feature is a row of features().
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <optional>
#include <regex>
#include <set>
#include <string>
#include <vector>

#include "tests/compose/compare.h"
#include "tests/compose/plain.h"
#include "tests/compose/scenario.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/parallel/exclusions.h"

namespace trireme::compose {
namespace {

constexpr double kSums = 2e-6;    // the same addends in another order; 7.8e-7 is reached
constexpr double k16Bits = 5e-2;  // numbers that are rounded to 16 bits on their way; 4.7e-2 is reached
constexpr const char* kNoAutocast = "the stand-in of a GPU has no autocast";

/// How a run with a feature differs from one without.
enum class Change {
  kNothing,   ///< the same gradients, losses and weights, bit for bit
  kRounding,  ///< the same up to rounding
  kTraining,  ///< another training
};

struct Feature {
  std::string name;
  std::set<std::string> slots;  ///< two features that share one exclude each other by what they are
  Change change;
  std::function<void(Scenario&)> apply;
  double tolerance = 0;          ///< of a gradient, relative to its norm, with kRounding
  std::string in_place_of = {};  ///< the feature whose bits it has, with kNothing; empty: those of a run without it
};

/// Two features that do not meet what each says of itself, and why not.
struct Exception {
  std::string first, second;
  double tolerance;  ///< as a feature's; negative: the two are not tried
  std::string reason;
};

const std::vector<Exception>& exceptions() {
  static const std::vector<Exception> all = {
      {"ZeRO 1", "16-bit messages", 2e-2, "at stage 0 the sums travel back in 16 bits, too"},
      {"ZeRO 1", "offloaded optimizer", 1e-5, "at stage 0 nothing is offloaded, and the GPU's kernel updates"},
      {"ZeRO 3, copy", "offloaded parameters", 1e-5,
       "at stage 2 parameters stay on the GPU, whose kernel updates them"},
      {"ZeRO 3, weights on disk", "offloaded parameters", -1, "one key, which has one device"},
      {"autocast", "GPU (stand-in)", -1, kNoAutocast},
      {"autocast", "registered buffers", -1, kNoAutocast},
      {"autocast", "offloaded optimizer", -1, kNoAutocast},
      {"autocast", "offloaded parameters", -1, kNoAutocast},
  };
  return all;
}

/// The features by the names that exclusions() give them.
const std::multimap<std::string, trireme::Feature>& known_features() {
  using enum trireme::Feature;
  static const std::multimap<std::string, trireme::Feature> all = {
      {"ZeRO 3, shared", kSharedGather},
      {"ZeRO 3, weights on disk", kWeightsOnDisk},
      {"states on disk", kStatesOnDisk},
      {"states on disk", kOffload},
      {"MiCS", kReplicas},
      {"hpZ", kReplicas},
      {"hpZ", kStatesOverReplicas},
      {"no_sync", kNoSync},
      {"coalesced", kCoalesced},
      {"deterministic", kDeterministic},
      {"recompute by call", kRecomputeByCall},
      {"recompute layers", kRecomputeLayers},
      {"leaf modules", kLeafModules},
      {"pipeline stages", kPipeline},
      {"step function over stages", kOwnership},
      {"step function over stages", kOwnershipOfAnySizes},
      {"step function over stages", kPipeline},
      {"pipeline, split backward", kPipeline},
      {"pipeline, chunks", kPipeline},
      {"pipeline, V of chunks", kPipeline},
      {"sequence, Ulysses", kSequence},
      {"sequence, ring", kSequence},
      {"sequence, ring", kRingAttention},
      {"tensor slices", kTensor},
      {"slices and sequence", kSequence},
      {"slices and sequence", kTensor},
      {"slices in stages", kPipeline},
      {"slices in stages", kTensor},
      {"parameter groups", kParameterGroups},
      {"zero::Init", kInit},
      {"Muon", kMatrixOptimizer},
      {"client optimizer", kClientOptimizer},
      {"torch.distributed", kSeparateMemory},
      {"GPU (stand-in)", kDevice},
      {"registered buffers", kDevice},
      {"offloaded optimizer", kDevice},
      {"offloaded optimizer", kOffload},
      {"offloaded parameters", kDevice},
      {"offloaded parameters", kOffload},
  };
  return all;
}

/// Two features of which this test's runs show something else than exclusions() say, and why.
struct Deviation {
  std::string first, second;
  std::string refusal;  ///< some of the text; empty: the pair runs
  std::string reason;
};

const std::vector<Deviation>& deviations() {
  static const std::vector<Deviation> all = [] {
    std::vector<Deviation> made;
    for (const char* other : {"pipeline stages", "pipeline, split backward", "pipeline, chunks", "slices in stages",
                              "step function over stages"})
      made.push_back({"leaf modules", other, "", "each stage has a module of that name"});
    return made;
  }();
  return all;
}

std::function<void(Scenario&)> stage(int number, const char* gather = "auto") {
  return [=](Scenario& scenario) {
    scenario.config["zero_optimization"]["stage"] = number;
    scenario.config["trireme"]["gather"] = gather;
  };
}

std::function<void(Scenario&)> key(const char* name, const Json& value) {
  return [=](Scenario& scenario) { scenario.config[name] = value; };
}

template <class Member, class Value>
std::function<void(Scenario&)> with(Member Scenario::*member, Value value) {
  return [=](Scenario& scenario) { scenario.*member = value; };
}

/// ZeRO 3 on four data-parallel ranks, two by two.
std::function<void(Scenario&)> two_by_two(const char* sharding) {
  return [=](Scenario& scenario) {
    scenario.data = 4;
    scenario.config["zero_optimization"] = {{"stage", 3}, {sharding, 2}};
  };
}

std::function<void(Scenario&)> sequence(const char* attention) {
  return [=](Scenario& scenario) {
    scenario.has_sequence_parts = true;
    scenario.config["trireme"]["sequence_attention"] = attention;
  };
}

/// Two stages, each of two data-parallel ranks that are two slices.
void slices_in_stages(Scenario& scenario) {
  scenario.has_slices = true;
  scenario.schedule = "1f1b";
}

/// Two data-parallel ranks, each of two parts of a sequence through two slices.
void slices_and_sequence(Scenario& scenario) {
  scenario.has_slices = true;
  sequence("ulysses")(scenario);
}

std::function<void(Scenario&)> offload(const char* what) {
  return [=](Scenario& scenario) {
    scenario.is_on_device = true;
    scenario.config["zero_optimization"][what] = {{"device", "cpu"}};
  };
}

Json on_disk() { return {{"device", "nvme"}, {"nvme_path", std::filesystem::temp_directory_path().string()}}; }

void states_on_disk(Scenario& scenario) { scenario.config["zero_optimization"]["offload_optimizer"] = on_disk(); }

void weights_on_disk(Scenario& scenario) {
  stage(3, "copy")(scenario);
  scenario.config["zero_optimization"]["offload_param"] = on_disk();
}

const std::vector<Feature>& features() {
  constexpr auto kNothing = Change::kNothing;
  constexpr auto kRounding = Change::kRounding;
  constexpr auto kTraining = Change::kTraining;
  static const std::vector<Feature> all = {
      {"ZeRO 1", {"stage"}, kNothing, stage(1)},
      // Reduces after each micro-batch, stages 0 and 1 after each window.
      {"ZeRO 2", {"stage"}, kRounding, stage(2), kSums},
      {"ZeRO 3, shared", {"stage"}, kNothing, stage(3, "shared"), 0, "ZeRO 2"},
      {"ZeRO 3, copy", {"stage"}, kNothing, stage(3, "copy"), 0, "ZeRO 2"},
      {"ZeRO 3, weights on disk", {"stage"}, kNothing, weights_on_disk, 0, "ZeRO 2"},
      {"MiCS", {"stage"}, kRounding, two_by_two("mics_shard_size"), kSums},
      {"hpZ", {"stage"}, kRounding, two_by_two("zero_hpz_partition_size"), kSums},
      {"bf16", {"precision"}, kRounding, key("bf16", {{"enabled", true}}), k16Bits},
      {"fp16", {"precision"}, kRounding, key("fp16", {{"enabled", true}, {"initial_scale_power", 8}}), k16Bits},
      {"autocast", {"precision"}, kRounding, key("torch_autocast", {{"enabled", true}}), k16Bits},
      {"16-bit messages", {}, kRounding, key("communication_data_type", "bf16"), 2e-2},
      {"no_sync", {"scope"}, kRounding, with(&Scenario::scope, Scope::kNoSync), kSums},
      {"coalesced", {"scope"}, kRounding, with(&Scenario::scope, Scope::kCoalesce), kSums},
      {"deterministic", {}, kRounding, key("deterministic", true), kSums},
      {"recompute by call", {}, kNothing, with(&Scenario::recomputes_by_call, true)},
      {"recompute layers",
       {"recompute"},
       kNothing,
       [](Scenario& scenario) { scenario.config["trireme"]["recompute"] = "full"; }},
      {"recompute selectively",
       {"recompute"},
       kNothing,
       [](Scenario& scenario) { scenario.config["trireme"]["recompute"] = "selective"; }},
      {"tiled",
       {},
       kRounding,
       [](Scenario& scenario) {
         scenario.config["trireme"]["tiled"] = {{"loss_tokens", 3}, {"mlp_tokens", 3}};
       },
       kSums},
      {"leaf modules",
       {},
       kNothing,
       [](Scenario& scenario) {
         scenario.config["zero_optimization"]["leaf_module"] = {{"name_suffixes", {"mlp"}}};
       }},
      {"zero::Init", {}, kNothing, with(&Scenario::is_initialized_sharded, true)},
      {"pipeline stages", {"pipe"}, kRounding, with(&Scenario::schedule, std::string("1f1b")), kSums},
      {"pipeline, split backward", {"pipe"}, kRounding, with(&Scenario::schedule, std::string("zb-h1")), kSums},
      {"pipeline, chunks", {"pipe"}, kRounding, with(&Scenario::schedule, std::string("interleaved")), kSums},
      {"pipeline, V of chunks", {"pipe"}, kRounding, with(&Scenario::schedule, std::string("zb-v")), kSums},
      {"step function over stages", {"pipe"}, kRounding, with(&Scenario::has_step_function, true), kSums},
      {"sequence, Ulysses", {"sequence"}, kRounding, sequence("ulysses"), kSums},
      {"sequence, ring", {"sequence"}, kRounding, sequence("ring"), kSums},
      {"tensor slices", {"tensor"}, kRounding, with(&Scenario::has_slices, true), kSums},
      {"slices in stages", {"pipe", "tensor"}, kRounding, slices_in_stages, kSums},
      {"slices and sequence", {"sequence", "tensor"}, kRounding, slices_and_sequence, kSums},
      {"second engine", {}, kNothing, with(&Scenario::has_second_engine, true)},
      {"evaluation between", {}, kNothing, with(&Scenario::evaluates_between, true)},
      {"schedule",
       {},
       kTraining,
       key("scheduler", {{"type", "LRRangeTest"},
                         {"params",
                          {{"lr_range_test_min_lr", kFirstLr},
                           {"lr_range_test_step_size", 1},
                           {"lr_range_test_step_rate", kLrRate}}}})},
      {"parameter groups",
       {},
       kTraining,
       with(&Scenario::parameter_groups,
            std::vector<ParameterGroup>{{.patterns = {"norm"}, .lr = 1e-4, .weight_decay = 0}})},
      {"client optimizer",
       {"optimizer"},
       kTraining,
       [](Scenario& scenario) {
         scenario.config.erase("optimizer");
         scenario.has_client_optimizer = true;
       }},
      {"Muon",
       {"optimizer"},
       kTraining,
       key("optimizer",
           {{"type", "Muon"},
            {"params",
             {{"lr", kLr}, {"weight_decay", kWeightDecay}, {"momentum", 0}, {"betas", {0, kBeta2}}, {"eps", kEps}}}})},
      {"gradient sum", {}, kTraining, key("gradient_allreduce_op", "sum")},
      {"resume", {"checkpoint"}, kNothing, with(&Scenario::checkpoint, Checkpoint::kResume)},
      {"resume, resharded", {"checkpoint"}, kNothing, with(&Scenario::checkpoint, Checkpoint::kResumeOtherWay)},
      {"asynchronous save", {"checkpoint"}, kNothing, with(&Scenario::checkpoint, Checkpoint::kAsync)},
      {"mapped files", {"ranks"}, kNothing, with(&Scenario::backend, RankBackend::kShm)},
      {"torch.distributed", {"ranks"}, kNothing, with(&Scenario::backend, RankBackend::kC10d)},
      {"GPU (stand-in)", {"device"}, kRounding, with(&Scenario::is_on_device, true), kSums},
      {"registered buffers",
       {"device"},
       kRounding,
       [](Scenario& scenario) {
         scenario.is_on_device = true;
         scenario.config["trireme"]["register_buffers"] = true;
       },
       kSums},
      {"offloaded optimizer", {"device"}, kRounding, offload("offload_optimizer"), kSums},
      {"offloaded parameters", {"device"}, kRounding, offload("offload_param"), kSums},
      // Last: beside the offloaded optimizer, whose device it then is.
      {"states on disk", {}, kNothing, states_on_disk},
  };
  return all;
}

using Indices = std::vector<size_t>;  // of features(), ascending

struct Result {
  Outcome outcome;      // empty after forget()
  std::string refusal;  // empty: it ran
};

std::map<Indices, Result>& results() {
  static std::map<Indices, Result> all;
  return all;
}

/// The run with these features, made once. Other errors than a refusal pass through.
const Result& result_of(const Indices& chosen) {
  if (const auto found = results().find(chosen); found != results().end()) return found->second;
  Scenario scenario;
  for (const size_t index : chosen) features()[index].apply(scenario);
  Result result;
  try {
    result.outcome = train(scenario);
  } catch (const ConfigError& error) {
    result.refusal = error.what();
  } catch (const StateError& error) {
    result.refusal = error.what();
  }
  // Whichever rank was the first to refuse.
  result.refusal = std::regex_replace(result.refusal, std::regex("^rank [0-9]+: "), "");
  result.refusal = std::regex_replace(result.refusal, std::regex("fake:[0-9]+"), "a GPU");
  return results().emplace(chosen, std::move(result)).first->second;
}

bool has(const Indices& chosen, Change change) {
  return std::any_of(chosen.begin(), chosen.end(), [&](size_t i) { return features()[i].change == change; });
}

size_t index_of(const std::string& name) {
  const auto found =
      std::find_if(features().begin(), features().end(), [&](const Feature& f) { return f.name == name; });
  if (found == features().end()) throw Error(ErrorCode::kInternal, "no feature is called " + name);
  return static_cast<size_t>(found - features().begin());
}

const Exception* exception_of(const Indices& chosen) {
  const auto is_it = [&](const Exception& e) { return chosen == Indices{index_of(e.first), index_of(e.second)}; };
  const auto found = std::find_if(exceptions().begin(), exceptions().end(), is_it);
  return found != exceptions().end() ? &*found : nullptr;
}

const Deviation* deviation_of(const Indices& chosen) {
  const auto is_it = [&](const Deviation& d) { return chosen == Indices{index_of(d.first), index_of(d.second)}; };
  const auto found = std::find_if(deviations().begin(), deviations().end(), is_it);
  return found != deviations().end() ? &*found : nullptr;
}

/// The row that two features are, if any: that of the first of each feature's names that has one.
const Exclusion* exclusion_of(const Indices& chosen) {
  if (chosen.size() != 2) return nullptr;
  const auto [a, a_end] = known_features().equal_range(features()[chosen[0]].name);
  const auto [b, b_end] = known_features().equal_range(features()[chosen[1]].name);
  for (auto one = a; one != a_end; ++one)
    for (auto other = b; other != b_end; ++other)
      for (const Exclusion& row : exclusions())
        if (std::minmax(one->second, other->second) == std::minmax(row.one, row.other)) return &row;
  return nullptr;
}

/// The text that the run with these features has to be refused with; nothing: it has to run.
std::optional<std::string> expected_refusal(const Indices& chosen) {
  if (const Deviation* deviation = deviation_of(chosen); deviation != nullptr)
    return deviation->refusal.empty() ? std::nullopt : std::optional(deviation->refusal);
  const Exclusion* row = exclusion_of(chosen);
  return row != nullptr ? std::optional(row->text) : std::nullopt;
}

Indices without(const Indices& chosen, Change change) {
  Indices rest;
  for (const size_t index : chosen) {
    const Feature& feature = features()[index];
    if (feature.change != change)
      rest.push_back(index);
    else if (!feature.in_place_of.empty())
      rest.push_back(index_of(feature.in_place_of));
  }
  std::sort(rest.begin(), rest.end());
  return rest;
}

double tolerance_of(const Indices& chosen) {
  double tolerance = kSums;  // plain libtorch adds in an order of its own
  for (const size_t index : chosen) tolerance += features()[index].tolerance;
  return tolerance;
}

/// Why `outcome` is not that of the same training, up to `tolerance`; empty: it is.
std::string difference_from(const Outcome& outcome, const Outcome& expected, double tolerance) {
  const auto is_near = [&](double one, double other) { return std::abs(one - other) <= tolerance * std::abs(other); };
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    const StepRecord &found = outcome.steps.at(i), &other = expected.steps[i];
    for (const auto& [name, gradient] : other.gradients) {
      if (!found.gradients.contains(name)) return str("step ", i, ": ", name, " has no gradient");
      const double far = distance(found.gradients.at(name), gradient);
      if (!(far <= tolerance))
        return str("step ", i, ": the gradient of ", name, " is another, by ", far, " of its norm");
    }
    if (!is_near(found.norm, other.norm)) return str("step ", i, ": the norm is ", found.norm, " and not ", other.norm);
    if (!is_near(found.loss, other.loss)) return str("step ", i, ": the loss is ", found.loss, " and not ", other.loss);
  }
  static const std::map<std::string, at::Tensor> start = parameters_of(*make_model());
  for (const auto& [name, tensor] : outcome.parameters) {
    const std::string known = name_of_weight(name);
    const at::Tensor& other = expected.parameters.at(known);
    const double rounding = tensor.scalar_type() == at::kFloat ? 1e-7 : 5e-3;  // of 16 bits
    // AdamW divides by a gradient's size, so that a small one's rounding grows.
    const double allowed = 4 * tolerance * distance(start.at(known), other) + rounding;
    if (const double far = distance(tensor, other); !(far <= allowed))
      return str(name, " is another, by ", far, " of its norm and not ", allowed);
  }
  return "";
}

/// Why `outcome` has not the same bits; empty: it has.
std::string difference(const Outcome& outcome, const Outcome& expected) {
  for (size_t i = 0; i < expected.steps.size(); ++i) {
    const StepRecord &found = outcome.steps.at(i), &other = expected.steps[i];
    if (found.loss != other.loss) return str("step ", i, ": the loss is ", found.loss, " and not ", other.loss);
    for (const auto& [name, gradient] : other.gradients)
      if (!at::equal(found.gradients.at(name), gradient))
        return str("step ", i, ": the gradient of ", name, " is another");
    // A sum of squares over units, which are others with leaf modules.
    if (!(std::abs(found.norm - other.norm) <= 1e-12 * other.norm))
      return str("step ", i, ": the norm is ", found.norm, " and not ", other.norm);
  }
  for (const auto& [name, tensor] : expected.parameters)
    if (!at::equal(outcome.parameters.at(name), tensor)) return name + " is another";
  return "";
}

/// The outcome of one process that trains with those features that change the training.
const Outcome& in_one_process(const Indices& chosen) {
  static std::map<std::string, Outcome> known;
  Scenario scenario, all;
  for (const size_t index : chosen) {
    features()[index].apply(all);
    if (features()[index].change == Change::kTraining) features()[index].apply(scenario);
  }
  scenario.data = all.data;
  scenario.has_sequence_parts = all.has_sequence_parts;
  scenario.has_slices = all.has_slices;
  scenario.schedule = all.schedule;
  scenario.has_step_function = all.has_step_function;
  std::string key = str(scenario.micro_batches(), " of ", scenario.data);
  for (const size_t index : without(without(chosen, Change::kNothing), Change::kRounding)) key += str(" ", index);
  const auto found = known.find(key);
  return found != known.end() ? found->second : known.emplace(key, train_plainly(scenario)).first->second;
}

/// Frees the tensors of a pair that no other one is compared with: a trim of the heap takes time by what is in it.
void forget(const Indices& chosen) {
  if (chosen.size() < 2) return;
  for (const Feature& feature : features())
    for (const size_t index : chosen)
      if (feature.in_place_of == features()[index].name) return;
  results().at(chosen).outcome = {};
}

/// Why the run with these features is not what its features say; empty: it is.
std::string flaw_of(const Indices& chosen) {
  const Outcome& outcome = result_of(chosen).outcome;
  const Exception* exception = exception_of(chosen);
  const std::string other =
      difference_from(outcome, in_one_process(chosen), tolerance_of(chosen) + (exception ? exception->tolerance : 0));
  if (!other.empty()) return other;
  if (has(chosen, Change::kNothing) && !exception)
    return difference(outcome, result_of(without(chosen, Change::kNothing)).outcome);
  if (has(chosen, Change::kNothing) || has(chosen, Change::kRounding)) return "";
  // Both features are in force where neither alone gives this.
  for (const size_t index : chosen) {
    const Indices alone = chosen.size() > 1 ? Indices{index} : Indices{};
    if (difference(outcome, result_of(alone).outcome).empty()) return features()[index].name + " makes no difference";
  }
  return "";
}

std::string name_of(const Indices& chosen) {
  std::string name;
  for (const size_t index : chosen)
    for (const char c : features()[index].name + "And")
      if (std::isalnum(static_cast<unsigned char>(c))) name += c;
  return name.substr(0, name.size() - 3);
}

bool is_tried(const Indices& pair) {
  const Feature &one = features()[pair[0]], &other = features()[pair[1]];
  const Exception* exception = exception_of(pair);
  return std::ranges::none_of(one.slots, [&](const std::string& slot) { return other.slots.contains(slot); }) &&
         (exception == nullptr || exception->tolerance >= 0);
}

/// Each feature alone, and each pair that is tried.
std::vector<Indices> combinations() {
  std::vector<Indices> all;
  for (size_t i = 0; i < features().size(); ++i) all.push_back({i});
  for (size_t i = 0; i < features().size(); ++i)
    for (size_t j = i + 1; j < features().size(); ++j)
      if (is_tried({i, j})) all.push_back({i, j});
  return all;
}

/// Each feature alone, and one of eight pairs.
std::vector<Indices> some_combinations() {
  constexpr size_t kOneOf = 8;
  std::vector<Indices> some;
  for (const Indices& chosen : combinations())
    if (chosen.size() == 1 || (chosen[0] + chosen[1]) % kOneOf == 0) some.push_back(chosen);
  return some;
}

// --- the table -------------------------------------------------------------------------------------------------------

std::string table() {
  std::vector<std::string> refusals;
  std::string text =
      "# Which features go together\n\n"
      "Made by `compose_test`, which trains a small Llama for two steps with each feature alone and with each pair of "
      "them. It compares\n"
      "the gradient of every parameter in every step, before clipping and relative to that gradient's norm, the global "
      "norm, the losses\n"
      "and the trained weights with those of one process that trains with plain libtorch. `yes`, they are the same; a "
      "number, the pair is\n"
      "refused with the text below;\n"
      "`-`, the two exclude each other by what they are, or the test's stand-in of a GPU cannot show it. "
      "`TRIREME_UPDATE_DOCS=1` before `compose_test` writes this "
      "part anew.\n\n|  | ";
  for (size_t i = 0; i < features().size(); ++i) text += str("| ", i + 1, " ");
  text += "|\n|---|---|";
  for (size_t i = 0; i < features().size(); ++i) text += "---|";
  text += "\n";
  for (size_t i = 0; i < features().size(); ++i) {
    text += str("| ", i + 1, " | ", features()[i].name, " ");
    for (size_t j = 0; j < i; ++j) {
      if (!is_tried({j, i})) {
        text += "| - ";
        continue;
      }
      const std::string& refusal = result_of({j, i}).refusal;
      if (refusal.empty()) {
        text += "| yes ";
        continue;
      }
      const auto found = std::find(refusals.begin(), refusals.end(), refusal);
      text += str("| ", found - refusals.begin() + 1, " ");
      if (found == refusals.end()) refusals.push_back(refusal);
    }
    text += "|\n";
  }
  text += "\n";
  for (size_t i = 0; i < refusals.size(); ++i) text += str(i + 1, ". ", refusals[i], "\n");
  return text;
}

void check_table() {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "../../docs/compose.md";
  const std::string made = table();
  std::ifstream file(path, std::ios::binary);
  std::string written{std::istreambuf_iterator<char>(file), {}};
  const auto end = std::min(written.find("\n## "), written.size());  // there other parts of the page begin
  if (std::getenv("TRIREME_UPDATE_DOCS") != nullptr) {
    std::ofstream(path, std::ios::binary) << made << written.substr(end);
    return;
  }
  EXPECT_EQ(written.substr(0, end), made) << "TRIREME_UPDATE_DOCS=1 compose_test writes docs/compose.md anew";
}

/// The tally of all combinations that were tried.
struct Tally {
  std::set<Indices> compared, refused;
  double largest = 0, largest_in_16_bits = 0;  ///< distance of a gradient from that of one process
};

class Compose : public ::testing::TestWithParam<Indices> {
 protected:
  static Tally& tally() {
    static Tally all;
    return all;
  }
  static void count(const Indices& chosen) {
    tally().compared.insert(chosen);
    double& largest = tolerance_of(chosen) < 1e-3 ? tally().largest : tally().largest_in_16_bits;
    const double found = distances(result_of(chosen).outcome, in_one_process(chosen)).gradients;
    largest = std::max(largest, found);
  }
  /// Where no filter left a combination out.
  static void TearDownTestSuite() {
    const Tally& all = tally();
    std::cout << all.compared.size() << " combinations compared with one process, " << all.refused.size()
              << " refused; the largest difference of a gradient is " << all.largest << " of its norm, in 16 bits "
              << all.largest_in_16_bits << std::endl;
    if (all.compared.size() + all.refused.size() == combinations().size()) check_table();
  }
};

TEST_P(Compose, TrainsAsOneProcessOrIsRefused) {
  if (tally().compared.contains(GetParam())) return;  // in the other suite of this process
  const Result& result = result_of(GetParam());
  const std::optional<std::string> refusal = expected_refusal(GetParam());
  EXPECT_EQ(refusal.has_value(), !result.refusal.empty())
      << refusal.value_or("no row of exclusions()") << "; " << result.refusal;
  if (refusal) {
    EXPECT_TRUE(has_filled(result.refusal, *refusal)) << result.refusal << "\nand not: " << *refusal;
  }
  if (result.refusal.empty()) {
    EXPECT_EQ(flaw_of(GetParam()), "");  // as exceptions() say, where they do
    count(GetParam());
    forget(GetParam());
  } else {
    tally().refused.insert(GetParam());
  }
}

const auto kName = [](const auto& info) { return name_of(info.param); };
INSTANTIATE_TEST_SUITE_P(Some, Compose, ::testing::ValuesIn(some_combinations()), kName);
INSTANTIATE_TEST_SUITE_P(Slow, Compose, ::testing::ValuesIn(combinations()), kName);

/// The places of features in the table.
Indices indices_of(const std::vector<std::string>& names) {
  Indices chosen;
  for (const std::string& name : names) chosen.push_back(index_of(name));
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// Cases that pairs do not show: shards of slices that are saved, offloaded, recomputed or the program's own to update.
TEST(ComposeSlices, WithMoreThanOneOtherFeatureTrainAsOneProcess) {
  const std::vector<std::vector<std::string>> all = {
      {"ZeRO 1", "no_sync", "parameter groups", "evaluation between", "resume"},
      {"ZeRO 1", "fp16", "deterministic", "recompute by call", "resume, resharded"},
      {"ZeRO 2", "autocast", "recompute selectively", "tiled", "resume"},
      {"ZeRO 2", "bf16", "16-bit messages", "offloaded optimizer", "resume, resharded"},
      {"ZeRO 3, shared", "bf16", "client optimizer", "tiled", "asynchronous save"},
      {"ZeRO 3, shared", "fp16", "recompute layers", "second engine", "mapped files"},
      {"ZeRO 3, copy", "client optimizer", "recompute layers", "coalesced", "resume, resharded"},
      {"ZeRO 3, copy", "bf16", "offloaded parameters", "recompute selectively", "resume, resharded"},
      {"ZeRO 3, copy", "GPU (stand-in)", "schedule", "leaf modules", "asynchronous save"}};
  for (std::vector<std::string> names : all) {
    names.emplace_back("tensor slices");
    const Indices chosen = indices_of(names);
    SCOPED_TRACE(name_of(chosen));
    const Result& result = result_of(chosen);
    ASSERT_EQ(result.refusal, "");
    EXPECT_EQ(difference_from(result.outcome, in_one_process(chosen), tolerance_of(chosen)), "");
  }
}

TEST(ComposeCheck, AnotherGradientNormLossOrWeightIsFound) {
  const Outcome plain = result_of({}).outcome;
  const auto expect_found = [&](double rounding, const std::function<void(Outcome&, double factor)>& change) {
    Outcome other = plain;
    change(other, 1 + rounding);
    EXPECT_NE(difference(other, plain), "");
    EXPECT_EQ(difference_from(other, plain, kSums), "");
    other = plain;
    change(other, 2);
    EXPECT_NE(difference_from(other, plain, 0.2), "");
  };
  expect_found(1e-6, [](Outcome& o, double factor) {
    at::Tensor& gradient = o.steps[1].gradients.begin()->second;
    gradient = gradient * factor;
  });
  expect_found(1e-6, [](Outcome& o, double factor) { o.steps[0].norm *= factor; });
  expect_found(1e-6, [](Outcome& o, double factor) { o.steps[1].loss *= factor; });
  expect_found(1e-7, [](Outcome& o, double factor) {
    at::Tensor& weight = o.parameters.begin()->second;
    weight = weight * factor;
  });
  EXPECT_EQ(difference(plain, plain), "");
  Outcome without_one = plain;
  without_one.steps[0].gradients.erase("model.norm.weight");
  EXPECT_NE(difference_from(without_one, plain, 0.2), "");
}

}  // namespace
}  // namespace trireme::compose
