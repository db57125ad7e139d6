// The proof that ranks which have the same parameter compute the same gradient of it.
#pragma once

#include <string>
#include <vector>

#include "trireme/activations/cut_activations.h"
#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"
#include "trireme/tensor/partition.h"

namespace trireme {

/// Compares gradients over a tensor group before the first update. Of a parameter that ranks have whole each computes
/// the whole gradient: where one has another, a sum over the axis is missing, or these ranks got other batches or other
/// random numbers. Two numbers stand for a gradient: its norm, and its product with a fixed vector. Each exchange of
/// the first step is shown to be what it is called, too: the vector's products with ranks' parts add up to that with
/// the sum.
class GradientProof {
 public:
  /// All outlive this. `pass` cuts activations over `slices`; null: none is. `shards` are the ranks over which
  /// parameters are sharded, `slices` those that have slices of the same layers, `model` all ranks.
  GradientProof(Pager& pager, Group& shards, Group& slices, Group& model, std::string axis, const PartitionPlan& plan,
                CutActivations* pass);

  /// The proof of the gradients of a closed window; does nothing where it has been shown, or where some gradient is not
  /// finite. Collective over the model.
  ///
  /// Cost      once a pass over the gradients, and 16 bytes for each parameter over both groups.
  /// Throws    StateError, on every rank of the model, that names the parameter and the ranks where this one sees them.
  void show();

 private:
  std::string problem_of(const at::Tensor& all) const;

  Pager& pager_;
  Group& shards_;
  Group& slices_;
  Group& model_;
  std::string axis_;  ///< of `slices`
  CutActivations* pass_;
  std::vector<const PartitionedParameter*> parameters_;  ///< as the pager has them
  bool is_shown_ = false;
};

/// Compares gradients of ranks that hold the same shards, before the first update: where one has another, a sum over
/// replicas is missing, and weights would drift apart. Nothing is compared where no two ranks have the same gradients
/// after their sum: sharding over all ranks, sequences, states over replicas.
class ReplicaProof {
 public:
  /// All outlive this. `replicas` hold the same shards; `model` are all ranks.
  ReplicaProof(Pager& pager, Group& replicas, Group& model) : pager_(pager), replicas_(replicas), model_(model) {}

  /// As GradientProof::show().
  ///
  /// Cost      once a pass over this rank's gradients, and 16 bytes for each parameter over `replicas`.
  /// Throws    StateError, on every rank of the model, that names the parameter and the ranks where this one sees it.
  void show();

 private:
  Pager& pager_;
  Group& replicas_;
  Group& model_;
  bool is_shown_ = false;
};

}  // namespace trireme
