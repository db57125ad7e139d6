#include "training/program_slices.h"

#include <set>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/pattern.h"
#include "trireme/base/words.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/intercept.h"
#include "trireme/pager/init/init.h"
#include "trireme/parallel/exclusions.h"

namespace trireme {

namespace {

constexpr const char* kMark =
    "the axis \"model\" has {} ranks, and nothing says which parameters the program has cut over them; name these in "
    "own_slices (Python: set parameter.tensor_model_parallel = True)";

void check_names(const std::set<std::string>& slices, const ModuleTensors& tensors, const TrainingOptions& options) {
  std::set<std::string> known;
  for (const NamedParameter& parameter : tensors.parameters) known.insert(parameter.name);
  for (const auto& [copy, name] : options.copies) known.insert({copy, name});
  for (const std::string& name : slices)
    if (!known.contains(name))
      throw ConfigError(str("own_slices: the module has no parameter '", name, "'; name those that it has"));
}

void check_whole(const ModuleTensors& tensors) {
  for (const NamedParameter& parameter : tensors.parameters)
    if (zero::is_sharded(parameter.tensor)) {
      const Exclusion& row = exclusion_of(Feature::kProgramSlices, Feature::kInit);
      throw ConfigError(filled(row.text, {parameter.name}), row.code);
    }
}

/// A digest of each parameter that is no slice, and of each buffer, with what it is.
struct Wholes {
  std::vector<std::string> names;
  std::vector<int64_t> digests;
};

Wholes wholes_of(const ModuleTensors& tensors, const std::set<std::string>& slices) {
  Wholes wholes;
  const auto add = [&](const char* kind, const std::string& name, const at::Tensor& tensor) {
    wholes.names.push_back(str(kind, " '", name, "'"));
    wholes.digests.push_back(digest_of(tensor.detach().contiguous().flatten()));
  };
  for (const NamedParameter& parameter : tensors.parameters)
    if (!slices.contains(parameter.name)) add("parameter", parameter.name, parameter.tensor);
  for (const NamedBuffer& buffer : tensors.buffers) add("buffer", buffer.name, buffer.tensor);
  return wholes;
}

/// Part `rank` of `ranks` tensors of `shape`, one behind the other.
TensorPart one_of(int ranks, int rank, std::vector<int64_t> shape) {
  shape.insert(shape.begin(), ranks);
  return {std::move(shape), 0, {{rank, rank + 1}}};
}

PartitionedParameter planned(const std::string& name, const at::Tensor& tensor, bool is_slice, int ranks) {
  PartitionedParameter parameter{.name = name, .rule = "the program"};
  for (int rank = 0; rank < ranks; ++rank)
    parameter.parts.push_back(is_slice ? one_of(ranks, rank, tensor.sizes().vec()) : TensorPart{tensor.sizes().vec()});
  return parameter;
}

}  // namespace

PartitionPlan plan_of_program(const TrainingGroups& groups, const ModuleTensors& tensors,
                              const TrainingOptions& options) {
  const CallerScope caller("initialize");
  const SubjectScope subject("the slices of the program");
  const WithoutInterception own_operators;
  const int ranks = groups.slices->size();
  Wholes wholes;
  all_or_throw(groups.model, [&] {
    if (!options.own_slices) throw ConfigError(filled(kMark, {str(ranks)}));
    check_names(*options.own_slices, tensors, options);
    check_whole(tensors);
    wholes = wholes_of(tensors, *options.own_slices);
  });
  const std::set<std::string>& slices = *options.own_slices;
  const auto other_names = first_different_line(groups.stage, [&] { return joined(slices, "\n"); });
  // The values of the first ranks of `sums` become those of all.
  if (groups.sums.rank() != 0) wholes.digests.clear();
  const auto other_values = first_difference(*groups.slices, wholes.digests);
  all_or_throw(groups.model, [&] {
    if (other_names)
      throw ConfigError(str("own_slices: the ranks name other parameters, first ", other_names->text(),
                            "; name the same ones on every rank"));
    if (other_values)
      throw ConfigError(
          str("initialize: ", wholes.names[other_values->index], " has other values on rank ", other_values->rank,
              " of group '", groups.slices->name(),
              "' than on its rank 0, and own_slices does not name it; a parameter that the program has ",
              "cut stands there (Python: set its tensor_model_parallel = True), and others, and buffers, ",
              "have the same values on every rank of the axis \"model\" (of a buffer with others: persistent=False)"));
  });
  PartitionPlan plan{.ranks = ranks, .source = "the program"};
  for (const NamedParameter& one : tensors.parameters)
    plan.parameters.push_back(planned(one.name, one.tensor, slices.contains(one.name), ranks));
  return plan;
}

}  // namespace trireme
