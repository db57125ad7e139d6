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

constexpr const char* kData = "data";  // "replica" × "shard"

const AxisPart* find_axis(const ParallelOptions& options, std::string_view name) {
  const auto is_it = [&](const AxisPart* axis) { return axis->name == name; };
  const auto found = std::find_if(options.axes.begin(), options.axes.end(), is_it);
  return found != options.axes.end() ? *found : nullptr;
}

bool is_data(const AxisPart& axis) { return &axis == &replica_axis() || &axis == &shard_axis(); }

/// The names of a topology's axes: "data" in the place of its two.
Names names_of(const std::vector<const AxisPart*>& axes) {
  Names names;
  for (const AxisPart* axis : axes)
    if (axis != &replica_axis()) names.push_back(is_data(*axis) ? kData : axis->name);
  return names;
}

/// `"pipe", "data" and "tensor"`.
std::string listed(const Names& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += str(i == 0 ? "\"" : i + 1 == names.size() ? " and \"" : ", \"", names[i], "\"");
  return text;
}

void check_axes(const Topology& ranks, const ParallelOptions& options) {
  const Names names = names_of(options.axes);
  for (const Axis& axis : ranks.axes())
    if (axis.size > 1 && std::find(names.begin(), names.end(), axis.name) == names.end())
      throw ConfigError(str("axis \"", axis.name, "\" of ", axis.size, " ranks is not there yet; use ", listed(names)),
                        ErrorCode::kUnsupported);
}

/// The ranks are laid out as the degrees have it.
void check_degrees(const ParallelOptions& options, const Topology& ranks) {
  for (const AxisPart* axis : options.axes) {
    if (axis->mismatch == nullptr) continue;
    const int degree = options.degrees.*axis->degree, size = ranks.size_of(axis->name);
    if (degree != size) throw ConfigError(filled(axis->mismatch, {str(degree), str(size)}));
  }
  if (options.degrees.expert != 1)
    throw ConfigError(str("degrees.expert=", options.degrees.expert, " is not there yet; leave it 1"),
                      ErrorCode::kUnsupported);
  const int replicas = options.degrees.replicas, data = ranks.size_of(kData);
  if (replicas < 1 || data % replicas != 0)
    throw ConfigError(str("degrees.replicas=", replicas, " must divide the data degree, ", data, "; choose another"));
}

/// With "replica" and "shard" in the place of "data".
Topology with_replicas(const Topology& ranks, const ParallelOptions& options) {
  std::vector<Axis> axes;
  const auto split = [&](int data) {
    axes.push_back({replica_axis().name, options.degrees.replicas});
    axes.push_back({shard_axis().name, data / options.degrees.replicas});
  };
  for (const Axis& axis : ranks.axes()) {
    if (axis.name == kData)
      split(axis.size);
    else if (find_axis(options, axis.name) != nullptr)
      axes.push_back(axis);
  }
  if (!ranks.has(kData)) split(1);
  return Topology(std::move(axes));
}

