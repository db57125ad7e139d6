// Calls of modules that lie wholly on another stage. What one of them showed stands for later ones, which need not run:
// smp's static_mode.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/flat_hash_map.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "ownership/homes.h"
#include "ownership/mailbox.h"
#include "ownership/region.h"
#include "ownership/sizes.h"
#include "trireme/ownership/ownership.h"

namespace trireme::ownership {

struct MicroBatch;

/// A tensor that is older than the step and that a call used, while it lives.
struct OlderTensor {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  bool requires_grad = false;
  const OperatorFacts* touched_by = nullptr;  ///< it is no trained parameter, and this operator read it
};

/// A call of a module, from its begin to its end, while it runs.
struct OpenCall {
  uint64_t key = 0;
  int stage = 0;
  std::vector<at::Tensor> inputs = {};
  size_t trace_begin = 0;
  Place place = {};    ///< of the micro-batch, when it began
  uint64_t begin = 0;  ///< tensors that are born later are its own
  bool stands = true;  ///< later calls need not run: it has used and changed nothing but its own
  std::vector<OlderTensor> older = {};
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> made = {};  ///< memory of results of its operators
  const OperatorFacts* visitor = nullptr;  ///< the first operator that counts as a visit of the stage

  bool is_own(const Home& home) const { return home.born > begin; }
  /// An operator uses a tensor of its stage.
  void uses(const at::Tensor& tensor, const Home& home, bool is_written);
};

/// The calls that were seen, by key. One stands for later ones where no operator of it ran on this stage, exchanged
/// anything, had sizes that depend on values, wrote what is older than the call, or left a tensor that is no result.
class SeenCalls {
 public:
  explicit SeenCalls(c10::Device device) : device_(device) {}

  using Begun = Ownership::ModuleCalls::Begun;
  /// As Ownership::ModuleCalls has them, of the micro-batch `now`.
  Begun begin(MicroBatch& now, Homes& homes, uint64_t key, int stage, const std::vector<at::Tensor>& inputs);
  /// The call that began last has ended. Its number, if it stands for later ones; -1: it does not.
  int64_t end(MicroBatch& now, Homes& homes, const std::vector<at::Tensor>& results);
  /// It has ended, and stands for none.
  void drop(MicroBatch& now);
  int64_t spared() const { return spared_; }

 private:
  struct Result {
    int input = -1;  ///< it is this input; -1: a tensor of its own
    ToldTensor told = {};
    bool is_parameter = false;
    uint64_t born = 0;  ///< behind the begin of the call
  };
  struct Seen {
    int64_t number = -1;  ///< -1: it does not stand
    int tries = 0;
    OperatorTrace operators = {};
    Place steps = {};  ///< by which the micro-batch goes on
    std::vector<OlderTensor> older = {};
    std::vector<Result> results = {};
    const OperatorFacts* visitor = nullptr;
  };
  std::optional<uint64_t> key_of_call(MicroBatch& now, Homes& homes, uint64_t key, int stage,
                                      const std::vector<at::Tensor>& inputs) const;
  static std::optional<std::vector<Result>> results_of(const OpenCall& call, const MicroBatch& now, Homes& homes,
                                                       const std::vector<at::Tensor>& results);
  std::vector<at::Tensor> repeat(MicroBatch& now, Homes& homes, const Seen& seen, int stage,
                                 const std::vector<at::Tensor>& inputs);

  const c10::Device device_;
  ska::flat_hash_map<uint64_t, std::unique_ptr<Seen>> seen_;
  int64_t count_ = 0, spared_ = 0;
};

/// An operator of another stage: what calls that are open have to know of it.
void look_at(MicroBatch& now, const OperatorFacts& facts, const HomedArguments& homed, const Home& home);
/// Its results, or those of one that every stage runs, but its `arguments`: calls that are open have made them.
void note_made(MicroBatch& now, c10::ArrayRef<c10::IValue> results, const std::vector<at::Tensor>& arguments = {});

}  // namespace trireme::ownership
