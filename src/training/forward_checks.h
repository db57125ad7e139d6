// Mistakes in a forward that pass without a word, or in words of libtorch that do not name the fix.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"
#include "trireme/precision/precision.h"
#include "trireme/step/buffers.h"

namespace trireme {

class ForwardChecks {
 public:
  /// All of these outlive it. `knows_micro_batch`: the program has said how many samples a micro-batch has.
  ForwardChecks(Group& group, const Pager& pager, const Buffers& buffers, const PrecisionOptions& precision,
                bool knows_micro_batch)
      : group_(group), pager_(pager), buffers_(buffers), precision_(precision), looks_(knows_micro_batch) {}

  /// Throws StateError: operators of this thread are not seen, where units are gathered. Tells once of autocast around
  /// the forward.
  void begin();
  /// Tells once of inputs that have another number of samples than `micro_batch`. One smaller batch may be the last of
  /// an epoch.
  void look_at(const at::Tensor& input, int64_t micro_batch);
  /// Throws ShapeError where a forward with inputs of these dtypes failed by `problem` because of a dtype.
  void explain(const std::string& problem, const std::vector<at::ScalarType>& inputs) const;

 private:
  Group& group_;
  const Pager& pager_;
  const Buffers& buffers_;
  const PrecisionOptions& precision_;
  bool looks_;
  bool has_explained_autocast_ = false;
  int smaller_batches_ = 0;  // in a row
};

}  // namespace trireme
