// A module's buffers (running statistics, counters) follow rank 0, as in DDP.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/module_tensors.h"
#include "trireme/base/state_tree.h"
#include "trireme/comm/group.h"

namespace trireme {

class Buffers {
 public:
  /// Rank 0's values become everybody's. Collective.
  Buffers(Group& group, std::vector<NamedBuffer> buffers);

  /// Copies rank 0's values of those buffers that have changed on any rank since the last call. Collective.
  ///
  /// Cost      nothing without buffers; else one pass over them, one all-reduce of a flag per buffer and, if one is set, one
  ///           broadcast.
  void follow_rank_0();

  const std::vector<NamedBuffer>& all() const { return buffers_; }
  /// Whole buffers, as they are saved and loaded.
  std::vector<TensorSlice> slices() const;
  /// Their present values count as seen.
  void accept();

 private:
  bool are_on_host() const;
  void broadcast(const std::vector<bool>& chosen);

  Group& group_;
  std::vector<NamedBuffer> buffers_;
  /// Of the values that all ranks last agreed on. Version counters would be cheaper, but batch_norm writes its running
  /// statistics without counting.
  std::vector<uint64_t> fingerprints_;
};

}  // namespace trireme
