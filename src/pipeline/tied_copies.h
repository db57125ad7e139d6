// Parameters that layers of several stages share.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <compare>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "trireme/comm/group.h"
#include "trireme/pager/pager.h"
#include "trireme/pipeline/stage_model.h"
#include "trireme/schedule/schedule.h"

namespace trireme {

/// The stage that owns such a parameter trains it. Every other one computes with a whole copy, whose gradient it sends
/// to the owner, and which it gets anew after each step.
///
/// The owner adds a copy's gradient to its own within a backward pass, as autograd does where one stage has both
/// layers. With `each_micro_batch` that happens in each pass, so that sums have the bits of a model without stages;
/// otherwise in the last one of a window.
///
/// Chunks of one stage end in another order than the list of ties has. So each gradient is sent behind a header that
/// says which copy of which tie it is from, and of which micro-batch; the owner keeps those that come before their
/// turn.
///
/// Cost      per window, or per micro-batch, one message of the parameter's size from each copy, and one back per step,
///           each behind a header of 48 bytes. A copy is whole at every ZeRO stage, with a gradient in fp32.
class TiedCopies {
 public:
  /// `stages`, with one rank per stage, has no other user. It and `pager` outlive this. `shape` says which stage has
  /// which part.
  TiedCopies(Group& stages, const std::vector<Tie>& ties, const pipeline::Schedule& shape, Pager& pager,
             bool each_micro_batch);

  /// The owners' values become the copies'. Collective over all ranks.
  void follow_owners();

  /// Owned parameters, with the gradients that their copies have, as roots of a backward pass.
  struct Roots {
    torch::autograd::edge_list edges;
    std::vector<at::Tensor> gradients;
  };
  /// A backward pass that gives gradients of weights.
  struct Pass {
    int chunk;
    int micro_batch;
    bool is_last;  ///< of its chunk in this window
  };
  /// Before the pass: what it has to start from, too. Waits for the copies.
  /// Throws    Error(kDiverged): a message is from no copy of a tie that this stage owns, or has another shape.
  Roots receive(const Pass& pass);
  /// After the pass: gradients of copies go to their owners, if they are due.
  void send(const Pass& pass);
  /// Drops the gradients of this window.
  void clear();

 private:
  struct Copy {
    int chunk, stage;  ///< of the copy
    int owner_stage;
    at::Tensor parameter;  ///< undefined on other stages
    at::Tensor sum = {};   ///< of gradients, in fp32; undefined: none yet
  };
  struct Tied {
    int chunk;             ///< of the owner
    at::Tensor parameter;  ///< the owner's; undefined on other stages
    int index = -1;        ///< in the pager
    std::vector<Copy> copies;
  };
  /// Which gradient a message carries.
  struct Key {
    int64_t tie, copy;    ///< indices
    int64_t micro_batch;  ///< -1: the sum of a window
    auto operator<=>(const Key&) const = default;
  };
  void cast_copies();
  Key key_of(size_t tie, size_t copy, const Pass& pass) const;
  /// The gradient with this key, from another stage or this one.
  at::Tensor take(const Key& key);
  /// Receives the next message from stage `from`.
  void receive_next(int from);
  bool is_here(const Copy& copy) const { return copy.stage == stages_.rank(); }
  bool owns(const Tied& tied) const { return tied.index >= 0; }

  Group& stages_;
  Pager& pager_;
  const bool each_micro_batch_;
  std::vector<Tied> ties_;               ///< in the same order on every stage
  std::map<Key, at::Tensor> gradients_;  ///< for owners on this stage, until their passes
  std::vector<std::pair<Pending<void>, at::Tensor>> leaving_;
};

/// Names of the parameters of `module` that are copies.
std::set<std::string> names_of_copies(const std::vector<Tie>& ties, const torch::nn::Module& module);

}  // namespace trireme
