// Messages of a stage with the others while the forward pass of a micro-batch runs.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <vector>

#include "ownership/cut_tensors.h"
#include "ownership/micro_batch.h"
#include "trireme/intercept.h"

namespace trireme::ownership {

/// Messages of the micro-batch that is set. Both sides of a message know its number. The second run of a region has
/// none: it gets what its first one received.
class Exchange {
 public:
  Exchange(int stage, int stages, Mailbox& mailbox) : stage_(stage), stages_(stages), mailbox_(mailbox) {}
  void set(MicroBatch* micro_batch) { now_ = micro_batch; }
  /// Ranks share layers from now on.
  void set(const CutTensors* cut) { cut_ = cut; }

  /// `stage` uses `tensor`, of the stage `home`: sends what it needs of this stage. Returns what this stage uses it as,
  /// where it is the one; undefined: as it is.
  at::Tensor use(OperatorCall& call, const OperatorFacts& facts, const at::Tensor& tensor, int home, int stage,
                 const Next& next);
  /// The results of an operator of this stage, to all others; and of one of the stage `from`. `key`: they hold for
  /// every call that has it, and are told once; null: they are told of each call.
  void tell(const OperatorFacts& facts, const Key* key, const ToldCall& told);
  ToldCall hear(const OperatorFacts& facts, const Key* key, int from);
  /// The same of numbers that the program reads.
  void tell_values(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> results);
  std::vector<c10::IValue> hear_values(const OperatorFacts& facts, int from);
  int64_t heard() const { return told_; }  ///< how often sizes were waited for
  /// `tensor`, or where it is a part the whole, with its history in the last piece. By later passes.
  at::Tensor whole_here(const at::Tensor& tensor);

 private:
  MessageName name(MessageKind kind, int64_t number, const OperatorFacts& facts) const;
  void cross(int from, int to);
  void cross_to_all(int from);

  const int stage_;
  const int stages_;
  Mailbox& mailbox_;
  MicroBatch* now_ = nullptr;
  const CutTensors* cut_ = nullptr;
  int64_t told_ = 0;
};

}  // namespace trireme::ownership
