#include "pipeline/failed_step.h"

#include <set>

namespace trireme {

void end_training(Training& training, const Group& world, const std::string& text) {
  training.condition().fail(text);
  const TrainingGroups& groups = training.groups();
  std::set<Group*> all{&groups.sums, &groups.stage, &groups.model};
  for (const auto& [axis, group] : groups.by_axis) all.insert(group);
  for (Group* const group : all)
    if (group != &world) group->abort(text);
  training.pager().defer_reductions(false);
}

}  // namespace trireme
