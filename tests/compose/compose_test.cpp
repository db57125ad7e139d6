// Every pair of features: it trains as each of the two would alone, or it is refused by name before anything has
// started.
//
// docs/compose.md has the table that this makes. A new feature is a row of features().
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <regex>
#include <string>
#include <vector>

#include "tests/compose/scenario.h"
#include "trireme/base/error.h"

namespace trireme::compose {
namespace {

constexpr const char* kNoAutocast = "the stand-in of a GPU has no autocast";

/// How a run with a feature differs from one without.
enum class Change {
  kNothing,   ///< the same losses and weights, bit for bit
  kRounding,  ///< the same up to rounding
  kTraining,  ///< another training
};

struct Feature {
  std::string name;
  std::string slot;  ///< features of one slot exclude each other; empty: a slot of its own
  Change change;
  std::function<void(Scenario&)> apply;
  double tolerance = 0;          ///< of losses, with kRounding
  std::string in_place_of = {};  ///< the feature whose bits it has, with kNothing; empty: those of a run without it
};

/// Two features that do not meet what each says of itself, and why not.
struct Exception {
  std::string first, second;
  double tolerance;  ///< of losses; negative: the two are not tried
  std::string reason;
};

const std::vector<Exception>& exceptions() {
  static const std::vector<Exception> all = {
      {"ZeRO 1", "16-bit messages", 2e-2, "at stage 0 the sums travel back in 16 bits, too"},
      {"ZeRO 1", "offloaded optimizer", 1e-5, "at stage 0 nothing is offloaded, and the GPU's kernel updates"},
      {"ZeRO 3, copy", "offloaded parameters", 1e-5,
       "at stage 2 parameters stay on the GPU, whose kernel updates them"},
      {"autocast", "GPU (stand-in)", -1, kNoAutocast},
      {"autocast", "registered buffers", -1, kNoAutocast},
      {"autocast", "offloaded optimizer", -1, kNoAutocast},
      {"autocast", "offloaded parameters", -1, kNoAutocast},
  };
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

std::function<void(Scenario&)> offload(const char* what) {
  return [=](Scenario& scenario) {
    scenario.is_on_device = true;
    scenario.config["zero_optimization"][what] = {{"device", "cpu"}};
  };
}

const std::vector<Feature>& features() {
  constexpr auto kNothing = Change::kNothing;
  constexpr auto kRounding = Change::kRounding;
  constexpr auto kTraining = Change::kTraining;
  static const std::vector<Feature> all = {
      {"ZeRO 1", "stage", kNothing, stage(1)},
      // Reduces after each micro-batch, stages 0 and 1 after each window.
      {"ZeRO 2", "stage", kRounding, stage(2), 1e-5},
      {"ZeRO 3, shared", "stage", kNothing, stage(3, "shared"), 0, "ZeRO 2"},
      {"ZeRO 3, copy", "stage", kNothing, stage(3, "copy"), 0, "ZeRO 2"},
      {"bf16", "precision", kRounding, key("bf16", {{"enabled", true}}), 2e-2},
      {"fp16", "precision", kRounding, key("fp16", {{"enabled", true}, {"initial_scale_power", 8}}), 2e-2},
      {"autocast", "precision", kRounding, key("torch_autocast", {{"enabled", true}}), 2e-2},
      {"16-bit messages", "", kRounding, key("communication_data_type", "bf16"), 2e-2},
      {"no_sync", "scope", kRounding, with(&Scenario::scope, Scope::kNoSync), 1e-5},
      {"coalesced", "scope", kRounding, with(&Scenario::scope, Scope::kCoalesce), 1e-5},
      {"deterministic", "", kRounding, key("deterministic", true), 1e-5},
      {"recompute by call", "", kNothing, with(&Scenario::recomputes_by_call, true)},
      {"recompute layers", "recompute", kNothing,
       [](Scenario& scenario) { scenario.config["trireme"]["recompute"] = "full"; }},
      {"recompute selectively", "recompute", kNothing,
       [](Scenario& scenario) { scenario.config["trireme"]["recompute"] = "selective"; }},
      {"tiled", "", kRounding,
       [](Scenario& scenario) {
         scenario.config["trireme"]["tiled"] = {{"loss_tokens", 3}, {"mlp_tokens", 3}};
       },
       1e-5},
      {"leaf modules", "", kNothing,
       [](Scenario& scenario) {
         scenario.config["zero_optimization"]["leaf_module"] = {{"name_suffixes", {"mlp"}}};
       }},
      {"zero::Init", "", kNothing, with(&Scenario::is_initialized_sharded, true)},
      {"pipeline stages", "", kRounding, with(&Scenario::is_in_stages, true), 1e-5},
      {"second engine", "", kNothing, with(&Scenario::has_second_engine, true)},
      {"evaluation between", "", kNothing, with(&Scenario::evaluates_between, true)},
      {"schedule", "", kTraining,
       key("scheduler", {{"type", "WarmupLR"}, {"params", {{"warmup_num_steps", 3}, {"warmup_max_lr", 2e-3}}}})},
      {"parameter groups", "", kTraining,
       with(&Scenario::parameter_groups,
            std::vector<ParameterGroup>{{.patterns = {"norm"}, .lr = 1e-4, .weight_decay = 0}})},
      {"client optimizer", "optimizer", kTraining,
       [](Scenario& scenario) {
         scenario.config.erase("optimizer");
         scenario.has_client_optimizer = true;
       }},
      {"Muon", "optimizer", kTraining, key("optimizer", {{"type", "Muon"}, {"params", {{"lr", 2e-3}}}})},
      {"gradient sum", "", kTraining, key("gradient_allreduce_op", "sum")},
      {"resume", "checkpoint", kNothing, with(&Scenario::checkpoint, Checkpoint::kResume)},
      {"resume, resharded", "checkpoint", kNothing, with(&Scenario::checkpoint, Checkpoint::kResumeOtherWay)},
      {"asynchronous save", "checkpoint", kNothing, with(&Scenario::checkpoint, Checkpoint::kAsync)},
      {"mapped files", "ranks", kNothing, with(&Scenario::backend, RankBackend::kShm)},
      {"torch.distributed", "ranks", kNothing, with(&Scenario::backend, RankBackend::kC10d)},
      {"GPU (stand-in)", "device", kRounding, with(&Scenario::is_on_device, true), 1e-5},
      {"registered buffers", "device", kRounding,
       [](Scenario& scenario) {
         scenario.is_on_device = true;
         scenario.config["trireme"]["register_buffers"] = true;
       },
       1e-5},
      {"offloaded optimizer", "device", kRounding, offload("offload_optimizer"), 1e-5},
      {"offloaded parameters", "device", kRounding, offload("offload_param"), 1e-5},
  };
  return all;
}

using Indices = std::vector<size_t>;  // of features(), ascending

struct Result {
  Outcome outcome;
  std::string refusal;  // empty: it ran
};

/// The run with these features, made once. Other errors than a refusal pass through.
const Result& result_of(const Indices& chosen) {
  static std::map<Indices, Result> results;
  if (const auto found = results.find(chosen); found != results.end()) return found->second;
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
  return results.emplace(chosen, std::move(result)).first->second;
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
  double tolerance = 0;
  for (const size_t index : chosen) tolerance += features()[index].tolerance;
  return tolerance;
}

/// Why `outcome` is not that of the same training; empty: it is.
std::string difference(const Outcome& outcome, const Outcome& expected, double tolerance) {
  for (size_t i = 0; i < expected.losses.size(); ++i)
    if (!(std::abs(outcome.losses.at(i) - expected.losses[i]) <= tolerance * std::abs(expected.losses[i])))
      return str("the loss of step ", i, " is ", outcome.losses[i], " and not ", expected.losses[i]);
  for (const auto& [name, tensor] : expected.parameters) {
    const bool is_same =
        tolerance == 0 ? at::equal(outcome.parameters.at(name), tensor)
                       : outcome.parameters.at(name).to(at::kFloat).allclose(tensor.to(at::kFloat), tolerance, 5e-3);
    if (!is_same) return name + " is another";
  }
  return "";
}

/// Why the run with these features is not what its features say; empty: it is.
std::string flaw_of(const Indices& chosen) {
  const Outcome& outcome = result_of(chosen).outcome;
  if (has(chosen, Change::kNothing)) {
    const Exception* exception = exception_of(chosen);
    return difference(outcome, result_of(without(chosen, Change::kNothing)).outcome,
                      exception ? exception->tolerance : 0);
  }
  if (has(chosen, Change::kRounding))
    return difference(outcome, result_of(without(chosen, Change::kRounding)).outcome, tolerance_of(chosen));
  // Both features are in force where neither alone gives this.
  for (const size_t index : chosen) {
    const Indices alone = chosen.size() > 1 ? Indices{index} : Indices{};
    if (difference(outcome, result_of(alone).outcome, 0).empty())
      return features()[index].name + " makes no difference";
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
  const std::string& slot = features()[pair[0]].slot;
  const Exception* exception = exception_of(pair);
  return (slot.empty() || slot != features()[pair[1]].slot) && (exception == nullptr || exception->tolerance >= 0);
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

class Compose : public ::testing::TestWithParam<Indices> {};

TEST_P(Compose, TrainsAsTheFeaturesWouldAloneOrIsRefused) {
  const Result& result = result_of(GetParam());
  if (result.refusal.empty()) {
    EXPECT_EQ(flaw_of(GetParam()), "");  // as exceptions() say, where they do
  } else {
    EXPECT_EQ(GetParam().size(), 2) << "a feature that is refused alone: " << result.refusal;
  }
}

INSTANTIATE_TEST_SUITE_P(Features, Compose, ::testing::ValuesIn(combinations()),
                         [](const auto& info) { return name_of(info.param); });

TEST(ComposeCheck, AFeatureThatChangesWhatItShouldNotIsFound) {
  const Outcome plain = result_of({}).outcome;
  Outcome other = plain;
  other.parameters.begin()->second = other.parameters.begin()->second + 1e-7;
  EXPECT_NE(difference(other, plain, 0), "");
  EXPECT_EQ(difference(other, plain, 1e-5), "");
  other.losses[3] *= 1.01;
  EXPECT_NE(difference(other, plain, 1e-5), "");
  EXPECT_EQ(difference(plain, plain, 0), "");
}

// --- the table -------------------------------------------------------------------------------------------------------

std::string table() {
  std::vector<std::string> refusals;
  std::string text =
      "# Which features go together\n\n"
      "Made by `compose_test`, which trains with each feature alone and with each pair of them and compares the losses "
      "and weights:\n"
      "`yes`, it trains as the features would alone; a number, it is refused with the "
      "text below;\n"
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

TEST(ComposeTable, IsThatOfTheDocumentation) {
  const auto path = std::filesystem::path(__FILE__).parent_path() / "../../docs/compose.md";
  const std::string made = table();
  std::ifstream file(path, std::ios::binary);
  std::string written{std::istreambuf_iterator<char>(file), {}};
  const auto end =
      std::min(written.find("\n## From Python\n"), written.size());  // there compose_test.py's table begins
  if (std::getenv("TRIREME_UPDATE_DOCS") != nullptr) {
    std::ofstream(path, std::ios::binary) << made << written.substr(end);
    return;
  }
  EXPECT_EQ(written.substr(0, end), made) << "TRIREME_UPDATE_DOCS=1 compose_test writes docs/compose.md anew";
}

}  // namespace
}  // namespace trireme::compose
