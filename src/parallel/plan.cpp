#include "trireme/parallel/plan.h"

#include <algorithm>
#include <sstream>
#include <string_view>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/format.h"
#include "trireme/base/pattern.h"
#include "trireme/base/words.h"
#include "trireme/parallel/exclusions.h"

namespace trireme {

namespace {

using Names = std::vector<std::string>;

/// The axes that are there; `expert` stands within "data".
constexpr const char* kAxes[] = {"pipe", "data", "sequence", "tensor"};

void check_axes(const Topology& ranks) {
  for (const Axis& axis : ranks.axes())
    if (axis.size > 1 && std::find(std::begin(kAxes), std::end(kAxes), axis.name) == std::end(kAxes))
      throw ConfigError(str("axis \"", axis.name, "\" of ", axis.size,
                            " ranks is not there yet; use \"pipe\", \"data\", \"sequence\" and \"tensor\""),
                        ErrorCode::kUnsupported);
  const std::pair<Feature, const char*> exclusive[] = {
      {Feature::kPipeline, "pipe"}, {Feature::kSequence, "sequence"}, {Feature::kTensor, "tensor"}};
  for (size_t i = 0; i < std::size(exclusive); ++i)
    for (size_t j = i + 1; j < std::size(exclusive); ++j) {
      const int one = ranks.size_of(exclusive[i].second), other = ranks.size_of(exclusive[j].second);
      const Exclusion* const row = find_exclusion(exclusive[i].first, exclusive[j].first);
      if (row != nullptr && one > 1 && other > 1)
        throw ConfigError(filled(row->text, {str(one), str(other)}), row->code);
    }
}

/// The ranks are laid out as the degrees have it.
void check_degrees(const Degrees& degrees, const Topology& ranks) {
  const std::pair<const char*, int> others[] = {
      {"pipe", degrees.pipe}, {"tensor", degrees.tensor}, {"sequence", degrees.sequence}, {"expert", degrees.expert}};
  for (const auto& [name, degree] : others) {
    const int size = ranks.size_of(name);
    if (degree == size) continue;
    if (name == std::string_view("pipe"))
      throw ConfigError(
          str("degrees.pipe=", degree, ", and this engine's ranks have ", size,
              " on the axis \"pipe\"; train a PipelineModule, which cuts a model into stages, or leave it 1"));
    if (name == std::string_view("sequence"))
      throw ConfigError(str("sequence_parallel_size=", degree, ", and the grid has ", size,
                            " ranks on the axis \"sequence\"; make the two the same"));
    if (name == std::string_view("tensor"))
      throw ConfigError(str("tensor_parallel.autotp_size=", degree, ", and the grid has ", size,
                            " ranks on the axis \"tensor\"; make the two the same"));
    throw ConfigError(str("degrees.", name, "=", degree, " is not there yet; leave it 1"), ErrorCode::kUnsupported);
  }
}

void check_replicas(const ParallelOptions& options, const Topology& ranks) {
  const int replicas = options.degrees.replicas, data = ranks.size_of("data");
  if (replicas < 1 || data % replicas != 0)
    throw ConfigError(str("degrees.replicas=", replicas, " must divide the data degree, ", data, "; choose another"));
  if (const Exclusion* row = first_exclusion(options); row != nullptr)
    throw ConfigError(filled(row->text, {str("degrees.replicas=", replicas), str(replicas)}), row->code);
}

/// With "replica" and "shard" in the place of "data".
Topology with_replicas(const Topology& ranks, int replicas) {
  std::vector<Axis> axes;
  const auto split = [&](int data) {
    axes.push_back({"replica", replicas});
    axes.push_back({"shard", data / replicas});
  };
  for (const Axis& axis : ranks.axes()) {
    if (axis.name == "data")
      split(axis.size);
    else if (axis.name == "pipe" || axis.name == "sequence" || axis.name == "tensor")
      axes.push_back(axis);
  }
  if (!ranks.has("data")) split(1);
  return Topology(std::move(axes));
}

/// Those of `names` that are longer than 1.
Names long_axes(const Topology& topology, const Names& names) {
  Names there;
  for (const std::string& name : names)
    if (topology.size_of(name) > 1) there.push_back(name);
  return there;
}

RankGroups groups_along(const Topology& topology, const Names& names) {
  Names axes = long_axes(topology, names);
  std::vector<std::vector<int>> ranks = topology.groups_along_all(axes);
  return {.axes = std::move(axes), .ranks = std::move(ranks)};
}

/// In the chain's order.
std::vector<PlannedPass> passes_of(const ParallelPlan& plan, const ParallelOptions& options) {
  std::vector<PlannedPass> passes;
  if (plan.size_of("sequence") > 1)
    passes.push_back({PassOrder::kSequence,
                      options.sequence_attention == SequenceAttention::kRing ? "sequence, ring" : "sequence, Ulysses",
                      plan.sequence.axes});
  if (plan.size_of("tensor") > 1) passes.push_back({PassOrder::kTensor, "tensor", plan.tensor.axes});
  if (options.computes_in_tiles) passes.push_back({PassOrder::kTiles, "tiles"});
  if (options.recomputes_selectively) passes.push_back({PassOrder::kRecompute, "recompute"});
  passes.push_back({PassOrder::kTouch, "pager", options.pager.stage == 3 ? plan.shards.axes : Names{}});
  return passes;
}

/// The elements of one parameter, in its own flattening, that lie in [begin, begin + numel) of its unit.
Interval part_of(const UnitLayout& unit, int parameter, int64_t begin, int64_t numel) {
  for (const ParameterRange& range : ranges_of(unit, begin, numel))
    if (range.parameter == parameter) return {range.parameter_begin, range.parameter_begin + range.numel};
  return {};
}

int position_in(const std::vector<int>& ranks, int rank) {
  return static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
}

std::string rule_of(const ParallelPlan& plan, int stage, const ParameterSpec& spec) {
  static constexpr const char* kByStage[] = {"ZeRO 0: every rank keeps all of it",
                                             "ZeRO 1: optimizer states are sharded",
                                             "ZeRO 2: gradients and optimizer states are sharded",
                                             "ZeRO 3: weights, gradients and optimizer states are sharded"};
  const std::string cut =
      spec.part.dim >= 0 ? str("cut along dim ", spec.part.dim, " over \"tensor\"; of a slice, ") : "";
  if (!spec.trainable)
    return str(cut, stage == 3 ? "frozen, ZeRO 3: weights are sharded" : "frozen: every rank keeps all of it");
  return str(cut, kByStage[stage], plan.states_over_replicas ? ", the last two over replicas too" : "");
}

std::vector<PlannedParameter> parameters_of(const ParallelPlan& plan, const PagerPolicy& policy,
                                            const std::vector<ParameterSpec>& specs) {
  const MeshSize mesh = {.shards = plan.shards.size(), .pieces = plan.states_over_replicas ? plan.replicas.size() : 1};
  const Layout layout = make_layout(specs, std::vector<MeshSize>{mesh}, policy.units);
  const int shard = position_in(plan.shards.of(plan.rank), plan.rank);
  const int piece = mesh.pieces > 1 ? position_in(plan.replicas.of(plan.rank), plan.rank) : 0;
  Names over_states = plan.shards.axes;
  if (plan.states_over_replicas)
    over_states.insert(over_states.end(), plan.replicas.axes.begin(), plan.replicas.axes.end());
  std::vector<PlannedParameter> parameters;
  for (int i = 0; i < static_cast<int>(specs.size()); ++i) {
    const UnitLayout& unit = layout.units[layout.unit_of[i]];
    const Interval all = {0, specs[i].numel()};
    PlannedParameter& parameter = parameters.emplace_back();
    parameter.name = specs[i].name;
    parameter.trainable = specs[i].trainable;
    parameter.why = rule_of(plan, policy.stage, specs[i]);
    parameter.held = policy.stage == 3 ? part_of(unit, i, shard * unit.shard_numel, unit.shard_numel) : all;
    if (policy.stage == 3) parameter.weights_over = plan.shards.axes;
    if (!specs[i].trainable) continue;
    parameter.updated =
        policy.stage == 0 ? all
                          : part_of(unit, i, shard * unit.shard_numel + piece * unit.piece_numel(), unit.piece_numel());
    if (policy.stage >= 2) parameter.gradient_over = over_states;
    if (policy.stage >= 1) parameter.states_over = over_states;
    parameter.gradient_sum = plan.sums.axes;
    parameter.mean_over = plan.mean_over;
  }
  return parameters;
}

// --- text ------------------------------------------------------------------------------------------------------------

/// "0-3" for neighbours, "0,4,8" for others; of many ranks the first two and the last.
std::string short_text(const std::vector<int>& ranks) {
  if (ranks.size() == 1) return str(ranks.front());
  if (ranks.back() - ranks.front() + 1 == static_cast<int>(ranks.size()))
    return str(ranks.front(), ranks.size() == 2 ? "," : "-", ranks.back());
  std::string text = str(ranks[0], ",", ranks[1]);
  if (ranks.size() > 4) return text + str(",…,", ranks.back());
  for (size_t i = 2; i < ranks.size(); ++i) text += str(",", ranks[i]);
  return text;
}

std::string short_text(const RankGroups& groups) {
  constexpr size_t kShown = 4;
  std::string text;
  for (size_t i = 0; i < std::min(groups.ranks.size(), kShown); ++i)
    text += str(i > 0 ? " " : "", short_text(groups.ranks[i]));
  if (groups.ranks.size() > kShown) text += str(" … ", groups.ranks.size(), " groups");
  return text;
}

std::string over(const Names& axes) { return axes.empty() ? "whole on each rank" : "sharded along " + joined(axes); }

void print_groups(std::ostream& text, const ParallelPlan& plan) {
  const std::pair<const char*, const RankGroups&> kinds[] = {
      {"step together", plan.model},           {"add gradients", plan.sums},     {"hold all shards", plan.shards},
      {"hold the same shards", plan.replicas}, {"share samples", plan.sequence}, {"share layers", plan.tensor},
      {"are a pipeline", plan.stages}};
  if (plan.topology.size() > 1) text << "ranks that, together with this one,\n";
  for (const auto& [what, groups] : kinds)
    if (groups.size() > 1) text << formatted("  {:<22}{}\n", what, short_text(groups.of(plan.rank)));
}

/// Parameters of which the same is said.
struct ParameterKind {
  const PlannedParameter* first;
  int64_t count = 0;
};

std::vector<ParameterKind> kinds_of(const ParallelPlan& plan) {
  std::vector<ParameterKind> kinds;
  for (const PlannedParameter& parameter : plan.parameters) {
    const auto found = std::find_if(kinds.begin(), kinds.end(),
                                    [&](const ParameterKind& kind) { return kind.first->why == parameter.why; });
    (found != kinds.end() ? *found : kinds.emplace_back(ParameterKind{&parameter})).count += 1;
  }
  return kinds;
}

void print_parameters(std::ostream& text, const ParallelPlan& plan) {
  for (const ParameterKind& kind : kinds_of(plan)) {
    const PlannedParameter& one = *kind.first;
    text << "  " << kind.count << (kind.count == 1 ? " parameter, such as " : " parameters, such as ") << one.name
         << "; " << one.why << "\n    weights    " << over(one.weights_over);
    if (one.trainable) {
      text << "\n    gradients  " << over(one.gradient_over) << "\n    states     " << over(one.states_over)
           << "\n    sum        ";
      if (one.gradient_sum.empty())
        text << "of this rank's gradients alone";
      else
        text << "of gradients along " << joined(one.gradient_sum);
      text << (one.mean_over > 1 ? str(", divided by ", one.mean_over) : ", not divided");
    }
    text << "\n";
  }
}

}  // namespace

const std::vector<int>& RankGroups::of(int rank) const {
  for (const std::vector<int>& group : ranks)
    if (std::find(group.begin(), group.end(), rank) != group.end()) return group;
  throw Error(ErrorCode::kInternal, str("rank ", rank, " is in no group"));
}

Topology topology_of(const Degrees& degrees, int world) {
  if (int64_t{degrees.pipe} * degrees.data * degrees.sequence * degrees.tensor != world)
    return Topology({{"data", world}});
  std::vector<Axis> axes;
  if (degrees.pipe > 1) axes.push_back({"pipe", degrees.pipe});
  axes.push_back({"data", degrees.data});
  if (degrees.sequence > 1) axes.push_back({"sequence", degrees.sequence});
  if (degrees.tensor > 1) axes.push_back({"tensor", degrees.tensor});
  return Topology(std::move(axes));
}

ParallelPlan make_plan(const Topology& ranks, int rank, const ParallelOptions& options,
                       const std::vector<ParameterSpec>& parameters) {
  check_axes(ranks);
  check_degrees(options.degrees, ranks);
  check_replicas(options, ranks);
  ParallelPlan plan{.topology = with_replicas(ranks, options.degrees.replicas), .rank = rank};
  const Topology& topology = plan.topology;
  for (const Axis& axis : topology.axes())
    plan.axes.push_back({axis.name, axis.size, topology.position_of(rank, axis.name)});
  plan.model = groups_along(topology, {"pipe", "replica", "shard", "sequence", "tensor"});
  plan.sums = groups_along(topology, {"replica", "shard", "sequence"});
  plan.shards = groups_along(topology, {"shard", "sequence"});
  plan.replicas = groups_along(topology, {"replica"});
  plan.sequence = groups_along(topology, {"sequence"});
  plan.tensor = groups_along(topology, {"tensor"});
  plan.stages = groups_along(topology, {"pipe"});
  plan.place = {.rank = ranks.position_of(rank, "data"), .size = ranks.size_of("data")};
  plan.states_over_replicas = options.states_over_replicas && options.degrees.replicas > 1;
  // Ranks of one sequence have parts of the same gradients: averaged where data-parallel ranks are added, they are one
  // sample's.
  const bool shares_samples = plan.sequence.size() > 1;
  plan.reduce_op = shares_samples ? ReduceOp::kMean : options.pager.gradient_op;
  plan.mean_over = options.pager.gradient_op == ReduceOp::kSum ? plan.sequence.size() : plan.sums.size();
  plan.passes = passes_of(plan, options);
  plan.parameters = parameters_of(plan, options.pager, parameters);
  return plan;
}

std::vector<std::vector<int>> positions_in(const std::vector<int>& members, const RankGroups& groups) {
  std::vector<std::vector<int>> within;
  for (const std::vector<int>& group : groups.ranks) {
    if (std::find(members.begin(), members.end(), group.front()) == members.end()) continue;
    std::vector<int>& positions = within.emplace_back();
    for (const int rank : group) positions.push_back(position_in(members, rank));
  }
  return within;
}

std::string plan_text(const ParallelPlan& plan) {
  std::ostringstream text;
  text << "rank " << plan.rank << " of " << plan.topology.size() << "\n\naxes\n";
  for (const PlannedAxis& axis : plan.axes) {
    text << formatted("  {:<10}{}, position {}", axis.name, axis.size, axis.position);
    if (axis.size > 1) text << "; ranks " << short_text(groups_along(plan.topology, {axis.name}));
    text << "\n";
  }
  print_groups(text, plan);
  text << "samples\n  place " << plan.place.rank << " of " << plan.place.size << "\n";
  if (!plan.parameters.empty())
    text << "parameters" << (plan.size_of("pipe") > 1 ? "; each stage has those of its layers\n" : "\n");
  print_parameters(text, plan);
  text << "passes over operators, outermost first\n";
  for (const PlannedPass& pass : plan.passes)
    text << "  " << pass.name << (pass.axes.empty() ? "" : ", along " + joined(pass.axes)) << "\n";
  return text.str();
}

}  // namespace trireme
