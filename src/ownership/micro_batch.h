// The state of one micro-batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "ownership/casts.h"
#include "ownership/cut_tensors.h"
#include "ownership/homes.h"
#include "ownership/mailbox.h"
#include "ownership/module_calls.h"
#include "ownership/pieces.h"
#include "ownership/region.h"
#include "ownership/sizes.h"
#include "ownership/transfers.h"
#include "ownership/turns.h"
#include "trireme/ownership/ownership.h"

namespace trireme::ownership {

/// The last micro-batches of a step that have read and written what is older than the step.
struct LastingUse {
  int64_t reader = -1, writer = -1;
};
using LastingUses = std::unordered_map<const c10::StorageImpl*, LastingUse>;

/// A micro-batch on this stage, from the begin of its forward pass to the end of its backward pass.
struct MicroBatch {
  int64_t number = 0;          ///< of the run
  int64_t number_in_step = 0;  ///< for people
  uint64_t seed = 0;
  ForwardOrder order = ForwardOrder::kOneByOne;
  Turns turns = Turns(1);
  bool measures = false;  ///< what turns spend
  Pieces pieces = {};
  Casts casts = {};
  Transfers transfers = {};
  Place place = {};
  uint64_t digest = 0;  ///< of all operators, homes and sizes
  OperatorTrace trace = {};
  std::vector<int64_t> sent = {}, received = {};  ///< numbers of messages, by stage
  /// Sizes of gradients that come back, until they have come.
  struct Sizes {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  std::map<TransferId, Sizes> gradient_sizes = {};
  /// Functions that make gradients of parts whole, before they go to another stage.
  std::map<TransferId, CutTensors::Whole> gradients_of_parts = {};
  ForwardFacts shown = {};  ///< turns and costs aside, which are in `turns`
  /// A tensor that is older than the micro-batch and was used: the turn of its stage, and whether it was written.
  struct Lasting {
    int turn;
    bool is_written = false;
  };
  std::unordered_map<const c10::StorageImpl*, Lasting> lasting = {};
  LastingUses* of_all = nullptr;  ///< uses of what is of this stage, by all micro-batches of the step
  int own_stage = 0;
  bool has_root = false;  ///< backward begins somewhere, here or on another stage
  /// One tensor that the program returned.
  struct Output {
    at::Tensor tensor;  ///< detached; a shadow until it has come
    int stage = -1;     ///< from which it comes; -1: it is here
    int64_t number = 0;
  };
  std::vector<Output> outputs = {};
  std::vector<std::shared_ptr<Region>> regions = {};  ///< whose first run has not ended
  std::optional<Replay> replay = {};                  ///< this is no micro-batch, but the second run of a region
  std::vector<OpenCall> calls = {};                   ///< of modules, the innermost one last

  /// An operator runs on `stage`. Throws StateError: as come_back().
  void visit(const OperatorFacts& facts, int stage);
  /// An operator of stage `to` needs stage `from`, a later one. Throws StateError: it stays ahead.
  void come_back(const OperatorFacts& facts, int from, int to);
  /// An operator uses something of a stage that is older than this micro-batch. Throws StateError: forward passes take
  /// turns, and a later micro-batch was before this one, or another one has made it.
  void touch(const OperatorFacts& facts, const HomedArgument& one, bool is_written);
  bool is_in_region() const;
  /// An operator of a region's first run writes what outlives the micro-batch, as its second run will. Throws
  /// StateError: it stays ahead, so that second runs come between other first runs than in one process.
  void write_twice(const OperatorFacts& facts);
  /// Notes what other stages compare: an operator with its home, -1 where there is none.
  void note(const OperatorFacts& facts, const Key& key, int stage);
  /// The same of an operator of a call that another one stands for.
  void note(const std::string& name, uint64_t of_call);
  /// Something happens that later calls of the modules around it cannot leave out.
  void must_run() {
    for (OpenCall& call : calls) call.stands = false;
  }
  /// Something has come from another stage, which a second run of the region needs.
  template <class Kind>
  void keep(const Kind& received) {
    for (const auto& region : regions)
      if (region->is_open) region->received.emplace_back(received);
  }
};

}  // namespace trireme::ownership
