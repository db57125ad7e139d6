// A module's buffers (running statistics, counters) follow rank 0, as in DDP.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/comm/group.h"

namespace trireme {

struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

/// The buffers that a module has when it is asked: it may replace one, or make its first one in forward.
class Buffers {
 public:
  using Source = std::function<std::vector<NamedBuffer>()>;
  /// Rank 0's values become everybody's. Collective. `device`: of the model's parameters. What `source` refers to
  /// outlives this.
  Buffers(Group& group, c10::Device device, Source source);

  /// Copies rank 0's values of those buffers that have changed on any rank since the last call. One that is not alike
  /// on all ranks (name, shape, dtype) stays each rank's own, which is told once. Collective.
  ///
  /// Cost      one pass over the buffers, one all-reduce of a flag per buffer and of one more, and, if one is set, one
  ///           broadcast. On a device just the broadcast, so that the host does not wait for it.
  void follow_rank_0();

  std::vector<NamedBuffer> all() const { return source_(); }
  /// Whole buffers, as they are saved and loaded.
  std::vector<TensorSlice> slices() const;
  /// Their present values count as seen.
  void accept();

 private:
  /// The buffers that all ranks have alike, in rank 0's order.
  std::vector<NamedBuffer> shared(const std::vector<NamedBuffer>& present) const;
  void agree(const std::vector<NamedBuffer>& present);
  void tell_others(const std::vector<NamedBuffer>& present);
  void remember(const std::vector<NamedBuffer>& shared);
  void broadcast(const std::vector<NamedBuffer>& shared, const std::vector<bool>& chosen);

  Group& group_;
  const bool is_on_host_;
  const Source source_;
  std::vector<uint64_t> known_;   ///< signatures of this rank's buffers when ranks last agreed
  std::vector<uint64_t> agreed_;  ///< of these, those that all ranks have, in rank 0's order
  bool has_told_ = false;
  /// Hashes of the values that all ranks last agreed on, by agreed_. Version counters would be cheaper, but batch_norm
  /// writes its running statistics without counting.
  std::vector<uint64_t> fingerprints_;
};

}  // namespace trireme