void check_exclusions(const Topology& topology, const ParallelOptions& options) {
  for (const AxisPart* axis : options.axes) {
    const int size = topology.size_of(axis->name);
    const AxisExclusion* const row = size > 1 ? first_exclusion(*axis, options) : nullptr;
    if (row == nullptr) continue;
    const auto is_other = [&](const AxisPart* other) { return other->feature == row->other; };
    const auto other = std::find_if(options.axes.begin(), options.axes.end(), is_other);
    const std::string ranks = str(size);
    const std::string degree =
        axis->member != nullptr ? str(axis->member, "=", size) : str("axis \"", axis->name, "\"");
    throw ConfigError(other != options.axes.end() ? filled(row->text, {ranks, str(topology.size_of((*other)->name))})
                                                  : filled(row->text, {degree, ranks}),
                      row->code);
  }
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

/// Groups along the axes of which `holds` does.
template <class Holds>
RankGroups groups_where(const ParallelPlan& plan, const Holds& holds) {
  Names names;
  for (const PlannedAxis& axis : plan.axes)
    if (holds(*axis.part)) names.push_back(axis.part->name);
  return groups_along(plan.topology, names);
}

/// One pass cuts activations along all axes that do, in its outermost place.
void join_cuts(std::vector<PlannedPass>& passes) {
  const auto sequence = std::ranges::find(passes, PassOrder::kSequence, &PlannedPass::order);
  const auto tensor = std::ranges::find(passes, PassOrder::kTensor, &PlannedPass::order);
  if (sequence == passes.end() || tensor == passes.end()) return;
  sequence->name += "; " + tensor->name;
  sequence->axes.insert(sequence->axes.end(), tensor->axes.begin(), tensor->axes.end());
  passes.erase(tensor);
}

/// In the chain's order.
std::vector<PlannedPass> passes_of(const ParallelPlan& plan, const ParallelOptions& options) {
  std::vector<PlannedPass> passes;
  for (const PlannedAxis& axis : plan.axes) {
    if (axis.size == 1 || axis.part->pass == nullptr) continue;
    std::optional<PlannedPass> pass = axis.part->pass(options);
    if (!pass) continue;
    pass->axes = {axis.part->name};
    passes.push_back(*std::move(pass));
  }
  if (options.computes_in_tiles) passes.push_back({PassOrder::kTiles, "tiles"});
  if (options.recomputes_selectively) passes.push_back({PassOrder::kRecompute, "recompute"});
  passes.push_back({PassOrder::kTouch, "pager", options.pager.stage == 3 ? plan.shards.axes : Names{}});
  std::stable_sort(passes.begin(), passes.end(),
                   [](const PlannedPass& one, const PlannedPass& other) { return one.order < other.order; });
  join_cuts(passes);
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
  const RankGroups& replicas = plan.along(replica_axis().name);
  const MeshSize mesh = {.shards = plan.shards.size(), .pieces = plan.states_over_replicas ? replicas.size() : 1};
  const Layout layout = make_layout(specs, std::vector<MeshSize>{mesh}, policy.units);
  const int shard = position_in(plan.shards.of(plan.rank), plan.rank);
  const int piece = mesh.pieces > 1 ? position_in(replicas.of(plan.rank), plan.rank) : 0;
  Names over_states = plan.shards.axes;
  if (plan.states_over_replicas) over_states.insert(over_states.end(), replicas.axes.begin(), replicas.axes.end());
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
  const auto print = [&](const char* together, const RankGroups& groups) {
    if (groups.size() > 1) text << formatted("  {:<22}{}\n", together, short_text(groups.of(plan.rank)));
  };
  if (plan.topology.size() > 1) text << "ranks that, together with this one,\n";
  print("step together", plan.model);
  print("add gradients", plan.sums);
  print("hold all shards", plan.shards);
  for (const PlannedAxis& axis : plan.axes)
    if (axis.part->together != nullptr) print(axis.part->together, axis.groups);
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

const RankGroups& ParallelPlan::along(std::string_view axis) const {
  for (const PlannedAxis& one : axes)
    if (one.part->name == axis) return one.groups;
  return alone;
}

Topology topology_of(const Degrees& degrees, int world) {
  std::vector<Axis> axes;
  int64_t ranks = 1;
  for (const AxisPart* axis : all_axes()) {
    if (axis == &replica_axis()) continue;
    const int size = is_data(*axis) ? degrees.data : axis->degree != nullptr ? degrees.*axis->degree : 1;
    ranks *= size;
    if (is_data(*axis))
      axes.push_back({kData, size});
    else if (size > 1)
      axes.push_back({axis->name, size});
  }
  return Topology(ranks == world ? std::move(axes) : std::vector<Axis>{{kData, world}});
}

Topology place(std::string_view strategy, const Degrees& degrees) {
  const std::string_view letters = strategy == "cluster" ? "DPT" : strategy == "spread" ? "TPD" : strategy;
  std::string sorted(letters);
  std::sort(sorted.begin(), sorted.end());
  if (sorted != "DPT")
    throw ConfigError(str("placement_strategy is \"", strategy,
                          "\"; expected \"cluster\", \"spread\" or the letters D, P and T in any order"));
  std::vector<Axis> axes;
  for (const char letter : letters) {
    if (letter == 'D') axes.push_back({kData, degrees.data});
    if (letter == 'P') axes.push_back({pipe_axis().name, degrees.pipe});
    if (letter == 'T') axes.push_back({tensor_axis().name, degrees.tensor});
  }
  return Topology(std::move(axes));
}

ParallelPlan make_plan(const Topology& ranks, int rank, const ParallelOptions& options,
                       const std::vector<ParameterSpec>& parameters) {
  check_axes(ranks, options);
  check_degrees(options, ranks);
  ParallelPlan plan{.ranks = ranks, .topology = with_replicas(ranks, options), .rank = rank};
  check_exclusions(plan.topology, options);
  for (const Axis& axis : plan.topology.axes())
    plan.axes.push_back({find_axis(options, axis.name), axis.size, plan.topology.position_of(rank, axis.name),
                         groups_along(plan.topology, {axis.name})});
  plan.alone = groups_along(plan.topology, {});
  plan.model = groups_where(plan, [](const AxisPart&) { return true; });
  plan.stage = groups_where(plan, [](const AxisPart& axis) { return axis.shares_layers; });
  plan.slices =
      groups_where(plan, [](const AxisPart& axis) { return axis.shares_layers && axis.law == SharedGradient::kWhole; });
  plan.stages = groups_where(plan, [](const AxisPart& axis) { return !axis.law; });
  const auto adds_gradients = [](const AxisPart& axis) { return axis.law == SharedGradient::kParts; };
  plan.sums = groups_where(plan, adds_gradients);
  plan.shards = groups_where(plan, [](const AxisPart& axis) { return axis.shards_states; });
  const RankGroups samples = groups_where(plan, [](const AxisPart& axis) { return !axis.shares_samples; });
  plan.place = {.rank = position_in(samples.of(rank), rank), .size = samples.size()};
  plan.states_over_replicas = options.states_over_replicas && options.degrees.replicas > 1;
  // Ranks that share samples have parts of the same gradients: averaged where ranks of other samples are added, they
  // are one sample's.
  const int sharers =
      groups_where(plan, [&](const AxisPart& axis) { return axis.shares_samples && adds_gradients(axis); }).size();
  plan.reduce_op = sharers > 1 ? ReduceOp::kMean : options.pager.gradient_op;
  plan.mean_over = options.pager.gradient_op == ReduceOp::kSum ? sharers : plan.sums.size();
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
    text << formatted("  {:<10}{}, position {}", axis.part->name, axis.size, axis.position);
    if (axis.size > 1) text << "; ranks " << short_text(axis.groups);
    text << "\n";
  }
  print_groups(text, plan);
  text << "samples\n  place " << plan.place.rank << " of " << plan.place.size << "\n";
  if (!plan.parameters.empty())
    text << (plan.stages.size() > 1 ? "parameters; each stage has those of its layers\n" : "parameters\n");
  print_parameters(text, plan);
  text << "passes over operators, outermost first\n";
  for (const PlannedPass& pass : plan.passes)
    text << "  " << pass.name << (pass.axes.empty() ? "" : ", along " + joined(pass.axes)) << "\n";
  return text.str();
}

}  // namespace trireme
