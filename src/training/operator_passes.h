// The passes over a model's operators that its configuration asks for. They live as long as the Training, since losses
// are computed outside of forward().
#pragma once

#include <memory>

#include "trireme/comm/group.h"
#include "trireme/config/config.h"
#include "trireme/pager/pager.h"
#include "trireme/recompute/selective.h"
#include "trireme/recompute/tiled.h"
#include "trireme/sequence/sequence_parallel.h"

namespace trireme {

struct OperatorPasses {
  /// `pager` and `sequence_group` (null: samples are not cut) outlive this.
  OperatorPasses(const Config& config, const Pager& pager, Group* sequence_group);

  // Null: the configuration does not ask for it.
  std::unique_ptr<SelectiveRecompute> recompute;
  std::unique_ptr<TiledComputation> tiled;
  std::unique_ptr<SequenceParallel> sequence;
};

}  // namespace trireme
