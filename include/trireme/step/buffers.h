// Keeps a module's buffers (running statistics, counters) equal to rank 0's, as DDP does.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "trireme/base/state_tree.h"
#include "trireme/comm/group.h"

namespace trireme {

/// A buffer of the module.
struct NamedBuffer {
  std::string name;
  at::Tensor tensor;
};

/// The module's buffers, listed anew at each call: a module may replace one, or make its first one in forward.
class Buffers {
 public:
  using Source = std::function<std::vector<NamedBuffer>()>;
  using IsPart = std::function<bool(const at::Tensor&)>;
  /// Gives all ranks rank 0's values. Collective. `device` is that of the model's parameters. `is_part`: of a tensor of
  /// which ranks have different elements. What `source` and `is_part` refer to outlives this.
  Buffers(Group& group, c10::Device device, Source source, IsPart is_part = nullptr);

  /// Copies rank 0's values of those buffers that have changed on any rank since the last call. A buffer that not all
  /// ranks have with the same name, shape and dtype is not copied, which is logged once. Collective.
  ///
  /// Throws    StateError: a buffer is a part, which would become rank 0's; so slices() does.
  /// Cost      one pass over the buffers, one all-reduce of a flag per buffer and of one more, and, if one is set, one
  ///           broadcast. On a device just the broadcast, so that the host does not wait for it.
  void follow_rank_0();

  /// Ranks keep the values that they have from here on: follow_rank_0() does nothing. To call on all of them.
  void keep_apart() { are_apart_ = true; }

  std::vector<NamedBuffer> all() const { return source_(); }
  /// Whole buffers, as they are saved and loaded.
  std::vector<TensorSlice> slices() const;
  /// Takes the present values as the last ones agreed on, so that they are not copied.
  void accept();

 private:
  /// The buffers that all ranks have alike, in rank 0's order.
  void refuse_parts(const std::vector<NamedBuffer>& present) const;
  std::vector<NamedBuffer> shared(const std::vector<NamedBuffer>& present) const;
  void agree(const std::vector<NamedBuffer>& present);
  void tell_others(const std::vector<NamedBuffer>& present);
  void remember(const std::vector<NamedBuffer>& shared);
  void broadcast(const std::vector<NamedBuffer>& shared, const std::vector<bool>& chosen);

  Group& group_;
  const bool is_on_host_;
  const Source source_;
  const IsPart is_part_;
  std::vector<int64_t> known_;   ///< signatures of this rank's buffers when ranks last agreed
  std::vector<int64_t> agreed_;  ///< of these, those that all ranks have, in rank 0's order
  bool has_told_ = false;
  bool are_apart_ = false;
  /// Hashes of the values that all ranks last agreed on, by agreed_. Version counters would be cheaper, but batch_norm
  /// writes its running statistics without counting.
  std::vector<int64_t> fingerprints_;
};

}  // namespace trireme
