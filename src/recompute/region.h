// One call of recompute(): what forward saved by number and shape, and the way to compute it again.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "recompute/save_hooks.h"
#include "recompute/surroundings.h"
#include "trireme/recompute/recompute.h"

namespace trireme::detail {

/// Shared by the hooks of its saved tensors, so it lives as long as the part of the graph that needs it.
class Region : public std::enable_shared_from_this<Region> {
 public:
  Region(const RecomputeOptions& options, const std::vector<at::Tensor>& inputs, RecordScope::Replay replay);

  /// Forward: autograd saves `tensor`. Returns its number.
  size_t record(const at::Tensor& tensor);
  /// Backward: tensor `index` again.
  at::Tensor take(size_t index);
  /// Nobody will take tensor `index` any more.
  void forget(size_t index);

 private:
  class Refill;
  /// Traits on which forward and recomputation must agree.
  struct Traits {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
    at::Device device;
    std::optional<uint32_t> parameter_version;
  };
  struct Slot {
    Traits traits;
    bool wanted = true;
    at::Tensor value;  // recomputed, until it is taken
    uint32_t version = 0;
  };

  static Traits traits_of(const at::Tensor& tensor);
  void recompute_all();
  /// Recomputation saves its next tensor.
  void refill(const at::Tensor& tensor);
  void check(const Slot& slot, const at::Tensor& tensor) const;
  std::string number(size_t index) const;

  const RecomputeOptions options_;
  const RecordScope::Replay replay_;
  const Surroundings surroundings_;
  std::vector<torch::autograd::SavedVariable> inputs_;  // so that a region around this one recomputes them in turn
  std::vector<uint32_t> input_versions_;

  std::mutex mutex_;  // guards what follows: autograd has a thread per device
  std::vector<Slot> slots_;
  size_t refilled_ = 0;
  int graph_task_ = -1;  // the backward pass that slots' values belong to
};

}  // namespace trireme::detail
