// The pass that runs each operator on the stage that owns its parameters.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ownership/homes.h"
#include "ownership/mailbox.h"
#include "ownership/pieces.h"
#include "ownership/sizes.h"
#include "ownership/transfers.h"
#include "trireme/intercept.h"
#include "trireme/ownership/ownership.h"

namespace trireme::ownership {

/// A micro-batch on this stage, from the begin of its forward pass to the end of its backward pass.
struct MicroBatch {
  int64_t number = 0;
  uint64_t seed = 0;
  bool stays_ahead = false;  ///< no operator may be of an earlier stage than the one before it
  Pieces pieces = {};
  Transfers transfers = {};
  int64_t position = 0;  ///< operators so far
  int64_t randoms = 0;   ///< of them those that draw
  uint64_t digest = 0;   ///< of all operators, homes and sizes
  OperatorTrace trace = {};
  std::vector<int64_t> sent = {}, received = {};                    ///< numbers of messages, by stage
  /// Of gradients that come back, until they have come.
  struct Sizes {
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  std::map<TransferId, Sizes> gradient_sizes = {};
  std::vector<int> visits = {};
  bool comes_back = false;  ///< a stage needs a later one's forward pass
  bool has_root = false;  ///< backward begins somewhere, here or on another stage
  /// One tensor that the program returned.
  struct Output {
    at::Tensor tensor;     ///< detached; a shadow until it has come
    int stage = -1;        ///< from which it comes; -1: it is here
    int64_t number = 0;
  };
  std::vector<Output> outputs = {};
};

/// Runs operators for the micro-batch whose forward pass this thread runs; without one, operators pass through.
class OwnershipPass final : public Pass {
 public:
  OwnershipPass(int stage, int stages, c10::Device device, Mailbox& mailbox)
      : stage_(stage), stages_(stages), device_(device), mailbox_(mailbox) {}

  PassOrder order() const override { return PassOrder::kOwnership; }
  void run(OperatorCall& call, Next next) override;

  Homes& homes() { return homes_; }
  MicroBatch* current() const { return current_; }
  void set_current(MicroBatch* micro_batch) {
    current_ = micro_batch;
    entered_.clear();
  }
  /// Until leave(), what has no parameters is computed on `stage`.
  void enter(int stage) { entered_.push_back(stage); }
  void leave() {
    if (!entered_.empty()) entered_.pop_back();
  }
  /// `tensor` on `stage`; see Ownership::move().
  at::Tensor move(const at::Tensor& tensor, int stage);
  const OwnershipCounters& counters() const { return counters_; }

 private:
  /// A tensor that an operator got in place of one of the program's.
  struct Replaced {
    size_t argument, item;
    at::Tensor original, used;
    bool is_received = false;
  };
  using Replacements = c10::SmallVector<Replaced, 2>;
  const OperatorFacts& facts_of(const OperatorCall& call);
  void visit(const OperatorFacts& facts, int stage);
  void come_back(const OperatorFacts& facts, int from, int to);
  void note(const OperatorFacts& facts, const Key& key, int stage);
  bool tells_each(const OperatorFacts& facts, const OperatorCall& call) const;
  static bool needs_gradient(const at::Tensor& tensor);
  static bool is_needed(const OperatorFacts& facts, const HomedArgument& one);
  static bool is_written(const OperatorCall& call, const HomedArgument& one);
  Home born(const Home& home) const;

  void run_replicated(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, const Next& next);
  void run_own(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, const Home& home,
               const Next& next);
  Replacements bring(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, bool uses,
                     const Next& next);
  bool is_view(const OperatorCall& call, const OperatorFacts& facts, const ToldCall* known, const Next& next);
  static std::vector<at::Tensor> originals_of(c10::ArrayRef<c10::IValue> arguments,
                                              const Replacements& replaced);
  void follow(const OperatorCall& call, const ToldCall& told, const std::vector<at::Tensor>& views_of,
              torch::jit::Stack stack);
  static void give_back(OperatorCall& call, const Replacements& replaced);
  void view_originals(OperatorCall& call, const ToldCall& told, const Replacements& replaced,
                      std::vector<c10::IValue> arguments);
  void note_results(const OperatorCall& call, const ToldCall& told, const Home& home);
  void take_written(const OperatorFacts& facts, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                    const Home& home);

  void run_remote(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, const Home& home,
                  const Next& next);
  static void note_writes(const OperatorFacts& facts, const ToldCall& told, c10::ArrayRef<c10::IValue> arguments,
                          const std::vector<at::Tensor>& tensors);
  void make_results(OperatorCall& call, const ToldCall& told, const std::vector<at::Tensor>& arguments,
                    const Home& home);
  static void refuse_mixed(const OperatorFacts& facts, const ToldCall& told);

  at::Tensor use(OperatorCall& call, const OperatorFacts& facts, const at::Tensor& tensor, int home, int stage,
                 const Next& next);
  void tell(const OperatorFacts& facts, const ToldCall& told);
  ToldCall hear(const OperatorFacts& facts, int from);
  void tell_values(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> results);
  std::vector<c10::IValue> hear_values(const OperatorFacts& facts, int from);
  MessageName name(MessageKind kind, int64_t number, const OperatorFacts& facts) const;

  const int stage_;
  const int stages_;
  const c10::Device device_;
  Mailbox& mailbox_;
  Homes homes_;
  ToldCalls told_;
  std::unordered_map<c10::OperatorHandle, OperatorFacts> facts_;
  MicroBatch* current_ = nullptr;
  std::vector<int> entered_;   ///< stages of the modules around the operator
  std::optional<int> forced_;  ///< the home of the call that move() makes
  OwnershipCounters counters_;
};

}  // namespace trireme::ownership
