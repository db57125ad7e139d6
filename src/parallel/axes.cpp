#include "trireme/parallel/axis.h"

namespace trireme {

const std::vector<const AxisPart*>& all_axes() {
  static const std::vector<const AxisPart*> all = {&pipe_axis(),     &replica_axis(), &shard_axis(),
                                                   &sequence_axis(), &tensor_axis(),  &model_axis()};
  return all;
}

}  // namespace trireme
